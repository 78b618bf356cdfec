"""Where requests become batches and results answers: the ledger of one model, in the event loop.

The states of an instance, who owns its slot of the arena, and what ends each:

    queued    the dispatcher    sent to a worker; expired; cancelled; quarantined; abandoned
    sent      the worker        its batch returns; the worker's exit is confirmed; and as for queued
    settled   nobody            (an instance that ends otherwise while it is sent is settled at
                                once, and its slot stays the worker's until either of the former)

An instance is settled exactly once, and the counters of `ModelMetrics` say at every instant that
accepted = succeeded + failed + expired + cancelled + in flight.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from functools import partial
from math import ceil, inf
from typing import TYPE_CHECKING

from models.speed.names import ANY_SIZE
from service.admission import Admission
from service.batch_sizes import SPARE, SizeLimit, fitting
from service.batcher import Batcher
from service.deadlines import NO_TICK, Deadlines
from service.errors import (
    DeadlineExceededError,
    InternalError,
    InvalidInputError,
    ModelFailedError,
    NonFiniteOutputError,
    OverloadedError,
    QuarantinedError,
    ServiceError,
    UnavailableError,
    WorkerCrashedError,
)
from service.instance import QUEUED, SENT, SETTLED, Instance
from service.lanes import Lane, Lanes
from service.metrics import ModelMetrics
from service.objective import Objective
from service.quarantine import MAX_CRASHES, Input, Quarantine
from service.request import CallOptions, Payload, Result, Timing
from service.schedule import Schedule
from service.steps import Traced
from workers.arena import Arena
from workers.engine import WorkerHandle
from workers.errors import WorkerLostError
from workers.messages import BatchDone, ItemError, ItemRef

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from models.spec import TensorSpec

logger = logging.getLogger(__name__)

_NEAR_BATCHES = 100.0
"""A deadline that is further off than so many batches of late needs no closer look."""


class Dispatcher:
    """Admits the instances of one model, batches them, sends them, and settles each exactly once.

    Used by the event loop's thread alone.
    """

    def __init__(
        self,
        *,
        name: str,
        arena: Arena,
        admission: Admission,
        quarantine: Quarantine,
        metrics: ModelMetrics,
        max_batch_size: int | None,
        batch_wait_ms: float = 0.0,
        objective: Objective | None = None,
    ) -> None:
        self.name = name
        self.inputs: Sequence[TensorSpec] = ()
        """What the model takes; known once a worker is ready."""
        self.loop = asyncio.get_running_loop()
        self._arena = arena
        self._admission = admission
        self._quarantine = quarantine
        self._metrics = metrics
        self._limit = SizeLimit(max_batch_size)
        self._objective = objective
        self._queue: Batcher[Instance] = Batcher()
        self._deadlines: Deadlines[Instance] = Deadlines(self._on_deadline, self._unsettled)
        self._traced: Traced[Instance] = Traced()
        self._lanes = Lanes()
        self._schedule = Schedule(
            self._queue,
            self._lanes,
            self._limit,
            batch_wait_ms / 1000,
            self._send,
            self._send_last,
        )
        self._drained: asyncio.Event = asyncio.Event()

    @property
    def num_queued(self) -> int:
        """Instances that wait for a worker."""
        return len(self._queue)

    @property
    def max_queue_length(self) -> int:
        """Instances that may wait; more are refused."""
        return self._admission.max_queue_length

    @property
    def queued_bytes(self) -> int:
        """Of the payloads of the instances that wait for a worker."""
        return sum(instance.ref.num_bytes for instance in self._queue)

    @property
    def max_batch_size(self) -> int:
        """Of the next batch."""
        return self._limit.now

    @property
    def num_quarantined(self) -> int:
        """Inputs that are refused because they have killed workers."""
        return self._quarantine.num_inputs(time.monotonic())

    @property
    def num_unsettled(self) -> int:
        """Instances that have no answer yet."""
        return self._metrics.in_flight

    @property
    def is_draining(self) -> bool:
        """Nothing more is admitted."""
        return self._admission.is_draining

    @property
    def num_responsive(self) -> int:
        """Workers that take batches and, if they are not at work, show signs of life."""
        return sum(not lane.worker.is_stalled for lane in self._lanes.open)

    @property
    def num_ready(self) -> int:
        """Workers that take batches."""
        return len(self._lanes.open)

    def submit(self, payload: Payload, options: CallOptions, request_id: str = "") -> Instance:
        """Admit one instance: copy its payload into the arena, if it is not there, and queue it.

        Without a worker it waits for one; whether one is to come is for the pool to know.

        Returns:
            The future of its result, which raises a `ServiceError`. Cancelling it gives it up.

        Raises:
            QuarantinedError: This input has killed workers.
            DeadlineExceededError: It comes too late.
            OverloadedError: The queue or the arena is full, or the deadline cannot be met.
            UnavailableError: The service is draining.
        """
        now = time.monotonic()
        num_bytes = payload.num_bytes
        quarantine = self._quarantine
        is_suspect = (
            num_bytes in quarantine.lengths or num_bytes in quarantine.suspect_lengths
        ) and self._check_record(payload, options, now)
        self._check_admission(options, now)
        owner, offset = payload.owner, payload.offset
        if owner is None:
            owner = self._arena
            offset = self._arena.put(payload.chunks, num_bytes)
        if offset is None:
            self._metrics.rejected["arena_full"] += 1
            raise OverloadedError("the arena for payloads is full", retry_after_s=1)
        ref = ItemRef(
            payload.kind,
            offset,
            num_bytes,
            options.deadline,
            options.wants_tensors,
            payload.headers,
            options.parameters,
            request_id,
            options.trace,
        )
        instance = Instance(self, ref, owner, now, options)
        if options.steps is not None:
            self._traced.add(instance, options.steps)
        if is_suspect:
            instance.is_solo = True
            instance.num_crashes = 1
        metrics = self._metrics
        metrics.accepted += 1
        metrics.in_flight += 1
        self._deadlines.add(instance, now)
        self._queue.push(instance, now)
        self._schedule.soon()
        return instance

    def attach(self, worker: WorkerHandle) -> None:
        """Give a ready worker its share of the work, until it is lost."""
        self.inputs = worker.ready.inputs
        if worker.ready.speed.preset not in ANY_SIZE:
            self._limit.hold()
        self._lanes.attach(worker)
        self._schedule.soon()

    def detach(self, worker: WorkerHandle) -> None:
        """Send nothing more to a worker: it is gone, or about to go."""
        self._lanes.detach(worker)

    def abandon(self, error: Callable[[], ServiceError]) -> None:
        """Answer all that is in flight: there is no worker, or no time, left for it.

        Args:
            error: Makes what each is answered with.
        """
        while self._queue:
            for instance in self._queue.next_batch(self._limit.now):
                instance.owner.free(instance.ref.offset)
                self._fail(instance, error())
        for instance in self._lanes.held():
            if instance.state != SETTLED:
                self._fail(instance, error())

    def cut_off(self, reason: str) -> None:
        """Admit nothing more, and answer all that is in flight."""
        self._admission.is_draining = True
        self.abandon(lambda: UnavailableError(reason, retry_after_s=1))

    async def drain(self, grace_s: float) -> None:
        """Admit nothing more, and wait until all is settled; after the grace the rest is failed."""
        self._admission.is_draining = True
        if self._metrics.in_flight:
            self._drained.clear()
            try:
                await asyncio.wait_for(self._drained.wait(), grace_s)
            except TimeoutError:
                logger.warning("%s: %d requests cut off", self.name, self._metrics.in_flight)
                self.cut_off("this server is shutting down and ran out of time")

    def on_cancelled(self, instance: Instance) -> None:
        """The caller of an instance has gone."""
        self._metrics.cancelled += 1
        if self._traced:
            self._traced.fail(instance, "cancelled", "nobody waits for it any more")
        self._unqueue(instance)
        self._settle(instance)

    def _unsettled(self) -> "Iterator[Instance]":
        yield from self._queue
        for instance in self._lanes.held():
            if instance.state != SETTLED:
                yield instance

    def _on_deadline(self, instance: Instance) -> None:
        if instance.state == SETTLED:
            return
        where = "in the queue" if instance.state == QUEUED else "in a worker"
        self._unqueue(instance)
        self._expire(instance, f"the deadline passed {where}")

    def _check_admission(self, options: CallOptions, now: float) -> None:
        admission, queue, lanes = self._admission, self._queue, self._lanes
        num_queued = len(queue)
        left_s = options.deadline - now
        num_workers = len(lanes.open) or 1
        # Where there are several kinds, all that wait may be of its own. Its kind may take half of
        # the time until its deadline, so each counts twice.
        num_counted = 2 * num_queued if queue.is_mixed else num_queued
        if admission.is_welcome(num_counted, num_counted + lanes.num_sent, num_workers, left_s):
            return
        admission.check(num_queued, num_workers, left_s)
        position = queue.position(options.priority, options.deadline, now)
        admission.check_share(position, num_queued, num_workers)
        admission.check_time(position, lanes.free_in(now), num_workers, left_s, now)

    def _unqueue(self, instance: Instance) -> None:
        if instance.state == QUEUED:
            self._queue.remove(instance)
            instance.owner.free(instance.ref.offset)

    def _send(self, lane: Lane, most: int, now: float) -> None:
        most = min(most, len(self._queue), self._limit.now)
        if self._queue.soonest() - now < _NEAR_BATCHES * self._admission.rate.batch_s:
            begin, curve = lane.begins_at(now), lane.next_curve
            self._queue.put_last(begin + curve.time_s(1))
            most = fitting(self._queue, most, begin, curve)
        self._give(lane, self._queue.next_batch(most), now)

    def _send_last(self, lane: Lane, most: int, now: float) -> bool:
        end = lane.begins_at(now) + lane.next_curve.time_s(most) * SPARE
        objective_s = self._objective.held_s if self._objective else inf

        def fits(instance: Instance) -> bool:
            return end <= min(instance.deadline, instance.arrived + objective_s)

        batch = self._queue.last_batch(most, fits)
        if batch:
            self._give(lane, batch, now)
        return bool(batch)

    def _give(self, lane: Lane, batch: list[Instance], now: float) -> None:
        try:
            future = lane.worker.run([instance.ref for instance in batch])
        except Exception as error:
            self._keep_back(batch, error)
            return
        for instance in batch:
            instance.state = SENT
        self._lanes.give(lane, batch)
        future.add_done_callback(partial(self._on_batch_done, lane, batch))
        if self._traced:
            self._traced.send(batch, lane.worker, now)
        if len(lane.batches) == 1:
            lane.begin(now, was_idle=True)
        if self._objective:
            self._plan(self._objective, now)

    def _keep_back(self, batch: list[Instance], error: Exception) -> None:
        """Fail an instance that cannot be sent; of several, find out which: send each alone."""
        if len(batch) > 1:
            for instance in reversed(batch):
                instance.is_solo = True
                self._queue.push_front(instance)
            return
        (instance,) = batch
        logger.error(
            "%s: an instance cannot be sent to a worker",
            self.name,
            exc_info=error,
            extra=instance.ref.log_ids(),
        )
        instance.owner.free(instance.ref.offset)
        self._fail(instance, InternalError("this input cannot be sent to a worker; see the log"))

    def _on_batch_done(
        self, lane: Lane, batch: list[Instance], future: "asyncio.Future[BatchDone]"
    ) -> None:
        now = time.monotonic()
        error = future.exception()
        if isinstance(error, WorkerLostError) and error.started:
            self._blame(batch, now)  # of those, too, that nobody waits for, while they have a slot
        elif error is None and batch[0].is_solo:
            self._acquit(batch[0], future.result())
        for instance in batch:
            if instance.state == SETTLED:
                instance.owner.free(instance.ref.offset)
        self._lanes.take(lane, batch)
        if error is None:
            slot = lane.worker.id.slot
            self._admission.rate.note(len(batch), now - lane.busy_since, now, slot)
            done = future.result()
            if not isinstance(done.outcomes[0], ItemError):  # or it may not have been computed
                self._lanes.learn(lane, len(batch), now)
                if not lane.is_lagging:
                    self._limit.note(len(batch), done.prepare_s + done.compute_s)
                    self._schedule.prepare_s = done.prepare_s
            if lane.batches:
                lane.begin(now, was_idle=False)
            if self._objective:
                self._objective.note(batch, now)
                self._plan(self._objective, now)
            if self._traced:
                self._traced.compute(batch, done)
            self._settle_batch(batch, done, now)
        elif isinstance(error, WorkerLostError):
            self._lanes.detach(lane.worker)
            if self._traced:
                self._traced.lose(batch, str(error), now)
            self._take_back(batch, error)
        else:
            raise error
        self._arrange(now)
        self._schedule.soon()

    def _arrange(self, now: float) -> None:
        """Have what waits go by priority, unless some of it would miss its deadline then."""
        if not self._queue.can_be_rearranged:
            return
        free_s, num_workers = self._lanes.free_in(now), len(self._lanes.open) or 1
        are_in_time = self._admission.are_in_time
        self._queue.arrange(
            lambda deadline, num: are_in_time(num, free_s, num_workers, deadline - now, now)
        )

    def _plan(self, objective: Objective, now: float) -> None:
        """Have batches and queue fit the objective."""
        lanes = self._lanes
        objective.plan(lanes.leading, lanes.num_sent, self._limit.own, now)
        self._limit.bound(objective.max_size)

    def _settle_batch(self, batch: list[Instance], done: BatchDone, now: float) -> None:
        metrics = self._metrics
        if self._quarantine.recent and not all(
            isinstance(outcome, ItemError) for outcome in done.outcomes
        ):
            self._quarantine.note_success()
        metrics.batch_size.observe(len(batch))
        metrics.prepare_duration.observe(done.prepare_s)
        metrics.inference_duration.observe(done.compute_s)
        # All that was neither preparing nor computing was waiting, here or in the worker.
        began = now - done.prepare_s - done.compute_s
        for instance, outcome in zip(batch, done.outcomes, strict=True):
            if instance.state == SETTLED:
                continue
            instance.owner.free(instance.ref.offset)
            queue_s = max(0.0, began - instance.arrived)
            metrics.queue_wait.observe(queue_s)
            if isinstance(outcome, ItemError):
                self._fail_item(instance, outcome)
            else:
                metrics.succeeded += 1
                self._settle(instance)
                timing = Timing(queue_s, done.prepare_s, done.compute_s)
                instance.set_result(Result(outcome, timing))

    def _fail_item(self, instance: Instance, error: ItemError) -> None:
        if error.code == "deadline_exceeded":
            self._expire(instance, error.message)
        elif error.code == "invalid_input":
            self._fail(instance, InvalidInputError(error.message))
        elif error.code == "non_finite_output":
            self._fail(instance, NonFiniteOutputError(error.message))
        elif error.code == "exhausted":
            self._fail(instance, UnavailableError(error.message, retry_after_s=1))
        else:
            self._fail(instance, ModelFailedError(error.message))

    def _blame(self, batch: list[Instance], now: float) -> None:
        """Hold a worker's death against what it was at: for good, if that was one input twice."""
        for instance in batch:
            input = self._input_of(instance)
            if instance.is_solo:
                instance.num_crashes, digest = self._quarantine.note_death_alone(
                    input, instance.num_crashes, now
                )
                if instance.num_crashes >= MAX_CRASHES:
                    self._convict(instance, digest)
            else:
                self._quarantine.note_death(input, now)
                instance.num_crashes = 1
                instance.is_solo = True

    def _acquit(self, instance: Instance, done: BatchDone) -> None:
        """Hold nothing more against an input that was computed alone, and well."""
        if not isinstance(done.outcomes[0], ItemError):
            self._quarantine.acquit(self._input_of(instance))

    def _convict(self, instance: Instance, digest: str) -> None:
        """See to it that no more workers die of an input, for whomever that waits."""
        logger.error(
            "%s: an input has killed %d workers: not trying it again (digest %s)",
            self.name,
            instance.num_crashes,
            digest,
            extra=instance.ref.log_ids(),
        )
        for other in [each for each in self._queue if self._is_quarantined(each)]:
            self._unqueue(other)
            self._fail(other, _quarantined(self._quarantine.duration_s))

    def _take_back(self, batch: list[Instance], error: WorkerLostError) -> None:
        """Queue again what a lost worker held, and is not settled nor guilty of its death."""
        for instance in reversed(batch):
            if instance.state == SETTLED:
                continue
            if instance.num_crashes >= MAX_CRASHES:
                instance.owner.free(instance.ref.offset)
                self._fail(
                    instance,
                    WorkerCrashedError(
                        f"{instance.num_crashes} workers died while they computed this input "
                        f"(the last: {error})"
                    ),
                )
            elif self._is_quarantined(instance):
                instance.owner.free(instance.ref.offset)
                self._fail(instance, _quarantined(self._quarantine.duration_s))
            else:
                self._metrics.retried += 1
                instance.state = QUEUED
                self._queue.push_front(instance)

    def _input_of(self, instance: Instance) -> Input:
        """What an instance asks for, as it lies in its slot; not to be kept."""
        ref = instance.ref
        arena = memoryview(self._arena.memory.map)
        payload = arena[ref.offset : ref.offset + ref.num_bytes]
        return Input(ref.kind, ref.headers, ref.parameters, payload)

    def _is_quarantined(self, instance: Instance) -> bool:
        """Whether an instance that was admitted has the input of one that has killed workers."""
        if instance.ref.num_bytes not in self._quarantine.lengths:
            return False
        return self._quarantine.left_s(self._input_of(instance), time.monotonic()) > 0

    def _check_record(self, payload: Payload, options: CallOptions, now: float) -> bool:
        """Whether an input is to be computed alone, since a worker has died with it.

        Raises:
            QuarantinedError: It is not to be computed at all.
        """
        chunks = payload.chunks
        whole = chunks[0] if len(chunks) == 1 else b"".join(chunks)
        input = Input(payload.kind, payload.headers, options.parameters, whole)
        left_s = self._quarantine.left_s(input, now)
        if left_s > 0:
            self._metrics.rejected["quarantined"] += 1
            raise _quarantined(left_s)
        return self._quarantine.is_suspect(input, now)

    def _expire(self, instance: Instance, message: str) -> None:
        self._metrics.expired += 1
        after_s = instance.deadline - instance.arrived
        self._end(instance, DeadlineExceededError(f"{message}, {after_s:.2f} s after it came"))

    def _fail(self, instance: Instance, error: ServiceError) -> None:
        self._metrics.failed += 1
        self._end(instance, error)

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
        metrics = self._metrics
        metrics.in_flight -= 1
        if not metrics.in_flight:
            self._drained.set()


def _quarantined(left_s: float) -> QuarantinedError:
    return QuarantinedError(
        "workers have died while they computed this very input; "
        f"it is not tried again within the next {ceil(left_s)} s"
    )
