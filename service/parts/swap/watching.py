"""Watches a version that answers clients, and says once it is worse than the former one.

Faults are counted, and compared with the share of faults that the former version had lately.
Load changes the size and the time of batches, so times of another load prove nothing. A canary is
compared with the former version's times for batches of the same size at that time. A former version
that answers no client gets copies of live inputs in groups of the same size now and then, and once
more before a version counts as slow.
"""

import asyncio
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import sqrt
from statistics import median
from typing import TYPE_CHECKING

from inferpool.service.catalog.catalog import ModelVersion
from inferpool.service.errors import ServiceError
from inferpool.service.parts.swap.comparison import item_ref, median_bounds
from inferpool.service.parts.swap.inputs import InputRecorder, SwapInput
from inferpool.service.parts.swap.requests import SwapOptions

if TYPE_CHECKING:
    from inferpool.service.api.routes.health import SwapFigures
    from inferpool.service.queue.pool import Pool
    from inferpool.workers.shared.messages import BatchDone

_LEAST_FAULTS = 3
_SURE = 3.0
"""Standard deviations by which a share of faults, or a median time, must pass its bound: by chance,
once in 700."""
_LEAST_BATCHES = 10
_NUM_RECENT = 64
"""Batches of each size that are remembered."""
_NUM_GROUPS = 6
"""Groups of live inputs that the former version computes to be measured; the first is dropped."""
_MOST_SIZES = 2
_INPUTS_WITHIN_S = 2.0
_GROUP_WITHIN_S = 2.0
_MEASURE_EVERY_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultShare:
    """Instances that a version has answered or failed on by its own fault."""

    num: int = 0
    num_faults: int = 0

    @classmethod
    def of(cls, version: ModelVersion) -> "FaultShare":
        """Return what a version has counted up to now."""
        metrics = version.metrics
        faults = metrics.faults + metrics.rejected["unavailable"]
        return cls(num=metrics.succeeded + faults, num_faults=faults)

    def __sub__(self, before: "FaultShare") -> "FaultShare":
        """Return what was counted since an earlier moment."""
        return FaultShare(num=self.num - before.num, num_faults=self.num_faults - before.num_faults)

    @property
    def share(self) -> float:
        """The share of faults; 0 if nothing was counted."""
        return self.num_faults / self.num if self.num else 0.0

    def surely_exceeds(self, bound: float) -> bool:
        """Return whether the share of faults is above a bound by more than chance.

        Wilson's interval: "Probable inference", Journal of the American Statistical Association
        22 (1927).
        """
        if self.num_faults < _LEAST_FAULTS:
            return False
        num, square = self.num, _SURE**2
        spread = sqrt(self.num_faults * (num - self.num_faults) / num + square / 4)
        return (self.num_faults + square / 2 - _SURE * spread) / (num + square) > bound


class BatchTimes:
    """Times of a pool's latest batches, by size."""

    def __init__(self, pool: "Pool") -> None:
        self._pool = pool
        self._item_s: defaultdict[int, deque[float]] = defaultdict(
            lambda: deque(maxlen=_NUM_RECENT)
        )
        self._remove: Callable[[], None] = _nothing

    @property
    def common(self) -> list[int]:
        """The sizes with enough batches, the most common first."""
        nums = Counter({size: len(times) for size, times in self._item_s.items()})
        return [size for size, num in nums.most_common() if num >= _LEAST_BATCHES]

    def item_s(self) -> dict[int, float]:
        """Return the median time of one instance in the batches of each common size."""
        return {size: median(self._item_s[size]) for size in self.common}

    def bounds_s(self) -> dict[int, tuple[float, float]]:
        """Return the bounds within which each of these medians surely lies, by the sign test."""
        return {size: median_bounds(self._item_s[size], _SURE) for size in self.common}

    def begin(self) -> None:
        """Begin to observe the batches, with no times of before."""
        self.clear()
        self._remove = self._pool.dispatcher.observe(self._note)

    def clear(self) -> None:
        """Drop all times."""
        self._item_s.clear()

    def stop(self) -> None:
        """Observe no further batches."""
        self._remove()

    def _note(self, num: int, done: "BatchDone") -> None:
        self._item_s[num].append((done.prepare_s + done.compute_s) / num)


