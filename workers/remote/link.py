"""A connection between the front end and an agent: sends and receives frames without blocking.

Runs in the event loop of either side. Payloads are sent from where they lie, and received into
where they are to lie: no copy is made on the way, except what TLS needs. TLS works on the socket
itself, since with asyncio's transports each byte is copied three times more.
"""

import asyncio
import contextlib
import logging
import socket
import ssl
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, Protocol, TypeVar

import msgspec

from inferpool.workers.remote.wire import LENGTHS, MAX_HEAD_BYTES, Message, Views, frame_start
from inferpool.workers.shared.messages import UNREADABLE

logger = logging.getLogger(__name__)

_STAGING_BYTES = 1 << 18
"""Size of the buffer for heads and small bodies: one read gets many small messages."""
_MOST_AT_ONCE = 4 << 20
"""Bytes read or sent in a row before other work gets its turn."""
_PIECE_BYTES = 1 << 20
"""Bytes of a piece that TLS sends at once: OpenSSL does not stop within a piece."""
_MOST_VIEWS = 512
"""Pieces sent by one system call; Linux allows 1024 (IOV_MAX)."""
_JOINED_BYTES = 1 << 14
"""Pieces up to this size are joined for TLS: a record has this size at most (RFC 8446, 5.1)."""
_TCP_CORK = getattr(socket, "TCP_CORK", None)
_TLS_RECORD = 0x1603
"""First bytes of a TLS handshake, which no frame begins with."""

_CLOSED = "the other side closed the connection"

M = TypeVar("M", bound=Message)
M_in = TypeVar("M_in", bound=Message, contravariant=True)


class LinkError(Exception):
    """The other side has sent something that is no frame."""


class LinkListener(Protocol[M_in]):
    """Receiver of the messages of a link."""

    def room_for(self, message: M_in, num_bytes: int) -> Views:
        """Return writable memory for the body that comes, in pieces.

        Raises:
            ValueError: There cannot be such a body. The link is closed.
        """

    def on_message(self, message: M_in, body: Views) -> None:
        """Handle a message; its body is in the memory that `room_for` has returned.

        Raises:
            ValueError: It makes no sense. The link is closed.
        """

    def on_closed(self, reason: str) -> None:
        """Handle the end of the link; called once."""


class Mailbox(Generic[M]):
    """Listener that stores messages without a body until another one replaces it."""

    def __init__(self, most: int = 64) -> None:
        """Store `most` messages at most."""
        self._most = most
        self._messages: deque[M] = deque()
        self._came = asyncio.Event()
        self._closed_reason = ""

    def room_for(self, message: M, num_bytes: int) -> Views:
        """Refuse all bodies."""
        raise ValueError("a body, from a stranger")

    def on_message(self, message: M, body: Views) -> None:
        """Store a message."""
        if len(self._messages) == self._most:
            raise ValueError("too many messages at once")
        self._messages.append(message)
        self._came.set()

    def on_closed(self, reason: str) -> None:
        """Wake the caller of `get`."""
        self._closed_reason = reason or "closed"
        self._came.set()

    async def get(self) -> M:
        """Return the next message.

        Raises:
            ConnectionError: The link has ended.
        """
        while not self._messages:
            if self._closed_reason:
                raise ConnectionError(self._closed_reason)
            self._came.clear()
            await self._came.wait()
        return self._messages.popleft()

    def hand_over(self, link: "HostLink[M]", listener: LinkListener[M]) -> None:
        """Pass what has come, and what will come, to the next listener."""
        link.listener = listener
        with link.closing_at_errors():
            while self._messages and not link.is_closed:
                listener.on_message(self._messages.popleft(), ())
        if self._closed_reason:
            listener.on_closed(self._closed_reason)


