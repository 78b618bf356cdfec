"""Which requests form the next batch: by priority, then the earliest deadline first.

Where what waits would else miss its deadline, the earliest deadline goes first whatever the
priority: so a priority says who is answered sooner, and not who is answered at all.

Pure: it holds no clock, no future and no process. Requests of one priority and of about the same
deadline share a bucket, where they are first come, first served: to put one in or to take one out,
from the middle too, costs the same however many wait. Whatever looks at all that wait looks at the
buckets, which are few.
"""

from bisect import bisect_right, insort
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import accumulate, chain, islice
from math import frexp, inf
from operator import attrgetter
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from inferpool.workers.messages import ItemRef

_OCTAVES, _OCTAVE_1_S = 26, 5
"""Lengths of timeouts that are told apart, by factors of 2 from 1/32 s up; and that of 1 s."""
_PER_OCTAVE = 8
"""Buckets are so much narrower than the shortest timeout of their kind."""
_PER_S = tuple(_PER_OCTAVE * 2.0 ** (_OCTAVE_1_S + 1 - octave) for octave in range(_OCTAVES))
"""Buckets per second, by the length of timeouts."""
_KINDS = 512
"""More than there are priorities times lengths of timeouts."""
_LATELY_S = 20.0
"""A kind came lately if one was admitted within this time. With 5 s, a kind that comes in bursts
every few seconds had half of its share of a slow model (one simulated mix)."""
_LOOK_AGAIN_S = 0.5
"""How often kinds are looked through for those that came lately no more."""
_MOST_SUMS = 64
"""Sums of what waits that are looked at one by one: of more buckets, each is over several."""
_LOOKS = 4
"""For each request that is taken from the end, how many may be looked at."""


class Queueable(Protocol, Hashable):
    """What the batcher looks at."""

    ref: ItemRef
    """Has its priority and its deadline."""
    arrived: float
    is_solo: bool
    """It makes a batch of its own: the last one it was in did not survive."""
    bucket: "Bucket"
    """Written by the batcher."""


Q = TypeVar("Q", bound=Queueable)


class Bucket:
    """Requests of one kind and of about the same deadline."""

    __slots__ = ("deadline", "end", "kind", "least_s", "number", "priority", "requests")

    def __init__(self, kind: int, number: int) -> None:
        octave = kind % _OCTAVES
        self.kind = kind
        """Kinds have different priorities, or timeouts that differ by up to a factor of 2."""
        self.priority = kind // _OCTAVES
        self.number = number
        self.deadline = number / _PER_S[octave]
        """None of its requests has an earlier one."""
        self.end = (number + 1) / _PER_S[octave]
        """Nor as late a one. Minus infinity once the bucket is not in use any more."""
        self.least_s = _PER_OCTAVE / _PER_S[octave] if octave else -inf
        """None came with a shorter timeout."""
        self.requests: OrderedDict[Any, None] = OrderedDict()


class Position(NamedTuple):
    """Where a request would stand if it came now, among those that wait."""

    num_ahead: int
    """Those that go first as long as all are in time."""
    num_by_deadline: int
    """Those with an earlier deadline, whatever their priority: what must be answered before it."""
    num_kin: int
    """Those of its kind, where others wait or came lately; 0 where none do."""
    num_kin_by_deadline: int
    """Those of its kind with an earlier deadline, likewise."""
    behind: Sequence[tuple[float, int]]
    """Later deadlines, and how many that wait now have to be answered by each of them, if not a
    little later."""


