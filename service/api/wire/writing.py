"""Writes answers as fast as clients read them. Lives in the event loop."""

import asyncio
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.flow_control import FlowControl

from inferpool.service.api.wire.budgets import UnreadAnswers

_MIN_WRITTEN_BYTES = 4096
"""A slow reader must read this much in each `write_timeout_s`, or the rest."""
_HIGH_WATER_BYTES = 64 * 1024
_PIECE_BYTES = 256 * 1024
"""Large answers are written in such pieces: uvloop's TLS takes everything at once, and does not
tell that the client has not read it."""


class AnswerWriter:
    """Writes large answers as the client reads them, and cuts off a client that does not read."""

    def __init__(
        self,
        transport: asyncio.Transport,
        flow: FlowControl,
        unread: UnreadAnswers,
        write_timeout_s: float,
        owner: Callable[[], str],
    ) -> None:
        """Write nothing yet; `owner` returns the owner of the memory that unread answers take."""
        self.owner = owner
        self._transport = transport
        self._flow = flow
        self._unread = unread
        self._timeout_s = write_timeout_s
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._num_unwritten = 0
        self._answer: bytes | None = None
        """The body of a large answer, until the client has read it."""
        self._num_sent = 0
        """Bytes of it that were written."""
        self._asgi_bytes = 0
        """Length of an application's large answer, until its last piece is written."""
        transport.set_write_buffer_limits(_HIGH_WATER_BYTES, 0)  # answers are kept to the last byte

    @property
    def has_answer(self) -> bool:
        """The client has not read a large answer to its end."""
        return self._answer is not None

    @property
    def num_unread_bytes(self) -> int:
        """Bytes that the kernel has not taken yet."""
        num_bytes = self._transport.get_write_buffer_size()
        return num_bytes if self._answer is None else num_bytes + len(self._answer) - self._num_sent

    def send(self, head: bytes, body: bytes) -> None:
        """Write a large answer as far as the client reads it; the rest follows later."""
        self._transport.write(head)
        self._answer, self._num_sent = body, 0
        self._send_on()
        if self._answer is not None:
            self._count_unread()

    def pause(self) -> None:
        """Begin to count and time a client that reads too slowly."""
        self.watch()
        self._count_unread()

    def resume(self) -> bool:
        """Write on after the client has read; return whether it has read everything."""
        self._send_on()
        if self._flow.write_paused:
            return False
        self._unread.give_back(self)
        if self._timer is not None:  # a stream may go on for long, and what comes is timed anew
            self._timer.cancel()
            self._timer = None
        return True

    def watch(self) -> None:
        """Begin to time a client that does not read, unless it is timed."""
        if self._timer is None:
            self._num_unwritten = self.num_unread_bytes
            self._timer = self._loop.call_later(self._timeout_s, self._check)

    def watch_rest(self) -> None:
        """Begin to time the client if it has not read everything that was written."""
        if self._transport.get_write_buffer_size():
            self.watch()

    def cut_off(self) -> None:
        """Close the connection at once, and drop what the client has not read."""
        self._answer = None
        self._transport.abort()

    def close(self) -> None:
        """Stop: the connection is lost."""
        if self._timer is not None:
            self._timer.cancel()
        self._answer = None
        self._unread.give_back(self)
        self.owner = str  # it refers to the connection, and nobody asks any more

    def in_pieces(self, app: Any) -> Any:
        """Return an application that writes large answers in pieces, but counts them as whole."""

        async def answer(scope: Any, receive: Any, send: Any) -> None:
            async def send_pieces(message: Any) -> None:
                body = message.get("body", b"")
                if len(body) <= _PIECE_BYTES:
                    await send(message)
                    return
                self._asgi_bytes = len(body)
                last = (len(body) - 1) // _PIECE_BYTES * _PIECE_BYTES
                try:
                    for place in range(0, last, _PIECE_BYTES):
                        piece = body[place : place + _PIECE_BYTES]
                        await send({**message, "body": piece, "more_body": True})
                finally:
                    self._asgi_bytes = 0
                await send({**message, "body": body[last:]})

            await app(scope, receive, send_pieces)

        return answer

    def _send_on(self) -> None:
        """Write as much of a large answer as the client reads now."""
        while self._answer is not None and not self._flow.write_paused:
            piece = memoryview(self._answer)[self._num_sent : self._num_sent + _PIECE_BYTES]
            if not piece:
                self._answer = None
                return
            self._num_sent += len(piece)
            self._transport.write(piece)

    def _count_unread(self) -> None:
        """Count the answers' memory while the client does not read them."""
        if self._answer is not None:
            num_bytes = len(self._answer)
        else:
            num_bytes = max(self._asgi_bytes, self._transport.get_write_buffer_size())
        self._unread.take(self, num_bytes)

    def _check(self) -> None:
        self._timer = None
        num_left = self.num_unread_bytes
        if num_left and num_left > self._num_unwritten - _MIN_WRITTEN_BYTES:
            self._transport.abort()
        elif num_left:
            self.watch()
