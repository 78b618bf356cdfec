"""The workers of one model as the scheduler sees them: what each holds, and when it is free."""

from collections.abc import Iterator
from math import inf

from inferpool.service.queue.batch_sizing import BatchCosts, CostCurve
from inferpool.service.queue.instance import Instance
from inferpool.workers.host.engine import WorkerHandle

_COMPARED_AT = 4
"""The batch size at which workers are compared."""
_LAGS_FROM, _LAGS_UNTIL = 2.0, 1.5
"""A worker lags from and until it takes so many times as long as the fastest. Workers on the same
kind of device vary by less."""
_LEAST_S = 0.002
"""Workers that take less than this for such a batch are all fast enough."""
_COMPARED_AFTER = 16
"""Batches between comparisons, after as many batches of each worker."""
_LATE, _LATE_S = 0.5, 0.01
"""How much longer than expected a batch may take, as a share and in seconds, before nobody counts
on its worker any more."""


class Lane:
    """The batches that one worker holds, and when it should be free."""

    __slots__ = (
        "_was_idle", "batches", "busy_since", "costs", "ends_at", "idle_since", "is_lagging",
        "worker",
    )  # fmt: skip

    def __init__(self, worker: WorkerHandle, costs: BatchCosts) -> None:
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
        """When the worker last became idle; 0 if it has not, or nobody takes turns with it."""
        self.is_lagging = False
        """The worker is clearly slower than another."""
        self._was_idle = True
        """The worker was idle when it was sent its oldest batch."""

    @property
    def has_credit(self) -> bool:
        """The worker may be sent a batch now. Nothing is sent behind a solo instance."""
        batches = self.batches
        return not batches or (len(batches) < self.worker.credit and not batches[-1][0].is_solo)

    @property
    def next_curve(self) -> CostCurve:
        """The costs of the next batch that it is sent, counted from `begins_at`."""
        return self.costs.curve(is_idle=not self.batches)

    @property
    def late_at(self) -> float:
        """The time after which nobody counts on its oldest batch any more."""
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
        """Note that it begins with its oldest batch now."""
        self.busy_since = now
        self._was_idle = was_idle
        self.ends_at = now + self.costs.time_s(len(self.batches[0]), is_idle=was_idle)

    def learn(self, size: int, now: float) -> None:
        """Learn from its oldest batch, which had this size and was answered now."""
        self.costs.note(size, now - self.busy_since, was_idle=self._was_idle)


class Lanes:
    """The lanes of all workers of one model."""

    def __init__(self) -> None:
        self.open: list[Lane] = []
        """Lanes of the workers that take batches."""
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
        """Lanes of workers that take no more batches, and still hold some."""

    def attach(self, worker: WorkerHandle) -> None:
        """Add a worker that takes batches."""
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

    def give(self, lane: Lane, batch: list[Instance]) -> None:
        """Note that a worker holds one more batch."""
        self.num_sent += len(batch)
        self._free_at = 0.0
        lane.batches.append(batch)

    def take(self, lane: Lane, batch: list[Instance]) -> None:
        """Note that a worker has returned a batch, or is lost with it."""
        self.num_sent -= len(batch)
        self._free_at = 0.0
        lane.batches.remove(batch)
        if not lane.batches and lane in self._leaving:
            self._leaving.remove(lane)

    def learn(self, lane: Lane, size: int, now: float) -> None:
        """Learn from the oldest batch of a worker, which had this size and was answered now."""
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
