"""The workers of one model as the scheduler sees them: what each holds, and when it is free.

That follows from how long batches of each size take, which is learned from earlier ones.
"""

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from math import inf

from inferpool.service.queue.instance import Instance
from inferpool.workers.host.engine import WorkerHandle

_COMPARED_AT = 4
"""The batch size at which workers are compared."""
_LAGS_FROM, _LAGS_UNTIL = 2.0, 1.5
"""A worker lags from and until it takes this many times as long as the fastest. Workers on the same
kind of device vary by less."""
_LEAST_S = 0.002
"""Workers that take less than this for such a batch are all fast enough."""
_COMPARED_AFTER = 16
"""Batches between comparisons, after as many batches of each worker."""
_LATE, _LATE_S = 0.5, 0.01
"""How much longer than expected a batch may take, as a share and in seconds, before the end of its
worker's batch counts as unknown."""

_LEVEL_WEIGHT = 0.1
"""The newest batch's weight in how slow the worker is now, at any size."""
_SHAPE_WEIGHT = 0.02
"""The newest batch's weight in how its size compares with others, once there were many."""
_MOST_UP, _MOST_DOWN = 3.0, 0.25
"""A batch counts for at most this many times what was expected, since the next may not have its bad
luck. A worker that has become slower for good is believed within a dozen batches."""
_UNKNOWN_FIXED = 0.5
"""While only one size was seen, this share of its time is assumed to be the same for all sizes."""
_REDRAWN_AFTER = 32
"""Batches (fewer after a new size) after which the curve is drawn again. Until then it is moved up
and down as a whole."""
_FORGOTTEN_AFTER = 1024
"""Batches after which a size that was not used is forgotten, so that it may be tried again."""


class Lane:
    """The batches that one worker holds, and when it should be free."""

    __slots__ = (
        "batches", "busy_since", "costs", "ends_at", "idle_since", "is_lagging", "was_idle",
        "worker",
    )  # fmt: skip

    def __init__(self, worker: WorkerHandle, costs: "BatchCosts") -> None:
        self.worker = worker
        self.costs = costs
        self.batches: list[list[Instance]] = []
        """The batches that the worker holds, oldest first."""
        self.busy_since = 0.0
        """When the worker began its oldest batch. For a pipeline, which works on several, it is the
        time of the last answer, so the curves learn how far apart answers come."""
        self.ends_at = 0.0
        """When the worker should answer that batch."""
        self.idle_since = 0.0
        """When the worker last became idle, if it takes turns with others; else 0."""
        self.is_lagging = False
        """The worker is clearly slower than another."""
        self.was_idle = True
        """The worker was idle when it was sent its oldest batch."""

    @property
    def has_credit(self) -> bool:
        """The worker may be sent a batch now. Nothing is sent behind a solo instance."""
        batches = self.batches
        return not batches or (len(batches) < self.worker.credit and not batches[-1][0].is_solo)

    @property
    def next_curve(self) -> "CostCurve":
        """The costs of the next batch that it is sent, counted from `begins_at`."""
        return self.costs.curve(is_idle=not self.batches)

    @property
    def late_at(self) -> float:
        """The time after which the end of its oldest batch counts as unknown."""
        if not self.batches:
            return inf
        return self.ends_at + max(_LATE_S, _LATE * (self.ends_at - self.busy_since))

    def begins_at(self, now: float) -> float:
        """Estimate when it would begin with a batch that is sent now."""
        if not self.batches:
            return now
        curve = self.costs.curve(is_idle=False)
        rest_s = sum(curve.time_s(len(batch)) for batch in self.batches[1:])
        return max(now, self.ends_at) + rest_s

    def begin(self, now: float, *, was_idle: bool) -> None:
        """Expect the end of its oldest batch, which it begins now."""
        self.busy_since = now
        self.was_idle = was_idle
        self.ends_at = now + self.costs.curve(is_idle=was_idle).time_s(len(self.batches[0]))


