"""One end of the pair of pipes between a front and the main process; both sides use it."""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Generic, TypeVar

import msgspec

from inferpool.service.parts.fronts.messages import InstanceAnswer, Submission
from inferpool.workers.shared.messages import UNREADABLE
from inferpool.workers.shared.queues import FrameError, FrameReader, FrameWriter

logger = logging.getLogger(__name__)

_encode = msgspec.msgpack.Encoder().encode

M = TypeVar("M")
T = TypeVar("T", Submission, InstanceAnswer)

_MAX_TURN_BYTES = 1 << 20
"""Items of more bytes than this are sent before the turn is over, so that no message gets huge."""


class Link(Generic[M, T]):
    """Sends and receives whole messages, and never waits for the other end."""

    def __init__(
        self,
        reader: Connection,
        writer: Connection,
        decode: Callable[[bytes], M],
        on_message: Callable[[M], None],
        on_end: Callable[[str], None],
        turn: Callable[[list[T], list[int]], msgspec.Struct],
        on_failure: Callable[[T], None],
    ) -> None:
        """Begin to listen.

        Args:
            reader: The pipe from the other end.
            writer: The pipe to it.
            decode: Decodes a message.
            on_message: Called with each message.
            on_end: Called once with the reason why nothing more will come.
            turn: Makes the message with the items and the ids of one turn.
            on_failure: Called with each item that cannot be encoded; the log says why.
        """
        self._turn: Callable[[list[T], list[int]], msgspec.Struct] = turn
        self._on_failure: Callable[[T], None] = on_failure
        self._items: list[T] = []
        self._ids: list[int] = []
        self._num_bytes = 0
        self._is_turn_due = False
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

    def add(self, item: T, num_bytes: int = 0) -> None:
        """Send an item with all others of this turn of the event loop."""
        self._items.append(item)
        self._num_bytes += num_bytes
        if self._num_bytes > _MAX_TURN_BYTES:
            self.send_turn()
        else:
            self._send_soon()

    def add_id(self, id: int) -> None:
        """Send an id with the items of this turn, or of the next one if there are none."""
        self._ids.append(id)
        self._send_soon()

    def send_turn(self) -> None:
        """Send all items in one message, or one by one if that cannot be encoded."""
        self._is_turn_due = False
        items, ids = self._items, self._ids
        self._items, self._ids, self._num_bytes = [], [], 0
        if not items and not ids:
            return
        try:
            self.send(self._turn(items, ids))
        except Exception:
            for item in items:
                try:
                    self.send(self._turn([item], []))
                except Exception:
                    logger.exception("%s %d cannot be sent", type(item).__name__, item.id)
                    self._on_failure(item)
            self.send(self._turn([], ids))

    @property
    def num_waiting_bytes(self) -> int:
        """Bytes that the other end has no room for yet."""
        return sum(map(len, self._writer.waiting))

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

    def _send_soon(self) -> None:
        if not self._is_turn_due:
            self._is_turn_due = True
            self._loop.call_soon(self._end_turn)

    def _end_turn(self) -> None:
        if self._items:
            self.send_turn()
        else:
            self._loop.call_soon(self.send_turn)

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
