"""Private queues: one producer, one consumer, no lock, gone with the incarnation that they serve.

Each is the pipe and the framing of a `torch.multiprocessing` SimpleQueue. The front end, which must
not import torch (3 s and 600 MB), works on the bare descriptors without ever blocking; in the
worker the same queue is a `torch.multiprocessing.queue.SimpleQueue`. There is no lock: two single
ends need none, and a process that is killed while it holds one takes the queue with it.
"""

import os
from collections import deque
from collections.abc import Iterable
from multiprocessing.connection import Connection, Pipe

from inferpool.workers.messages import Frames

_READ_BYTES = 1 << 18
_PIPE_BYTES = 1 << 20
"""Asked of the kernel; an unprivileged process may get less once many pipes are open."""
_F_SETPIPE_SZ = 1031
"""linux/fcntl.h; the fcntl module has it on Linux from Python 3.10 on."""


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
    from inferpool.workers.inside.worker_queue import WorkerQueue

    return WorkerQueue(reader, writer)


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