class Lanes:
    """The lanes of all workers of one model."""

    def __init__(self) -> None:
        self.open: list[Lane] = []
        """Lanes of the workers that accept batches."""
        self.leading: list[Lane] = []
        """The fast ones among them: all, if they are about equally fast."""
        self.lagging: list[Lane] = []
        """The others, the fastest first."""
        self.num_sent = 0
        """Instances that workers hold, settled or not."""
        self._free_at = 0.0
        """The cached result of `free_in`; 0 after any change of workers or batches."""
        self._num_learned = 0
        self._costs: dict[int, BatchCosts] = {}
        """Costs by slot, since the next incarnation of a worker is as fast as the one before."""
        self._leaving: list[Lane] = []
        """Lanes of workers that accept no more batches, and still hold some."""

    def attach(self, worker: WorkerHandle) -> None:
        """Add a worker that accepts batches."""
        costs = self._costs.setdefault(worker.id.slot, BatchCosts())
        self.open.append(Lane(worker, costs))
        self._compare()

    def detach(self, worker: WorkerHandle) -> None:
        """Send a worker nothing more. It keeps what it holds until it returns it or is lost."""
        for lane in self.open:
            if lane.worker is worker:
                self.open.remove(lane)
                self._compare()
                if lane.batches:
                    self._leaving.append(lane)
                return

    def give(self, lane: Lane, batch: list[Instance], now: float) -> None:
        """Count a batch as held by a worker, which begins it at once if it is idle."""
        self.num_sent += len(batch)
        self._free_at = 0.0
        lane.batches.append(batch)
        if len(lane.batches) == 1:
            lane.begin(now, was_idle=True)

    def answered(
        self, lane: Lane, batch: list[Instance], now: float, *, was_computed: bool
    ) -> None:
        """Learn from a worker's oldest batch, if it was computed, and expect the next one's end."""
        self.take(lane, batch)
        if was_computed:
            self.learn(lane, len(batch), now)
        if lane.batches:
            lane.begin(now, was_idle=False)

    def take(self, lane: Lane, batch: list[Instance]) -> None:
        """Count a batch as held no more by a worker, which has returned it or is lost with it."""
        self.num_sent -= len(batch)
        self._free_at = 0.0
        lane.batches.remove(batch)
        if not lane.batches and lane in self._leaving:
            self._leaving.remove(lane)

    def learn(self, lane: Lane, size: int, now: float) -> None:
        """Learn from the oldest batch of a worker, which had this size and was answered now."""
        are_several = len(self.open) > 1
        is_first = are_several and not lane.costs.curve(is_idle=False).is_known
        lane.costs.learn(size, now - lane.busy_since, was_idle=lane.was_idle)
        self._num_learned += 1
        if are_several and (
            is_first
            or self._num_learned <= _COMPARED_AFTER * len(self.open)
            or not self._num_learned % _COMPARED_AFTER
        ):
            self._compare()

    def free_in(self, now: float) -> float:
        """Estimate how soon the leading workers can begin with what waits, in seconds.

        It is 0 if one of them is idle, since that one begins at once, and else their average.
        """
        if not self._free_at and self.leading:
            self._free_at = now
            if all(lane.batches for lane in self.leading):
                begins_at = [lane.begins_at(now) for lane in self.leading]
                self._free_at = sum(begins_at) / len(begins_at)
        return max(0.0, self._free_at - now)

    def answered_by(self, num: int, most: int, now: float) -> float:
        """Estimate when the leading workers will have answered `num` more instances.

        It is infinite if none of them is on time.
        """
        size = max(1, min(num, most))
        beginnings = sorted(
            (lane.begins_at(now), lane.costs.time_s(size, is_idle=False) / size)
            for lane in self.leading
            if now < lane.late_at
        )
        at, left, per_s = now, float(num), 0.0
        for begin, item_s in beginnings:
            done = per_s * (begin - at)
            if done >= left:
                break
            at, left = begin, left - done
            per_s += 1 / max(item_s, 1e-9)
        return at + left / per_s if per_s else inf

    def _compare(self) -> None:
        """Divide the workers into leading and lagging ones."""
        self._free_at = 0.0
        times_s = {id(lane): lane.costs.time_s(_COMPARED_AT, is_idle=False) for lane in self.open}
        known_s = [time_s for time_s in times_s.values() if time_s]
        fastest_s = max(_LEAST_S / _LAGS_FROM, min(known_s, default=0.0))
        for lane in self.open:
            bound = _LAGS_UNTIL if lane.is_lagging else _LAGS_FROM
            lane.is_lagging = times_s[id(lane)] > bound * fastest_s
        self.leading = [lane for lane in self.open if not lane.is_lagging]
        self.lagging = [lane for lane in self.open if lane.is_lagging]
        self.lagging.sort(key=lambda lane: times_s[id(lane)])

    def held(self) -> Iterator[Instance]:
        """Yield all instances that workers hold."""
        for lane in (*self.open, *self._leaving):
            for batch in lane.batches:
                yield from batch


