"""The accounts of one model's instances: each is opened once and settled exactly once.

At every instant the counters of `ModelMetrics` satisfy
accepted = succeeded + failed + expired + cancelled + in flight. Used by the event loop's thread
alone.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from math import ceil

from inferpool.service.errors import (
    DeadlineExceededError,
    InvalidInputError,
    ModelFailedError,
    NonFiniteOutputError,
    ServiceError,
    UnavailableError,
    WorkerCrashedError,
)
from inferpool.service.queue.instance import (
    NO_TICK,
    SETTLED,
    Attempt,
    Instance,
    InstanceSteps,
    InstanceTiming,
    Result,
)
from inferpool.service.telemetry.metrics import ModelMetrics
from inferpool.workers.host.engine import WorkerHandle
from inferpool.workers.shared.messages import BatchDone, ItemError

TICK_S = 0.01
"""How late a deadline may be noticed, at most, while the event loop turns."""
FAR_S = 1.0
"""Deadlines further off than this are not tracked yet. Nearly all instances are answered before
theirs comes near, so most cost nothing."""
_LOOK_S = 0.5
_FAULTS = ("model_error", "non_finite_output", "worker_crashed")
"""Errors that are the model's own, rather than those of an input, a caller or the host."""


class Ledger:
    """Opens an account for each instance, and settles it once.

    Arena slots are freed by the dispatcher, except in `settle_batch`.
    """

    def __init__(
        self,
        metrics: ModelMetrics,
        on_due: Callable[[Instance], None],
        unsettled: Callable[[], Iterable[Instance]],
    ) -> None:
        """Start without instances.

        Args:
            metrics: The counters.
            on_due: Called with each instance at its deadline, unless it was settled before.
            unsettled: Returns all instances that are queued or sent; it may return more.
        """
        self.metrics = metrics
        self.deadlines = Deadlines(on_due, unsettled)
        self.traced = TracedInstances()
        self._drained = asyncio.Event()

    def beside(self) -> "Ledger":
        """Return another ledger of the same dispatcher, with counters that are shown nowhere."""
        other = copy(self)
        other.metrics = ModelMetrics(self.metrics.name)
        other._drained = asyncio.Event()
        return other

    def open(self, instance: Instance, now: float, steps: InstanceSteps | None) -> None:
        """Open the account of an admitted instance; `steps` are given if it is traced."""
        if steps is not None:
            self.traced.add(instance, steps)
        metrics = self.metrics
        metrics.accepted += 1
        metrics.in_flight += 1
        self.deadlines.add(instance, now)

    async def drained(self, grace_s: float) -> None:
        """Wait until every instance is settled.

        Raises:
            TimeoutError: Some are not, after `grace_s` seconds.
        """
        if self.metrics.in_flight:
            self._drained.clear()
            await asyncio.wait_for(self._drained.wait(), grace_s)

    def settle_batch(self, batch: Sequence[Instance], done: BatchDone, now: float) -> None:
        """Answer the instances of a batch that has come back, and free their slots."""
        if self.traced:
            self.traced.compute(batch, done)
        metrics = self.metrics
        prepare_s, compute_s = done.prepare_s, done.compute_s
        # All time that was neither preparation nor computation was waiting, here or in the worker.
        began = now - prepare_s - compute_s
        waits_s: list[float] = []
        for instance, outcome in zip(batch, done.outcomes, strict=True):
            instance.owner.free(instance.ref.offset)
            if instance.state == SETTLED:
                continue
            queue_s = max(0.0, began - instance.arrived)
            waits_s.append(queue_s)
            if isinstance(outcome, ItemError):
                self.fail_item(instance, outcome)
            else:
                metrics.succeeded += 1
                self.settle(instance)
                instance.set_result(Result(outcome, InstanceTiming(queue_s, prepare_s, compute_s)))
        metrics.observe_batch(len(batch), prepare_s, compute_s, waits_s)

    def cancel(self, instance: Instance) -> None:
        """Settle an instance after its caller has gone."""
        self.metrics.cancelled += 1
        if self.traced:
            self.traced.fail(instance, "cancelled", "nobody waits for it any more")
        self.settle(instance)

    def expire(self, instance: Instance, message: str) -> None:
        """Answer an instance after its deadline has passed."""
        self.metrics.expired += 1
        after_s = instance.ref.deadline - instance.arrived
        self._end(instance, DeadlineExceededError(f"{message}, {after_s:.2f} s after it came"))

    def fail(self, instance: Instance, error: ServiceError) -> None:
        """Answer an instance with an error."""
        self.metrics.failed += 1
        self._end(instance, error)

    def fail_item(self, instance: Instance, error: ItemError) -> None:
        """Answer an instance with the error that its worker gave it."""
        if error.code in _FAULTS:
            self.metrics.faults += 1
        if error.code == "deadline_exceeded":
            self.expire(instance, error.message)
        elif error.code in ("invalid_input", "unfit_input"):
            self.metrics.unfit += error.code == "unfit_input"
            self.fail(instance, InvalidInputError(error.message))
        elif error.code == "non_finite_output":
            self.fail(instance, NonFiniteOutputError(error.message))
        elif error.code == "worker_crashed":
            self.fail(instance, WorkerCrashedError(error.message))
        elif error.code == "exhausted":
            self.fail(instance, UnavailableError(error.message, retry_after_s=1))
        else:
            self.fail(instance, ModelFailedError(error.message))

    def _end(self, instance: Instance, error: ServiceError) -> None:
        if self.traced:
            self.traced.fail(instance, error.code, error.message)
        self.settle(instance)
        instance.set_exception(error)

    def settle(self, instance: Instance) -> None:
        """Close the account of an instance whose end has been counted."""
        instance.state = SETTLED
        if self.traced:
            self.traced.settle(instance)
        if instance.tick != NO_TICK:
            self.deadlines.discard(instance)
        metrics = self.metrics
        metrics.in_flight -= 1
        if not metrics.in_flight:
            self._drained.set()


