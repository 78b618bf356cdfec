"""Bounds the connections of a process: their number, and the memory they hold. Event loop.

Limits of each connection do not bound a thousand of them: a client that sends half of a large body,
or reads nothing of a large answer, makes this process keep it.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Collection
from typing import Generic, Protocol, TypeVar

import msgspec

from inferpool.service.errors import OverloadedError, ServiceError

_RETRY_AFTER_S = 1
_MIN_AGE_S = 1.0
"""A client that has had less time cannot have shown how fast it sends or reads."""
_SHARE_LEFT = 7 / 8
"""Share of the limit to go down to, since looking through ten thousand clients takes
milliseconds."""
_MOST_REFUSALS = 16
"""Refusals in one turn; they take a millisecond or two."""

_MIN_IDLE_S = 1.0
"""A connection that has been idle for less may be about to send its request."""
_SEARCH_EVERY_S = 0.1
"""Looking through ten thousand connections takes a millisecond."""


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

    def __init__(self, max_bytes: int, clock: Callable[[], float] = _loop_time) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._clock = clock
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
            held = self._clients[sender] = _Usage(self._clock())
        held.num_bytes = num_bytes
        self.num_bytes += num_more

    def _make_room(self, newcomer: Sender, num_bytes: int) -> None:
        now = self._clock()
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
            f"unfinished requests take {num_bytes} bytes of at most {self.max_bytes} "
            "(max_unfinished_bytes): the slowest are refused",
            retry_after_s=_RETRY_AFTER_S,
        )


class Refusals:
    """Bounds the refusals in one turn of the event loop, so that a flood of them delays nobody.

    To refuse takes longer than to read what comes. So while one flood is refused, bit by bit, the
    calls of others are read, and their answers are sent. A client whose refusal waits here sends
    nothing more meanwhile.
    """

    def __init__(self) -> None:
        self._line: deque[Callable[[], None]] = deque()
        self._num_left = _MOST_REFUSALS
        self._is_due = False

    def add(self, refuse: Callable[[], None]) -> None:
        """Call this now, or in a later turn if there were many in this one."""
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._begin_turn)
        if self._num_left:
            self._num_left -= 1
            refuse()
        else:
            self._line.append(refuse)

    def _begin_turn(self) -> None:
        self._is_due = False
        self._num_left = _MOST_REFUSALS
        for _ in range(min(len(self._line), _MOST_REFUSALS)):
            self.add(self._line.popleft())


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
            unread = self._clients[reader] = _Usage(self._clock(), reader.num_unread_bytes)
        elif num_bytes > unread.num_bytes:
            unread.num_at_first += num_bytes - unread.num_bytes
        self.num_bytes += num_bytes - unread.num_bytes
        unread.num_bytes = num_bytes
        if self.num_bytes > self.max_bytes:
            self._cut_slowest()

    def _cut_slowest(self) -> None:
        """Cut off the slowest readers until there is room for some time."""
        now = self._clock()

        def num_read(reader: SlowReader, held: _Usage) -> int:
            return held.num_at_first - reader.num_unread_bytes

        for slowest in self._slowest_first(num_read, now):
            if len(self._clients) == 1 or self.num_bytes <= self.max_bytes * _SHARE_LEFT:
                return
            self.give_back(slowest)
            self.num_cut += 1
            slowest.cut_off()


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
