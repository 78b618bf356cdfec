"""Holds a latency objective: bounds the batches and the queue of one model."""

import logging
from collections.abc import Sequence
from math import ceil, inf, sqrt

from inferpool.service.catalog.catalog import ModelVersion
from inferpool.service.errors import OverloadedError
from inferpool.service.queue.admission import Admission
from inferpool.service.queue.batcher import Position
from inferpool.service.queue.instance import Instance
from inferpool.service.queue.scheduling.background import is_background
from inferpool.service.queue.scheduling.lanes import CostCurve, Lane
from inferpool.service.queue.scheduling.scheduler import BatchScheduler, QueuePolicy
from inferpool.workers.shared.messages import BatchDone

logger = logging.getLogger(__name__)

_LATE_SHARE = 0.005
"""The share of late answers to aim at: half of what the objective allows."""
_STEP = 0.05
"""How much a batch that is late as a whole lowers the aim."""
_FIRST_SHARE, _LEAST_SHARE = 0.9, 0.5
"""The first and the lowest aim, as shares of the objective."""
_ANY_SIZE = 65536
_RATE_OVER_S = 0.25
"""Seconds over which arrivals are counted for their rate."""
_SURE = 0.5
"""Standard deviations below the mean that are counted on of what arrives."""
_BETTER = 1.03
"""A larger batch must serve more by at least this factor."""
_SURELY_LOST = 100
"""Times in a row that a single instance takes too long before the user is told."""


