"""Bounds what a connection may send besides bodies: heads, and calls in line. Event loop."""

import asyncio
import logging
from collections.abc import Callable, Sequence, Sized
from urllib.parse import unquote

import httptools
from uvicorn.protocols.http.flow_control import FlowControl

from inferpool.service.api.errors import LargeHeadError, LongUrlError
from inferpool.service.api.wire.budgets import UnfinishedRequests
from inferpool.service.errors import BadRequestError, InternalError, OverloadedError, ServiceError

logger = logging.getLogger(__name__)

MAX_HEADERS = 100
MAX_URL_BYTES = 8 * 1024
"""More than the 8,000 that RFC 9110 (4.1) asks for at least."""
MAX_PIPELINED = 1024
"""Calls of one connection that wait for their turn; one read may bring thousands."""
MAX_HEAD_BYTES = 64 * 1024
"""Of request line and headers."""
_CALL_BYTES = 4096
"""What a call that waits for its turn takes besides its bytes."""


class QueueAwareFlow(FlowControl):
    """Does not read on while calls wait in line, though uvicorn does for each call of its own.

    What came then would be the body of a call that nobody has looked at: as much as is sent.
    """

    def __init__(self, transport: asyncio.Transport, line: Sized) -> None:
        """Watch a connection.

        Args:
            transport: Of the connection.
            line: The calls that wait for their turn.
        """
        super().__init__(transport)
        self._line = line

    def resume_reading(self) -> None:
        """Read on, unless a call waits."""
        if not self._line:
            super().resume_reading()


class IncomingLimits:
    """Counts what has come of the heads of one connection, and of its calls in line."""

    __slots__ = (
        "_flow", "_loop", "_num_in_head", "_num_in_line", "_on_late", "_refuse", "_timeout_s",
        "_timer", "_unfinished", "give_way", "num_head_bytes",
    )  # fmt: skip

    def __init__(
        self,
        flow: FlowControl,
        unfinished: UnfinishedRequests,
        head_timeout_s: float,
        *,
        refuse: Callable[[ServiceError], None],
        give_way: Callable[[ServiceError], None],
        on_late: Callable[[], None],
    ) -> None:
        """Begin with nothing.

        Args:
            flow: Tells whether it is us who do not read on.
            unfinished: Counts what all connections have sent of calls that are not whole.
            head_timeout_s: How long a head may take to come.
            refuse: Told why the head that comes is not taken.
            give_way: Told why nothing that waits is taken, the calls in line included.
            on_late: Told that a head takes too long.
        """
        self._flow = flow
        self._unfinished = unfinished
        self._timeout_s = head_timeout_s
        self._refuse = refuse
        self.give_way = give_way
        self._on_late = on_late
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self.num_head_bytes = 0
        """Bytes of a head that has not come in one piece, or 0."""
        self._num_in_head = 0
        """Bytes of a head that is not whole, as they were counted."""
        self._num_in_line = 0
        """Bytes that calls which wait for their turn are taken to need."""

    def take_head(self, num_bytes: int) -> None:
        """Count more of a head that has not come in one piece, and time it."""
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
        """The head is whole, or not waited for."""
        self.num_head_bytes = 0
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._num_in_head:
            self._count(0, self._num_in_line)

    def take_line(self, num_calls: int, num_bytes: int) -> None:
        """Count calls that wait for their turn, and what was read to make them."""
        try:
            self._count(self._num_in_head, self._num_in_line + num_bytes + num_calls * _CALL_BYTES)
        except OverloadedError as error:
            self.give_way(error)

    def end_line(self) -> None:
        """No call waits for its turn any more."""
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
        if self._flow.read_paused:  # it is us who do not read on
            self.take_head(0)
        else:
            self._on_late()


def check_head(
    url: bytes, headers: Sequence[tuple[bytes, bytes]], num_hosts: int, *, is_old: bool
) -> None:
    """See whether a head that is whole can be taken.

    Args:
        url: As it came.
        headers: All of them.
        num_hosts: How many of them are `Host`.
        is_old: It is HTTP/1.0, which needs none.

    Raises:
        LongUrlError: The URL is too long.
        LargeHeadError: The head is.
        BadRequestError: It does not name one host.
    """
    if len(url) > MAX_URL_BYTES:
        raise LongUrlError(f"the URL has more than {MAX_URL_BYTES} bytes")
    if num_hosts != 1 and (num_hosts or not is_old):
        raise BadRequestError(f"there must be one Host header, and there are {num_hosts}")
    if len(url) + sum(len(name) + len(value) for name, value in headers) > MAX_HEAD_BYTES:
        raise _too_large_head()


def error_of(error: httptools.HttpParserError) -> ServiceError:
    """What to tell a client whose bytes the parser could not take, or we could not."""
    cause = error.__context__
    if isinstance(cause, ServiceError):
        return cause
    if cause is None or isinstance(cause, (httptools.HttpParserError, UnicodeDecodeError)):
        return BadRequestError(f"this is no HTTP that can be read: {error}")
    logger.error("a request could not be taken: %r", cause, exc_info=cause)
    return InternalError("this is a mistake of the service; its log has more")


def _too_large_head() -> LargeHeadError:
    return LargeHeadError(f"the request line and headers have more than {MAX_HEAD_BYTES} bytes")


def target_of(url: bytes) -> tuple[str, bytes]:
    """Split a URL into the path that it names, decoded, and its query: as uvicorn reads them.

    Raises:
        HttpParserError: It is no URL.
        UnicodeDecodeError: It has characters that a URL has not.
    """
    if not url.startswith(b"/") or b"%" in url or b"#" in url:
        parsed = httptools.parse_url(url)
        return unquote((parsed.path or b"").decode("ascii")), parsed.query or b""
    path, _, query = url.partition(b"?")
    return path.decode("ascii"), query
