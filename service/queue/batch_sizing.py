"""How long a batch of each size takes, learned from earlier ones, and how large a batch may be.

A batch takes longer the more instances it has, and its first is answered with its last. So a batch
does not grow past what the tightest deadline among its members allows. An instance whose deadline
cannot be met even by a batch of its own does not count: it would only slow down the others.

Everything here is pure computation. To note a batch costs a microsecond.
"""

from bisect import bisect_left
from dataclasses import dataclass
from itertools import islice
from math import inf
from typing import TYPE_CHECKING

from inferpool.models.speed_names import LONG_S, MOST_GROWN

if TYPE_CHECKING:
    from inferpool.service.queue.batcher import Batcher, Q

AUTO_SIZE = 8
"""The largest batch, unless the settings say otherwise or more instances cost next to nothing."""
_AUTO_MOST = 64
_PAYS = 0.9
"""A batch of twice the size pays if an instance takes no more than this share of its time."""
_NUM_COLD = 2
"""First full batches of a size, in which libraries of an accelerator choose and load kernels."""
_TRIED_AGAIN_AFTER = 512
"""Full batches after which an accelerator gets larger ones again that did not pay before."""
_FREE_S = 0.002
"""A worker's time for a batch below which messages and wake-ups cost more than the batch does. An
echo of 64 takes 0.9 ms, and needs an eighth of the messages that batches of 8 need."""
_NUM_FULL = 8
"""Full batches that are averaged before the limit changes."""
_SLOW = 3.0
"""A full batch counts for at most this many times the average: it may have been interrupted."""
SPARE = 1.2
"""The factor on the estimated time of a batch: batches vary, and half of them take longer."""

_LEVEL_WEIGHT = 0.1
"""The newest batch's weight in how slow the worker is now, whatever the size."""
_SHAPE_WEIGHT = 0.02
"""The newest batch's weight in how its size compares with others, once there were many."""
_MOST_UP, _MOST_DOWN = 3.0, 0.25
"""A batch counts for at most so many times what was expected, since the next may not have its bad
luck. A worker that has become slower for good is believed within a dozen batches."""
_UNKNOWN_FIXED = 0.5
"""While only one size was seen, this share of its time is assumed to be the same for all sizes."""
_REDRAWN_AFTER = 32
"""Batches (fewer after a new size) after which the curve is drawn again. Until then it is moved up
and down as a whole."""
_FORGOTTEN_AFTER = 1024
"""Batches after which a size that was not used is forgotten, so that it may be tried again."""


class CostCurve:
    """Seconds by batch size: a level that moves fast, times a shape that moves slowly.

    So if a worker slows down (a busy host, larger inputs), the estimate rises for the sizes that it
    is not given at the moment, too. Between the sizes seen the shape is a straight line. It never
    falls: where it would, neighbours are averaged (pool adjacent violators; Ayer et al., "An
    empirical distribution function for sampling with incomplete information", 1955).
    """

    def __init__(self) -> None:
        self._level = 1.0
        self._seen: dict[int, _SizeStats] = {}
        self._num_notes = 0
        self._redraw_at = 0
        self._redraw_after = 1
        self._sizes: list[float] = []
        self._times_s: list[float] = []
        """The corners of the shape. The first and the last extend it beyond the sizes seen."""

    @property
    def is_known(self) -> bool:
        """A batch has been noted."""
        return bool(self._seen)

    def note(self, size: int, took_s: float) -> None:
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

    def note(self, size: int, took_s: float, *, was_idle: bool) -> None:
        """Learn from a batch."""
        (self._idle if was_idle else self._ahead).note(size, took_s)


