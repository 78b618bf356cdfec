"""Bounds the memory that connections hold in all. Event loop.

Limits of each connection do not bound a thousand of them: a client that sends half of a large body,
or reads nothing of a large answer, makes this process keep it.
"""

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

import msgspec

from inferpool.service.api.wire.held import HeldBytes, place_of
from inferpool.service.errors import OverloadedError, OverShareError, ServiceError

_RETRY_AFTER_S = 1
_MIN_AGE_S = 1.0
"""A client that has had less time cannot have shown how fast it sends or reads."""
_SHARE_LEFT = 7 / 8
"""Share of the limit to go down to, since looking through ten thousand clients takes
milliseconds."""
_LOOK_EVERY_S = 0.1
"""How soon clients of one front are dropped if those of another one need the room."""
_MOST_REFUSALS = 16
"""Refusals in one iteration of the event loop; they take a millisecond or two."""


class EdgeUse(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Memory that the connections of one process hold, and how many calls that has cost.

    Fields have the names of metrics.
    """

    unfinished_bytes: int = 0
    max_unfinished_bytes: int = 0
    unfinished_refused: int = 0
    """Requests without room since the process began."""
    unread_bytes: int = 0
    max_unread_bytes: int = 0
    readers_cut: int = 0
    """Connections closed to make room since the process began."""


C = TypeVar("C")


def _loop_time() -> float:
    return asyncio.get_running_loop().time()


class Client(Protocol):
    """Has a client make this process keep memory."""

    def owner(self) -> str:
        """Return the owner of that memory: a key or an address."""


class Sender(Client, Protocol):
    """Holds an unfinished request of a client."""

    def give_way(self, error: ServiceError) -> None:
        """Refuse the request, and forget its bytes."""


class _Usage:
    """Memory that one client makes this process keep."""

    __slots__ = ("num_at_first", "num_bytes", "owner", "since")

    def __init__(self, since: float, owner: int, num_at_first: int = 0) -> None:
        self.since = since
        self.owner = owner
        self.num_at_first = num_at_first
        """Bytes that it still had to read."""
        self.num_bytes = 0


class _Budget(ABC, Generic[C]):
    """The memory that clients make all fronts keep, and may keep together.

    An owner with several clients may have a `share` of what the other owners leave. What is over
    that, or over all, is taken from the owner that has the most, from its slowest clients first.
    """

    def __init__(
        self,
        max_bytes: int,
        clock: Callable[[], float] = _loop_time,
        *,
        share: float = 1.0,
        held: HeldBytes | None = None,
    ) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        """Bytes that the clients of this process have."""
        self.share = share
        self.held = held or HeldBytes()
        self._clock = clock
        self._clients: dict[C, _Usage] = {}
        self._timer: asyncio.TimerHandle | None = None

    def give_back(self, client: C) -> None:
        """Stop counting a client: it makes us keep nothing more, or is gone."""
        usage = self._clients.pop(client, None)
        if usage is not None:
            self._add(usage, -usage.num_bytes)

    @abstractmethod
    def _num_moved(self, client: C, usage: _Usage) -> int:
        """Return how many bytes a client has sent or read."""

    @abstractmethod
    def _drop(self, client: C) -> None:
        """End a client, which is no longer counted."""

    @abstractmethod
    def _may_drop(self, client: C, usage: _Usage, now: float) -> bool:
        """Return whether a client may be dropped for others."""

    def _add(self, usage: _Usage, num_bytes: int) -> None:
        usage.num_bytes += num_bytes
        self.num_bytes += num_bytes
        self.held.add(usage.owner, num_bytes)
        if self.held.is_shared and self._timer is None and self._clients:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(_LOOK_EVERY_S, self._make_room_for_fronts)

    def _is_over(self, owner: int, alone_bytes: int, num_more: int = 0, part: float = 1) -> bool:
        """Return whether `num_more` bytes would be too much, for all or for their owner.

        An owner may have all that is left for its only client, which has `alone_bytes`; and one
        that has less than another one has no excess before that.
        """
        own, total = self.held.of(owner) + num_more, self.held.total + num_more
        most = part * self.max_bytes
        if total > most:
            return True
        if own - num_more <= alone_bytes or own <= self.share * (most - (total - own)):
            return False
        return self.held.of(self.held.greatest()) <= own

    def _make_room(self, newcomer: C, usage: _Usage, num_more: int) -> None:
        """Drop clients until there is room for some time, or none is left to be dropped.

        Nobody's clients are dropped for those of an owner that has more.
        """
        lines = self._slowest_first()
        owner = usage.owner
        while self._is_over(owner, usage.num_bytes, num_more, _SHARE_LEFT):
            own = self.held.of(owner) + num_more
            greater = [each for each in lines if each == owner or self.held.of(each) > own]
            if not greater:
                return
            greatest = max(greater, key=self.held.of)
            is_enough = not self._is_over(owner, usage.num_bytes, num_more)
            if is_enough and greatest == owner != self.held.greatest():
                return  # others in another front have more, and make room soon
            slowest = lines[greatest].popleft()
            if not lines[greatest]:
                del lines[greatest]
            if slowest is newcomer and (num_more or len(self._clients) == 1):
                return
            self.give_back(slowest)
            self._drop(slowest)

    def _make_room_for_fronts(self) -> None:
        """Drop clients here if the owner that has the most leaves too little for other fronts."""
        self._timer = None
        most = _SHARE_LEFT * self.max_bytes
        greatest = self.held.greatest() if self.held.total > most else None
        line = self._slowest_first().get(greatest) if greatest is not None else None
        while line and self.held.total > most:
            slowest = line.popleft()
            if self._clients[slowest].num_bytes == self.held.total:
                break  # an only one may have more
            self.give_back(slowest)
            self._drop(slowest)
        if self._clients:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(_LOOK_EVERY_S, self._make_room_for_fronts)

    def _slowest_first(self) -> dict[int, deque[C]]:
        """Sort the clients of each owner by how fast they send or read, those under a second last.

        Clients that may not be dropped are left out.
        """
        now = self._clock()

        def rank(client: C) -> tuple[bool, float, float]:
            usage = self._clients[client]
            age_s = now - usage.since
            pace = self._num_moved(client, usage) / max(age_s, _MIN_AGE_S)
            return age_s < _MIN_AGE_S, pace, usage.since

        lines: dict[int, deque[C]] = {}
        for client in sorted(self._clients, key=rank):
            usage = self._clients[client]
            if self._may_drop(client, usage, now):
                lines.setdefault(usage.owner, deque()).append(client)
        return lines


class UnfinishedRequests(_Budget[Sender]):
    """Bounds the bytes of requests that are not whole, or wait in line.

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
            OverShareError: There is room, but not for its owner.
        """
        usage = self._clients.get(sender)
        is_new = usage is None
        if usage is None:
            usage = _Usage(self._clock(), place_of(sender.owner()))
        num_more = num_bytes - usage.num_bytes
        if num_more > 0 and self._is_over(usage.owner, usage.num_bytes, num_more):
            self._make_room(sender, usage, num_more)
            if self._is_over(usage.owner, usage.num_bytes, num_more):
                self.num_refused += 1
                raise self._error(num_more)
        if is_new:
            self._clients[sender] = usage
        self._add(usage, num_more)

    def _num_moved(self, client: Sender, usage: _Usage) -> int:
        return usage.num_bytes

    def _may_drop(self, client: Sender, usage: _Usage, now: float) -> bool:
        return now - usage.since >= _MIN_AGE_S

    def _drop(self, client: Sender) -> None:
        self.num_refused += 1
        client.give_way(self._error(0))

    def _error(self, num_more: int) -> OverloadedError:
        total = self.held.total
        if num_more and total + num_more <= self.max_bytes:
            return OverShareError(
                "the unfinished requests of this key or address have their share of "
                f"{self.max_bytes} bytes (per_key_share = {self.share:g} of what others leave)",
                retry_after_s=_RETRY_AFTER_S,
            )
        return OverloadedError(
            f"unfinished requests take {total} bytes of at most {self.max_bytes} "
            "(max_unfinished_bytes): the slowest are refused",
            retry_after_s=_RETRY_AFTER_S,
        )


class Refusals:
    """Bounds the refusals in one iteration of the event loop, so that a flood delays nobody.

    To refuse takes longer than to read what comes. So while one flood is refused, bit by bit, the
    calls of others are read, and their answers are sent. A client sends nothing more while its
    refusal waits here.
    """

    def __init__(self) -> None:
        self._line: deque[Callable[[], None]] = deque()
        self._num_left = _MOST_REFUSALS
        self._is_due = False

    def add(self, refuse: Callable[[], None]) -> None:
        """Call this now, or in a later iteration if there were many in this one."""
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._begin_iteration)
        if self._num_left:
            self._num_left -= 1
            refuse()
        else:
            self._line.append(refuse)

    def _begin_iteration(self) -> None:
        self._is_due = False
        self._num_left = _MOST_REFUSALS
        for _ in range(min(len(self._line), _MOST_REFUSALS)):
            self.add(self._line.popleft())


class SlowReader(Client, Protocol):
    """A connection to a client that has not read its answer yet."""

    @property
    def num_unread_bytes(self) -> int:
        """Bytes that the kernel has not taken yet."""

    def cut_off(self) -> None:
        """Close it at once, and drop what it has not read."""


class UnreadAnswers(_Budget[SlowReader]):
    """Bounds the bytes of unread answers: if there are too many, the slowest readers go.

    A large answer holds its memory until its last byte is read, and so it counts as a whole. One
    answer may be larger than the budget.
    """

    num_cut = 0
    """Connections closed to make room."""

    def take(self, reader: SlowReader, num_bytes: int) -> None:
        """Count the bytes of a reader's answers, and make room if there are too many."""
        usage = self._clients.get(reader)
        if usage is None:
            owner = place_of(reader.owner())
            usage = self._clients[reader] = _Usage(self._clock(), owner, reader.num_unread_bytes)
        elif num_bytes > usage.num_bytes:
            usage.num_at_first += num_bytes - usage.num_bytes
        self._add(usage, num_bytes - usage.num_bytes)
        if self._is_over(usage.owner, usage.num_bytes):
            self._make_room(reader, usage, 0)

    def _num_moved(self, client: SlowReader, usage: _Usage) -> int:
        return usage.num_at_first - client.num_unread_bytes

    def _may_drop(self, client: SlowReader, usage: _Usage, now: float) -> bool:
        return True

    def _drop(self, client: SlowReader) -> None:
        self.num_cut += 1
        client.cut_off()


class EdgeLimits(msgspec.Struct, frozen=True, kw_only=True):
    """How much connections may cost."""

    max_connections: int = 10_000
    head_timeout_s: float = 10.0
    """How long request line and headers may take to arrive, and a TLS handshake before them."""
    write_timeout_s: float = 30.0
    """A client that reads nothing of its answer for this long is cut off."""
    max_unfinished_bytes: int = 128 * 2**20
    """Memory for unfinished requests of all connections."""
    max_unread_bytes: int = 256 * 2**20
    """Memory for unread answers of all connections."""

    def share(self, num: int) -> "EdgeLimits":
        """Return the limits of each of several processes that together keep to these.

        They count bytes together; see `HeldBytes`.
        """
        return msgspec.structs.replace(self, max_connections=-(-self.max_connections // num))