class HostLink(Generic[M]):
    """One connection, from the end of its TLS handshake until it is closed."""

    def __init__(
        self, sock: socket.socket, kind: object, listener: LinkListener[M], *, max_body_bytes: int
    ) -> None:
        """Begin to receive.

        Args:
            sock: A connected socket. The link owns it from now on.
            kind: Type of the messages that come: `wire.ToAgent` or `wire.ToFrontEnd`.
            listener: Gets them. It may be replaced between two messages.
            max_body_bytes: Largest body that may come.
        """
        self.listener = listener
        self.max_head_bytes = MAX_HEAD_BYTES
        self.num_unsent_bytes = 0
        """Bytes that wait for the other side to read."""
        self.heard_at = time.monotonic()
        """Time at which the other side's last bytes came, be it within a message."""
        self._sock = sock
        self._fd = sock.fileno()
        self._is_tls = isinstance(sock, ssl.SSLSocket)
        self._decode: Callable[[memoryview], M] = msgspec.msgpack.Decoder(kind).decode
        self._max_body_bytes = max_body_bytes
        self._loop = asyncio.get_running_loop()
        self._unsent: deque[memoryview] = deque()
        self._is_waiting_for_room = False
        self.is_closed = False
        """Nothing is sent or received any more."""
        self._staging = memoryview(bytearray(_STAGING_BYTES))
        self._num_read_bytes = 0
        self._start = self._end = 0
        """Part of the staging buffer that is filled and not used up."""
        self._message: M | None = None
        """Message with a body on its way."""
        self._body: Views = ()
        self._missing: deque[memoryview] = deque()
        """Parts of the body that have not come yet."""
        sock.setblocking(False)
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._loop.add_reader(self._fd, self._on_readable)
        if self._is_tls:
            self._loop.call_soon(self._on_readable)  # what came with the handshake is not announced

    def send(self, message: Message, body: Sequence[memoryview] = ()) -> None:
        """Send a message. Its body is read until it is sent, or the link is closed.

        After the end of the link this does nothing: the listener learns of the end.

        Raises:
            FrameTooLargeError: The message is too large. Nothing was sent.
            Exception: It cannot be encoded. Nothing was sent.
        """
        num_bytes = sum(piece.nbytes for piece in body)
        start = frame_start(message, num_bytes)
        if self.is_closed:
            return
        self._unsent.append(memoryview(start))
        self._unsent.extend(piece.cast("B") for piece in body if piece.nbytes)
        self.num_unsent_bytes += len(start) + num_bytes
        if not self._is_waiting_for_room:
            self._flush()

    def close(self, reason: str = "closed") -> None:
        """Close the link, and drop what is not sent yet; the listener learns it soon."""
        if self.is_closed:
            return
        self.is_closed = True
        self._loop.remove_reader(self._fd)
        if self._is_waiting_for_room:
            self._loop.remove_writer(self._fd)
        self._unsent.clear()
        self._missing.clear()
        self._sock.close()
        self._loop.call_soon(self._tell_closed, reason)

    @contextlib.contextmanager
    def closing_at_errors(self) -> Iterator[None]:
        """Close the link if what has come makes no sense, or if its listener makes a mistake."""
        try:
            yield
        except (LinkError, ValueError, *UNREADABLE) as error:
            self.close(f"it sent what makes no sense: {error}")
        except Exception as error:  # the rest of what has come must not wait for ever
            logger.exception("a message of a host could not be handled")
            self.close(f"a message could not be handled: {error!r}")

    def _tell_closed(self, reason: str) -> None:
        self.listener.on_closed(reason)

    # Sending

    def _flush(self) -> None:
        try:
            self._write_some()
        except (BlockingIOError, ssl.SSLWantWriteError, ssl.SSLWantReadError):
            pass
        except OSError as error:
            self.close(_explained(error))
            return
        is_waiting = bool(self._unsent)
        if is_waiting and not self._is_waiting_for_room:
            self._loop.add_writer(self._fd, self._flush)
        elif self._is_waiting_for_room and not is_waiting:
            self._loop.remove_writer(self._fd)
        self._is_waiting_for_room = is_waiting

    def _write_some(self) -> None:
        unsent, until = self._unsent, self.num_unsent_bytes - _MOST_AT_ONCE
        if not self._is_tls:
            while unsent and self.num_unsent_bytes > until:
                pieces = [unsent[index] for index in range(min(len(unsent), _MOST_VIEWS))]
                self._note_sent(self._sock.sendmsg(pieces))
            return
        is_long = self.num_unsent_bytes > 2 * _JOINED_BYTES
        with self._full_segments() if is_long else contextlib.nullcontext():
            while unsent and self.num_unsent_bytes > until:
                self._join_small()
                self._note_sent(self._sock.send(unsent[0][:_PIECE_BYTES]))

    def _note_sent(self, num_bytes: int) -> None:
        unsent = self._unsent
        self.num_unsent_bytes -= num_bytes
        while num_bytes:
            size = unsent[0].nbytes
            if num_bytes < size:
                unsent[0] = unsent[0][num_bytes:]
                return
            num_bytes -= size
            unsent.popleft()

    def _join_small(self) -> None:
        """Join small pieces at the front of the queue: each would become a TLS record."""
        unsent = self._unsent
        if len(unsent) < 2 or unsent[0].nbytes + unsent[1].nbytes > _JOINED_BYTES:
            return
        joined = bytearray()
        while unsent and len(joined) + unsent[0].nbytes <= _JOINED_BYTES:
            joined += unsent.popleft()
        unsent.appendleft(memoryview(joined))

    @contextlib.contextmanager
    def _full_segments(self) -> Iterator[None]:
        """Have the kernel send only full segments in the block: OpenSSL writes record by record."""
        if _TCP_CORK is None or self._sock.family == socket.AF_UNIX:
            yield
            return
        self._sock.setsockopt(socket.IPPROTO_TCP, _TCP_CORK, 1)
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                self._sock.setsockopt(socket.IPPROTO_TCP, _TCP_CORK, 0)

    # Receiving

    def _on_readable(self) -> None:
        with self.closing_at_errors():
            until = self._num_read_bytes + _MOST_AT_ONCE
            while not self.is_closed and self._num_read_bytes < until:
                if not self._read_once():
                    return
        if self._is_tls and not self.is_closed:
            self._loop.call_soon(self._on_readable)  # OpenSSL may hold data that nobody announces

    def _read_once(self) -> bool:
        """Read once, and handle what is complete then; return whether there may be more."""
        is_body = bool(self._missing)
        into = self._missing[0] if is_body else self._room()
        try:
            num_bytes = self._sock.recv_into(into)
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return False
        except OSError as error:
            self.close(_explained(error))
            return False
        if not num_bytes:
            self.close(_CLOSED)
            return False
        self.heard_at = time.monotonic()
        self._num_read_bytes += num_bytes
        if is_body:
            self._note_read(num_bytes)
        else:
            self._end += num_bytes
            self._parse()
        return self._is_tls or num_bytes == into.nbytes  # a TLS read ends with each record

    def _room(self) -> memoryview:
        if self._start == self._end:
            if self._staging.nbytes > _STAGING_BYTES:  # it was for a long head
                self._staging = memoryview(bytearray(_STAGING_BYTES))
            self._start = self._end = 0
        elif self._end == self._staging.nbytes:
            self._make_room()
        return self._staging[self._end :]

    def _note_read(self, num_bytes: int) -> None:
        """Count the next part of the body; deliver the message after the last."""
        view = self._missing[0]
        if num_bytes < view.nbytes:
            self._missing[0] = view[num_bytes:]
            return
        self._missing.popleft()
        if not self._missing:
            self._deliver()

    def _make_room(self) -> None:
        """Move what is not used up to the start of the staging buffer."""
        left = bytes(self._staging[self._start : self._end])
        self._staging[: len(left)] = left
        self._start, self._end = 0, len(left)

    def _parse(self) -> None:
        """Handle all that is complete in the staging buffer."""
        while not self.is_closed and self._end - self._start >= LENGTHS.size:
            head_bytes, body_bytes = LENGTHS.unpack_from(self._staging, self._start)
            if head_bytes > self.max_head_bytes or body_bytes > self._max_body_bytes:
                if head_bytes >> 16 == _TLS_RECORD:
                    raise LinkError("it speaks TLS, and this side does not")
                raise LinkError(f"a message of {head_bytes} and {body_bytes} bytes")
            head_start = self._start + LENGTHS.size
            if head_start + head_bytes > self._end:
                if LENGTHS.size + head_bytes > self._staging.nbytes:
                    self._grow(LENGTHS.size + head_bytes)
                return
            message = self._decode(self._staging[head_start : head_start + head_bytes])
            self._start = head_start + head_bytes
            if not body_bytes:
                self.listener.on_message(message, ())
                continue
            self._message = message
            self._body = self.listener.room_for(message, body_bytes)
            self._missing.extend(view for view in self._body if view.nbytes)
            if sum(view.nbytes for view in self._missing) != body_bytes:
                raise LinkError(f"a body of {body_bytes} bytes, which does not fit its head")
            self._take_staged()
            if self._missing:
                return

    def _grow(self, num_bytes: int) -> None:
        """Use a staging buffer of its own for a long head."""
        staging = memoryview(bytearray(num_bytes))
        left = self._end - self._start
        staging[:left] = self._staging[self._start : self._end]
        self._staging, self._start, self._end = staging, 0, left

    def _take_staged(self) -> None:
        """Move the part of a body that is in the staging buffer to where it is to lie."""
        while self._missing and self._start < self._end:
            view = self._missing[0]
            num_bytes = min(view.nbytes, self._end - self._start)
            view[:num_bytes] = self._staging[self._start : self._start + num_bytes]
            self._start += num_bytes
            self._note_read(num_bytes)

    def _deliver(self) -> None:
        message, body = self._message, self._body
        assert message is not None
        self._message, self._body = None, ()
        self.listener.on_message(message, body)


def _explained(error: OSError) -> str:
    if isinstance(error, ssl.SSLEOFError | ssl.SSLZeroReturnError):
        return _CLOSED
    if error.strerror:
        return f"the connection broke: {error.strerror}"
    return f"the connection broke: {error}"
