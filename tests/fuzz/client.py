"""A raw client: sends bytes as they are, and reads answers only as far as HTTP makes it."""

import asyncio
import re
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.fuzz.inputs import Input

ANSWER_TIMEOUT_S = 20.0
"""Within this an input is answered, or its connection closed."""
_QUIET_S = 0.3
"""After so long without an answer, what was no whole request is said to end here."""

_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_CHUNKED = re.compile(rb"\r\ntransfer-encoding: *chunked", re.IGNORECASE)
_CLOSES = re.compile(rb"\r\nconnection: *close", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer of the service."""

    status: int
    head: bytes
    body: bytes


@dataclass(slots=True)
class Outcome:
    """What became of one input."""

    input: Input
    answers: list[Answer] = field(default_factory=list)
    error: str = ""
    """Why this is neither an answer nor a clean close."""


class Connection(asyncio.Protocol):
    """One connection, on which one input at a time is out."""

    def __init__(self) -> None:
        self.is_open = False
        self._transport: asyncio.Transport
        self._buffer = b""
        self._is_head_request = False
        self._answers: list[Answer] = []
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

    async def ask(self, input: Input) -> Outcome:
        """Send an input and wait for what comes of it."""
        self._answers = []
        self._is_head_request = input.data.startswith(b"HEAD ")
        outcome = Outcome(input)
        self._transport.write(input.data)
        quiet_s = ANSWER_TIMEOUT_S if input.is_framed else _QUIET_S
        if not await self._wait(quiet_s) and not input.is_framed:
            if self._transport.can_write_eof():
                self._transport.write_eof()
            await self._wait(ANSWER_TIMEOUT_S)
        outcome.answers = self._answers
        if not self._answers and self.is_open:
            outcome.error = f"neither answered nor closed in {ANSWER_TIMEOUT_S:g} s"
        elif not self._answers and input.is_framed:
            outcome.error = "the connection was closed without an answer"
        elif self._buffer and input.is_framed:
            outcome.error = f"more than one answer: {self._buffer[:80]!r}"
        if (
            not input.is_framed
            or outcome.error
            or any(_CLOSES.search(a.head) for a in self._answers)
        ):
            self.close()
        return outcome

    def close(self) -> None:
        """Hang up."""
        self.is_open = False
        self._transport.abort()

    async def _wait(self, timeout_s: float) -> bool:
        """Wait for an answer, or the end; false if neither came."""
        try:
            async with asyncio.timeout(timeout_s):
                while self.is_open and not self._answers:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            return False
        return True

    def _take(self) -> Answer | None:
        """The next whole answer of what has arrived."""
        head, found, rest = self._buffer.partition(b"\r\n\r\n")
        if not found:
            return None
        status = int(head[9:12]) if head[9:12].isdigit() else 0
        length = _LENGTH.search(head)
        if status in (204, 304) or 0 < status < 200 or self._is_head_request:
            size = 0
        elif length is not None:
            size = int(length[1])
        elif _CHUNKED.search(head):
            size = rest.find(b"0\r\n\r\n") + 5
            if size < 5:
                return None
        else:
            size = 0
        if len(rest) < size:
            return None
        self._buffer = rest[size:]
        return Answer(status, head, rest[:size])


async def send_all(
    address: tuple[str, int],
    next_input: Callable[[], Input | None],
    on_outcome: Callable[[Outcome], None],
    num_connections: int,
) -> None:
    """Send inputs over many connections until there are no more."""

    async def work() -> None:
        connection: Connection | None = None
        while (input := next_input()) is not None:
            if connection is None or not connection.is_open or not input.is_framed:
                if connection is not None and connection.is_open:
                    connection.close()
                try:
                    connection = await _connect(address)
                except OSError as error:
                    on_outcome(Outcome(input, error=f"cannot connect: {error}"))
                    connection = None
                    continue
            on_outcome(await connection.ask(input))
        if connection is not None and connection.is_open:
            connection.close()

    await asyncio.gather(*(work() for _ in range(num_connections)))


async def _connect(address: tuple[str, int]) -> Connection:
    _, connection = await asyncio.get_running_loop().create_connection(Connection, *address)
    return connection
