"""A gRPC server in the event loop of a test, before models that answer as told."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from functools import partial
from typing import Any

import grpc
from grpc import aio

from inferpool.service.api.exchange import Predict
from inferpool.service.api.wire.budgets import UnreadAnswers
from inferpool.service.endpoint import make_guard, make_limits
from inferpool.service.parts.open_inference.grpc.health import HealthService
from inferpool.service.parts.open_inference.grpc.inference import InferenceService
from inferpool.service.parts.open_inference.grpc.reading import SOON_S, MessageReader
from inferpool.service.parts.open_inference.grpc.reflection import Reflection
from inferpool.service.parts.open_inference.grpc.schema import Method, schema
from inferpool.service.parts.open_inference.grpc.server import GrpcServer
from inferpool.service.settings.settings import Settings
from tests.service.api.fakes import FakeModel

INFERENCE_SERVICE = "inference.GRPCInferenceService"


class Channel:
    """Calls methods by their names, as generated code would."""

    def __init__(self, channel: Any) -> None:
        self.channel = channel
        services = schema().services
        self.methods = {(s, m.name): m for s in services for m in schema().methods(s)}

    def method(self, name: str, service: str = INFERENCE_SERVICE) -> Method:
        return self.methods[service, name]

    def call(self, name: str, service: str = INFERENCE_SERVICE, **options: Any) -> Any:
        """Return a function that makes a call, given a request or an iterator of them."""
        method = self.methods[service, name]
        ways = {
            (False, False): self.channel.unary_unary,
            (False, True): self.channel.unary_stream,
            (True, True): self.channel.stream_stream,
        }
        make = ways[method.is_client_streaming, method.is_server_streaming]
        return partial(
            make(
                f"/{service}/{name}",
                request_serializer=lambda message: message.SerializeToString(),
                response_deserializer=method.response.FromString,
            ),
            **{"timeout": 60, **options},
        )

    async def ask(
        self,
        name: str,
        service: str = INFERENCE_SERVICE,
        /,
        *,
        options: Mapping = {},
        **fields: Any,
    ) -> Any:
        """Make a call of a method with one answer."""
        request = self.methods[service, name].request(**fields)
        return await self.call(name, service, **options)(request)


def no_repository() -> Any:
    raise AssertionError("no test here asks for it")


class Served:
    """A server that is up, and what it was asked."""

    def __init__(self, server: GrpcServer, predict: Predict, ready: dict[str, bool]) -> None:
        self.server = server
        self.predict = predict
        self.is_hurried = False
        self.ready = ready
        self.done: list[tuple[str, int]] = []
        """The model and status of each call of `ModelInfer`."""


@contextlib.asynccontextmanager
async def serving(
    *models: FakeModel, soon_s: float = SOON_S, **changes: object
) -> AsyncIterator[tuple[Served, Channel]]:
    """Serve models until the end of the block, with some settings changed."""
    given = {"models": {}, "default_model": "", "grpc_port": 0, **changes}
    settings = Settings.model_validate(given)
    guard = make_guard(settings)
    predict = Predict(
        {model.name: model for model in models},
        limits=make_limits(settings),
        guard=guard,
        unread=UnreadAnswers(settings.max_unread_bytes),
    )
    ready = {"": True} | {model.name: True for model in models}
    reader = MessageReader(predict, soon_s)
    servicers = [
        InferenceService(ready.get, no_repository, predict, reader, settings.write_timeout_s),
        HealthService(ready.get, predict.models, reader),
        Reflection(),
    ]
    server = GrpcServer(settings, guard, servicers, is_hurried=lambda: served.is_hurried)
    served = Served(server, predict, ready)
    predict.on_done = lambda model, status, _: served.done.append((model, status))
    served.server.start()
    try:
        async with aio.insecure_channel(served.server.address) as channel:
            yield served, Channel(channel)
    finally:
        await served.server.stop()


async def refused(call: Any) -> tuple[grpc.StatusCode, str]:
    """Return the status and the text that a call is refused with."""
    try:
        await call
    except aio.AioRpcError as error:
        return error.code(), error.details() or ""
    raise AssertionError("it was answered")


async def ask_and_read_nothing(served: Served, method: str, *messages: Any) -> asyncio.StreamWriter:
    """Make a call whose answer may not be sent: its client allows no bytes of it (RFC 9113, 6.9).

    Returns the connection, which is to be closed.
    """

    def frame(kind: int, flags: int, stream: int, data: bytes) -> bytes:
        return len(data).to_bytes(3) + bytes([kind, flags]) + stream.to_bytes(4) + data

    head = {
        ":method": "POST",
        ":scheme": "http",
        ":path": f"/{INFERENCE_SERVICE}/{method}",
        ":authority": "x",
        "content-type": "application/grpc",
        "te": "trailers",
    }
    pairs = b"".join(
        b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()
        for name, value in head.items()
    )
    no_window = b"\0\4" + bytes(4)  # SETTINGS_INITIAL_WINDOW_SIZE
    data = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0, no_window) + frame(4, 1, 0, b"")
    data += frame(1, 4, 1, pairs)
    for index, message in enumerate(messages, 1):
        body = message.SerializeToString()
        is_last = index == len(messages)
        data += frame(0, int(is_last), 1, b"\0" + len(body).to_bytes(4) + body)
    _, writer = await asyncio.open_connection("127.0.0.1", served.server.port)
    writer.write(data)
    await writer.drain()
    return writer
