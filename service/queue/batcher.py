"""Orders waiting instances, and forms batches: by priority, then the earliest deadline first.

If the order by priority would make something late, the earliest deadline goes first instead. So a
priority decides what is answered sooner, and not what is answered at all.

Instances of one priority and of about the same deadline share a bucket, which is first come, first
served. To add one or to take one out, even from the middle, costs the same however many wait.
A search of everything that waits goes through the buckets, which are few. Pure: it holds no
clock, no future and no process.
"""

from bisect import bisect_right, insort
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import accumulate, chain, islice
from math import frexp, inf
from operator import attrgetter
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from inferpool.workers.shared.messages import ItemRef

_OCTAVES, _OCTAVE_1_S = 26, 5
"""The number of timeout classes, which differ by factors of 2 from 1/32 s up, and that of 1 s."""
_PER_OCTAVE = 8
"""A bucket is this many times narrower than the shortest timeout of its kind."""
_PER_S = tuple(_PER_OCTAVE * 2.0 ** (_OCTAVE_1_S + 1 - octave) for octave in range(_OCTAVES))
"""Buckets per second, by timeout class."""
_KINDS = 512
"""More than priorities times timeout classes."""
_LATELY_S = 20.0
"""A kind came lately if one of it was admitted within this time. With 5 s, a kind that came in
bursts every few seconds got half of its share of a slow model (one simulated mix)."""
_LOOK_AGAIN_S = 0.5
"""Seconds between searches for kinds that have not come lately."""
_MOST_SUMS = 64
"""Sums that are looked at one by one. With more buckets, each sum covers several."""
_LOOKS = 4
"""Instances that may be looked at for each one taken from the end."""


class Queueable(Protocol, Hashable):
    """The part of an instance that the batcher uses."""

    ref: ItemRef
    """Holds its priority, its deadline and its caller."""
    arrived: float
    is_solo: bool
    """It must be alone in its batch, since a worker died with it."""
    bucket: "Bucket"
    """Set by the batcher."""


Q = TypeVar("Q", bound=Queueable)


class Bucket:
    """Instances of one kind with about the same deadline."""

    __slots__ = ("deadline", "end", "instances", "kind", "least_s", "num_of", "number", "priority")

    def __init__(self, kind: int, number: int) -> None:
        octave = kind % _OCTAVES
        self.kind = kind
        """Kinds have different priorities, or timeouts that differ by up to a factor of 2."""
        self.priority = kind // _OCTAVES
        self.number = number
        self.deadline = number / _PER_S[octave]
        """Its instances have no earlier deadline."""
        self.end = (number + 1) / _PER_S[octave]
        """Its instances' deadlines are earlier than this. Minus infinity once it is out of use."""
        self.least_s = _PER_OCTAVE / _PER_S[octave] if octave else -inf
        """Its instances came with at least this timeout."""
        self.instances: OrderedDict[Any, None] = OrderedDict()
        self.num_of: defaultdict[int, int] = defaultdict(int)
        """How many of its instances each caller has, where callers are told apart."""


class Position(NamedTuple):
    """The place of an instance that came now among those that wait."""

    num_ahead: int
    """Instances that go first as long as all are in time."""
    num_by_deadline: int
    """Instances of any priority with an earlier deadline."""
    num_kin: int
    """Instances of its kind, if other kinds wait or came lately; else 0."""
    num_kin_by_deadline: int
    """Instances of its kind with an earlier deadline, under the same condition."""
    behind: Sequence[tuple[float, int]]
    """Later deadlines, and how many of those that wait must be answered by each of them, or a
    little later."""
    num_own: int = 0
    """Instances of its caller; 0 where callers are not told apart."""
    num_own_by_deadline: int = 0
    """Instances of its caller with an earlier deadline, under the same condition."""