class Deadlines:
    """A timing wheel with one timer per tick rather than one per instance.

    Varghese and Lauck, "Hashed and hierarchical timing wheels", SOSP 1987. Instances with a far
    deadline are not in the wheel: every half second, a search of all waiting instances adds those
    with a near deadline. That costs less than a second wheel.
    """

    def __init__(
        self, on_due: Callable[[Instance], None], waiting: Callable[[], Iterable[Instance]]
    ) -> None:
        self._on_due = on_due
        self._waiting = waiting
        self._loop = asyncio.get_running_loop()
        self._ticks: dict[int, set[Instance]] = {}
        self._is_looking = False

    def add(self, instance: Instance, now: float) -> None:
        """Watch the deadline of an instance."""
        if instance.ref.deadline - now <= FAR_S:
            self._keep(instance)
        elif not self._is_looking:
            self._is_looking = True
            self._loop.call_later(_LOOK_S, self._look)

    def discard(self, instance: Instance) -> None:
        """Remove an instance from the wheel, if it is there."""
        instances = self._ticks.get(instance.tick)
        if instances is not None:
            instances.discard(instance)

    def _keep(self, instance: Instance) -> None:
        instance.tick = tick = ceil(instance.ref.deadline / TICK_S)
        instances = self._ticks.get(tick)
        if instances is None:
            instances = self._ticks[tick] = set()
            self._loop.call_at(tick * TICK_S, self._fire, tick)
        instances.add(instance)

    def _look(self) -> None:
        self._is_looking = False
        near = self._loop.time() + FAR_S
        for instance in self._waiting():
            if instance.tick != NO_TICK:
                continue
            if instance.ref.deadline <= near:
                self._keep(instance)
            elif not self._is_looking:
                self._is_looking = True
                self._loop.call_later(_LOOK_S, self._look)

    def _fire(self, tick: int) -> None:
        for instance in self._ticks.pop(tick):
            self._on_due(instance)


class TracedInstances(dict[Instance, InstanceSteps]):
    """The steps of the instances that are traced and have no answer yet.

    It is empty, and so false, while nothing is traced. The ledger asks it nothing then.
    """

    def add(self, instance: Instance, steps: InstanceSteps) -> None:
        """Begin to note the steps of an admitted instance."""
        steps.arrived = instance.arrived
        self[instance] = steps

    def send(self, batch: Sequence[Instance], worker: WorkerHandle, now: float) -> None:
        """Record that a batch is sent to a worker."""
        id, device = worker.id, worker.ready.device
        for steps in self.of(batch):
            attempt = Attempt(id.worker, id.incarnation, device, len(batch), now, host=id.host)
            steps.tries.append(attempt)

    def lose(self, batch: Sequence[Instance], reason: str, now: float) -> None:
        """Record that the worker of a batch is lost."""
        for steps in self.of(batch):
            steps.tries[-1].lost = now
            steps.tries[-1].reason = reason

    def compute(self, batch: Sequence[Instance], done: BatchDone) -> None:
        """Record when a batch that has come back was prepared and computed."""
        for steps in self.of(batch):
            newest = steps.tries[-1]
            newest.prepare_began, newest.prepare_s = done.prepare_began, done.prepare_s
            newest.compute_began, newest.compute_s = done.compute_began, done.compute_s

    def fail(self, instance: Instance, code: str, message: str) -> None:
        """Record the error that an instance is about to end with."""
        steps = self.get(instance)
        if steps is not None:
            steps.code, steps.message = code, message

    def settle(self, instance: Instance) -> None:
        """Record the end of an instance, and drop it."""
        steps = self.pop(instance, None)
        if steps is not None:
            steps.settled = time.monotonic()

    def of(self, batch: Sequence[Instance]) -> Iterator[InstanceSteps]:
        """Yield the steps of those instances that are traced."""
        for instance in batch:
            steps = self.get(instance)
            if steps is not None:
                yield steps
