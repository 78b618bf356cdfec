"""A raw HTTP client: it sends bytes as they are, and reads answers as leniently as it can."""

import asyncio
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from tests.fuzz.inputs import HostileInput

ANSWER_TIMEOUT_S = 90.0
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


class RawConnection:
    """One connection, on which one input at a time is out."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.is_open = True
        self._reader = reader
        self._writer = writer
        self._last: int | None = None

    async def ask(self, input: HostileInput) -> RawExchange:
        """Send an input and wait for what comes of it."""
        exchange = RawExchange(input)
        self._writer.write(input.data)
        reading = asyncio.ensure_future(self._read_answers(exchange))
        if not input.is_framed:
            await asyncio.wait({reading}, timeout=_QUIET_S)
            if not reading.done() and self._writer.can_write_eof():
                self._writer.write_eof()
        await asyncio.wait({reading}, timeout=ANSWER_TIMEOUT_S)
        if not reading.done():
            reading.cancel()
            exchange.error = f"neither answered nor closed in {ANSWER_TIMEOUT_S:g} s"
        elif input.is_framed and not exchange.answers:
            exchange.error = f"closed without an answer, {self._last} came before on its connection"
        elif input.is_framed and len(exchange.answers) > 1:
            exchange.error = f"more than one answer: {exchange.answers[1].head!r}"
        closes = any(_CLOSES.search(answer.head) for answer in exchange.answers)
        if closes or exchange.error or not input.is_framed:
            self.close()
        self._last = input.number
        return exchange

    def close(self) -> None:
        """Hang up."""
        self.is_open = False
        self._writer.transport.abort()

    async def _read_answers(self, exchange: RawExchange) -> None:
        """Read the answer to an input, and any further answers that have come with it."""
        is_head = exchange.input.data.startswith(b"HEAD ")
        try:
            while not exchange.answers:
                await self._read_answer(exchange, is_head)
            async with asyncio.timeout(0):
                while True:
                    await self._read_answer(exchange, is_head)
        except TimeoutError:
            pass
        except (asyncio.IncompleteReadError, ConnectionError):
            self.is_open = False

    async def _read_answer(self, exchange: RawExchange, is_head: bool) -> None:
        head = (await self._reader.readuntil(b"\r\n\r\n"))[:-4]
        status = int(head[9:12]) if head[9:12].isdigit() else 0
        body = b""
        if status in (204, 304) or 0 < status < 200 or is_head:
            pass
        elif length := _LENGTH.search(head):
            body = await self._reader.readexactly(int(length[1]))
        elif _CHUNKED.search(head):
            body = await self._reader.readuntil(b"0\r\n\r\n")
        if status >= 200:
            exchange.answers.append(FuzzAnswer(status, head, body))


async def send_all(
    address: tuple[str, int],
    inputs: Iterator[HostileInput],
    on_exchange: Callable[[RawExchange], None],
    num_connections: int,
) -> None:
    """Send inputs over many connections until there are no more."""

    async def work() -> None:
        connection: RawConnection | None = None
        for input in inputs:
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
    return RawConnection(*await asyncio.open_connection(*address, limit=1 << 26))
