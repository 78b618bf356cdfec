"""A server of the endpoint on a free port, and clients that speak to it over raw sockets."""

import asyncio
import contextlib
import json
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import uvicorn

from inferpool.service.api.auth import Guard
from inferpool.service.api.codecs.body import Limits
from inferpool.service.api.cors import Cors
from inferpool.service.api.wire.budgets import EdgeLimits, EdgeUse, UnfinishedRequests
from inferpool.service.api.wire.handshakes import TlsHandshake
from inferpool.service.api.wire.listening import listen
from inferpool.service.api.wire.protocol import PredictProtocol
from inferpool.service.api.wire.server import DrainingServer
from inferpool.workers.shared.arena import Arena
from tests.service.api.fakes import FakeModel, as_app, endpoint, in_front

POST = b"POST /predict HTTP/1.1\r\nhost: h\r\ncontent-type: image/png\r\n"
ONE = POST + b"content-length: 1\r\n\r\nx"
CHUNKED = POST + b"transfer-encoding: chunked\r\n\r\n"
NOBODY = POST.replace(b"/predict", b"/predict/nobody")
GET = b"GET /predict HTTP/1.1\r\nhost: h\r\n\r\n"
"""Refused with 405, by the protocol itself."""
ROUTES = {
    "straight": POST,
    "asgi": POST.replace(b"/predict", b"/mounted/predict"),
}
"""Calls that the protocol answers itself, and those that uvicorn's cycle answers."""
WAYS = ("asgi", "protocol", "front")
"""Ways to the endpoint: through ASGI; straight off the socket; so, and through a front's pipes."""
Way = Literal["asgi", "protocol", "front"]
EDGE = frozenset(EdgeLimits.__struct_fields__)
LONG_S = 600.0
_NO_HURRY = {"head_timeout_s": LONG_S, "write_timeout_s": LONG_S, "body_gap_s": LONG_S}


class RawAnswer(NamedTuple):
    """One answer as it was read from a socket."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class RawClient:
    """One connection to a server."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self.send = writer.write

    async def read_answer(self) -> RawAnswer:
        status, headers = await self.read_head()
        body = await self.reader.readexactly(int(headers["content-length"]))
        return RawAnswer(status, headers, body)

    async def read_head(self) -> tuple[int, dict[str, str]]:
        lines = (await self.reader.readuntil(b"\r\n\r\n")).decode().splitlines()
        return int(lines[0].split()[1]), dict(line.split(": ", 1) for line in lines[1:] if line)

    async def read_statuses(self, num: int) -> list[int]:
        return [(await self.read_answer()).status for _ in range(num)]

    async def read_all(self) -> list[RawAnswer]:
        """Whole answers until the server closes the connection."""
        answers = []
        with contextlib.suppress(asyncio.IncompleteReadError):
            while True:
                answers.append(await self.read_answer())
        return answers

    async def ask(self, data: bytes) -> RawAnswer:
        self.send(data)
        return await self.read_answer()

    async def status(self, data: bytes) -> int:
        return (await self.ask(data)).status

    async def is_closed(self) -> bool:
        """Wait for the server to close the connection; False if it sends anything before."""
        return await self.reader.read() == b""

    def stop_reading(self) -> None:
        """Take no more than a few bytes."""
        self.reader._limit = 1  # type: ignore[attr-defined]

    def read_on(self, num_bytes: int = 1 << 20) -> None:
        self.reader._limit = num_bytes  # type: ignore[attr-defined]
        self.reader._maybe_resume_transport()  # type: ignore[attr-defined]


class PredictServer:
    """A uvicorn server of one fake model, and what it recorded."""

    def __init__(
        self,
        model: FakeModel | None,
        way: Way = "protocol",
        *,
        guard: Guard | None = None,
        cors: Cors | None = None,
        tls: ssl.SSLContext | None = None,
        unfinished: UnfinishedRequests | None = None,
        around: Callable[[Any], Any] = lambda app: app,
        keep_alive_s: float = LONG_S,
        **limits: float,
    ) -> None:
        """Make it.

        Args:
            around: Puts something before the application.
            limits: Fields of `Limits` and `EdgeLimits`. By default nothing ends by its clock.
        """
        limits = {**_NO_HURRY, **limits}
        self.model = model or FakeModel()
        self.statuses: list[int] = []
        edge = EdgeLimits(**{name: limits[name] for name in limits.keys() & EDGE})  # type: ignore[arg-type]  # bytes are whole numbers
        predict = endpoint(
            in_front(self.model, Arena(1 << 22)) if way == "front" else self.model,
            guard=guard,
            cors=cors,
            unfinished=unfinished or UnfinishedRequests(edge.max_unfinished_bytes),
            limits=Limits(**{name: limits[name] for name in limits.keys() - EDGE}),  # type: ignore[arg-type]  # as above
            on_done=lambda _, status, __: self.statuses.append(status),
        )
        self.protocol = PredictProtocol.bound_to(predict, edge)
        http: Any = "httptools" if way == "asgi" else self.protocol
        if tls is not None:
            http = partial(TlsHandshake, http, tls)
        self.server = DrainingServer(
            uvicorn.Config(
                around(as_app(predict)),
                log_config=None,
                lifespan="off",
                http=http,
                timeout_keep_alive=keep_alive_s,  # type: ignore[arg-type]  # fractions do as well
            )
        )

    @property
    def connections(self) -> list[Any]:
        return list(self.server.server_state.connections)

    @property
    def listener(self) -> socket.socket:
        return self.server.servers[0].sockets[0]  # type: ignore[return-value]  # it does all we need

    @property
    def use(self) -> EdgeUse:
        return self.protocol.connection_limits.use()

    @contextlib.asynccontextmanager
    async def connect(
        self, *, rcvbuf_bytes: int | None = None, **options: Any
    ) -> AsyncIterator[RawClient]:
        connection = socket.socket()
        if rcvbuf_bytes is not None:  # else the kernel makes it as large as it likes
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, rcvbuf_bytes)
        connection.connect(self.listener.getsockname())
        connection.setblocking(False)
        reader, writer = await asyncio.open_connection(sock=connection, **options)
        try:
            yield RawClient(reader, writer)
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError, ssl.SSLError):
                await writer.wait_closed()

    async def answer_to(self, data: bytes) -> RawAnswer:
        """The answer to a call on a connection of its own."""
        async with self.connect() as client:
            return await client.ask(data)

    async def is_well(self) -> bool:
        """Another client is served."""
        return (await self.answer_to(ONE)).status == 200

    def shut_connections_down(self) -> None:
        for connection in self.connections:
            connection.shutdown()


@contextlib.asynccontextmanager
async def serve(
    model: FakeModel | None = None, way: Way = "protocol", **options: Any
) -> AsyncIterator[PredictServer]:
    """Serve a model; see `PredictServer` for the options."""
    made = PredictServer(model, way, **options)
    server = made.server
    server.config.load()
    server.lifespan = server.config.lifespan_class(server.config)
    await server.startup([listen("127.0.0.1", 0)])
    try:
        yield made
    finally:
        server.force_exit = True
        await server.shutdown()


def silent_model() -> FakeModel:
    """A model that answers nothing until a test sets the result."""
    return FakeModel(lambda _: None)


async def until(is_true: Callable[[], object]) -> None:
    while not is_true():  # noqa: ASYNC110  # what it looks at cannot call back
        await asyncio.sleep(0.005)
