"""GRPCInferenceService, and the server around it. Main process, event loop."""

import logging
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import grpc
import msgspec
from google.protobuf import json_format
from google.protobuf.message import DecodeError

from inferpool.service.api.auth import Guard, caller_of
from inferpool.service.api.codecs.body import joined
from inferpool.service.api.exchange import Predict, Tracing
from inferpool.service.api.wire.budgets import EdgeLimits
from inferpool.service.endpoint import make_predict
from inferpool.service.errors import BadRequestError, ServiceError, StartError
from inferpool.service.parts.open_inference.grpc.health import HealthService
from inferpool.service.parts.open_inference.grpc.infer import UnaryInfer, values_of, with_deadline
from inferpool.service.parts.open_inference.grpc.reading import (
    MessageReader,
    UnsentAnswers,
    client_of,
)
from inferpool.service.parts.open_inference.grpc.reflection import Reflection
from inferpool.service.parts.open_inference.grpc.schema import INFERENCE, schema
from inferpool.service.parts.open_inference.grpc.server import Endpoint, GrpcServer, Servicer
from inferpool.service.parts.open_inference.grpc.statuses import headers_of, refuse, wants_gzip
from inferpool.service.parts.open_inference.grpc.streams import StreamCalls
from inferpool.service.report import is_host_ready
from inferpool.service.service import Service

if TYPE_CHECKING:
    from inferpool.service.parts.open_inference.repository import Repository

logger = logging.getLogger(__name__)

_SERVICE = f"{INFERENCE}.GRPCInferenceService"
_LEAST_GRPCIO = (1, 84)
"""Earlier releases decompress messages without a bound."""
_AUTO_CONNECTIONS = 1000
_INFER = "/v2/models/m/infer"
_MEMORY = "shared memory is not supported: send tensors in the message"
_TRACE = "tracing cannot be set by clients: see the setting trace_endpoint"
_LOG = "logging cannot be set by clients: operators have /admin/log-level"
_REFUSED = {
    **{
        f"{kind}SharedMemory{what}": f"{kind.lower()} {_MEMORY}"
        for kind in ("System", "Cuda")
        for what in ("Status", "Register", "Unregister")
    },
    "TraceSetting": _TRACE,
    "LogSettings": _LOG,
}
"""Methods that would open files of this host, or change the service for all its clients."""


