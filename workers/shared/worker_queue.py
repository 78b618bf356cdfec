"""The worker's end of a private queue: a queue of torch.multiprocessing with typed messages."""

import os
import select
import threading
from collections import deque
from multiprocessing.connection import Connection

import msgspec
from torch.multiprocessing.queue import ConnectionWrapper, SimpleQueue

from inferpool.workers.shared.messages import FromWorker, ToWorker
from inferpool.workers.shared.queues import Frames

_READ_BYTES = 1 << 16
_KEPT_BYTES = 1 << 20
"""Largest buffer that is kept for the next message."""
_HEAD_BYTES = 4
_decode = msgspec.msgpack.Decoder(ToWorker).decode
_encode_into = msgspec.msgpack.Encoder().encode_into


class WorkerQueue(SimpleQueue):
    """A SimpleQueue with one producer, one consumer and no lock between processes.

    Messages are msgpack, not pickles, and are decoded by type. Close one end with `receive_only` or
    `send_only`: only then does each process see the death of the other as the end of file.
    """

    def __init__(self, reader: Connection, writer: Connection) -> None:
        self._reader = ConnectionWrapper(reader)
        self._writer = ConnectionWrapper(writer)
        self._poll = reader.poll
        self._reader_fd, self._writer_fd = reader.fileno(), writer.fileno()
        self._frames = Frames()
        self._arrived: deque[bytes] = deque()
        self._put_lock = threading.Lock()
        self._buffer = bytearray()

    def receive_only(self) -> "WorkerQueue":
        """Close the writing end in this process."""
        self._writer.close()
        self._poller = select.poll()
        self._poller.register(self._reader_fd, select.POLLIN)
        return self

    def send_only(self) -> "WorkerQueue":
        """Close the reading end in this process."""
        self._reader.close()
        return self

    def leave_to_parent(self) -> None:
        """Close the writing end in a forked process: two writers would mix their frames."""
        self._put_lock = threading.Lock()  # a thread of the parent may hold it
        self._writer.close()
        self._writer_fd = -1

    def fileno(self) -> int:
        """Return the descriptor of the receiving end."""
        return self._reader_fd

    def wait(self, timeout_s: float) -> bool:
        """Wait for a message or the end of file; return True if there is one."""
        return bool(self._arrived or self._poller.poll(timeout_s * 1000))

    def get(self) -> ToWorker:
        """Wait for the next message and return it, or None for the sentinel.

        Raises:
            EOFError: The front end is gone.
        """
        while not self._arrived:
            data = os.read(self._reader_fd, _READ_BYTES)
            if not data:
                raise EOFError
            self._arrived.extend(self._frames.feed(data))
        message: ToWorker = _decode(self._arrived.popleft())
        return message

    def put(self, message: FromWorker) -> None:
        """Send a message. Any thread may call it.

        Raises:
            OSError: The front end is gone, or this end was left to the parent process.
        """
        with self._put_lock:
            buffer = self._buffer
            _encode_into(message, buffer, _HEAD_BYTES)
            buffer[:_HEAD_BYTES] = (len(buffer) - _HEAD_BYTES).to_bytes(_HEAD_BYTES, "big")
            written = os.write(self._writer_fd, buffer)
            if written < len(buffer):
                self._write_rest(memoryview(buffer)[written:])
            if len(buffer) > _KEPT_BYTES:
                self._buffer = bytearray()

    def _write_rest(self, rest: memoryview) -> None:
        while rest:
            rest = rest[os.write(self._writer_fd, rest) :]
