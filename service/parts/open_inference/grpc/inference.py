"""GRPCInferenceService, and the server around it. Main process, event loop."""

from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from inferpool.service.api.auth import Guard
from inferpool.service.api.codecs.body import joined
from inferpool.service.api.exchange import Predict, Tracing
from inferpool.service.api.wire.budgets import EdgeLimits
from inferpool.service.endpoint import make_predict
from inferpool.service.errors import BadRequestError, ServiceError, StartError
from inferpool.service.parts.open_inference.grpc.health import HealthService
from inferpool.service.parts.open_inference.grpc.infer import UnaryInfer, with_deadline
from inferpool.service.parts.open_inference.grpc.reading import MessageReader, client_of
from inferpool.service.parts.open_inference.grpc.reflection import Reflection
from inferpool.service.parts.open_inference.grpc.schema import INFERENCE, schema
from inferpool.service.parts.open_inference.grpc.server import Endpoint, GrpcServer, Servicer
from inferpool.service.parts.open_inference.grpc.statuses import headers_of, refuse, wants_gzip
from inferpool.service.parts.open_inference.grpc.streams import StreamCalls
from inferpool.service.report import is_host_ready
from inferpool.service.service import Service

_SERVICE = f"{INFERENCE}.GRPCInferenceService"
_LEAST_GRPCIO = (1, 84)
"""Earlier releases decompress messages without a bound."""
_AUTO_CONNECTIONS = 1000


def make_grpc(service: Service, guard: Guard, tracer: Tracing | None) -> GrpcServer:
    """Build the server of the protocol over gRPC.

    Raises:
        StartError: Its port is in use, or grpcio is too old.
        TlsError: The certificate or its key cannot be used.
    """
    release = grpc.__version__
    if tuple(int(each) for each in release.split(".")[:2]) < _LEAST_GRPCIO:
        least = ".".join(map(str, _LEAST_GRPCIO))
        raise StartError(
            f"grpc_port: grpcio {release} is too old, it must be {least} or later: "
            "pip install 'inferpool[grpc]'"
        )
    settings = service.settings
    wanted = settings.max_connections
    edge = EdgeLimits(
        max_connections=_AUTO_CONNECTIONS if wanted == "auto" else wanted,
        max_unfinished_bytes=settings.max_unfinished_bytes,
        max_unread_bytes=settings.max_unread_bytes,
    )
    predict = make_predict(
        service.catalog.entries, settings, guard, tracer, service.metrics.model, edge
    )
    reader, is_ready = MessageReader(predict), partial(_is_ready, service)
    servicers: list[Servicer] = [
        InferenceService(is_ready, predict, reader, settings.write_timeout_s),
        HealthService(is_ready, service.pools, reader),
    ]
    if settings.docs:
        servicers.append(Reflection())
    return GrpcServer(settings, guard, servicers, edge.max_connections)


def _is_ready(service: Service, name: str) -> bool | None:
    """Return whether a model, or for an empty name the server, is ready; None: there is none."""
    if not name:
        return is_host_ready(service.pools.values()) and not service.is_draining
    pool = service.pools.get(name)
    return None if pool is None else pool.is_ready and not service.is_draining


class InferenceService:
    """Answers the calls of GRPCInferenceService."""

    def __init__(
        self,
        is_ready: Callable[[str], bool | None],
        predict: Predict,
        reader: MessageReader,
        write_timeout_s: float,
    ) -> None:
        """Answer for a service.

        Args:
            is_ready: Says whether a model is ready, or for an empty name the server.
            predict: Submits instances.
            reader: Reads requests.
            write_timeout_s: How long clients of streams may take to read an answer.
        """
        self._is_ready = is_ready
        self._predict = predict
        self._reader = reader
        self._streams = StreamCalls(predict, write_timeout_s)
        self._unary = UnaryInfer(predict)
        self._methods = {each.name: each for each in schema().methods(_SERVICE)}

    def endpoints(self) -> Mapping[str, Endpoint]:
        """Return the endpoint of each method."""
        found = {
            "ServerLive": Endpoint("/health/live", self._plain("ServerLive", self._live)),
            "ServerReady": Endpoint("/health/ready", self._plain("ServerReady", self._ready)),
            "ModelInfer": Endpoint("/predict", self._infer),
            "ModelStreamInfer": Endpoint("/predict", self._stream, is_streaming=True),
        }
        return {f"/{_SERVICE}/{name}": endpoint for name, endpoint in found.items()}

    def begin_drain(self) -> None:
        """End streams once what they have sent is answered."""
        self._streams.begin_drain()

    def _plain(
        self, name: str, answer: Callable[[Any, Any], Awaitable[None]]
    ) -> Callable[[Any], Awaitable[bytes]]:
        """Return the handler of a method without tensors; `answer` completes its response."""
        method = self._methods[name]

        async def handle(context: Any) -> bytes:
            headers = dict(headers_of(context.invocation_metadata()))
            message = await self._reader.read(context, headers)
            try:
                request = method.request.FromString(message)
            except DecodeError:
                text = f"the message is no {method.request.DESCRIPTOR.name}"
                raise BadRequestError(text) from None
            response = method.response()
            await answer(request, response)
            return bytes(response.SerializeToString())

        return handle

    async def _infer(self, context: Any) -> bytes:
        metadata = context.invocation_metadata()
        headers = headers_of(metadata)
        message = await self._reader.read(context, joined(headers))
        headers = with_deadline(headers, context.time_remaining())
        client = client_of(context.peer())
        request_id, answer = await self._unary.answer(message, headers, client)
        if isinstance(answer, ServiceError):
            await refuse(context, answer, request_id)
        context.set_trailing_metadata((("x-request-id", request_id),))
        if wants_gzip(metadata):
            context.set_compression(grpc.Compression.Gzip)
        return answer

    async def _stream(self, context: Any) -> None:
        metadata = context.invocation_metadata()
        if wants_gzip(metadata):
            context.set_compression(grpc.Compression.Gzip)
        await self._streams.answer(context, headers_of(metadata), client_of(context.peer()))

    async def _live(self, _: Any, response: Any) -> None:
        response.live = True

    async def _ready(self, _: Any, response: Any) -> None:
        response.ready = self._is_ready("") is True
