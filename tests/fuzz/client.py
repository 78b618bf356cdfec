"""A raw HTTP client: it sends bytes as they are, and reads answers as leniently as it can."""

import asyncio
import re
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.fuzz.inputs import HostileInput

ANSWER_TIMEOUT_S = 20.0
"""Time within which an input is answered, or its connection closed."""
_QUIET_S = 0.3
"""Time without an answer after which an input that is no whole request is ended."""

_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_CHUNKED = re.compile(rb"\r\ntransfer-encoding: *chunked", re.IGNORECASE)
_CLOSES = re.compile(rb"\r\nconnection: *close", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class FuzzAnswer:
    """One answer of the service."""

    status: int
    head: bytes
    body: bytes


@dataclass(slots=True)
class RawExchange:
    """One input with the answers to it."""

    input: HostileInput
    answers: list[FuzzAnswer] = field(default_factory=list)
    error: str = ""
    """Why there is neither an answer nor a clean close."""


class RawConnection(asyncio.Protocol):
    """One connection, on which one input at a time is out."""

    def __init__(self) -> None:
        self.is_open = False
        self._transport: asyncio.Transport
        self._buffer = b""
        self._is_head_request = False
        self._answers: list[FuzzAnswer] = []
        self._changed = asyncio.Event()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport
        self.is_open = True

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False
        self._changed.set()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while (answer := self._take()) is not None:
            if answer.status >= 200:
                self._answers.append(answer)
        self._changed.set()

    async def ask(self, input: HostileInput) -> RawExchange:
        """Send an input and wait for what comes of it."""
        self._answers = []
        self._is_head_request = input.data.startswith(b"HEAD ")
        exchange = RawExchange(input)
        self._transport.write(input.data)
        quiet_s = ANSWER_TIMEOUT_S if input.is_framed else _QUIET_S
        if not await self._wait(quiet_s) and not input.is_framed:
            if self._transport.can_write_eof():
                self._transport.write_eof()
            await self._wait(ANSWER_TIMEOUT_S)
        exchange.answers = self._answers
        if not self._answers and self.is_open:
            exchange.error = f"neither answered nor closed in {ANSWER_TIMEOUT_S:g} s"
        elif not self._answers and input.is_framed:
            exchange.error = "the connection was closed without an answer"
        elif self._buffer and input.is_framed:
            exchange.error = f"more than one answer: {self._buffer[:80]!r}"
        closes = any(_CLOSES.search(answer.head) for answer in self._answers)
        if closes or exchange.error or not input.is_framed:
            self.close()
        return exchange

    def close(self) -> None:
        """Hang up."""
        self.is_open = False
        self._transport.abort()

    async def _wait(self, timeout_s: float) -> bool:
        """Wait for an answer, or the end; return whether either came."""
        try:
            async with asyncio.timeout(timeout_s):
                while self.is_open and not self._answers:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            return False
        return True

    def _take(self) -> FuzzAnswer | None:
        """Take the next whole answer off what has arrived."""
        head, found, rest = self._buffer.partition(b"\r\n\r\n")
        if not found:
            return None
        status = int(head[9:12]) if head[9:12].isdigit() else 0
        length = _LENGTH.search(head)
        size = 0
        if status in (204, 304) or 0 < status < 200 or self._is_head_request:
            pass
        elif length is not None:
            size = int(length[1])
        elif _CHUNKED.search(head):
            size = rest.find(b"0\r\n\r\n") + 5
            if size < 5:
                return None
        if len(rest) < size:
            return None
        self._buffer = rest[size:]
        return FuzzAnswer(status, head, rest[:size])


async def send_all(
    address: tuple[str, int],
    next_input: Callable[[], HostileInput | None],
    on_exchange: Callable[[RawExchange], None],
    num_connections: int,
) -> None:
    """Send inputs over many connections until there are no more."""

    async def work() -> None:
        connection: RawConnection | None = None
        while (input := next_input()) is not None:
            if connection and (not connection.is_open or not input.is_framed):
                connection.close()
                connection = None
            try:
                connection = connection or await _connect(address)
                on_exchange(await connection.ask(input))
            except OSError as error:
                on_exchange(RawExchange(input, error=f"cannot connect: {error}"))
        if connection:
            connection.close()

    await asyncio.gather(*(work() for _ in range(num_connections)))


async def _connect(address: tuple[str, int]) -> RawConnection:
    loop = asyncio.get_running_loop()
    _, connection = await loop.create_connection(RawConnection, *address)
    return connection
