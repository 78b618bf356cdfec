"""Fills batches: from the queue, and where there is room, with work in the background."""

from math import inf

from inferpool.service.queue.admission import RateMeter
from inferpool.service.queue.batch_sizing import SPARE, SizeLimit, fitting
from inferpool.service.queue.batcher import Batcher
from inferpool.service.queue.instance import Instance
from inferpool.service.queue.scheduling.background import Background
from inferpool.service.queue.scheduling.lanes import Lane
from inferpool.service.queue.scheduling.objective import Objective

_NEAR_BATCHES = 100.0
"""A deadline further off than so many recent batches needs no closer look."""


class BatchFiller:
    """Takes the instances of the next batch out of the queues of one model."""

    def __init__(
        self,
        queue: Batcher[Instance],
        background: Background,
        limit: SizeLimit,
        rate: RateMeter,
        objective: Objective | None,
    ) -> None:
        """Take what it fills from, and what it goes by."""
        self._queue = queue
        self._background = background
        self._limit = limit
        self._rate = rate
        self._objective = objective

    def fill(self, lane: Lane, most: int, now: float) -> list[Instance]:
        """Take instances from the front of the queue, as many as can be in time together."""
        queue, begin, curve = self._queue, lane.begins_at(now), lane.next_curve
        most = min(most, queue.num_waiting, self._limit.now)
        if queue.soonest() - now < _NEAR_BATCHES * self._rate.batch_s:
            queue.put_last(begin + curve.time_s(1))
            most = fitting(queue, most, begin, curve)
        batch = queue.next_batch(most)
        self._background.note_others(curve.time_s(len(batch)), now)
        if num := self._background.companions(curve, len(batch), self._limit.now):
            in_time = begin + curve.time_s(len(batch) + num) * SPARE
            if not batch[0].is_solo and in_time <= min(each.ref.deadline for each in batch):
                batch += self._background.queue.next_batch(num)
        return batch

    def fill_from_end(self, lane: Lane, most: int, now: float) -> list[Instance]:
        """Take instances from the end of the queue that have the time for this worker."""
        end = lane.begins_at(now) + lane.next_curve.time_s(most) * SPARE
        objective_s = self._objective.held_s if self._objective else inf

        def fits(instance: Instance) -> bool:
            return end <= min(instance.ref.deadline, instance.arrived + objective_s)

        return self._queue.last_batch(most, fits)

    def fill_from_background(self, lane: Lane, now: float) -> list[Instance]:
        """Take instances of the background alone."""
        curve = lane.next_curve
        size = self._background.size(curve, self._limit.now, now)
        batch = self._background.queue.next_batch(size)
        self._background.note(curve.time_s(len(batch)))
        return batch
