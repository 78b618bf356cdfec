"""Bounds the number of connections. Event loop."""

import asyncio
from collections import deque
from collections.abc import Collection
from typing import Protocol

import msgspec

from inferpool.service.api.wire.budgets import EdgeUse, UnfinishedRequests, UnreadAnswers

_MIN_IDLE_S = 1.0
"""A connection that has been idle for less may be about to send its request."""
_SEARCH_EVERY_S = 0.1
"""Looking through ten thousand connections takes a millisecond."""


class EdgeLimits(msgspec.Struct, frozen=True, kw_only=True):
    """How much connections may cost."""

    max_connections: int = 10_000
    head_timeout_s: float = 10.0
    """How long request line and headers may take to arrive, and a TLS handshake before them."""
    write_timeout_s: float = 30.0
    """A client that takes nothing of its answer for so long is cut off."""
    max_unfinished_bytes: int = 128 * 2**20
    """Memory for unfinished requests of all connections."""
    max_unread_bytes: int = 256 * 2**20
    """Memory for unread answers of all connections."""

    def share(self, num: int) -> "EdgeLimits":
        """Return the limits of each of several processes that together keep to these."""
        return msgspec.structs.replace(
            self,
            max_connections=-(-self.max_connections // num),
            max_unfinished_bytes=self.max_unfinished_bytes // num,
            max_unread_bytes=self.max_unread_bytes // num,
        )


class CountedConnection(Protocol):
    """A connection, as far as its place matters."""

    @property
    def is_idle(self) -> bool:
        """No call of it is being answered."""

    @property
    def idle_since(self) -> float:
        """The beginning of that, in the loop's time."""

    def shed(self) -> None:
        """Close it at once: its place is needed."""


class ConnectionLimits:
    """The limits and budgets of all connections of a process.

    If there are too many, the one that has been idle longest is closed; if none is, the new one.
    """

    def __init__(self, limits: EdgeLimits, unfinished: UnfinishedRequests) -> None:
        self.limits = limits
        self.unfinished = unfinished
        self.unread = UnreadAnswers(limits.max_unread_bytes)
        self._oldest: deque[CountedConnection] = deque()
        """Connections that were idle at the last search, the longest idle first."""
        self._searched_at = float("-inf")

    def have_room(self, everyone: Collection[CountedConnection]) -> bool:
        """Return whether a new connection may stay; an idle one may be closed for it."""
        if len(everyone) <= self.limits.max_connections:
            return True
        return self._shed_an_idle_one(everyone)

    def use(self) -> EdgeUse:
        """Return what all connections hold now."""
        unfinished, unread = self.unfinished, self.unread
        return EdgeUse(
            unfinished.num_bytes,
            unfinished.max_bytes,
            unfinished.num_refused,
            unread.num_bytes,
            unread.max_bytes,
            unread.num_cut,
        )

    def _shed_an_idle_one(self, everyone: Collection[CountedConnection]) -> bool:
        now = asyncio.get_running_loop().time()
        if not self._oldest and now - self._searched_at >= _SEARCH_EVERY_S:
            self._searched_at = now
            idle = [each for each in everyone if _is_idle_at(each, now)]
            self._oldest.extend(sorted(idle, key=lambda each: each.idle_since))
        while self._oldest:
            each = self._oldest.popleft()
            if _is_idle_at(each, now):
                each.shed()
                return True
        return False


def _is_idle_at(connection: CountedConnection, now: float) -> bool:
    return connection.is_idle and now - connection.idle_since >= _MIN_IDLE_S