class VersionWatch:
    """Compares a version that answers clients with the former one. Lives in the event loop."""

    def __init__(
        self,
        old: ModelVersion,
        new: ModelVersion,
        options: SwapOptions,
        since: FaultShare,
        *,
        is_canary: bool = False,
    ) -> None:
        """Watch nothing yet.

        Args:
            old: The former version.
            new: The version that is watched.
            options: The bounds.
            since: Earlier counts of the former version; only what came after them matters.
            is_canary: The former version answers clients at the same time.
        """
        self.old = old
        """The former version."""
        self.new = new
        """The version that is watched."""
        self._options = options
        self._ends_at = time.monotonic() + options.rollback_s
        self._since = since
        self._until = None if is_canary else FaultShare.of(old)
        self._start = FaultShare.of(new)
        self._counted = FaultShare()
        """The counts while it was looked at, until it was stopped."""
        self._times = BatchTimes(new.pool)
        self._old_times = BatchTimes(old.pool) if is_canary else None
        self._measured: Mapping[int, float] = {}
        """The former version's time for an instance, by the size of its group."""
        self._next_measure = 0.0
        self.ratio: float | None = None
        """How many times as long as the former version it takes for an instance."""

    @property
    def num_answered(self) -> int:
        """Inputs that the version has answered or failed on while it was looked at."""
        return self._tally().num

    @property
    def is_over(self) -> bool:
        """The former version need not be kept any more."""
        return time.monotonic() >= self._ends_at

    def begin(self) -> None:
        """Begin to watch, or go on if it was stopped."""
        self._start = FaultShare.of(self.new) - self._counted
        self._times.begin()
        if self._old_times is not None:
            self._old_times.begin()

    async def look(self) -> str:
        """Return why the version is worse; empty if it is not, as far as is known, or is forced."""
        if self._options.policy == "force":
            return ""
        return self._faults() or await self._latency()

    def stop(self) -> None:
        """Watch no longer. What the version computes until the next `begin` does not count."""
        self._counted = self._tally()
        self._times.stop()
        if self._old_times is not None:
            self._old_times.stop()

    def with_figures(self, figures: "SwapFigures") -> "SwapFigures":
        """Return figures with what has been found."""
        tally = self._tally()
        return replace(
            figures,
            num_answered=tally.num,
            fault_share=round(tally.share, 5) if tally.num else None,
            fault_share_before=round(self._before().share, 5),
            live_latency_ratio=None if self.ratio is None else round(self.ratio, 3),
        )

    def _tally(self) -> FaultShare:
        return FaultShare.of(self.new) - self._start

    def _before(self) -> FaultShare:
        return (self._until or FaultShare.of(self.old)) - self._since

    def _faults(self) -> str:
        if self.new.pool.is_lost and not self.old.pool.is_lost:
            return f"none of its workers is left ({self.new.pool.reason})"
        tally, before = self._tally(), self._before()
        if not tally.surely_exceeds(before.share + self._options.max_fault_share):
            return ""
        return (
            f"it fails on {tally.share:.2%} of {tally.num} inputs, the former version on "
            f"{before.share:.2%} of {before.num}; max_fault_share is "
            f"{self._options.max_fault_share:g}"
        )

    async def _latency(self) -> str:
        if self._old_times is not None:
            self.ratio = _ratio(self._times.item_s(), self._old_times.item_s())
            least = {size: low for size, (low, _) in self._times.bounds_s().items()}
            most = {size: high for size, (_, high) in self._old_times.bounds_s().items()}
            is_sure = (_ratio(least, most) or 0.0) > self._options.max_latency_ratio
            return self._slow() if is_sure else ""
        sizes = self._times.common[:_MOST_SIZES]
        if self.old.pool.is_draining:  # memory was too short to keep it
            return ""
        if not sizes or time.monotonic() < self._next_measure:
            return ""
        ratio = _ratio(self._times.item_s(), self._measured)
        if ratio is not None and ratio <= self._options.max_latency_ratio:
            self.ratio = ratio
            return ""
        for _ in range(2):  # the second time it counts
            self._times.clear()
            measured = await self._measure(sizes)
            self._measured = {**self._measured, **measured}
            self._next_measure = time.monotonic() + _MEASURE_EVERY_S
            self.ratio = _ratio(self._times.item_s(), measured)
            if not self._slow():
                return ""
        return self._slow()

    def _slow(self) -> str:
        if self.ratio is None or self.ratio <= self._options.max_latency_ratio:
            return ""
        return (
            f"it takes {self.ratio:.2f} times as long for an input as the former version does now, "
            f"max_latency_ratio is {self._options.max_latency_ratio:g}"
        )

    async def _measure(self, sizes: list[int]) -> dict[int, float]:
        """Have the former version compute copies of live inputs, in groups of these sizes."""
        until = time.monotonic() + _INPUTS_WITHIN_S
        recorder = InputRecorder(self.new.pool, max(sizes))
        try:
            while not recorder.is_full and time.monotonic() < until:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        finally:
            recorder.stop()
        inputs = recorder.take_all()
        found: dict[int, float] = {}
        for size in sizes:
            taken_s: list[float] = []
            while len(taken_s) < _NUM_GROUPS:
                spent_s = await self._group_s(inputs, size)
                if spent_s is None:
                    return found
                taken_s.append(spent_s)
            found[size] = median(taken_s[1:])
        until = time.monotonic() + _INPUTS_WITHIN_S
        while not self._times.common and time.monotonic() < until:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        return found

    async def _group_s(self, inputs: list[SwapInput], size: int) -> float | None:
        """Return the former version's time for an instance of a group; None if it fails."""
        if not inputs:
            return None
        spent_s = 0.0

        def note(num: int, done: "BatchDone") -> None:
            nonlocal spent_s
            spent_s += done.prepare_s + done.compute_s

        dispatcher = self.old.pool.dispatcher
        remove = dispatcher.observe(note)
        try:
            async with asyncio.timeout(_GROUP_WITHIN_S):
                futures = [
                    dispatcher.submit(item_ref(each, _GROUP_WITHIN_S), (each.payload,))
                    for each in (inputs * size)[:size]
                ]
                results = await asyncio.gather(*futures, return_exceptions=True)
        except (ServiceError, TimeoutError):
            return None
        finally:
            remove()
        if any(isinstance(result, BaseException) for result in results):
            return None
        return spent_s / size


def _nothing() -> None: ...


def _ratio(new: Mapping[int, float], old: Mapping[int, float]) -> float | None:
    """Compare times of an instance at the sizes that both have; None if there are none."""
    shared = [size for size in new if old.get(size)]
    return median(new[size] / old[size] for size in shared) if shared else None
