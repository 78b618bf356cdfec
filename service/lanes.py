"""The workers of one model as the dispatcher sees them: what each holds, and until when."""

from collections.abc import Iterator

from service.batch_costs import BatchCosts, CostCurve
from service.instance import Instance
from workers.engine import WorkerHandle


class Lane:
    """One worker."""

    __slots__ = ("_was_idle", "batches", "busy_since", "costs", "ends_at", "worker")

    def __init__(self, worker: WorkerHandle, costs: BatchCosts) -> None:
        self.worker = worker
        self.costs = costs
        self.batches: list[list[Instance]] = []
        """Those that it holds, oldest first."""
        self.busy_since = 0.0
        """Since when it has been on its oldest batch."""
        self.ends_at = 0.0
        """When it will probably have answered that."""
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
        curve = self.costs.curve(is_idle=was_idle)
        self.ends_at = now + curve.time_s(len(self.batches[0]))

    def learn(self, size: int, now: float) -> None:
        """It has answered its oldest batch, which had this size."""
        self.costs.note(size, now - self.busy_since, was_idle=self._was_idle)


class Lanes:
    """All of them."""

    def __init__(self) -> None:
        self.open: list[Lane] = []
        """Of the workers that take batches."""
        self.num_sent = 0
        """Instances that workers hold, settled or not."""
        self._costs: dict[int, BatchCosts] = {}
        """By slot: the next incarnation of a worker is as fast as the one before."""
        self._leaving: list[Lane] = []
        """Of those that take no more, and hold some yet."""

    def attach(self, worker: WorkerHandle) -> None:
        """A worker takes batches."""
        costs = self._costs.setdefault(worker.id.slot, BatchCosts())
        self.open.append(Lane(worker, costs))

    def detach(self, worker: WorkerHandle) -> None:
        """A worker takes no more; what it holds, it holds until it returns it or is lost."""
        for lane in self.open:
            if lane.worker is worker:
                self.open.remove(lane)
                if lane.batches:
                    self._leaving.append(lane)
                return

    def give(self, lane: Lane, batch: list[Instance]) -> None:
        """A worker holds one batch more."""
        self.num_sent += len(batch)
        lane.batches.append(batch)

    def take(self, lane: Lane, batch: list[Instance]) -> None:
        """A worker has returned a batch, or is lost with it."""
        self.num_sent -= len(batch)
        lane.batches.remove(batch)
        if not lane.batches and lane in self._leaving:
            self._leaving.remove(lane)

    def held(self) -> Iterator[Instance]:
        """All that workers hold."""
        for lane in (*self.open, *self._leaving):
            for batch in lane.batches:
                yield from batch