def make_grpc(
    service: Service,
    guard: Guard,
    tracer: Tracing | None,
    repository: "Callable[[], Repository]",
) -> GrpcServer:
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
        InferenceService(is_ready, repository, predict, reader, settings.write_timeout_s),
        HealthService(is_ready, service.pools, reader),
    ]
    if settings.docs:
        servicers.append(Reflection())
    return GrpcServer(settings, guard, servicers, edge.max_connections, lambda: service.is_hurried)


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
        repository: "Callable[[], Repository]",
        predict: Predict,
        reader: MessageReader,
        write_timeout_s: float,
    ) -> None:
        """Answer for a service.

        Args:
            is_ready: Says whether a model is ready, or for an empty name the server.
            repository: Returns what describes, loads and unloads models.
            predict: Submits instances.
            reader: Reads requests.
            write_timeout_s: How long clients of streams may take to read an answer.
        """
        self._is_ready = is_ready
        self._repository = repository
        self._reader = reader
        self._streams = StreamCalls(predict, write_timeout_s)
        self._unsent = UnsentAnswers(predict)
        self._unary = UnaryInfer(predict)
        self._methods = {each.name: each for each in schema().methods(_SERVICE)}

    def endpoints(self) -> Mapping[str, Endpoint]:
        """Return the endpoint of each method."""
        found = {
            "ModelInfer": Endpoint(_INFER, self._infer),
            "ModelStreamInfer": Endpoint(_INFER, self._stream, is_streaming=True),
        }
        plain: Mapping[str, tuple[str, _Answer]] = {
            "ServerLive": ("/v2/health/live", self._live),
            "ServerReady": ("/v2/health/ready", self._ready),
            "ServerMetadata": ("/v2", self._server),
            "ModelReady": ("/v2/models/m/ready", self._model_ready),
            "ModelMetadata": ("/v2/models/m", self._metadata),
            "ModelConfig": ("/v2/models/m/config", self._config),
            "ModelStatistics": ("/v2/models/m/stats", self._statistics),
            "RepositoryIndex": ("/v2/repository/index", self._index),
            "RepositoryModelLoad": ("/v2/repository/models/m/load", self._load),
            "RepositoryModelUnload": ("/v2/repository/models/m/unload", self._unload),
        }
        for name, (path, answer) in plain.items():
            found[name] = Endpoint(path, self._plain(name, answer))
        for name, words in _REFUSED.items():
            found[name] = Endpoint("/v2", self._plain(name, _refusal(words)))
        return {f"/{_SERVICE}/{name}": endpoint for name, endpoint in found.items()}

    def begin_drain(self) -> None:
        """End streams once what they have sent is answered."""
        self._streams.begin_drain()

    def _plain(self, name: str, answer: "_Answer") -> Callable[[Any], Awaitable[bytes]]:
        """Return the handler of a method without tensors; `answer` completes its response."""
        method = self._methods[name]

        async def handle(context: Any) -> bytes:
            asked = Caller.by(context)
            message = await self._reader.read(context, asked.headers)
            try:
                request = method.request.FromString(message)
            except DecodeError:
                text = f"the message is no {method.request.DESCRIPTOR.name}"
                raise BadRequestError(text) from None
            response = method.response()
            await answer(request, response, asked)
            return bytes(response.SerializeToString())

        return handle

    async def _infer(self, context: Any) -> bytes:
        metadata = context.invocation_metadata()
        headers = headers_of(metadata)
        client = client_of(context.peer())
        request_id, answer = await self._unary.answer(
            await self._reader.read(context, dict(headers)),  # kept no longer than it is needed
            with_deadline(headers, context.time_remaining()),
            client,
        )
        if isinstance(answer, ServiceError):
            await refuse(context, answer, request_id)
        self._unsent.hold(context, dict(headers), len(answer))
        context.set_trailing_metadata((("x-request-id", request_id),))
        if wants_gzip(metadata):
            context.set_compression(grpc.Compression.Gzip)
        return answer

    async def _stream(self, context: Any) -> None:
        metadata = context.invocation_metadata()
        if wants_gzip(metadata):
            context.set_compression(grpc.Compression.Gzip)
        await self._streams.answer(context, headers_of(metadata), client_of(context.peer()))

    async def _live(self, _: Any, response: Any, __: "Caller") -> None:
        response.live = True

    async def _ready(self, _: Any, response: Any, __: "Caller") -> None:
        response.ready = self._is_ready("") is True

    async def _server(self, _: Any, response: Any, __: "Caller") -> None:
        _fill(response, self._repository().server_metadata())

    async def _model_ready(self, request: Any, response: Any, _: "Caller") -> None:
        """Answer that a model which is not there is not ready, as Triton does."""
        try:
            self._repository().check_ready(request.name, request.version)
        except ServiceError:
            return
        response.ready = True

    async def _metadata(self, request: Any, response: Any, _: "Caller") -> None:
        _fill(response, self._repository().metadata(request.name, request.version))

    async def _config(self, request: Any, response: Any, _: "Caller") -> None:
        _fill(response.config, self._repository().config(request.name, request.version))

    async def _statistics(self, request: Any, response: Any, _: "Caller") -> None:
        _fill(response, self._repository().statistics(request.name, request.version))

    async def _index(self, request: Any, response: Any, _: "Caller") -> None:
        entries = self._repository().index(ready_only=request.ready)
        _fill(response, {"models": entries})

    async def _load(self, request: Any, _: Any, asked: "Caller") -> None:
        begin = self._repository().begin_load
        await self._change(begin, "load", request, asked)

    async def _unload(self, request: Any, _: Any, asked: "Caller") -> None:
        begin = self._repository().begin_unload
        await self._change(begin, "unload", request, asked)

    async def _change(
        self,
        begin: Callable[[str, Mapping[str, object]], bool],
        what: str,
        request: Any,
        asked: "Caller",
    ) -> None:
        name = request.model_name
        if begin(name, values_of(request.parameters)):
            logger.info(
                "admin: %s %s",
                what,
                name,
                extra={"key": caller_of(asked.headers), "client": asked.client or "unknown"},
            )
        await self._repository().until_changed(name)


class Caller(NamedTuple):
    """The caller of a method."""

    headers: Mapping[bytes, bytes]
    """The metadata that mean the same as headers of HTTP."""
    client: str | None
    """Its address."""

    @classmethod
    def by(cls, context: Any) -> "Caller":
        """Return the caller, given grpcio's context."""
        headers = joined(headers_of(context.invocation_metadata()))
        return cls(headers, client_of(context.peer()))


_Answer = Callable[[Any, Any, Caller], Awaitable[None]]


def _refusal(words: str) -> _Answer:
    async def refuse_it(_: Any, __: Any, ___: Caller) -> None:
        raise BadRequestError(words)

    return refuse_it


def _fill(message: Any, value: object) -> None:
    """Complete a message with what a value has under the same names."""
    json_format.ParseDict(_without_none(msgspec.to_builtins(value)), message)


def _without_none(value: Any) -> Any:
    """Leave out what is not there, which has no other form in protobuf."""
    if isinstance(value, dict):
        return {name: _without_none(each) for name, each in value.items() if each is not None}
    return [_without_none(each) for each in value] if isinstance(value, list) else value