class Sums(NamedTuple):
    """How many wait, by deadline."""

    buckets: list[Bucket]
    """Those that are not empty, by deadline."""
    deadlines: list[float]
    """Theirs."""
    numbers: list[int]
    """Requests in each bucket and all before it."""
    by_priority: dict[int, tuple[int, list[int]]]
    """Requests of better priorities, and those of this one in each bucket and all before it."""

    def num_ahead(self, priority: int, index: int) -> int:
        """How many go before one of this priority whose deadline is that of this bucket."""
        counts = self.by_priority.get(priority)
        if counts is None:
            sizes = [(bucket.priority, len(bucket.requests)) for bucket in self.buckets]
            counts = self.by_priority[priority] = (
                sum(size for other, size in sizes if other < priority),
                list(accumulate(size if other == priority else 0 for other, size in sizes)),
            )
        return counts[0] + (counts[1][index - 1] if index else 0)

    def behind(self, index: int) -> list[tuple[float, int]]:
        """Deadlines from this bucket on, and how many have to be answered by each of them."""
        step = -(-(len(self.numbers) - index) // _MOST_SUMS) or 1
        numbers = self.numbers[index + step - 1 :: step]
        if (len(self.numbers) - index) % step:
            numbers.append(self.numbers[-1])
        return list(zip(self.deadlines[index::step], numbers, strict=True))


class Batcher(Generic[Q]):
    """The queue of one model."""

    def __init__(self) -> None:
        self._buckets: dict[int, Bucket] = {}
        """Those in use, by number and kind."""
        self._by_deadline: list[Bucket] = []
        """The same, in this order."""
        self._order: list[Bucket] = []
        """The same, the one that goes first in front."""
        self._is_tight = False
        """The order is by deadline alone."""
        self._newest = Bucket(0, 0)
        """The one that the last request went to."""
        self._late = Bucket(0, 0)
        """Requests that will be late whatever is done. They go last, and are counted as the others
        are until they expire: so they take room of the queue."""
        self._kinds: dict[int, float] = {}
        """The kinds that wait or came lately, and when one was last seen to come."""
        self._kinds_looked_at = 0.0
        self.is_mixed = False
        """Requests of several kinds wait or came lately. It may stay true until the next look."""
        self._sums: Sums | None = None
        """None once a request was added or taken."""
        self.num_waiting = 0
        """Requests that wait: as `len`, which costs a call."""

    def __len__(self) -> int:
        """Requests that wait."""
        return self.num_waiting

    def __iter__(self) -> Iterator[Q]:
        """Those that wait, the best first."""
        for bucket in self._order:
            yield from bucket.requests
        yield from self._late.requests

    def position(self, priority: int, deadline: float, now: float) -> Position:
        """Where a request would stand if it came now."""
        if self.is_mixed and now >= self._kinds_looked_at + _LOOK_AGAIN_S:
            self._forget_kinds(now)
        buckets = self._by_deadline
        if not self.is_mixed and (not buckets or buckets[-1].deadline <= deadline):
            num = self.num_waiting - len(self._late.requests)
            return Position(num, num, 0, 0, ())
        sums = self._sums or self._sum_up()
        index = bisect_right(sums.deadlines, deadline)
        num_by_deadline = sums.numbers[index - 1] if index else 0
        num_ahead = sums.num_ahead(priority, index)
        num_kin = num_kin_by_deadline = 0
        if self.is_mixed:
            kind = _kind_of(priority, deadline - now)
            for bucket in [bucket for bucket in sums.buckets if bucket.kind == kind]:
                num_kin += len(bucket.requests)
                if bucket.deadline <= deadline:
                    num_kin_by_deadline = num_kin
        behind = sums.behind(index)
        return Position(num_ahead, num_by_deadline, num_kin, num_kin_by_deadline, behind)

    def push(self, request: Q, now: float) -> None:
        """Add a request behind its equals."""
        deadline, priority, bucket = request.ref.deadline, request.ref.priority, self._newest
        if (
            not bucket.deadline <= deadline < bucket.end
            or bucket.priority != priority
            or deadline - now < bucket.least_s
        ):
            self._newest = bucket = self._bucket(priority, deadline, now)
        request.bucket = bucket
        bucket.requests[request] = None
        self.num_waiting += 1
        self._sums = None

    def push_front(self, request: Q) -> None:
        """Put back a request that was taken before, ahead of its equals."""
        bucket = request.bucket
        if bucket.end == -inf:
            kind, number = bucket.kind, bucket.number
            key = number * _KINDS + kind
            request.bucket = bucket = self._buckets.get(key) or self._open(kind, number)
        bucket.requests[request] = None
        bucket.requests.move_to_end(request, last=False)
        self.num_waiting += 1
        self._sums = None

    def remove(self, request: Q) -> None:
        """Take out a request that waits."""
        del request.bucket.requests[request]
        self.num_waiting -= 1
        self._sums = None

    def put_last(self, alone_by: float) -> None:
        """Have those in front go last that will be late even if they are answered alone, at once.

        Else each of them would make the next one late.
        """
        late = self._late.requests
        for bucket in self._order:
            requests = bucket.requests
            while requests:
                request = next(iter(requests))
                if request.ref.deadline >= alone_by or request.is_solo:
                    return
                self._sums = None
                del requests[request]
                late[request] = None
                request.bucket = self._late

    @property
    def can_be_rearranged(self) -> bool:
        """What waits has several priorities, or goes by deadline alone: see `arrange`."""
        return self._is_tight or self._order is not self._by_deadline

    def arrange(self, is_in_time: Callable[[float, int], bool]) -> None:
        """Go by priority while all that waits will be in time, or else by deadline alone.

        Args:
            is_in_time: Whether so many can be answered by a moment.
        """
        sums = self._sums or self._sum_up()
        is_tight = not all(is_in_time(deadline, num) for deadline, num in sums.behind(0))
        if is_tight != self._is_tight:
            self._is_tight = is_tight
            self._sort()

    def next_batch(self, max_size: int) -> list[Q]:
        """Take the best requests, at most `max_size`; a solo request comes alone."""
        batch: list[Q] = []
        for bucket in chain(self._order, (self._late,)):
            requests = bucket.requests
            while requests and len(batch) < max_size:
                request = next(iter(requests))
                if request.is_solo and batch:
                    break
                del requests[request]
                batch.append(request)
                if request.is_solo:
                    break
            if batch and (batch[-1].is_solo or requests or len(batch) == max_size):
                break
        self.num_waiting -= len(batch)
        self._sums = None
        return batch

    def last_batch(self, max_size: int, fits: Callable[[Q], bool]) -> list[Q]:
        """Take the requests whose turn is furthest off, at most `max_size`; no solo requests.

        Args:
            max_size: How many.
            fits: Says of each whether it may be taken. Few that may not are passed over.
        """
        batch: list[Q] = []
        looked_at = (r for bucket in reversed(self._order) for r in reversed(bucket.requests))
        for request in islice(looked_at, _LOOKS * max_size):
            if not request.is_solo and fits(request):
                batch.append(request)
                if len(batch) == max_size:
                    break
        for request in batch:
            self.remove(request)
        batch.reverse()
        return batch

    def oldest(self) -> Q | None:
        """The request that a batch formed now would begin with."""
        return next(iter(self), None)

    def soonest(self) -> float:
        """No request that waits and can be in time has an earlier deadline than this.

        A bound, from the buckets; infinite where none waits.
        """
        for bucket in self._by_deadline:
            if bucket.requests:
                return bucket.deadline
        return inf

    def _bucket(self, priority: int, deadline: float, now: float) -> Bucket:
        kind = _kind_of(priority, deadline - now)
        self._kinds[kind] = now
        self.is_mixed = len(self._kinds) > 1
        number = int(deadline * _PER_S[kind % _OCTAVES])
        return self._buckets.get(number * _KINDS + kind) or self._open(kind, number)

    def _open(self, kind: int, number: int) -> Bucket:
        """Have one more bucket in use, and those that are empty no longer."""
        for other in [other for other in self._by_deadline if not other.requests]:
            other.end = -inf
            del self._buckets[other.number * _KINDS + other.kind]
        bucket = self._buckets[number * _KINDS + kind] = Bucket(kind, number)
        self._by_deadline = [other for other in self._by_deadline if other.requests]
        insort(self._by_deadline, bucket, key=_DEADLINE)
        self._sort()
        return bucket

    def _sort(self) -> None:
        self._order = order = self._by_deadline
        if not self._is_tight and any(bucket.priority != order[0].priority for bucket in order):
            self._order = sorted(order, key=_PRIORITY)

    def _sum_up(self) -> "Sums":
        buckets = [bucket for bucket in self._by_deadline if bucket.requests]
        self._sums = Sums(
            buckets,
            [bucket.deadline for bucket in buckets],
            list(accumulate([len(bucket.requests) for bucket in buckets])),
            {},
        )
        return self._sums

    def _forget_kinds(self, now: float) -> None:
        """Keep those kinds of which one waits or came lately."""
        waiting = {bucket.kind for bucket in self._by_deadline if bucket.requests}
        self._kinds = {
            kind: came
            for kind, came in self._kinds.items()
            if kind in waiting or now - came < _LATELY_S
        }
        self._kinds_looked_at = now
        self.is_mixed = len(self._kinds) > 1


_DEADLINE = attrgetter("deadline")
_PRIORITY = attrgetter("priority")


def _kind_of(priority: int, timeout_s: float) -> int:
    octave = frexp(timeout_s)[1] + _OCTAVE_1_S
    if not 0 <= octave < _OCTAVES:
        octave = 0 if octave < 0 else _OCTAVES - 1
    return priority * _OCTAVES + octave
