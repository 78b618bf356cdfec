"""The books of one model: which instances have no answer yet, and what became of the others.

An instance is settled exactly once, and the counters of `ModelMetrics` say at every instant that
accepted = succeeded + failed + expired + cancelled + in flight. Used by the event loop's thread
alone.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence

from inferpool.service.errors import (
    DeadlineExceededError,
    InvalidInputError,
    ModelFailedError,
    NonFiniteOutputError,
    ServiceError,
    UnavailableError,
)
from inferpool.service.queue.deadlines import NO_TICK, Deadlines
from inferpool.service.queue.instance import SETTLED, Instance, Result, Timing
from inferpool.service.queue.steps import InstanceSteps, Traced
from inferpool.service.telemetry.metrics import ModelMetrics
from inferpool.workers.host.engine import WorkerHandle
from inferpool.workers.messages import BatchDone, ItemError


class Books:
    """Opens an account for each instance, and settles it once.

    The arena's slots are not its business but where an answer has come: see `settle_batch`.
    """

    def __init__(
        self,
        metrics: ModelMetrics,
        on_due: Callable[[Instance], None],
        unsettled: Callable[[], Iterable[Instance]],
    ) -> None:
        """Begin with no instance.

        Args:
            metrics: What is counted.
            on_due: Told each instance at its deadline, unless it was settled before.
            unsettled: Names those that wait or are with a worker; more does no harm.
        """
        self.metrics = metrics
        self._deadlines: Deadlines[Instance] = Deadlines(on_due, unsettled)
        self._traced: Traced[Instance] = Traced()
        self._drained = asyncio.Event()

    def open(self, instance: Instance, now: float, steps: InstanceSteps | None) -> None:
        """An instance is admitted.

        Args:
            instance: The admitted instance.
            now: CLOCK_MONOTONIC seconds.
            steps: Where to note what becomes of it, if it is traced.
        """
        if steps is not None:
            self._traced.add(instance, steps)
        metrics = self.metrics
        metrics.accepted += 1
        metrics.in_flight += 1
        self._deadlines.add(instance, now)

    async def drained(self, grace_s: float) -> None:
        """Wait until every instance is settled.

        Raises:
            TimeoutError: Some are not after so many seconds.
        """
        if self.metrics.in_flight:
            self._drained.clear()
            await asyncio.wait_for(self._drained.wait(), grace_s)

    def note_sent(self, batch: Sequence[Instance], worker: WorkerHandle, now: float) -> None:
        """A worker holds a batch."""
        if self._traced:
            self._traced.send(batch, worker, now)

    def note_lost(self, batch: Sequence[Instance], reason: str, now: float) -> None:
        """A worker is lost with a batch."""
        if self._traced:
            self._traced.lose(batch, reason, now)

    def settle_batch(self, batch: Sequence[Instance], done: BatchDone, now: float) -> None:
        """Answer the instances of a batch that has come back, and free their slots."""
        if self._traced:
            self._traced.compute(batch, done)
        metrics = self.metrics
        prepare_s, compute_s = done.prepare_s, done.compute_s
        metrics.batch_size.observe(len(batch))
        metrics.prepare_duration.observe(prepare_s)
        metrics.inference_duration.observe(compute_s)
        # All that was neither preparing nor computing was waiting, here or in the worker.
        began = now - prepare_s - compute_s
        waits_s: list[float] = []
        for instance, outcome in zip(batch, done.outcomes, strict=True):
            instance.owner.free(instance.ref.offset)
            if instance.state == SETTLED:
                continue
            queue_s = max(0.0, began - instance.arrived)
            waits_s.append(queue_s)
            if isinstance(outcome, ItemError):
                self._fail_item(instance, outcome)
            else:
                metrics.succeeded += 1
                self._settle(instance)
                instance.set_result(Result(outcome, Timing(queue_s, prepare_s, compute_s)))
        metrics.queue_wait.observe_all(waits_s)

    def cancel(self, instance: Instance) -> None:
        """Nobody waits for an instance any more."""
        self.metrics.cancelled += 1
        if self._traced:
            self._traced.fail(instance, "cancelled", "nobody waits for it any more")
        self._settle(instance)

    def expire(self, instance: Instance, message: str) -> None:
        """An instance did not get its answer in time."""
        self.metrics.expired += 1
        after_s = instance.ref.deadline - instance.arrived
        self._end(instance, DeadlineExceededError(f"{message}, {after_s:.2f} s after it came"))

    def fail(self, instance: Instance, error: ServiceError) -> None:
        """An instance gets an error for its answer."""
        self.metrics.failed += 1
        self._end(instance, error)

    def _fail_item(self, instance: Instance, error: ItemError) -> None:
        if error.code == "deadline_exceeded":
            self.expire(instance, error.message)
        elif error.code == "invalid_input":
            self.fail(instance, InvalidInputError(error.message))
        elif error.code == "non_finite_output":
            self.fail(instance, NonFiniteOutputError(error.message))
        elif error.code == "exhausted":
            self.fail(instance, UnavailableError(error.message, retry_after_s=1))
        else:
            self.fail(instance, ModelFailedError(error.message))

    def _end(self, instance: Instance, error: ServiceError) -> None:
        if self._traced:
            self._traced.fail(instance, error.code, error.message)
        self._settle(instance)
        instance.set_exception(error)

    def _settle(self, instance: Instance) -> None:
        instance.state = SETTLED
        if self._traced:
            self._traced.settle(instance)
        if instance.tick != NO_TICK:
            self._deadlines.discard(instance)
        metrics = self.metrics
        metrics.in_flight -= 1
        if not metrics.in_flight:
            self._drained.set()
