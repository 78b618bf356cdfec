"""How many bytes all connections of a process may hold together. Event loop.

Limits of each connection are none for a thousand of them: a client that sends half of a large body,
or reads none of a large answer, makes this process keep it.
"""

import asyncio
from collections.abc import Callable, Mapping
from typing import Protocol, TypeVar

import msgspec

from inferpool.service.errors import OverloadedError, ServiceError

_RETRY_AFTER_S = 1
_MIN_AGE_S = 1.0
"""A client that has had less time cannot have shown how fast it sends or reads."""
_SHARE_LEFT = 7 / 8
"""Share of the limit to go down to: to look through ten thousand clients takes milliseconds."""


class EdgeUse(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What the connections of one process hold now, and what that has cost."""

    unfinished_bytes: int = 0
    max_unfinished_bytes: int = 0
    num_refused: int = 0
    """Requests for which there was no room, since the process began."""
    unread_bytes: int = 0
    max_unread_bytes: int = 0
    num_cut: int = 0
    """ConnectionLimits that were closed to make room, since the process began."""


C = TypeVar("C")


class Sender(Protocol):
    """Holds what has come of a client's requests."""

    def give_way(self, error: ServiceError) -> None:
        """Refuse what is not whole, and forget its bytes."""


class _Held:
    """What one client makes this process keep."""

    __slots__ = ("num_at_first", "num_bytes", "since")

    def __init__(self, since: float, num_at_first: int = 0) -> None:
        self.since = since
        self.num_at_first = num_at_first
        """Bytes that it had still to read."""
        self.num_bytes = 0


class UnfinishedRequests:
    """The bytes of requests that have begun to come, until they are whole and it is their turn.

    The slowest senders go when there is no room. Who has sent for less than a second stays, so that
    a few bodies that are held back cannot shut the others out.
    """

    def __init__(self, max_bytes: int) -> None:
        """Allow so many bytes."""
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self.num_refused = 0
        """Requests for which there was no room."""
        self._senders: dict[Sender, _Held] = {}

    def hold(self, sender: Sender, num_bytes: int) -> None:
        """Count what a sender holds now, and make room if that is too much.

        Raises:
            OverloadedError: There is no room for it, and nobody slower; it counts as before.
        """
        held = self._senders.get(sender)
        num_more = num_bytes - (held.num_bytes if held is not None else 0)
        if num_more > 0 and self.num_bytes + num_more > self.max_bytes:
            self._make_room(sender, num_more)
        if held is None:
            held = self._senders[sender] = _Held(asyncio.get_running_loop().time())
        held.num_bytes = num_bytes
        self.num_bytes += num_more

    def give_back(self, sender: Sender) -> None:
        """Count a sender no longer."""
        held = self._senders.pop(sender, None)
        if held is not None:
            self.num_bytes -= held.num_bytes

    def _make_room(self, newcomer: Sender, num_bytes: int) -> None:
        now = asyncio.get_running_loop().time()
        num_before, num_left = self.num_bytes, self.max_bytes * _SHARE_LEFT
        for slowest in _slowest_first(self._senders, lambda _, held: held.num_bytes, now):
            is_young = now - self._senders[slowest].since < _MIN_AGE_S
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
        """Close it at once, and forget what it has not read."""


class UnreadAnswers:
    """The bytes of answers that wait to be read: the slowest readers go when they are too many.

    A large answer takes its memory until the last of it is read, and so it counts as a whole.
    """

    def __init__(self, max_bytes: int) -> None:
        """Allow so many bytes, and in any case one answer."""
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self.num_cut = 0
        """ConnectionLimits that were closed to make room."""
        self._readers: dict[SlowReader, _Held] = {}

    def take(self, reader: SlowReader, num_bytes: int) -> None:
        """Count what a reader's answers take now, and make room if that is too much."""
        unread = self._readers.get(reader)
        if unread is None:
            now = asyncio.get_running_loop().time()
            unread = self._readers[reader] = _Held(now, reader.num_unread_bytes)
        elif num_bytes > unread.num_bytes:
            unread.num_at_first += num_bytes - unread.num_bytes
        self.num_bytes += num_bytes - unread.num_bytes
        unread.num_bytes = num_bytes
        if self.num_bytes > self.max_bytes:
            self._cut_slowest()

    def give_back(self, reader: SlowReader) -> None:
        """Count a reader no longer: it has read everything, or is gone."""
        unread = self._readers.pop(reader, None)
        if unread is not None:
            self.num_bytes -= unread.num_bytes

    def _cut_slowest(self) -> None:
        """Cut off readers, the slowest first, until there is room for some time to come."""
        now = asyncio.get_running_loop().time()

        def num_read(reader: SlowReader, held: _Held) -> int:
            return held.num_at_first - reader.num_unread_bytes

        for slowest in _slowest_first(self._readers, num_read, now):
            if len(self._readers) == 1 or self.num_bytes <= self.max_bytes * _SHARE_LEFT:
                return
            self.give_back(slowest)
            self.num_cut += 1
            slowest.cut_off()


def _slowest_first(
    clients: Mapping[C, _Held], num_moved: Callable[[C, _Held], int], now: float
) -> list[C]:
    """Clients by how fast they send or read; those that have had less than a second come last.

    Args:
        clients: What each holds.
        num_moved: Tells how many bytes one has sent or read.
        now: Seconds of the event loop's clock.
    """

    def rank(client: C) -> tuple[bool, float, float]:
        held = clients[client]
        age_s = now - held.since
        pace = num_moved(client, held) / max(age_s, _MIN_AGE_S)
        return age_s < _MIN_AGE_S, pace, held.since

    return sorted(clients, key=rank)