class SizeLimit:
    """The most instances that a batch may have: a fixed number, or with `auto` what pays.

    With `auto` (None) it starts at 8, which workers have warmed up with. On CPUs it doubles, up to
    64, while full batches come back so fast that twice as many would still cost next to nothing,
    and falls back when they turn out slower. On accelerators, which compute many instances at once,
    it doubles, up to 256, as long as the time per instance falls clearly, and falls back if it does
    not. Networks that were compiled for some sizes stay with them.
    """

    def __init__(self, max_batch_size: int | None) -> None:
        self.now = self.own = max_batch_size or AUTO_SIZE
        """`own` is the limit without an objective."""
        self._may_grow = max_batch_size is None
        self._is_accelerated = False
        self._full_s = 0.0
        self._num_full = 0
        self._half_s = 0.0
        """Time per instance in batches of half the size, while it is compared; else 0."""
        self._num_until_trial = 0

    def hold(self) -> None:
        """Stay at the size that workers have warmed up with."""
        if self._may_grow:
            self._may_grow = False
            self.now = self.own = AUTO_SIZE

    def accelerate(self) -> None:
        """Note that the fast workers compute on accelerators."""
        if not self._is_accelerated:
            self._is_accelerated, self._num_full = True, -_NUM_COLD

    def bound(self, most: int) -> None:
        """Allow no more than an objective does."""
        self.now = min(self.own, most)

    def note(self, size: int, prepare_s: float, compute_s: float) -> None:
        """Learn from a batch that took a worker so long to prepare and to compute."""
        if size < self.own or not self._may_grow:
            return
        # An accelerator computes a batch while the next one is prepared.
        took_s = max(prepare_s, compute_s) if self._is_accelerated else prepare_s + compute_s
        if self._num_full > 0:
            took_s = min(took_s, _SLOW * self._full_s)
        self._num_full += 1
        if self._num_full <= 0:
            return
        self._full_s += (took_s - self._full_s) / min(self._num_full, _NUM_FULL)
        if self._num_full < _NUM_FULL:
            return
        if self._is_accelerated:
            self._judge()
        elif self._full_s <= _FREE_S / 2 and self.own < _AUTO_MOST:
            self._change(self.own * 2)
        elif self._full_s > 2 * _FREE_S and self.own > AUTO_SIZE:
            self._change(self.own // 2)

    def _judge(self) -> None:
        """Try batches of twice the size, or keep to those of half the size if these do not pay."""
        item_s = self._full_s / self.own
        does_not_pay = self._half_s and item_s > _PAYS * self._half_s
        self._half_s = 0.0
        self._num_until_trial -= 1
        if self.own > AUTO_SIZE and (does_not_pay or self._full_s > 2 * LONG_S):
            self._num_until_trial = _TRIED_AGAIN_AFTER
            self._change(self.own // 2)
        elif self._num_until_trial <= 0 and self._full_s <= LONG_S and self.own < MOST_GROWN:
            self._half_s = item_s
            self._change(self.own * 2)
            self._num_full = -_NUM_COLD

    def _change(self, size: int) -> None:
        self.now = self.own = size
        self._full_s, self._num_full = 0.0, 0


def fitting(queue: "Batcher[Q]", most: int, begin: float, curve: CostCurve) -> int:
    """Return the size of the next batch that lets each member be in time that can be.

    If no deadline is near, this costs the same for any size.

    Args:
        queue: The waiting instances; at least one.
        most: The largest size.
        begin: When the worker will begin with the batch.
        curve: The worker's times.
    """
    if begin + curve.time_s(most) * SPARE <= queue.soonest():
        return most
    alone_s = curve.time_s(1) * SPARE
    num, allowed, tightest = 0, most, inf
    for instance in islice(queue, most):
        deadline = instance.ref.deadline
        if deadline < tightest and begin + alone_s <= deadline:
            # At least 1, as `alone_s` shows; rounding might say 0.
            fits = max(1, curve.size_within((deadline - begin) / SPARE, allowed))
            if num >= fits:
                break  # with it the batch would be too large for its own deadline
            allowed, tightest = fits, deadline
        if num == allowed:
            break
        num += 1
    return num


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
