"""Decides how much work in the background is computed along with others, and how much alone.

Such work uses what is idle: a worker that nothing else waits for, and the room left in a batch that
is too small to use its device well. Both get no more than a frugal batch: the smallest that serves
nearly as many instances per second as the best one. A larger batch would gain little, and
keep the calls that come meanwhile waiting.
"""

from collections.abc import Iterator
from math import inf

from inferpool.service.queue.batcher import Batcher
from inferpool.service.queue.instance import BACKGROUND, Instance
from inferpool.service.queue.scheduling.lanes import CostCurve, Lane

_NEARLY = 1.1
"""In a frugal batch, an instance may take this many times as long as in the best one."""
_ENOUGH = 0.9
"""Batches of others are filled up while it gets less than this part of the time that is idle: of
that of its own batches, and of what the others lose by not being frugal.

Both were chosen by simulation: of six kinds of models at 40 % of their capacity, it took 82 to 98 %
of what was idle (without either: 4 to 93 %), and the p99 of other calls was 0.5 to 0.85 times what
it was without, times 1.2, plus one full batch (without either: 0.4 to 1.15 times)."""
_REMEMBERED_S = 2.0
"""Seconds of both after which what came before counts half."""
_LATELY_S = 2.0
"""If no other call came for this long, a batch is as large as it may be."""
_MOST_OWED_S = 1.0
"""The most seconds that others can owe it beyond one batch."""


class TurnsQueue:
    """The instances that wait in the background: callers take turns, each with its own order."""

    def __init__(self) -> None:
        self._queues: dict[int, Batcher[Instance]] = {}
        """Instances that wait, by caller; the caller that was served last comes last."""
        self.num_waiting = 0

    def __iter__(self) -> Iterator[Instance]:
        """Yield those that wait, caller by caller."""
        for queue in self._queues.values():
            yield from queue

    def push(self, instance: Instance, now: float) -> None:
        """Add an instance behind those of its caller."""
        self._queue_of(instance).push(instance, now)
        self.num_waiting += 1

    def push_front(self, instance: Instance) -> None:
        """Put back an instance that was taken before, ahead of those of its caller."""
        self._queue_of(instance).push_front(instance)
        self.num_waiting += 1

    def remove(self, instance: Instance) -> None:
        """Remove an instance that waits."""
        self._queue_of(instance).remove(instance)
        self.num_waiting -= 1

    def oldest(self) -> Instance | None:
        """Return the first instance of the next batch."""
        return next((queue.oldest() for queue in self._queues.values() if queue.num_waiting), None)

    def next_batch(self, max_size: int) -> list[Instance]:
        """Return instances of callers in turn, at most `max_size`; a solo one comes alone."""
        batch: list[Instance] = []
        waiting = [(caller, queue) for caller, queue in self._queues.items() if queue.num_waiting]
        while waiting and len(batch) < max_size:
            caller, queue = waiting.pop(0)
            oldest = queue.oldest()
            assert oldest is not None
            if oldest.is_solo and batch:
                break
            batch += queue.next_batch(1 if waiting else max_size - len(batch))
            self._queues[caller] = self._queues.pop(caller)
            if batch[-1].is_solo:
                break
            if queue.num_waiting:
                waiting.append((caller, queue))
        self.num_waiting -= len(batch)
        return batch

    def _queue_of(self, instance: Instance) -> Batcher[Instance]:
        caller = instance.ref.caller
        queue = self._queues.get(caller)
        if queue is None:
            queue = self._queues[caller] = Batcher()
        return queue


class Background:
    """The work of one model in the background, which waits until there is room for it."""

    def __init__(self, share: float = 0.0) -> None:
        """Begin with nothing; `share` is its part of the workers' time even if other calls wait."""
        self.queue = TurnsQueue()
        self._owed = share / (1 - share)
        """Seconds that it is owed for each one that others get while it waits."""
        self._owed_s = self._batch_s = 0.0
        """The seconds that others owe it, and those that its last batch took."""
        self._own_s = self._wasted_s = 0.0
        """The time of its own batches lately, and what others would have saved by frugal ones."""
        self.others_at = -inf
        """When others were last sent a batch."""

    def size(self, curve: CostCurve, most: int, now: float) -> int:
        """Return the size of its next batch."""
        if now > self.others_at + _LATELY_S or not curve.is_known:
            return most
        size = _frugal(curve, most)
        return max(size, curve.size_within(self._owed_s, most)) if self.is_owed else size

    def companions(self, curve: CostCurve, num: int, most: int) -> int:
        """Return how many may go along with a batch of others.

        As long as workers are idle often enough, there are none, since they delay the others.
        """
        oldest = self.queue.oldest()
        if oldest is None or oldest.is_solo or not curve.is_known:
            return 0
        size = _frugal(curve, most)
        wasted_s = curve.time_s(num) - num * curve.time_s(size) / size
        if num >= size or self._own_s >= _ENOUGH * (self._own_s + self._wasted_s + wasted_s):
            self._wasted_s += max(0.0, wasted_s)
            self._forget()
            return 0
        return size - num

    @property
    def is_owed(self) -> bool:
        """It waits, and its share entitles it to one more batch before others."""
        return self._owed_s > self._batch_s and self.queue.num_waiting > 0

    def is_due(self, lane: Lane) -> bool:
        """Return whether it is owed the next batch of a worker.

        A worker never holds two of its batches, so that others wait for one at most.
        """
        return self.is_owed and not any(is_background(batch) for batch in lane.batches)

    def count_own(self, took_s: float) -> None:
        """Count a batch of its own, by the time that it should take."""
        self._batch_s = took_s
        self._own_s += took_s
        self._forget()
        self._owed_s = max(0.0, self._owed_s - took_s)

    def _forget(self) -> None:
        if self._own_s + self._wasted_s > _REMEMBERED_S:
            self._own_s, self._wasted_s = self._own_s / 2, self._wasted_s / 2

    def count_others(self, took_s: float) -> None:
        """Count a batch of others while it waits, by the time that it should take."""
        if self._owed:
            self._owed_s = min(self._owed_s + self._owed * took_s, self._batch_s + _MOST_OWED_S)


def is_background(batch: list[Instance]) -> bool:
    """Return whether a batch has nothing else; companions of others come behind them."""
    return batch[0].ref.priority >= BACKGROUND


def _frugal(curve: CostCurve, most: int) -> int:
    """Return the smallest size that serves nearly as many per second as the best one."""
    sizes, size = [], 1
    while size < most:
        sizes.append(size)
        size += 1 + size // 8
    sizes.append(most)
    item_s = [curve.time_s(size) / size for size in sizes]
    best_s = min(item_s)
    return next(
        size for size, each_s in zip(sizes, item_s, strict=True) if each_s <= _NEARLY * best_s
    )