class Objective(QueuePolicy):
    """Holds the 99th percentile of the time to an answer within an objective, at the least cost.

    Workers never wait: a worker that comes free gets what there is. So answers are as early as they
    can be at any load, and batches grow with the load by themselves. Two things could still make
    answers late, and are decided here:

    - How large a batch may get. An instance that arrives just after a batch began waits for the
      next worker to come free and then for its own batch. So with W workers a full batch may take
      W / (W + 1) of the objective. If more arrives than can be served so, batches may be larger,
      and are filled with what comes shortly before a worker is free.
    - How many may wait. An instance that would be answered too late is refused at once. So what is
      admitted is answered in time at any load, and workers stay busy with full batches.

    If even a single instance takes longer than the objective, nothing can be held: batches are as
    large as without one, and nothing is refused for its sake.
    """

    def __init__(self, scheduler: BatchScheduler, objective_s: float, *, model: str) -> None:
        self.objective_s = objective_s
        self._scheduler = scheduler
        self._model = model
        self._num_lost = 0
        """Times in a row that a single instance took longer than the objective."""
        self._has_warned = False
        self.aim_s = _FIRST_SHARE * objective_s
        """The most that an estimate may be: less than the objective, as far as estimates err."""
        self._max_size = _ANY_SIZE
        """The largest batch."""
        self._num_asked = 0
        """Instances that came since the rate was last computed, refused ones included."""
        self._rate = 0.0
        self._counted_at = 0.0
        self._batch_s = 0.0
        """The time of a full batch; 0 while it is unknown, or the objective cannot be held."""
        self._free_at: list[float] = []
        """When each worker can begin with a further batch, sorted."""

    @property
    def useful_s(self) -> float:
        """The aim; infinite if it cannot be held, or is not known to be."""
        return self.aim_s if self._batch_s else inf

    def is_welcome(self, num_ahead: int, now: float) -> bool:
        """Return whether an instance is answered within the aim, and count it as asked for."""
        self._num_asked += 1
        return self._answered_s(num_ahead, now) <= self.aim_s

    def check(self, position: Position, admission: Admission, now: float) -> None:
        """Check that an instance is answered within the aim, and that its key keeps to its share.

        Raises:
            OverShareError: Its key would take more than its share of the time.
            OverloadedError: It would be answered too late.
        """
        answered_s = self._answered_s(position.num_ahead, now)
        num_own = position.num_own_by_deadline
        if num_own >= self._max_size:  # less would not fill a batch, and so lose throughput
            num_counted = position.num_ahead + ceil(admission.key_share.extra(num_own))
            if answered_s <= self.aim_s < self._answered_s(num_counted, now):
                raise admission.key_share.over(f"the {num_own} requests of this key that wait", 1)
        if answered_s > self.aim_s:
            admission.rejected["objective"] += 1
            raise OverloadedError(
                f"an answer would take about {answered_s * 1000:.0f} ms, and this model's "
                f"objective is {self.objective_s * 1000:g} ms",
                retry_after_s=max(1, ceil(answered_s - self.aim_s)),
            )

    def end(self, lane: Lane, batch: list[Instance], done: BatchDone | None, now: float) -> float:
        """Learn from the answers to clients."""
        if done is not None and not (is_background(batch) or batch[0].is_compared):
            self._learn(batch, now)
        return 0.0

    def plan(self, now: float) -> None:
        """Plan again after workers were sent or have answered something."""
        limit = self._scheduler.limit
        self._plan(self._scheduler.lanes.leading, limit.own, now)
        limit.bound(self._max_size)

    def _plan(self, lanes: Sequence[Lane], limit: int, now: float) -> None:
        self._free_at = sorted(lane.begins_at(now) for lane in lanes)
        curves = [lane.costs.curve(is_idle=False) for lane in lanes]
        curve = max(curves, key=lambda curve: curve.time_s(1), default=None)
        if curve is None or not curve.is_known:
            return
        alone_s = curve.time_s(1)
        if alone_s > self.objective_s:
            self._max_size, self._batch_s = _ANY_SIZE, 0.0
            self._warn_of_lost(alone_s)
            return
        self._num_lost = 0
        self.aim_s = max(self.aim_s, alone_s)  # or even an idle worker would be refused work
        self._measure_rate(now)
        self._max_size = self._best_size(curve, len(lanes), limit)
        self._batch_s = curve.time_s(self._max_size)

    def _learn(self, batch: Sequence[Instance], now: float) -> None:
        """Aim lower for each late answer of a batch, and higher for the others.

        The share of late answers settles where both balance (Robbins and Monro, "A stochastic
        approximation method", 1951).
        """
        objective_s = self.objective_s
        num_late = sum(now - instance.arrived > objective_s for instance in batch)
        aim_s = self.aim_s * (1 + _STEP * (_LATE_SHARE - num_late / len(batch)))
        self.aim_s = min(objective_s, max(_LEAST_SHARE * objective_s, aim_s))

    def _warn_of_lost(self, alone_s: float) -> None:
        self._num_lost += 1
        if self._num_lost >= _SURELY_LOST and not self._has_warned:
            self._has_warned = True
            text = "%s: objective_p99_ms = %g cannot be held: a single instance takes %.3g ms"
            logger.warning(text, self._model, self.objective_s * 1e3, alone_s * 1e3)

    def _measure_rate(self, now: float) -> None:
        elapsed_s = now - self._counted_at
        if elapsed_s > _RATE_OVER_S:
            self._rate = self._num_asked / elapsed_s
            self._num_asked, self._counted_at = 0, now

    def _best_size(self, curve: CostCurve, num_workers: int, limit: int) -> int:
        """Return the batch size that serves the most of what arrives now per second, in time."""
        aim_s, rate = self.aim_s, self._rate
        size = max(1, curve.size_within(aim_s * num_workers / (num_workers + 1), limit))
        best, best_rate = size, 0.0
        while size <= limit and (time_s := curve.time_s(size)) < aim_s:
            # Only what comes shortly before a worker is free is admitted.
            num = rate * min(time_s / num_workers, aim_s - time_s)
            served = min(size, num - _SURE * sqrt(num)) / time_s
            if served > best_rate * _BETTER:
                best, best_rate = size, served
            size += 1 + size // 8
        return best

    def _answered_s(self, num_ahead: int, now: float) -> float:
        """Estimate the seconds to an answer behind `num_ahead` others; 0 if unknown."""
        free_at = self._free_at
        if not self._batch_s or not free_at or (not num_ahead and free_at[0] <= now):
            return 0.0
        turn, number = divmod(num_ahead // self._max_size, len(free_at))
        return max(0.0, free_at[number] - now) + (turn + 1) * self._batch_s


def add_objective(version: ModelVersion) -> None:
    """Hold the objective of a version, if its settings have one."""
    p99_ms = version.settings.objective_p99_ms
    if p99_ms:
        scheduler = version.pool.dispatcher.scheduler
        scheduler.policies.append(Objective(scheduler, p99_ms / 1000, model=version.name))
