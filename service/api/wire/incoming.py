"""Bounds what a connection may send besides bodies that are read: heads, calls in line, and more.

Event loop.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence, Sized
from functools import cached_property

import httptools
from uvicorn.protocols.http.flow_control import FlowControl

from inferpool.service.api.errors import INTERNAL_MESSAGE, LargeHeadError, LongUrlError
from inferpool.service.api.wire.budgets import UnfinishedRequests
from inferpool.service.errors import BadRequestError, InternalError, OverloadedError, ServiceError

logger = logging.getLogger(__name__)

MAX_HEADERS = 100
MAX_URL_BYTES = 8 * 1024
"""More than the 8,000 that RFC 9110 (4.1) asks for at least."""
MAX_PIPELINED = 1024
"""Calls of one connection that wait in line; one read may bring thousands."""
MAX_HEAD_BYTES = 64 * 1024
"""Bytes of request line and headers."""
_CALL_BYTES = 4096
"""Memory of a call that waits in line, besides its bytes."""

MAX_LINGER_BYTES = 64 * 2**20
"""Bytes that are read and dropped behind the last answer of a connection."""
MAX_LINGER_S = 10.0
_LINGER_GAP_S = 2.0
"""A client that has sent nothing for so long has had time to read its answer."""

_UPGRADE_HEADERS = (b"connection", b"upgrade", b"http2-settings")
MAX_TRAILER_BYTES = 64 * 1024
"""Names and values of all trailers of a message; nothing here reads them."""
_FREE_CHUNKS = 8192
"""Chunks of any size that every body may have: some clients write JSON token by token."""
_MEAN_CHUNK_BYTES = 64
"""The mean length that further chunks must have. 16 MiB then take 270,000, which is 0.1 s of the
event loop, in steps of a few milliseconds."""


class QueueAwareFlow(FlowControl):
    """Stops reading while calls wait in line; uvicorn reads on for each call of its own.

    Else as much would be read as is sent: the body of a call that nobody has looked at yet.
    """

    def __init__(self, transport: asyncio.Transport, line: Sized) -> None:
        """Watch a connection and the calls that wait in its line."""
        # Not uvicorn's own: it makes an event for each connection, which few of them need.
        self._transport = transport
        self.read_paused = False
        self.write_paused = False
        self._line = line

    @cached_property
    def _is_writable_event(self) -> asyncio.Event:  # type: ignore[override]  # uvicorn only reads it
        """The event for calls that uvicorn answers."""
        event = asyncio.Event()
        if not self.write_paused:
            event.set()
        return event

    def resume_reading(self) -> None:
        """Read on, unless a call waits."""
        if not self._line:
            super().resume_reading()


class Lingering:
    """Bounds what a client sends behind its last answer: it is dropped so that it can read that.

    A socket that is closed while data arrives is reset, and what the client has not read is lost.
    The connection counts among all as an idle one, which is closed if its place is needed.
    """

    __slots__ = ("_close", "_last_num_bytes", "_loop", "_num_bytes", "_timer", "_until")

    def __init__(self, close: Callable[[], None]) -> None:
        """Begin; `close` ends the connection."""
        self._close = close
        self._num_bytes = self._last_num_bytes = 0
        self._loop = asyncio.get_running_loop()
        self._until = self._loop.time() + MAX_LINGER_S
        self._timer = self._loop.call_later(_LINGER_GAP_S, self._look)

    def take(self, num_bytes: int) -> None:
        """Count what has come."""
        self._num_bytes += num_bytes
        if self._num_bytes > MAX_LINGER_BYTES:
            self.stop()
            self._close()

    def stop(self) -> None:
        """Stop: the connection is lost."""
        self._timer.cancel()

    def _look(self) -> None:
        """Close the connection if nothing has come since the last look, or time is over."""
        if self._num_bytes == self._last_num_bytes or self._loop.time() >= self._until:
            self._close()
            return
        self._last_num_bytes = self._num_bytes
        self._timer = self._loop.call_later(_LINGER_GAP_S, self._look)


class IncomingLimits:
    """Bounds the heads of one connection, and its calls in line."""

    __slots__ = (
        "_clear_line", "_flow", "_loop", "_num_in_head", "_num_in_line", "_on_late", "_refuse",
        "_timeout_s", "_timer", "_unfinished", "num_head_bytes", "owner",
    )  # fmt: skip

    def __init__(
        self,
        flow: FlowControl,
        unfinished: UnfinishedRequests,
        head_timeout_s: float,
        *,
        refuse: Callable[[ServiceError], None],
        clear_line: Callable[[], None],
        on_late: Callable[[], None],
        owner: Callable[[], str],
    ) -> None:
        """Begin with nothing.

        `refuse` gets the error of the head that comes; `clear_line` is called before if the calls
        in line are refused too. `on_late` is called if a head takes too long. `owner` returns the
        owner of the memory that its calls take.
        """
        self._flow = flow
        self._unfinished = unfinished
        self._timeout_s = head_timeout_s
        self._refuse = refuse
        self._clear_line = clear_line
        self._on_late = on_late
        self.owner = owner
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self.num_head_bytes = 0
        """Bytes of a head that comes in several pieces, or 0."""
        self._num_in_head = 0
        """Bytes counted for an unfinished head."""
        self._num_in_line = 0
        """Bytes counted for the calls that wait in line."""

    def take_head(self, num_bytes: int) -> None:
        """Count another piece of an unfinished head, and time the head."""
        self.num_head_bytes += num_bytes
        if self.num_head_bytes > MAX_HEAD_BYTES:
            self._refuse(_too_large_head())
            return
        try:
            self._count(self._num_in_head + num_bytes, self._num_in_line)
        except OverloadedError as error:
            self._refuse(error)
            return
        if self._timer is None:
            self._timer = self._loop.call_later(self._timeout_s, self._look)

    def end_head(self) -> None:
        """Stop counting the head: it is whole, or nobody waits for it."""
        self.num_head_bytes = 0
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._num_in_head:
            self._count(0, self._num_in_line)

    def take_line(self, num_calls: int, num_bytes: int) -> None:
        """Count calls that wait in line, and the bytes that were read for them."""
        try:
            self._count(self._num_in_head, self._num_in_line + num_bytes + num_calls * _CALL_BYTES)
        except OverloadedError as error:
            self.give_way(error)

    def give_way(self, error: ServiceError) -> None:
        """Refuse an unfinished head, and the calls that wait in line."""
        self._clear_line()
        self._refuse(error)

    def end_line(self) -> None:
        """Stop counting calls: none waits any more."""
        if self._num_in_line:
            self._count(self._num_in_head, 0)

    def _count(self, num_in_head: int, num_in_line: int) -> None:
        if num_in_head or num_in_line:
            self._unfinished.hold(self, num_in_head + num_in_line)
        else:
            self._unfinished.give_back(self)
        self._num_in_head, self._num_in_line = num_in_head, num_in_line

    def _look(self) -> None:
        self._timer = None
        if self._flow.read_paused:  # we have stopped reading
            self.take_head(0)
        else:
            self._on_late()


class ChunkLimits:
    """Bounds the chunks and trailers of one message; its errors end the message.

    A chunk costs the parser and us about as much however short it is, and the parser keeps a
    trailer until it ends. Nobody keeps what stands between chunks: sizes and extensions.
    """

    __slots__ = (
        "_has_moved_on",
        "_num_body_bytes",
        "_num_chunks",
        "_num_other_bytes",
        "_num_trailer_bytes",
    )

    def __init__(self) -> None:
        self._num_chunks = 0
        self._num_body_bytes = 0
        self._num_trailer_bytes = 0
        self._num_other_bytes = 0
        """Bytes of the latest reads, none of which brought any of the body."""
        self._has_moved_on = False
        """The newest read has brought some of the body."""

    def take_chunk(self, num_bytes: int) -> None:
        """Count a chunk, or the part of one that came in one read.

        Raises:
            BadRequestError: There are too many for their content.
        """
        self._has_moved_on = True
        self._num_chunks += 1
        self._num_body_bytes += num_bytes
        if self._num_chunks > _FREE_CHUNKS + self._num_body_bytes // _MEAN_CHUNK_BYTES:
            raise BadRequestError(
                f"the body has {self._num_chunks} chunks in its first {self._num_body_bytes} "
                f"bytes: send chunks of {_MEAN_CHUNK_BYTES} bytes or more, or a Content-Length"
            )

    def take_trailer(self, num_bytes: int) -> None:
        """Count a trailer.

        Raises:
            LargeHeadError: Together they are too long.
        """
        self._num_trailer_bytes += num_bytes
        if self._num_trailer_bytes > MAX_TRAILER_BYTES:
            raise _too_long()

    def take_read(self, num_bytes: int) -> None:
        """Count a read that began and ended in this message. Call it after the parser is fed.

        Raises:
            LargeHeadError: The latest reads brought nothing of the body: a trailer or a chunk
                extension does not end.
        """
        self._num_other_bytes = 0 if self._has_moved_on else self._num_other_bytes + num_bytes
        self._has_moved_on = False
        if self._num_other_bytes > MAX_TRAILER_BYTES:
            raise _too_long()


def check_head(
    url: bytes, headers: Sequence[tuple[bytes, bytes]], num_hosts: int, *, is_old: bool
) -> None:
    """Check a whole head, which has `num_hosts` Host headers; HTTP/1.0 (`is_old`) needs none.

    Raises:
        LongUrlError: The URL is too long.
        LargeHeadError: The head is too long.
        BadRequestError: It does not name one host.
    """
    if len(url) > MAX_URL_BYTES:
        raise LongUrlError(f"the URL has more than {MAX_URL_BYTES} bytes")
    if num_hosts != 1 and (num_hosts or not is_old):
        raise BadRequestError(f"there must be one Host header, and there are {num_hosts}")
    if len(url) + sum(len(name) + len(value) for name, value in headers) > MAX_HEAD_BYTES:
        raise _too_large_head()


def head_without_upgrade(
    parser: httptools.HttpRequestParser, url: bytes, headers: Sequence[tuple[bytes, bytes]]
) -> bytes:
    """Return the head that a parser has read, without what asks for another protocol.

    The parser treats the bytes after such a head as the other protocol's. We speak none, and the
    request may have a body.
    """
    lines = [b"%b %b HTTP/%b" % (parser.get_method(), url, parser.get_http_version().encode())]
    lines += [b"%b: %b" % each for each in headers if each[0] not in _UPGRADE_HEADERS]
    return b"\r\n".join([*lines, b"", b""])


def error_of(error: httptools.HttpParserError) -> ServiceError:
    """Return the error for bytes that the parser, or one of our callbacks, has refused."""
    cause = error.__context__
    if isinstance(cause, ServiceError):
        return cause
    if cause is None or isinstance(cause, (httptools.HttpParserError, UnicodeDecodeError)):
        return BadRequestError(f"this is not valid HTTP: {error}")
    logger.error("a request could not be taken: %r", cause, exc_info=cause)
    return InternalError(INTERNAL_MESSAGE)


def _too_large_head() -> LargeHeadError:
    return LargeHeadError(f"the request line and headers have more than {MAX_HEAD_BYTES} bytes")


def _too_long() -> LargeHeadError:
    return LargeHeadError(f"trailers or chunk extensions have more than {MAX_TRAILER_BYTES} bytes")
