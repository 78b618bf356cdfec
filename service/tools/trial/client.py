"""A strict and cheap HTTP/1.1 client: one keep-alive connection, one request at a time.

It shares the machine with the service that it asks, so it costs some 40 us a request.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import httptools

Address = tuple[str, int]
"""Host and port."""


@dataclass(slots=True)
class TrialAnswer:
    """What came back."""

    status: int
    request_id: bytes
    """The header X-Request-ID."""
    body: bytes


class NoAnswerError(Exception):
    """The request was sent, and the connection ended, or the time did, without an answer."""


class TrialConnection(asyncio.Protocol):
    """A connection to the service. Lives in the event loop."""

    def __init__(self, on_stray: Callable[[], None]) -> None:
        """Begin without a connection; `connect` makes them.

        Args:
            on_stray: Told of each answer, or piece of one, that nobody had asked for.
        """
        self.is_open = False
        self._on_stray = on_stray
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._waiter: asyncio.Future[TrialAnswer] | None = None
        self._asked_id = b""
        self._answered_id = b""
        self._request_id = b""
        self._chunks: list[bytes] = []

    async def ask(self, request: bytes, timeout_s: float, request_id: bytes = b"") -> TrialAnswer:
        """Send a whole request and await its answer.

        Args:
            request: Head and body.
            timeout_s: How long to wait.
            request_id: Its X-Request-ID. With it, a second answer to the request before this one
                is told from the answer to this one.

        Raises:
            NoAnswerError: None came. The connection is of no use any more.
        """
        assert self._waiter is None, "one request at a time"
        assert self._transport is not None
        if not self.is_open:
            raise NoAnswerError("the connection was closed before the request")
        waiter: asyncio.Future[TrialAnswer] = self._loop.create_future()
        self._waiter = waiter
        self._asked_id = request_id
        timer = self._loop.call_later(timeout_s, self._fail, f"no answer in {timeout_s:.3g} s")
        self._transport.write(request)
        try:
            return await waiter
        finally:
            timer.cancel()
            self._waiter = None

    async def read(self, path: str, timeout_s: float) -> bytes:
        """Ask for a page and await what it says.

        Raises:
            NoAnswerError: There is no answer that tells.
        """
        answer = await self.ask(head_of("GET", path) + b"\r\n", timeout_s)
        if answer.status != 200:
            raise NoAnswerError(f"{path} answers with {answer.status}")
        return answer.body

    def send(self, request: bytes) -> None:
        """Send a whole request, whose answer nobody will wait for."""
        assert self._transport is not None
        self._transport.write(request)

    def close(self) -> None:
        """Hang up."""
        self.is_open = False
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.Protocol`."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's are no subclass
        self.is_open = True

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        if self._waiter is None or self._waiter.done():
            self._on_stray()
            self.close()
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            if self._waiter.done():  # what follows the answer is no HTTP
                self._on_stray()
            self._fail(f"what came is no HTTP answer: {error}")
            self.close()

    def eof_received(self) -> bool:
        """See `asyncio.Protocol`."""
        return False

    def connection_lost(self, error: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        self.is_open = False
        self._fail("the connection was closed" + (f": {error}" if error else ""))

    def on_message_begin(self) -> None:
        """See httptools."""
        if self._waiter is None or self._waiter.done():
            self._on_stray()
        self._request_id = b""
        self._chunks.clear()

    def on_header(self, name: bytes, value: bytes) -> None:
        """See httptools."""
        if len(name) == 12 and name.lower() == b"x-request-id":
            self._request_id = value

    def on_body(self, body: bytes) -> None:
        """See httptools."""
        self._chunks.append(body)

    def on_message_complete(self) -> None:
        """See httptools."""
        if self._waiter is None or self._waiter.done():
            return
        if self._request_id == self._answered_id != self._asked_id:
            self._on_stray()
            return
        self._answered_id = self._asked_id
        status = self._parser.get_status_code()
        self._waiter.set_result(TrialAnswer(status, self._request_id, b"".join(self._chunks)))
        if not self._parser.should_keep_alive():
            self.close()

    def _fail(self, reason: str) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(NoAnswerError(reason))


async def connect(address: Address, on_stray: Callable[[], None]) -> TrialConnection:
    """Open a connection.

    Raises:
        OSError: Nobody listens.
    """
    loop = asyncio.get_running_loop()
    _, connection = await loop.create_connection(lambda: TrialConnection(on_stray), *address)
    return connection


def head_of(
    method: str, path: str, *, content_type: str = "", num_bytes: int = 0, more: str = ""
) -> bytes:
    """The head of a request, but for the X-Request-ID and the empty line that ends it."""
    lines = f"{method} {path} HTTP/1.1\r\nHost: inferpool\r\nContent-Length: {num_bytes}\r\n{more}"
    if content_type:
        lines += f"Content-Type: {content_type}\r\n"
    return lines.encode("ascii")