class CostCurve:
    """Seconds by batch size: a level that moves fast, times a shape that moves slowly.

    So if a worker slows down (a busy host, larger inputs), the estimate rises for the sizes that it
    is not given at the moment, too. Between the sizes seen the shape is a straight line. It never
    falls: where it would, neighbours are averaged (pool adjacent violators; Ayer et al., "An
    empirical distribution function for sampling with incomplete information", 1955).
    """

    def __init__(self) -> None:
        self.is_known = False
        """A batch has been noted."""
        self._level = 1.0
        self._seen: dict[int, _SizeStats] = {}
        self._num_notes = 0
        self._redraw_at = 0
        self._redraw_after = 1
        self._sizes: list[float] = []
        self._times_s: list[float] = []
        """The corners of the shape. The first and the last extend it beyond the sizes seen."""

    def learn(self, size: int, took_s: float) -> None:
        """Learn from a batch."""
        self._num_notes += 1
        seen = self._seen.get(_class_of(size))
        if seen is None:
            self._add(size, took_s)
            return
        ratio = took_s / (self._level * seen.time_s) if seen.time_s else 1.0
        ratio = _MOST_UP if ratio > _MOST_UP else _MOST_DOWN if ratio < _MOST_DOWN else ratio
        seen.num += 1
        weight = max(1 / seen.num, _SHAPE_WEIGHT)
        seen.size += weight * (size - seen.size)
        seen.time_s *= 1 + weight * (ratio - 1)
        seen.noted_at = self._num_notes
        self._level *= 1 + _LEVEL_WEIGHT * (ratio - 1)

    def time_s(self, size: int) -> float:
        """Estimate what a batch of that size takes; 0 if nothing is known."""
        if self._num_notes >= self._redraw_at:
            self._redraw()
        sizes, times_s = self._sizes, self._times_s
        if not sizes:
            return 0.0
        right = min(max(bisect_left(sizes, size), 1), len(sizes) - 1)
        left = right - 1
        slope = (times_s[right] - times_s[left]) / (sizes[right] - sizes[left])
        return self._level * (times_s[left] + slope * (size - sizes[left]))

    def size_within(self, limit_s: float, most: int) -> int:
        """Return the largest size up to `most` that should not take longer; 0 if there is none."""
        low, high = 0, most
        while low < high:
            middle = (low + high + 1) // 2
            if self.time_s(middle) <= limit_s:
                low = middle
            else:
                high = middle - 1
        return low

    def _add(self, size: int, took_s: float) -> None:
        """Add a new size. Its first batch may have been slow by chance, or by being the first."""
        if self._seen:
            largest = max(self._seen.values(), key=lambda each: each.size)
            share = min(size, largest.size)
            in_proportion_s = self.time_s(round(share)) * size / share
            took_s = min(took_s, _MOST_UP * in_proportion_s)
        self.is_known = True
        self._seen[_class_of(size)] = _SizeStats(size, took_s / self._level, self._num_notes)
        self._redraw_at, self._redraw_after = 0, 1

    def _redraw(self) -> None:
        self._redraw_at = self._num_notes + self._redraw_after
        self._redraw_after = min(2 * self._redraw_after, _REDRAWN_AFTER)
        oldest = self._num_notes - _FORGOTTEN_AFTER
        self._seen = {key: each for key, each in self._seen.items() if each.noted_at > oldest}
        blocks: list[_EqualSizes] = []
        for each in sorted(self._seen.values(), key=lambda each: each.size):
            blocks.append(_EqualSizes([each.size], each.time_s, min(each.num, 1 / _SHAPE_WEIGHT)))
            while len(blocks) > 1 and blocks[-2].time_s > blocks[-1].time_s:
                last = blocks.pop()
                blocks[-1].merge(last)
        self._sizes = [size for block in blocks for size in block.sizes]
        self._times_s = [block.time_s for block in blocks for _ in block.sizes]
        if self._sizes:
            self._extend()

    def _extend(self) -> None:
        """Extend the shape by a straight line through the smallest and the largest size seen."""
        sizes, times_s = self._sizes, self._times_s
        slope = (1 - _UNKNOWN_FIXED) * times_s[-1] / sizes[-1]
        if len(sizes) > 1:
            slope = (times_s[-1] - times_s[0]) / (sizes[-1] - sizes[0])
        times_s.insert(0, max(0.0, times_s[0] - slope * sizes[0]))
        sizes.insert(0, 0.0)
        times_s.append(times_s[-1] + slope)
        sizes.append(sizes[-1] + 1)


class BatchCosts:
    """The times of one worker's batches: one curve for an idle worker, one for a busy one.

    An idle worker's time includes preparing the batch. A busy one has prepared it meanwhile, as
    far as it got.
    """

    def __init__(self) -> None:
        self._idle = CostCurve()
        self._ahead = CostCurve()

    def curve(self, *, is_idle: bool) -> CostCurve:
        """Return the curve for an idle or a busy worker, or the other one if only that is known.

        An idle worker's time counts from when the batch is sent, a busy one's from its turn.
        """
        own, other = (self._idle, self._ahead) if is_idle else (self._ahead, self._idle)
        return own if own.is_known or not other.is_known else other

    def time_s(self, size: int, *, is_idle: bool) -> float:
        """Estimate what a batch of that size takes; 0 if nothing is known."""
        return self.curve(is_idle=is_idle).time_s(size)

    def learn(self, size: int, took_s: float, *, was_idle: bool) -> None:
        """Learn from a batch."""
        (self._idle if was_idle else self._ahead).learn(size, took_s)


@dataclass(slots=True)
class _SizeStats:
    """Batches of about one size."""

    size: float
    time_s: float
    noted_at: int
    num: int = 1


@dataclass(slots=True)
class _EqualSizes:
    """Neighbouring sizes that are taken to cost the same."""

    sizes: list[float]
    time_s: float
    weight: float

    def merge(self, next: "_EqualSizes") -> None:
        weight = self.weight + next.weight
        self.time_s = (self.time_s * self.weight + next.time_s * next.weight) / weight
        self.weight = weight
        self.sizes += next.sizes


def _class_of(size: int) -> int:
    """Return the class of a size: above 8, the first three binary digits count."""
    shift = max(0, size.bit_length() - 3)
    return size >> shift << shift
