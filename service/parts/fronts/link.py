"""One end of the pair of pipes between a front and the main process; both sides use it."""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Generic, TypeVar

import msgspec

from inferpool.service.parts.fronts.messages import InstanceAnswer, Submission
from inferpool.workers.host.queues import FrameReader, FrameWriter
from inferpool.workers.shared.messages import UNREADABLE, FrameError

logger = logging.getLogger(__name__)

_encode = msgspec.msgpack.Encoder().encode

M = TypeVar("M")
T = TypeVar("T", Submission, InstanceAnswer)


class Link(Generic[M]):
    """Sends and receives whole messages, and never waits for the other end."""

    def __init__(
        self,
        reader: Connection,
        writer: Connection,
        decode: Callable[[bytes], M],
        on_message: Callable[[M], None],
        on_end: Callable[[str], None],
    ) -> None:
        """Begin to listen; `on_end` is called once with the reason why nothing more will come."""
        self._loop = asyncio.get_running_loop()
        self._reader = FrameReader(reader)
        self._writer = FrameWriter(writer)
        self._decode = decode
        self._on_message = on_message
        self._on_end = on_end
        self._is_open = True
        self._loop.add_reader(self._reader.fd, self._on_readable)

    def send(self, message: msgspec.Struct) -> None:
        """Send a message, in as many pieces as the pipe has room for.

        Raises:
            Exception: It cannot be encoded; nothing of it was sent.
        """
        if self._is_open:
            self._writer.write(_encode(message))

    def send_all(
        self,
        kind: Callable[[list[T], list[int]], msgspec.Struct],
        items: list[T],
        ids: list[int],
        on_failure: Callable[[T], None],
    ) -> None:
        """Send all items in one message, or one by one if that cannot be encoded.

        `on_failure` is called with each item that cannot be sent; the log says why.
        """
        try:
            self.send(kind(items, ids))
        except Exception:
            for item in items:
                try:
                    self.send(kind([item], []))
                except Exception:
                    logger.exception("%s %d cannot be sent", type(item).__name__, item.id)
                    on_failure(item)
            self.send(kind([], ids))

    def flush(self) -> None:
        """Write what waits and fits, without waiting for the loop."""
        self._writer.flush()

    def read_rest(self) -> None:
        """Read what the other end wrote before it ended."""
        self._reader.is_dry = False
        while self._is_open and not self._reader.is_dry:
            self._on_readable()

    def close(self) -> None:
        """Close both pipes."""
        if self._is_open:
            self._is_open = False
            self._loop.remove_reader(self._reader.fd)
            with contextlib.suppress(OSError):
                self._reader.close()
                self._writer.close()

    def _on_readable(self) -> None:
        try:
            for frame in self._reader.frames():
                self._on_message(self._decode(frame))
        except EOFError:
            self._end("its pipe is closed")
        except (FrameError, *UNREADABLE) as error:
            self._end(f"it wrote what is no message: {error}")

    def _end(self, reason: str) -> None:
        if self._is_open:
            self.close()
            self._on_end(reason)
