"""Connections of a front to the main process: one call at a time on each. Runs in a front.

A body is sent only once the main process asks for it, and its answer is read meanwhile: a call that
is refused early is refused early for the client too.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence

import httptools
from uvicorn.protocols.http.httptools_impl import HEADER_RE, HEADER_VALUE_RE

from inferpool.service.errors import BadRequestError

_READ_BYTES = 64 * 1024
_RETRY_S = 0.5
"""The kernel refuses a connection while too many wait for the main process to accept them."""
_CONTINUE = 100
_FIRST_FINAL = 200

Header = tuple[bytes, bytes]


class RelayBrokenError(Exception):
    """The main process does not answer, or what it sends is no answer."""


class Relay:
    """Stores a few unused connections to the main process for the next calls."""

    def __init__(self, path: str, *, most_unused: int, unused_s: float) -> None:
        """Connect to nothing yet.

        Args:
            path: The main process's Unix socket.
            most_unused: Connections to keep.
            unused_s: For how long.
        """
        self._path = path
        self._most_unused = most_unused
        self._unused_s = unused_s
        self._unused: list[tuple[float, RelayConnection]] = []

    @contextlib.asynccontextmanager
    async def connection(self) -> "AsyncIterator[RelayConnection]":
        """Yield a connection for one call, and store it if the call has left it in order.

        Raises:
            RelayBrokenError: There is none.
        """
        connection = self._take_unused() or await self._connect()
        try:
            yield connection
        finally:
            if connection.is_reusable and len(self._unused) < self._most_unused:
                self._unused.append((time.monotonic(), connection))
            else:
                connection.close()

    def close(self) -> None:
        """Close those that are not used."""
        for _, connection in self._unused:
            connection.close()
        self._unused.clear()

    def _take_unused(self) -> "RelayConnection | None":
        oldest = time.monotonic() - self._unused_s
        while self._unused:
            since, connection = self._unused.pop()
            if since >= oldest and not connection.is_gone:
                return connection
            connection.close()
        return None

    async def _connect(self) -> "RelayConnection":
        for is_last in (False, True):
            try:
                return RelayConnection(*await asyncio.open_unix_connection(self._path))
            except OSError as error:
                if is_last:
                    raise RelayBrokenError(repr(error)) from error
            await asyncio.sleep(_RETRY_S)
        raise AssertionError


class RelayConnection:
    """Sends one call after another to the main process, and reads its answers."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._answer: _Answer | None = None
        self._owes_body = False
        """The last call has a body, and not all of it was sent."""

    @property
    def is_gone(self) -> bool:
        """The main process has closed it."""
        return self._reader.at_eof() or self._writer.is_closing()

    @property
    def is_reusable(self) -> bool:
        """The last call has ended in order."""
        answer = self._answer
        if answer is None or self._owes_body or self.is_gone:
            return False
        return answer.is_whole and answer.keep_alive

    async def ask(
        self,
        method: str,
        target: bytes,
        headers: Sequence[Header],
        body: AsyncIterator[bytes] | None,
    ) -> tuple[int, list[Header]]:
        """Send a call, and return the status and headers of its answer.

        No more of the body is asked for once there is an answer.

        Raises:
            BadRequestError: It cannot be sent.
            RelayBrokenError: The main process does not answer.
            Exception: What `body` raises.
        """
        self._owes_body = body is not None
        head = _head_of(method, target, headers, has_body=self._owes_body)
        self._answer = answer = _Answer(has_body=method != "HEAD")
        self._writer.write(head)
        sending: asyncio.Task[None] | None = None
        try:
            while answer.status < _FIRST_FINAL:
                await self._read()
                if answer.status == _CONTINUE and body is not None and sending is None:
                    sending = asyncio.create_task(self._send(body), name="body to main")
        finally:
            if sending is not None:
                await _end(sending)
        return answer.status, answer.headers

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yield the body of the answer as it comes.

        Raises:
            RelayBrokenError: It ended too early.
        """
        answer = self._answer
        assert answer is not None
        while True:
            pieces, answer.pieces = answer.pieces, []
            for piece in pieces:
                yield piece
            if answer.is_whole:
                return
            await self._read()

    def close(self) -> None:
        """Close it, even if that fails."""
        self._writer.close()

    async def _read(self) -> None:
        assert self._answer is not None
        try:
            data = await self._reader.read(_READ_BYTES)
            if not data:
                raise RelayBrokenError("the connection has ended")
            self._answer.feed(data)
        except (OSError, httptools.HttpParserError) as error:
            raise RelayBrokenError(repr(error)) from error

    async def _send(self, body: AsyncIterator[bytes]) -> None:
        try:
            async for piece in body:
                if piece:
                    self._writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
                    await self._writer.drain()
        except OSError:
            return  # the main process has closed the connection; `_read` finds that too
        except Exception:
            self._writer.close()  # so that nobody waits for an answer
            raise
        self._writer.write(b"0\r\n\r\n")
        self._owes_body = False


class _Answer:
    """Receives an answer from the parser, piece by piece."""

    def __init__(self, *, has_body: bool) -> None:
        """Expect an answer; that to a HEAD request has no body."""
        self.status = 0
        self.headers: list[Header] = []
        self.pieces: list[bytes] = []
        self.is_whole = False
        self.keep_alive = True
        self._has_body = has_body
        self._parser = httptools.HttpResponseParser(self)

    def feed(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_message_begin(self) -> None:
        self.headers = []

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()
        self.keep_alive = self._parser.should_keep_alive()
        self.is_whole = self.status >= _FIRST_FINAL and not self._has_body

    def on_body(self, body: bytes) -> None:
        self.pieces.append(body)

    def on_message_complete(self) -> None:
        self.is_whole = self.status >= _FIRST_FINAL


async def _end(sending: "asyncio.Task[None]") -> None:
    """Send no more of a body, and raise what has ended it."""
    sending.cancel()
    await asyncio.wait([sending])
    if not sending.cancelled() and (error := sending.exception()) is not None:
        raise error


def _head_of(method: str, target: bytes, headers: Sequence[Header], *, has_body: bool) -> bytes:
    """Render the head of a call.

    Raises:
        BadRequestError: Something in it would end its line.
    """
    if not target.isascii() or not target.decode().isprintable() or b" " in target:
        raise BadRequestError("the URL has characters that must be percent-encoded")
    for name, value in headers:
        if HEADER_RE.search(name) or HEADER_VALUE_RE.search(value):
            raise BadRequestError(
                f"the header {name[:80]!r} has characters that cannot be passed on"
            )
    lines = [b"%b %b HTTP/1.1" % (method.encode("ascii"), target)]
    lines += [b"%b: %b" % header for header in headers]
    if has_body:
        lines += [b"transfer-encoding: chunked", b"expect: 100-continue"]
    return b"\r\n".join([*lines, b"", b""])
