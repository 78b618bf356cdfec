"""Private queues: one producer, one consumer, no lock, gone with the incarnation that they serve.

Each is the pipe and the framing of a `torch.multiprocessing` SimpleQueue. The front end, which must
not import torch (3 s and 600 MB), works on the bare descriptors without ever blocking; in the
worker the same queue is a `torch.multiprocessing.queue.SimpleQueue`. There is no lock: two single
ends need none, and a process that is killed while it holds one takes the queue with it.
"""

import os
import struct
from collections import deque
from collections.abc import Iterable, Iterator
from multiprocessing.connection import Connection, Pipe

_READ_BYTES = 1 << 18
_PIPE_BYTES = 1 << 20
"""Asked of the kernel; an unprivileged process may get less once many pipes are open."""
MAX_FRAME_BYTES = 1 << 30
_F_SETPIPE_SZ = 1031
"""linux/fcntl.h; the fcntl module has it on Linux from Python 3.10 on."""


class FrameError(Exception):
    """The other end wrote something that is no frame."""


class PrivateQueue:
    """A queue before its ends are given away; pass it to the process that takes the other end."""

    def __init__(self) -> None:
        self.reader: Connection
        self.writer: Connection
        self.reader, self.writer = Pipe(duplex=False)
        _widen(self.writer.fileno())

    def __reduce__(self) -> tuple[object, ...]:
        """In a worker the queue is one of torch.multiprocessing."""
        return _in_worker, (self.reader, self.writer)

    def close(self) -> None:
        """Close whichever ends are still open here."""
        self.reader.close()
        self.writer.close()


def _in_worker(reader: Connection, writer: Connection) -> object:
    from workers.worker_queue import WorkerQueue

    return WorkerQueue(reader, writer)


class Frames:
    """Makes frames of what is read, and keeps what is half a frame.

    The framing is that of multiprocessing.connection: a signed 32-bit length, big-endian, or -1 and
    an unsigned 64-bit one.
    """

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterable[bytes]:
        """The frames that are whole now, to be gone through at once.

        Raises:
            FrameError: A length is out of bounds.
        """
        if not self._buffer and len(data) >= 4 and int.from_bytes(data[:4], "big") == len(data) - 4:
            return (data[4:],)  # the usual case: exactly one frame
        return self._cut(data)

    def _cut(self, data: bytes) -> Iterator[bytes]:
        buffer = self._buffer
        buffer += data
        while len(buffer) >= 4:
            start, length = _parse_head(buffer)
            if length is None or len(buffer) < start + length:
                return
            frame = bytes(memoryview(buffer)[start : start + length])
            del buffer[: start + length]
            yield frame


class FrameReader:
    """The front end's reading end: takes what is there, and never waits."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.fd = connection.fileno()
        os.set_blocking(self.fd, False)
        self._frames = Frames()
        self.is_dry = False
        """The last look found nothing to read."""

    def frames(self) -> Iterable[bytes]:
        """The frames that have arrived whole.

        Raises:
            EOFError: The other end is closed; what was written before was yielded first.
            FrameError: A length is out of bounds.
        """
        try:
            data = os.read(self.fd, _READ_BYTES)
        except BlockingIOError:
            self.is_dry = True
            return ()
        except OSError as error:
            raise EOFError from error
        self.is_dry = False
        if not data:
            raise EOFError
        return self._frames.feed(data)

    def close(self) -> None:
        """Close the end."""
        self._connection.close()


def _parse_head(buffer: bytearray) -> tuple[int, int | None]:
    """Where the first frame's body starts, and its length if that has arrived."""
    (length,) = struct.unpack_from("!i", buffer)
    start = 4
    if length == -1:
        if len(buffer) < 12:
            return 12, None
        (length,) = struct.unpack_from("!Q", buffer, 4)
        start = 12
    if not 0 <= length <= MAX_FRAME_BYTES:
        raise FrameError(f"a frame of {length} bytes")
    return start, length


class FrameWriter:
    """The front end's writing end: writes what fits now and keeps the rest until there is room."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.fd = connection.fileno()
        os.set_blocking(self.fd, False)
        self._waiting: deque[memoryview] = deque()

    def write(self, body: bytes) -> bool:
        """Send a frame; True once all is written, else call `flush` when the end is writable.

        A broken pipe is no error here: the reading side sees the end of file.
        """
        self._waiting.append(memoryview(len(body).to_bytes(4, "big") + body))
        return self.flush()

    def flush(self) -> bool:
        """Write what waits; True once nothing is left."""
        waiting = self._waiting
        while waiting:
            try:
                written = os.write(self.fd, waiting[0])
            except BlockingIOError:
                return False
            except OSError:
                waiting.clear()
                return True
            if written == len(waiting[0]):
                waiting.popleft()
            else:
                waiting[0] = waiting[0][written:]
        return True

    def close(self) -> None:
        """Close the end."""
        self._connection.close()


def _widen(fd: int) -> None:
    try:
        import fcntl

        fcntl.fcntl(fd, _F_SETPIPE_SZ, _PIPE_BYTES)
    except (ImportError, OSError):
        return  # the default of 64 KiB serves as well, in more pieces
