"""Accepts connections and gives each to the front that has the fewest. Main process's event loop.

Measured with bursts of 64 keep-alive connections over two processes of uvloop: a listening socket
that both inherit gave one of them 50 to 64, because the process that wakes first accepts all that
wait; SO_REUSEPORT gave 32 to 38 (of 8 connections up to 7). Here both get 32. It costs the main
process two system calls per connection and none per call. If a front dies, connections that were
not accepted yet are not lost.
"""

import asyncio
import logging
import socket
from collections.abc import Callable, Sequence

from inferpool.service.api.wire.backlog import take_last
from inferpool.service.parts.fronts.front_process import FrontProcess

logger = logging.getLogger(__name__)

_MAX_ACCEPTED = 64
"""Connections accepted in one turn of the loop."""
_PAUSE_S = 0.05
"""How long connections wait in the backlog after no descriptor was left, or no front took one."""


class ConnectionBalancer:
    """Shares the connections of one listening socket among the fronts that accept any."""

    def __init__(
        self, listener: socket.socket, takers: Callable[[], Sequence[FrontProcess]]
    ) -> None:
        self._listener = listener
        self._takers = takers
        self._is_open = False
        self._is_closed = False
        self._timer: asyncio.TimerHandle | None = None
        """Ends a pause."""
        self._in_hand: socket.socket | None = None
        """A connection that was accepted and that no front has taken yet."""
        listener.setblocking(False)

    def open(self) -> None:
        """Begin to accept; connections that came earlier have waited in the backlog."""
        if not self._is_open and not self._is_closed:
            self._is_open = True
            self._timer = None
            loop = asyncio.get_running_loop()
            loop.add_reader(self._listener.fileno(), self._accept)
            if self._in_hand is not None:  # else it would wait for the next one to come
                loop.call_soon(self._accept_if_open)

    async def accept_last(self) -> None:
        """Pass on all connections that have been made, and accept no more."""
        if self._is_open or self._timer is not None:
            await take_last(self._listener, self._accept)
        self.close()

    def close(self) -> None:
        """Pass on the connections that wait now, and accept no more."""
        if self._is_closed:
            return
        if self._is_open or self._timer is not None:
            self._accept()
        self._pause()
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
        self._listener.close()
        if self._in_hand is not None:
            logger.warning("no front takes a connection: it is closed")
            self._in_hand.close()

    def _accept_if_open(self) -> None:
        if self._is_open:
            self._accept()

    def _accept(self) -> None:
        for _ in range(_MAX_ACCEPTED):
            takers = sorted(self._takers(), key=lambda taker: taker.num_open)
            if not takers:
                self._pause_for(_PAUSE_S)
                return
            if self._in_hand is None:
                try:
                    self._in_hand, _ = self._listener.accept()
                except (BlockingIOError, ConnectionAbortedError):
                    return
                except OSError as error:
                    logger.warning("a connection could not be accepted: %s", error)
                    self._pause_for(_PAUSE_S)
                    return
            if not any(taker.give(self._in_hand) for taker in takers):
                self._pause_for(_PAUSE_S)  # they have as many as they can look at
                return
            self._in_hand.close()
            self._in_hand = None

    def _pause(self) -> None:
        if self._is_open:
            self._is_open = False
            asyncio.get_running_loop().remove_reader(self._listener.fileno())

    def _pause_for(self, seconds: float) -> None:
        if self._is_open:
            self._pause()
            self._timer = asyncio.get_running_loop().call_later(seconds, self.open)
