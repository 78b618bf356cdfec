"""How many connections there may be, and which one goes when there are too many. Event loop."""

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
    """What connections may cost."""

    max_connections: int = 10_000
    head_timeout_s: float = 10.0
    """How long request line and headers may take to arrive, and a TLS handshake before them."""
    write_timeout_s: float = 30.0
    """A client that takes nothing of its answer for so long is cut off."""
    max_unfinished_bytes: int = 128 * 2**20
    """What may be kept of requests that are on their way, over all connections."""
    max_unread_bytes: int = 256 * 2**20
    """What may be kept of answers that are not read yet, over all connections."""

    def share(self, num: int) -> "EdgeLimits":
        """The limits of each of several processes that together keep to these."""
        return msgspec.structs.replace(
            self,
            max_connections=-(-self.max_connections // num),
            max_unfinished_bytes=self.max_unfinished_bytes // num,
            max_unread_bytes=self.max_unread_bytes // num,
        )


class Connection(Protocol):
    """A connection, as it is counted here."""

    @property
    def is_idle(self) -> bool:
        """No call of it is being answered."""

    @property
    def idle_since(self) -> float:
        """When that began, in the loop's time."""

    def shed(self) -> None:
        """Close it at once: its place is needed."""


class ConnectionLimits:
    """Bounds their number: the longest idle one goes first, then the newcomer is turned away."""

    def __init__(self, limits: EdgeLimits, unfinished: UnfinishedRequests) -> None:
        self.limits = limits
        self.unfinished = unfinished
        self.unread = UnreadAnswers(limits.max_unread_bytes)
        self._oldest: deque[Connection] = deque()
        """Those that were idle at the last search, the longest one first."""
        self._searched_at = float("-inf")

    def have_room(self, everyone: Collection[Connection]) -> bool:
        """Whether one that has just joined the others may stay, if need be for an idle one."""
        if len(everyone) <= self.limits.max_connections:
            return True
        return self._shed_an_idle_one(everyone)

    def use(self) -> EdgeUse:
        """What all connections hold now."""
        unfinished, unread = self.unfinished, self.unread
        return EdgeUse(
            unfinished.num_bytes,
            unfinished.max_bytes,
            unfinished.num_refused,
            unread.num_bytes,
            unread.max_bytes,
            unread.num_cut,
        )

    def _shed_an_idle_one(self, everyone: Collection[Connection]) -> bool:
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


def _is_idle_at(connection: Connection, now: float) -> bool:
    return connection.is_idle and now - connection.idle_since >= _MIN_IDLE_S
