"""What became of an instance whose call is traced, noted where it happens: spans are made of it.

All moments are seconds of CLOCK_MONOTONIC, which all processes of a host share.
"""

import time
from collections.abc import Iterator, Sequence
from typing import Protocol, TypeVar

import msgspec

from inferpool.workers.host.engine import WorkerHandle
from inferpool.workers.messages import BatchDone


class Attempt(msgspec.Struct, array_like=True):
    """One time that an instance was sent to a worker."""

    worker: str
    """Over all its lives: model/slot."""
    incarnation: int
    device: str
    """What it is: "NVIDIA H100 80GB HBM3", "cpu"."""
    batch_size: int
    sent: float
    prepare_began: float = 0.0
    """0.0 while it is not known to have begun; so is the next."""
    prepare_s: float = 0.0
    compute_began: float = 0.0
    compute_s: float = 0.0
    lost: float = 0.0
    """When its worker was found to be lost; 0.0 if it was not."""
    reason: str = ""
    """Why that was lost."""


class InstanceSteps(msgspec.Struct, array_like=True):
    """From the arrival of an instance to its end."""

    arrived: float = 0.0
    settled: float = 0.0
    """0.0 while it has no answer."""
    code: str = ""
    """Of the error that it ended with; empty if it succeeded."""
    message: str = ""
    tries: list[Attempt] = []

    def take(self, noted: "InstanceSteps") -> None:
        """Take over what another process has noted of the same instance.

        Of one that was given up, spans may be made meanwhile; without its arrival there are none.
        """
        self.code, self.message = noted.code, noted.message
        self.settled, self.tries = noted.settled, noted.tries
        self.arrived = noted.arrived


class Arrived(Protocol):
    """An instance."""

    arrived: float
    """When it was admitted."""


T = TypeVar("T", bound=Arrived)


class Traced(dict[T, InstanceSteps]):
    """The steps of a dispatcher's instances that are traced and have no answer yet.

    Empty, and so false, while nothing is traced: that is all that it costs then.
    """

    def add(self, instance: T, steps: InstanceSteps) -> None:
        """It was admitted."""
        steps.arrived = instance.arrived
        self[instance] = steps

    def send(self, batch: Sequence[T], worker: WorkerHandle, now: float) -> None:
        """They go to a worker."""
        id, device = worker.id, worker.ready.device
        for steps in self._of(batch):
            steps.tries.append(Attempt(id.worker, id.incarnation, device, len(batch), now))

    def lose(self, batch: Sequence[T], reason: str, now: float) -> None:
        """The worker that they were sent to is lost."""
        for steps in self._of(batch):
            steps.tries[-1].lost = now
            steps.tries[-1].reason = reason

    def compute(self, batch: Sequence[T], done: BatchDone) -> None:
        """They have come back."""
        for steps in self._of(batch):
            newest = steps.tries[-1]
            newest.prepare_began, newest.prepare_s = done.prepare_began, done.prepare_s
            newest.compute_began, newest.compute_s = done.compute_began, done.compute_s

    def fail(self, instance: T, code: str, message: str) -> None:
        """It is about to be settled by an error."""
        steps = self.get(instance)
        if steps is not None:
            steps.code, steps.message = code, message

    def settle(self, instance: T) -> None:
        """It has its answer."""
        steps = self.pop(instance, None)
        if steps is not None:
            steps.settled = time.monotonic()

    def _of(self, batch: Sequence[T]) -> Iterator[InstanceSteps]:
        for instance in batch:
            steps = self.get(instance)
            if steps is not None:
                yield steps