class DeadlineSums(NamedTuple):
    """The number of instances that wait, by deadline."""

    buckets: list[Bucket]
    """The buckets that are not empty, by deadline."""
    deadlines: list[float]
    """The deadlines of the buckets."""
    numbers: list[int]
    """Instances in each bucket and all before it."""
    by_priority: dict[int, tuple[int, list[int]]]
    """By priority: instances of better priorities, and those of this one up to each bucket."""

    def num_ahead(self, priority: int, index: int) -> int:
        """Return how many go before one of this priority and of this bucket's deadline."""
        counts = self.by_priority.get(priority)
        if counts is None:
            sizes = [(bucket.priority, len(bucket.instances)) for bucket in self.buckets]
            counts = self.by_priority[priority] = (
                sum(size for other, size in sizes if other < priority),
                list(accumulate(size if other == priority else 0 for other, size in sizes)),
            )
        return counts[0] + (counts[1][index - 1] if index else 0)

    def behind(self, index: int) -> list[tuple[float, int]]:
        """Return the deadlines from this bucket on, and how many must be answered by each."""
        step = -(-(len(self.numbers) - index) // _MOST_SUMS) or 1
        numbers = self.numbers[index + step - 1 :: step]
        if (len(self.numbers) - index) % step:
            numbers.append(self.numbers[-1])
        return list(zip(self.deadlines[index::step], numbers, strict=True))


class Batcher(Generic[Q]):
    """The queue of one model."""

    def __init__(self) -> None:
        self._buckets: dict[int, Bucket] = {}
        """The buckets in use, by number and kind."""
        self._by_deadline: list[Bucket] = []
        """The same, by deadline."""
        self._order: list[Bucket] = []
        """The same, in the order in which they go."""
        self._is_tight = False
        """The order is by deadline alone, since time is tight."""
        self.can_be_rearranged = False
        """Several priorities wait, or time is tight: see `arrange`."""
        self._newest = Bucket(0, 0)
        """The bucket that the last instance went to."""
        self._late = Bucket(0, 0)
        """Instances that will be late in any case. They go last, and take up room of the queue
        until they expire."""
        self._kinds: dict[int, float] = {}
        """The kinds that wait or came lately, and when each last came."""
        self._kinds_looked_at = 0.0
        self.is_mixed = False
        """Several kinds wait or came lately. It may stay true until the next look."""
        self._sums: DeadlineSums | None = None
        """None after an instance was added or taken."""
        self.num_waiting = 0
        """The same as `len`, without the cost of a call."""

    def __len__(self) -> int:
        """Return the number of instances that wait."""
        return self.num_waiting

    def __iter__(self) -> Iterator[Q]:
        """Yield those that wait, in the order in which they go."""
        for bucket in self._order:
            yield from bucket.instances
        yield from self._late.instances

    def position(self, priority: int, deadline: float, now: float, caller: int = 0) -> Position:
        """Return the place of an instance that came now."""
        own = self._num_own(caller, deadline) if caller else (0, 0)
        if self.is_mixed and now >= self._kinds_looked_at + _LOOK_AGAIN_S:
            self._forget_kinds(now)
        buckets = self._by_deadline
        if not self.is_mixed and (not buckets or buckets[-1].deadline <= deadline):
            num = self.num_waiting - len(self._late.instances)
            return Position(num, num, 0, 0, (), *own)
        sums = self._sums or self._sum_up()
        index = bisect_right(sums.deadlines, deadline)
        num_by_deadline = sums.numbers[index - 1] if index else 0
        num_ahead = sums.num_ahead(priority, index)
        num_kin = num_kin_by_deadline = 0
        if self.is_mixed:
            kind = _kind_of(priority, deadline - now)
            for bucket in [bucket for bucket in sums.buckets if bucket.kind == kind]:
                num_kin += len(bucket.instances)
                if bucket.deadline <= deadline:
                    num_kin_by_deadline = num_kin
        behind = sums.behind(index)
        return Position(num_ahead, num_by_deadline, num_kin, num_kin_by_deadline, behind, *own)

    def push(self, instance: Q, now: float) -> None:
        """Add an instance behind its equals."""
        ref, bucket = instance.ref, self._newest
        deadline, priority = ref.deadline, ref.priority
        if (
            not bucket.deadline <= deadline < bucket.end
            or bucket.priority != priority
            or deadline - now < bucket.least_s
        ):
            self._newest = bucket = self._bucket(priority, deadline, now)
        instance.bucket = bucket
        bucket.instances[instance] = None
        if ref.caller:
            bucket.num_of[ref.caller] += 1
        self.num_waiting += 1
        self._sums = None

    def push_front(self, instance: Q) -> None:
        """Put back an instance that was taken before, ahead of its equals."""
        bucket = instance.bucket
        if bucket.end == -inf:
            kind, number = bucket.kind, bucket.number
            key = number * _KINDS + kind
            instance.bucket = bucket = self._buckets.get(key) or self._open(kind, number)
        bucket.instances[instance] = None
        bucket.instances.move_to_end(instance, last=False)
        if caller := instance.ref.caller:
            bucket.num_of[caller] += 1
        self.num_waiting += 1
        self._sums = None

    def remove(self, instance: Q) -> None:
        """Remove an instance that waits."""
        del instance.bucket.instances[instance]
        if caller := instance.ref.caller:
            instance.bucket.num_of[caller] -= 1
        self.num_waiting -= 1
        self._sums = None

    def put_last(self, alone_by: float) -> None:
        """Move those to the end that would be late even if they were answered alone, at once.

        Otherwise each of them would make the next one late.
        """
        late = self._late.instances
        for bucket in self._order:
            instances = bucket.instances
            while instances:
                instance = next(iter(instances))
                if instance.ref.deadline >= alone_by or instance.is_solo:
                    return
                self._sums = None
                del instances[instance]
                late[instance] = None
                instance.bucket = self._late
                if caller := instance.ref.caller:
                    bucket.num_of[caller] -= 1
                    self._late.num_of[caller] += 1

    def arrange(self, is_in_time: Callable[[float, int], bool]) -> None:
        """Order by priority while everything will be in time, or else by deadline alone.

        Args:
            is_in_time: Returns whether all instances of a number (second) can be answered by a
                deadline (first).
        """
        sums = self._sums or self._sum_up()
        is_tight = not all(is_in_time(deadline, num) for deadline, num in sums.behind(0))
        if is_tight != self._is_tight:
            self._is_tight = is_tight
            self._sort()

    def next_batch(self, max_size: int) -> list[Q]:
        """Remove and return the best instances, at most `max_size`; a solo instance comes alone."""
        batch: list[Q] = []
        for bucket in chain(self._order, (self._late,)):
            instances, num_of = bucket.instances, bucket.num_of
            while instances and len(batch) < max_size:
                instance = next(iter(instances))
                if instance.is_solo and batch:
                    break
                del instances[instance]
                batch.append(instance)
                if num_of and (caller := instance.ref.caller):
                    num_of[caller] -= 1
                if instance.is_solo:
                    break
            if batch and (batch[-1].is_solo or instances or len(batch) == max_size):
                break
        self.num_waiting -= len(batch)
        self._sums = None
        return batch

    def last_batch(self, max_size: int, fits: Callable[[Q], bool]) -> list[Q]:
        """Remove and return the last instances of the order, at most `max_size`; no solo instances.

        Args:
            max_size: The most to take.
            fits: Returns whether an instance may be taken. Only a few that may not are passed over.
        """
        batch: list[Q] = []
        looked_at = (r for bucket in reversed(self._order) for r in reversed(bucket.instances))
        for instance in islice(looked_at, _LOOKS * max_size):
            if not instance.is_solo and fits(instance):
                batch.append(instance)
                if len(batch) == max_size:
                    break
        for instance in batch:
            self.remove(instance)
        batch.reverse()
        return batch

    def oldest(self) -> Q | None:
        """Return the first instance of the next batch."""
        return next(iter(self), None)

    def soonest(self) -> float:
        """Return a time before which no instance that can be in time has its deadline.

        It is infinite if none waits.
        """
        for bucket in self._by_deadline:
            if bucket.instances:
                return bucket.deadline
        return inf

    def _num_own(self, caller: int, deadline: float) -> tuple[int, int]:
        """Return how many of a caller wait, and how many of these with an earlier deadline."""
        num = num_by_deadline = 0
        for bucket in self._by_deadline:
            num += bucket.num_of.get(caller, 0)
            if bucket.deadline <= deadline:
                num_by_deadline = num
        return num + self._late.num_of.get(caller, 0), num_by_deadline

    def _bucket(self, priority: int, deadline: float, now: float) -> Bucket:
        kind = _kind_of(priority, deadline - now)
        self._kinds[kind] = now
        self.is_mixed = len(self._kinds) > 1
        number = int(deadline * _PER_S[kind % _OCTAVES])
        return self._buckets.get(number * _KINDS + kind) or self._open(kind, number)

    def _open(self, kind: int, number: int) -> Bucket:
        """Add a bucket, and remove those that are empty."""
        for other in [other for other in self._by_deadline if not other.instances]:
            other.end = -inf
            del self._buckets[other.number * _KINDS + other.kind]
        bucket = self._buckets[number * _KINDS + kind] = Bucket(kind, number)
        self._by_deadline = [other for other in self._by_deadline if other.instances]
        insort(self._by_deadline, bucket, key=_DEADLINE)
        self._sort()
        return bucket

    def _sort(self) -> None:
        self._order = order = self._by_deadline
        if not self._is_tight and any(bucket.priority != order[0].priority for bucket in order):
            self._order = sorted(order, key=_PRIORITY)
        self.can_be_rearranged = self._is_tight or self._order is not order

    def _sum_up(self) -> DeadlineSums:
        buckets = [bucket for bucket in self._by_deadline if bucket.instances]
        self._sums = DeadlineSums(
            buckets,
            [bucket.deadline for bucket in buckets],
            list(accumulate([len(bucket.instances) for bucket in buckets])),
            {},
        )
        return self._sums

    def _forget_kinds(self, now: float) -> None:
        """Remove the kinds without waiting or recent instances."""
        waiting = {bucket.kind for bucket in self._by_deadline if bucket.instances}
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
