"""Memory that all connections of a process may hold together. Event loop.

Limits of each connection do not bound a thousand of them: a client that sends half of a large body,
or reads nothing of a large answer, makes this process keep it.
"""

import asyncio
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

import msgspec

from inferpool.service.errors import OverloadedError, ServiceError

_RETRY_AFTER_S = 1
_MIN_AGE_S = 1.0
"""A client that has had less time cannot have shown how fast it sends or reads."""
_SHARE_LEFT = 7 / 8
"""Share of the limit to go down to, since looking through ten thousand clients takes
milliseconds."""


class EdgeUse(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Memory that the connections of one process hold, and how many calls that has cost."""

    unfinished_bytes: int = 0
    max_unfinished_bytes: int = 0
    num_refused: int = 0
    """Requests without room since the process began."""
    unread_bytes: int = 0
    max_unread_bytes: int = 0
    num_cut: int = 0
    """Connections closed to make room since the process began."""


C = TypeVar("C")


class Sender(Protocol):
    """Holds an unfinished request of a client."""

    def give_way(self, error: ServiceError) -> None:
        """Refuse the request, and forget its bytes."""


class _Usage:
    """Memory that one client makes this process keep."""

    __slots__ = ("num_at_first", "num_bytes", "since")

    def __init__(self, since: float, num_at_first: int = 0) -> None:
        self.since = since
        self.num_at_first = num_at_first
        """Bytes that it still had to read."""
        self.num_bytes = 0


class _Budget(Generic[C]):
    """The memory that clients make this process keep, and may keep together."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._clients: dict[C, _Usage] = {}

    def give_back(self, client: C) -> None:
        """Stop counting a client: it makes us keep nothing more, or is gone."""
        usage = self._clients.pop(client, None)
        if usage is not None:
            self.num_bytes -= usage.num_bytes

    def _slowest_first(self, num_moved: Callable[[C, _Usage], int], now: float) -> list[C]:
        """Sort clients by how fast they send or read; those under a second old come last."""

        def rank(client: C) -> tuple[bool, float, float]:
            usage = self._clients[client]
            age_s = now - usage.since
            pace = num_moved(client, usage) / max(age_s, _MIN_AGE_S)
            return age_s < _MIN_AGE_S, pace, usage.since

        return sorted(self._clients, key=rank)


class UnfinishedRequests(_Budget[Sender]):
    """Bounds the bytes of requests that are not whole, or wait for their turn.

    If there is no room, the slowest senders go. A client that has sent for less than a second
    stays, so that a few bodies that are held back cannot shut the others out.
    """

    num_refused = 0
    """Requests without room."""

    def hold(self, sender: Sender, num_bytes: int) -> None:
        """Count the bytes of a sender, and make room if there are too many.

        Raises:
            OverloadedError: There is no room, and no slower sender. The sender counts as
                before.
        """
        held = self._clients.get(sender)
        num_more = num_bytes - (held.num_bytes if held is not None else 0)
        if num_more > 0 and self.num_bytes + num_more > self.max_bytes:
            self._make_room(sender, num_more)
        if held is None:
            held = self._clients[sender] = _Usage(asyncio.get_running_loop().time())
        held.num_bytes = num_bytes
        self.num_bytes += num_more

    def _make_room(self, newcomer: Sender, num_bytes: int) -> None:
        now = asyncio.get_running_loop().time()
        num_before, num_left = self.num_bytes, self.max_bytes * _SHARE_LEFT
        for slowest in self._slowest_first(lambda _, held: held.num_bytes, now):
            is_young = now - self._clients[slowest].since < _MIN_AGE_S
            if slowest is newcomer or is_young or self.num_bytes + num_bytes <= num_left:
                break
            self.give_back(slowest)
            self.num_refused += 1
            slowest.give_way(self._error(num_before))
        if self.num_bytes + num_bytes > self.max_bytes:
            self.num_refused += 1
            raise self._error(num_before)

    def _error(self, num_bytes: int) -> OverloadedError:
        return OverloadedError(
            f"requests that are on their way take {num_bytes} bytes, and no more than "
            f"{self.max_bytes} are kept (max_unfinished_bytes): the slowest are refused",
            retry_after_s=_RETRY_AFTER_S,
        )


class SlowReader(Protocol):
    """A connection whose client has not read its answer yet."""

    @property
    def num_unread_bytes(self) -> int:
        """Bytes that the kernel has not taken yet."""

    def cut_off(self) -> None:
        """Close it at once, and drop what it has not read."""


class UnreadAnswers(_Budget[SlowReader]):
    """Bounds the bytes of unread answers: if there are too many, the slowest readers go.

    A large answer takes its memory until its last byte is read, and so it counts as a whole. One
    answer may be larger than the budget.
    """

    num_cut = 0
    """Connections closed to make room."""

    def take(self, reader: SlowReader, num_bytes: int) -> None:
        """Count the bytes of a reader's answers, and make room if there are too many."""
        unread = self._clients.get(reader)
        if unread is None:
            now = asyncio.get_running_loop().time()
            unread = self._clients[reader] = _Usage(now, reader.num_unread_bytes)
        elif num_bytes > unread.num_bytes:
            unread.num_at_first += num_bytes - unread.num_bytes
        self.num_bytes += num_bytes - unread.num_bytes
        unread.num_bytes = num_bytes
        if self.num_bytes > self.max_bytes:
            self._cut_slowest()

    def _cut_slowest(self) -> None:
        """Cut off the slowest readers until there is room for some time."""
        now = asyncio.get_running_loop().time()

        def num_read(reader: SlowReader, held: _Usage) -> int:
            return held.num_at_first - reader.num_unread_bytes

        for slowest in self._slowest_first(num_read, now):
            if len(self._clients) == 1 or self.num_bytes <= self.max_bytes * _SHARE_LEFT:
                return
            self.give_back(slowest)
            self.num_cut += 1
            slowest.cut_off()
