"""The worker's end of a private queue: a torch.multiprocessing queue of typed messages."""

import select
import threading
from multiprocessing.connection import Connection

import msgspec
from torch.multiprocessing.queue import ConnectionWrapper, SimpleQueue

from workers.messages import Batch, FromWorker

_decode = msgspec.msgpack.Decoder(Batch | None).decode
_encode = msgspec.msgpack.Encoder().encode


class WorkerQueue(SimpleQueue):
    """A SimpleQueue with one producer, one consumer and no lock between processes.

    Messages are msgpack, not pickles: the front end decodes what a worker wrote by type. Keep only
    one end with `receive_only` or `send_only`, so that the death of either process is seen by the
    other as the end of file.
    """

    def __init__(self, reader: Connection, writer: Connection) -> None:
        self._reader = ConnectionWrapper(reader)
        self._writer = ConnectionWrapper(writer)
        self._poll = reader.poll
        self._receive = reader.recv_bytes
        self._send = writer.send_bytes
        self._put_lock = threading.Lock()

    def receive_only(self) -> "WorkerQueue":
        """Close the writing end in this process."""
        self._writer.close()
        self._poller = select.poll()
        self._poller.register(self._reader.fileno(), select.POLLIN)
        return self

    def send_only(self) -> "WorkerQueue":
        """Close the reading end in this process."""
        self._reader.close()
        return self

    def wait(self, timeout_s: float) -> bool:
        """Wait until there is something to get, or the end of file."""
        return bool(self._poller.poll(timeout_s * 1000))

    def get(self) -> Batch | None:
        """The next batch, or None for the sentinel. Blocks.

        Raises:
            EOFError: The front end is gone.
        """
        batch: Batch | None = _decode(self._receive())
        return batch

    def put(self, message: FromWorker) -> None:
        """Send a message; any thread may.

        Raises:
            BrokenPipeError: The front end is gone.
        """
        data = _encode(message)
        with self._put_lock:
            self._send(data)
