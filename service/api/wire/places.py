"""Places of connections: how many there may be, in all and by address. In the event loop."""

import asyncio
from collections import Counter, deque
from collections.abc import Collection
from typing import Protocol

from inferpool.service.api.wire.budgets import (
    EdgeLimits,
    EdgeUse,
    UnfinishedRequests,
    UnreadAnswers,
)
from inferpool.service.api.wire.held import HeldBytes
from inferpool.service.queue.shares import allowance

_MIN_IDLE_S = 1.0
"""A connection that has been idle for less may be about to send its request."""
_SEARCH_EVERY_S = 0.1
"""Looking through ten thousand connections takes a millisecond."""


class CountedConnection(Protocol):
    """A connection, as far as its place matters."""

    @property
    def is_idle(self) -> bool:
        """No call of it is being answered."""

    @property
    def idle_since(self) -> float:
        """The beginning of that, in the loop's time."""

    @property
    def address(self) -> str:
        """The owner that its client's address stands for."""

    def shed(self) -> None:
        """Close it at once: its place is needed."""


class ConnectionLimits:
    """The limits and budgets of all connections of a process.

    If there are too many, the one that has been idle longest is closed; if none is, the new one. An
    address may have its share of the places that are not idle, so that one that keeps all of them
    at work leaves some to others.
    """

    def __init__(
        self, limits: EdgeLimits, unfinished: UnfinishedRequests, unread: HeldBytes | None = None
    ) -> None:
        """Begin; `unread` counts the unread answers if several processes do so together."""
        self.limits = limits
        self.unfinished = unfinished
        self.unread = UnreadAnswers(limits.max_unread_bytes, share=unfinished.share, held=unread)
        self._oldest: deque[CountedConnection] = deque()
        """Connections that were idle at the last search, the longest idle first."""
        self._nums: Counter[str] = Counter()
        """Connections of each address, at the last search and begun since."""
        self._searched_at = float("-inf")

    def have_room(
        self, newcomer: CountedConnection, everyone: Collection[CountedConnection]
    ) -> bool:
        """Return whether a new connection may stay; an idle one may be closed for it."""
        share, most, num = self.unfinished.share, self.limits.max_connections, len(everyone)
        if num <= share * most:  # no address has more
            return True
        self._look_at(newcomer, everyone)
        own, left = self._nums[newcomer.address], most - (num - 1) + len(self._oldest)
        if own and allowance(own, left, share) < 1:
            return False
        if num > most and not self._shed_an_idle_one():
            return False
        self._nums[newcomer.address] = own + 1
        return True

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

    def _look_at(
        self, newcomer: CountedConnection, everyone: Collection[CountedConnection]
    ) -> None:
        """Count the other connections by address, and list the idle ones."""
        now = asyncio.get_running_loop().time()
        if now - self._searched_at < _SEARCH_EVERY_S:
            return
        self._searched_at = now
        self._nums = Counter(each.address for each in everyone)
        self._nums[newcomer.address] -= 1
        idle = [each for each in everyone if _is_idle_at(each, now)]
        self._oldest = deque(sorted(idle, key=lambda each: each.idle_since))

    def _shed_an_idle_one(self) -> bool:
        now = asyncio.get_running_loop().time()
        while self._oldest:
            each = self._oldest.popleft()
            if _is_idle_at(each, now):
                each.shed()
                return True
        return False


def _is_idle_at(connection: CountedConnection, now: float) -> bool:
    return connection.is_idle and now - connection.idle_since >= _MIN_IDLE_S
