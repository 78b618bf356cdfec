"""Numbered requests at a rate of our own choosing, whatever the server does: an open loop.

For `tests.fault_model:FaultModel`, whose right answers are known. Raw sockets and one parser for
answers with a Content-Length, so that one core sends some 15,000 requests a second.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

_TICK_S = 0.001


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of one request. Moments are of `time.monotonic`."""

    number: int
    due: float
    """When it was to be sent, which is what its latency counts from."""
    got: float
    status: int
    """0 where the connection broke."""
    total_ms: float
    """What the server says that it took (Server-Timing)."""
    retry_after_s: int
    """0 where there was none."""
    is_right: bool

    @property
    def latency_s(self) -> float:
        """From when it was due to its answer."""
        return self.got - self.due


class _Connection(asyncio.Protocol):
    """One connection, one request at a time."""

    def __init__(self, load: "Load") -> None:
        self._load = load
        self._number = -1
        self._due = 0.0
        self._data = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def ask(self, number: int, due: float) -> None:
        """Send the request of a number."""
        self._number, self._due = number, due
        body = b'{"instances":[{"n":%d}]}' % number
        self.transport.write(b"%b%d\r\n\r\n%b" % (self._load.head, len(body), body))

    def data_received(self, data: bytes) -> None:
        self._data += data
        head, end, body = self._data.partition(b"\r\n\r\n")
        if not end or len(body) < int(_header(head, b"content-length")):
            return
        self._data = b""
        status = int(head[9:12])
        total_ms = float(_header(head, b"server-timing").rpartition(b"total;dur=")[2])
        retry_after_s = int(_header(head, b"retry-after") or 0)
        is_right = b'"twice":%d,' % (2 * self._number) in body
        self._finish(status, total_ms, retry_after_s, is_right)

    def connection_lost(self, error: Exception | None) -> None:
        if self._number >= 0:
            self._finish(0, 0.0, 0, False)

    def _finish(self, status: int, total_ms: float, retry_after_s: int, is_right: bool) -> None:
        now = time.monotonic()
        number, self._number = self._number, -1
        self._load.on_answer(
            self, Answer(number, self._due, now, status, total_ms, retry_after_s, is_right)
        )


class Load:
    """Connections to one server, and what it answered."""

    def __init__(self, host: str, port: int, *, timeout_ms: int | None = None) -> None:
        """Prepare to ask.

        Args:
            host: The server's.
            port: The server's.
            timeout_ms: What each request gives as X-Timeout-Ms.
        """
        self._address = host, port
        lines = [
            b"POST /predict HTTP/1.1",
            b"host: %b" % host.encode(),
            b"content-type: application/json",
            *([b"x-timeout-ms: %d" % timeout_ms] if timeout_ms else []),
            b"content-length: ",
        ]
        self.head = b"\r\n".join(lines)
        self._idle: deque[_Connection] = deque()
        self._num_asked = 0
        self._answers: list[Answer] = []
        self._on_idle: Callable[[], None] = lambda: None

    async def connect(self, num_connections: int) -> None:
        """Open more connections."""
        loop = asyncio.get_running_loop()
        for _ in range(num_connections):
            _, connection = await loop.create_connection(lambda: _Connection(self), *self._address)
            self._idle.append(connection)

    async def closed(self, num_clients: int, seconds: float) -> list[Answer]:
        """Have clients ask, each again when it has its answer."""
        until = time.monotonic() + seconds

        def go_on() -> None:
            if time.monotonic() < until:
                self._ask(time.monotonic())

        return await self._run(num_clients, go_on, until)

    async def open(self, rate: float, seconds: float) -> list[Answer]:
        """Ask at even distances, and do not wait for answers to do so.

        Args:
            rate: Requests per second.
            seconds: How long.
        """
        began = time.monotonic()
        num_due = int(rate * seconds)
        first = self._num_asked
        while (num_sent := self._num_asked - first) < num_due:
            now = time.monotonic()
            if began + num_sent / rate > now:
                await asyncio.sleep(_TICK_S)
                continue
            if not self._idle:
                await self.connect(1)
            self._ask(began + num_sent / rate)
        return await self._run(0, lambda: None, time.monotonic())

    def on_answer(self, connection: _Connection, answer: Answer) -> None:
        """A connection has its answer."""
        self._answers.append(answer)
        if answer.status:
            self._idle.append(connection)
            self._on_idle()

    def close(self) -> None:
        """Hang up."""
        for connection in self._idle:
            connection.transport.abort()

    def _ask(self, due: float) -> None:
        number = self._num_asked
        self._num_asked += 1
        self._idle.popleft().ask(number, due)

    async def _run(self, num_first: int, go_on: Callable[[], None], until: float) -> list[Answer]:
        """Begin, and wait for the last answer; returns those that came since the last time."""
        self._on_idle = go_on
        for _ in range(num_first):
            go_on()
        while (  # noqa: ASYNC110  # it is only the end that is found by looking
            time.monotonic() < until or len(self._answers) < self._num_asked
        ):
            await asyncio.sleep(0.01)
        answers, self._answers = self._answers, []
        self._num_asked = 0
        return answers


def _header(head: bytes, name: bytes) -> bytes:
    _, found, rest = head.partition(b"\r\n" + name + b": ")
    return rest.partition(b"\r\n")[0] if found else b""
