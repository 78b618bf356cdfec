"""The workers of one model as the dispatcher sees them: what each holds, and until when."""

from collections.abc import Iterator

from service.instance import Instance
from workers.engine import WorkerHandle


class Lane:
    """One worker."""

    __slots__ = ("batches", "busy_since", "ends_at", "worker")

    def __init__(self, worker: WorkerHandle) -> None:
        self.worker = worker
        self.batches: list[list[Instance]] = []
        """Those that it holds, oldest first."""
        self.busy_since = 0.0
        """Since when it has been on its oldest batch."""
        self.ends_at = 0.0
        """When it will probably have answered that."""

    @property
    def has_credit(self) -> bool:
        """It may be sent a batch now; beside a solo instance, nothing else is at stake."""
        batches = self.batches
        return not batches or (len(batches) < self.worker.credit and not batches[-1][0].is_solo)

    def expect(self, now: float, item_s: float) -> None:
        """It begins with its oldest batch now, which takes this long per instance."""
        self.busy_since = now
        self.ends_at = now + (len(self.batches[0]) if self.batches else 0) * item_s


class Lanes:
    """All of them."""

    def __init__(self) -> None:
        self.open: list[Lane] = []
        """Of the workers that take batches."""
        self.num_sent = 0
        """Instances that workers hold, settled or not."""
        self._leaving: list[Lane] = []
        """Of those that take no more, and hold some yet."""

    def attach(self, worker: WorkerHandle) -> None:
        """A worker takes batches."""
        self.open.append(Lane(worker))

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
