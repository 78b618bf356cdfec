"""The workers of one model as the dispatcher sees them: what each holds, and until when."""

from collections.abc import Iterator
from math import inf

from inferpool.service.queue.batch_costs import BatchCosts, CostCurve
from inferpool.service.queue.instance import Instance
from inferpool.workers.host.engine import WorkerHandle

_COMPARED_AT = 4
"""The size of batch by whose time workers are compared."""
_LAGS_FROM, _LAGS_UNTIL = 2.0, 1.5
"""Times the fastest worker's time: workers of the same kind of device vary by less."""
_LEAST_S = 0.002
"""Workers that take less for such a batch are all fast enough."""
_COMPARED_AFTER = 16
"""Batches, once there were as many for each worker."""
_LATE, _LATE_S = 0.5, 0.01
"""How much longer than expected a batch may take, as a share and at least, before one no longer
counts on its worker."""


class Lane:
    """One worker."""

    __slots__ = ("_was_idle", "batches", "busy_since", "costs", "ends_at", "is_lagging", "worker")

    def __init__(self, worker: WorkerHandle, costs: BatchCosts) -> None:
        self.worker = worker
        self.costs = costs
        self.batches: list[list[Instance]] = []
        """Those that it holds, oldest first."""
        self.busy_since = 0.0
        """Since when it has been on its oldest batch; of a pipeline, which has several under way,
        since its last answer: so what is learned is how far apart answers come."""
        self.ends_at = 0.0
        """When it will probably have answered that."""
        self.is_lagging = False
        """It is clearly slower than another."""
        self._was_idle = True
        """It had nothing to do when it was sent that."""

    @property
    def has_credit(self) -> bool:
        """It may be sent a batch now; beside a solo instance, nothing else is at stake."""
        batches = self.batches
        return not batches or (len(batches) < self.worker.credit and not batches[-1][0].is_solo)

    @property
    def next_curve(self) -> CostCurve:
        """What the next batch that it is sent will take it, from `begins_at` on."""
        return self.costs.curve(is_idle=not self.batches)

    @property
    def late_at(self) -> float:
        """From when on its oldest batch is no longer to be counted on."""
        if not self.batches:
            return inf
        return self.ends_at + max(_LATE_S, _LATE * (self.ends_at - self.busy_since))

    def begins_at(self, now: float) -> float:
        """When it will probably begin with a batch that it is sent now."""
        if not self.batches:
            return now
        curve = self.costs.curve(is_idle=False)
        rest_s = sum(curve.time_s(len(batch)) for batch in self.batches[1:])
        return max(now, self.ends_at) + rest_s

    def begin(self, now: float, *, was_idle: bool) -> None:
        """It begins with its oldest batch now."""
        self.busy_since = now
        self._was_idle = was_idle
        self.ends_at = now + self.costs.time_s(len(self.batches[0]), is_idle=was_idle)

    def learn(self, size: int, now: float) -> None:
        """It has answered its oldest batch, which had this size."""
        self.costs.note(size, now - self.busy_since, was_idle=self._was_idle)


class Lanes:
    """All of them."""

    def __init__(self) -> None:
        self.open: list[Lane] = []
        """Of the workers that take batches."""
        self.leading: list[Lane] = []
        """Of these the fast ones: all, where they are about equally fast."""
        self.lagging: list[Lane] = []
        """The others, the fastest first."""
        self.num_sent = 0
        """Instances that workers hold, settled or not."""
        self._free_at = 0.0
        """See `free_in`; 0 if not computed since a worker came, went, was sent or returned a
        batch."""
        self._num_learned = 0
        self._costs: dict[int, BatchCosts] = {}
        """By slot: the next incarnation of a worker is as fast as the one before."""
        self._leaving: list[Lane] = []
        """Of those that take no more, and hold some yet."""

    def attach(self, worker: WorkerHandle) -> None:
        """A worker takes batches."""
        costs = self._costs.setdefault(worker.id.slot, BatchCosts())
        self.open.append(Lane(worker, costs))
        self._compare()

    def detach(self, worker: WorkerHandle) -> None:
        """A worker takes no more; what it holds, it holds until it returns it or is lost."""
        for lane in self.open:
            if lane.worker is worker:
                self.open.remove(lane)
                self._compare()
                if lane.batches:
                    self._leaving.append(lane)
                return

    def give(self, lane: Lane, batch: list[Instance]) -> None:
        """A worker holds one batch more."""
        self.num_sent += len(batch)
        self._free_at = 0.0
        lane.batches.append(batch)

    def take(self, lane: Lane, batch: list[Instance]) -> None:
        """A worker has returned a batch, or is lost with it."""
        self.num_sent -= len(batch)
        self._free_at = 0.0
        lane.batches.remove(batch)
        if not lane.batches and lane in self._leaving:
            self._leaving.remove(lane)

    def learn(self, lane: Lane, size: int, now: float) -> None:
        """A worker has answered its oldest batch, which had this size."""
        are_several = len(self.open) > 1
        is_first = are_several and not lane.costs.curve(is_idle=False).is_known
        lane.learn(size, now)
        self._num_learned += 1
        if are_several and (
            is_first
            or self._num_learned <= _COMPARED_AFTER * len(self.open)
            or not self._num_learned % _COMPARED_AFTER
        ):
            self._compare()

    def free_in(self, now: float) -> float:
        """Seconds until the leading workers can begin with what waits, on average.

        It is 0 if one of them is idle: that one begins at once.
        """
        if not self._free_at and self.leading:
            self._free_at = now
            if all(lane.batches for lane in self.leading):
                begins_at = [lane.begins_at(now) for lane in self.leading]
                self._free_at = sum(begins_at) / len(begins_at)
        return max(0.0, self._free_at - now)

    def answered_by(self, num: int, most: int, now: float) -> float:
        """When the leading workers will have answered so many more; never, if none is on time.

        Args:
            num: Instances, besides those that they hold.
            most: The largest batch.
            now: CLOCK_MONOTONIC seconds.
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
        """Tell those that are clearly slower than the fastest from the others."""
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
        """All that workers hold."""
        for lane in (*self.open, *self._leaving):
            for batch in lane.batches:
                yield from batch
