"""Private queues between the front end and one worker: one producer, one consumer, no lock.

Each queue is a pipe with the framing of a `torch.multiprocessing` SimpleQueue: a signed 32-bit
big-endian length, or -1 and an unsigned 64-bit length, then that many bytes. The front end must
not import torch (3 s and 600 MB), so it reads and writes the descriptors itself and never blocks;
in the worker the same queue is a `torch.multiprocessing.queue.SimpleQueue`. With one process at
each end no lock is needed, so a process that is killed cannot leave one locked. Each incarnation of
a worker gets new queues, which are closed after its exit.
"""

import asyncio
import os
import struct
from collections import deque
from collections.abc import Iterable, Iterator
from multiprocessing.connection import Connection

MAX_FRAME_BYTES = 1 << 30
_READ_BYTES = 1 << 18


class FrameReader:
    """Reading end in the front end; it never blocks."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.fd = connection.fileno()
        os.set_blocking(self.fd, False)
        self._frames = Frames()
        self.is_dry = False
        """True if the last read found nothing."""

    def frames(self) -> Iterable[bytes]:
        """Return the frames that have arrived completely.

        Raises:
            EOFError: The other end is closed, and all that it wrote has been returned.
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


class FrameWriter:
    """Writing end in the front end: writes as much as fits, and the rest once there is room."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._fd = connection.fileno()
        os.set_blocking(self._fd, False)
        self._loop = asyncio.get_running_loop()
        self.waiting: deque[memoryview] = deque()

    def write(self, body: bytes) -> bool:
        """Send a frame; return True if all is written already.

        A broken pipe is no error here: the reader of that process sees its end.
        """
        self.waiting.append(memoryview(frame_of(body)))
        is_written = self.flush()
        if not is_written:
            self._loop.add_writer(self._fd, self._on_writable)
        return is_written

    def flush(self) -> bool:
        """Write as much as fits of what is left; return True once that is nothing."""
        waiting = self.waiting
        while waiting:
            try:
                written = os.write(self._fd, waiting[0])
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
        """Close the end, and drop what is left."""
        self._loop.remove_writer(self._fd)
        self._connection.close()

    def _on_writable(self) -> None:
        if self.flush():
            self._loop.remove_writer(self._fd)


class FrameError(Exception):
    """The other end wrote something that is no frame."""


def frame_of(body: bytes) -> bytes:
    """Return a frame for `Frames`, of the kind that `multiprocessing` writes."""
    return len(body).to_bytes(4, "big") + body


class Frames:
    """Parser of frames; it keeps incomplete ones until the rest arrives."""

    def __init__(self, max_frame_bytes: int = MAX_FRAME_BYTES) -> None:
        self._buffer = bytearray()
        self._max_frame_bytes = max_frame_bytes

    def feed(self, data: bytes) -> Iterable[bytes]:
        """Return the frames that are complete now. Use them up before the next call.

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
            start, length = _parse_head(buffer, self._max_frame_bytes)
            if length is None or len(buffer) < start + length:
                return
            frame = bytes(memoryview(buffer)[start : start + length])
            del buffer[: start + length]
            yield frame


def _parse_head(buffer: bytearray, max_frame_bytes: int) -> tuple[int, int | None]:
    """Return the start of the first frame's body, and its length if that has arrived."""
    (length,) = struct.unpack_from("!i", buffer)
    start = 4
    if length == -1:
        if len(buffer) < 12:
            return 12, None
        (length,) = struct.unpack_from("!Q", buffer, 4)
        start = 12
    if not 0 <= length <= max_frame_bytes:
        raise FrameError(f"a frame of {length} bytes")
    return start, length
