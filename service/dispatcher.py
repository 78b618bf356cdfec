"""Where requests become batches and results answers: the ledger of one model, in the event loop.

The states of an instance, who owns its slot of the arena, and what ends each:

    queued    the dispatcher    sent to a worker; expired; cancelled
    sent      the worker        its batch returns; the worker's exit is confirmed
    settled   nobody            (an instance that expires or is cancelled while it is sent is
                                settled at once, and its slot stays the worker's until the above)

An instance is settled exactly once, and the counters of `ModelMetrics` say at every instant that
accepted = succeeded + failed + expired + cancelled + in flight.
"""

import asyncio
import logging
import time
from functools import partial
from typing import TYPE_CHECKING, Final

from service.admission import Admission
from service.batcher import Batcher
from service.deadlines import Deadlines
from service.errors import (
    DeadlineExceededError,
    InvalidInputError,
    ModelFailedError,
    OverloadedError,
    ServiceError,
    UnavailableError,
    WorkerCrashedError,
)
from service.metrics import ModelMetrics
from service.request import CallOptions, Payload, Result, Timing
from workers.arena import Arena
from workers.engine import WorkerHandle
from workers.errors import WorkerLostError
from workers.messages import BatchDone, ItemError, ItemRef

if TYPE_CHECKING:
    from collections.abc import Sequence

    from models.spec import TensorSpec

logger = logging.getLogger(__name__)

_QUEUED: Final = 0
_SENT: Final = 1
_SETTLED: Final = 2

_MAX_CRASHES = 3
"""Workers that may die with an instance: in its batch, and twice while it was computed alone."""
_EARLY_S = 0.001
"""How long before the end of a batch the next one is sent, beyond what its preparation takes."""
_OVERLAP_PAYS_S = 0.002
"""Below this, a worker is back for more before a timer could be of use."""


class Instance(asyncio.Future[Result]):
    """One instance in the ledger, and the future of its result. Cancelling it takes it out."""

    __slots__ = (
        "arrived", "deadline", "dispatcher", "is_solo", "lane", "num_crashes", "priority", "ref",
        "state", "tick",
    )  # fmt: skip

    def __init__(
        self, dispatcher: "Dispatcher", ref: ItemRef, arrived: float, options: CallOptions
    ) -> None:
        super().__init__(loop=dispatcher.loop)
        self.dispatcher = dispatcher
        self.ref = ref
        self.arrived = arrived
        self.deadline = options.deadline
        self.priority = options.priority
        self.state = _QUEUED
        self.num_crashes = 0
        self.is_solo = False
        self.lane = 0
        self.tick = 0

    __hash__ = asyncio.Future.__hash__

    def cancel(self, msg: object = None) -> bool:
        """Give the instance up: nobody waits for it any more."""
        if self.done():
            return False
        self.dispatcher.on_cancelled(self)
        return super().cancel(msg)


class _Lane:
    """A worker as the dispatcher sees it."""

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
        metrics: ModelMetrics,
        max_batch_size: int,
        batch_wait_ms: float = 0.0,
    ) -> None:
        self.name = name
        self.inputs: Sequence[TensorSpec] = ()
        """What the model takes; known once a worker is ready."""
        self.is_expecting_worker = False
        """None is ready, but one will be within a moment: what comes may wait for it."""
        self.loop = asyncio.get_running_loop()
        self._arena = arena
        self._admission = admission
        self._metrics = metrics
        self._max_batch_size = max_batch_size
        self._batch_wait_s = batch_wait_ms / 1000
        self._queue: Batcher[Instance] = Batcher()
        self._deadlines: Deadlines[Instance] = Deadlines(self._on_deadline)
        self._lanes: list[_Lane] = []
        self._num_unsettled = 0
        self._is_pump_due = False
        self._timer: asyncio.TimerHandle | None = None
        self._drained: asyncio.Event = asyncio.Event()
        self._prepare_s = 0.0

    @property
    def num_queued(self) -> int:
        """Instances that wait for a worker."""
        return len(self._queue)

    @property
    def num_unsettled(self) -> int:
        """Instances that have no answer yet."""
        return self._num_unsettled

    @property
    def is_draining(self) -> bool:
        """Nothing more is admitted."""
        return self._admission.is_draining

    @property
    def num_ready(self) -> int:
        """Workers that take batches."""
        return len(self._lanes)

    def submit(self, payload: Payload, options: CallOptions, request_id: str = "") -> Instance:
        """Admit one instance: copy its payload into the arena and queue it.

        Returns:
            The future of its result, which raises a `ServiceError`. Cancelling it gives it up.

        Raises:
            OverloadedError: The queue or the arena is full, or the deadline cannot be met.
            UnavailableError: There is no worker, or the service is draining.
        """
        now = time.monotonic()
        self._admission.check(
            num_queued=len(self._queue),
            num_workers=len(self._lanes) or int(self.is_expecting_worker),
            left_s=options.deadline - now,
            now=now,
        )
        num_bytes = payload.num_bytes
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
        )
        instance = Instance(self, ref, now, options)
        self._metrics.accepted += 1
        self._num_unsettled += 1
        instance.tick = self._deadlines.add(instance, options.deadline)
        self._queue.push(instance, now)
        self._pump_soon()
        return instance

    def attach(self, worker: WorkerHandle) -> None:
        """Give a ready worker its share of the work, until it is lost."""
        self.inputs = worker.ready.inputs
        self._lanes.append(_Lane(worker))
        self._pump_soon()

    def detach(self, worker: WorkerHandle) -> None:
        """Send nothing more to a worker: it is gone, or about to go."""
        self._lanes = [lane for lane in self._lanes if lane.worker is not worker]

    def abandon(self, reason: str) -> None:
        """Answer all that is in flight: there is no worker, or no time, left for it."""
        while self._queue:
            for instance in self._queue.next_batch(self._max_batch_size):
                self._arena.free(instance.ref.offset)
                self._fail(instance, UnavailableError(reason, retry_after_s=1))
        for lane in self._lanes:
            for batch in lane.batches:
                for instance in batch:
                    if instance.state != _SETTLED:
                        self._fail(instance, UnavailableError(reason, retry_after_s=1))

    def cut_off(self, reason: str) -> None:
        """Admit nothing more, and answer all that is in flight."""
        self._admission.is_draining = True
        self.abandon(reason)

    async def drain(self, grace_s: float) -> None:
        """Admit nothing more, and wait until all is settled; after the grace the rest is failed."""
        self._admission.is_draining = True
        if self._num_unsettled:
            self._drained.clear()
            try:
                await asyncio.wait_for(self._drained.wait(), grace_s)
            except TimeoutError:
                logger.warning("%s: %d requests cut off", self.name, self._num_unsettled)
                self.abandon("this server is shutting down and ran out of time")

    def on_cancelled(self, instance: Instance) -> None:
        """The caller of an instance has gone."""
        self._metrics.cancelled += 1
        self._unqueue(instance)
        self._settle(instance)

    def _on_deadline(self, instance: Instance) -> None:
        if instance.state == _SETTLED:
            return
        where = "in the queue" if instance.state == _QUEUED else "in a worker"
        self._unqueue(instance)
        self._expire(instance, f"the deadline passed {where}")

    def _unqueue(self, instance: Instance) -> None:
        if instance.state == _QUEUED:
            self._queue.remove(instance)
            self._arena.free(instance.ref.offset)

    def _pump_soon(self) -> None:
        """Send what can be sent, once all that arrived in this turn of the loop is queued."""
        if not self._is_pump_due:
            self._is_pump_due = True
            self.loop.call_soon(self._pump)

    def _pump(self) -> None:
        self._is_pump_due = False
        while self._queue:
            now = time.monotonic()
            idle = [lane for lane in self._lanes if not lane.batches]
            if idle:
                if self._waits_for_more(now):
                    return
                size = min(self._max_batch_size, -(-len(self._queue) // len(idle)))
                self._send(idle[0], size, now)
                continue
            lane = self._next_busy(now)
            if lane is None:
                return
            self._send(lane, self._max_batch_size, now)

    def _waits_for_more(self, now: float) -> bool:
        """Whether `batch_wait_ms` still holds the next batch back."""
        if not self._batch_wait_s or len(self._queue) >= self._max_batch_size:
            return False
        oldest = self._queue.oldest()
        assert oldest is not None
        left_s = oldest.arrived + self._batch_wait_s - now
        if left_s <= 0 or oldest.is_solo:
            return False
        self._wake_in(left_s)
        return True

    def _next_busy(self, now: float) -> _Lane | None:
        """A busy worker that should have its next batch now: a full one, or the end is near."""
        lanes = [lane for lane in self._lanes if lane.has_credit]
        oldest = self._queue.oldest()
        if not lanes or oldest is None or oldest.is_solo:  # which waits for an idle worker
            return None
        lane = min(lanes, key=lambda lane: (len(lane.batches), lane.ends_at))
        if len(self._queue) >= self._max_batch_size:
            return lane
        if len(lane.batches) > 1 or lane.ends_at - lane.busy_since < _OVERLAP_PAYS_S:
            return None
        left_s = lane.ends_at - now - self._prepare_s - _EARLY_S
        if left_s <= 0:
            return lane
        self._wake_in(left_s)
        return None

    def _wake_in(self, delay_s: float) -> None:
        due = self.loop.time() + delay_s
        if self._timer is not None:
            if self._timer.when() <= due:
                return
            self._timer.cancel()
        self._timer = self.loop.call_at(due, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self._pump()

    def _send(self, lane: _Lane, size: int, now: float) -> None:
        batch = self._queue.next_batch(size)
        for instance in batch:
            instance.state = _SENT
        lane.batches.append(batch)
        if len(lane.batches) == 1:
            self._expect(lane, now, len(batch))
        future = lane.worker.run([instance.ref for instance in batch])
        future.add_done_callback(partial(self._on_batch_done, lane, batch))

    def _expect(self, lane: _Lane, now: float, size: int) -> None:
        lane.busy_since = now
        lane.ends_at = now + size * self._admission.rate.item_s

    def _on_batch_done(
        self, lane: _Lane, batch: list[Instance], future: "asyncio.Future[BatchDone]"
    ) -> None:
        now = time.monotonic()
        for instance in batch:
            if instance.state == _SETTLED:
                self._arena.free(instance.ref.offset)
        lane.batches.remove(batch)
        error = future.exception()
        if error is None:
            self._admission.rate.note(len(batch), now - lane.busy_since, now)
            self._expect(lane, now, len(lane.batches[0]) if lane.batches else 0)
            self._settle_batch(batch, future.result(), now)
        elif isinstance(error, WorkerLostError):
            self.detach(lane.worker)
            self._take_back(batch, error)
        else:
            raise error
        self._pump_soon()

    def _settle_batch(self, batch: list[Instance], done: BatchDone, now: float) -> None:
        metrics = self._metrics
        self._prepare_s = done.prepare_s
        metrics.batch_size.observe(len(batch))
        metrics.prepare_duration.observe(done.prepare_s)
        metrics.inference_duration.observe(done.compute_s)
        free = self._arena.free
        # All that was neither preparing nor computing was waiting, here or in the worker.
        began = now - done.prepare_s - done.compute_s
        for instance, outcome in zip(batch, done.outcomes, strict=True):
            if instance.state == _SETTLED:
                continue
            free(instance.ref.offset)
            queue_s = max(0.0, began - instance.arrived)
            metrics.queue_wait.observe(queue_s)
            if isinstance(outcome, ItemError):
                self._fail_item(instance, outcome)
            else:
                metrics.succeeded += 1
                self._settle(instance)
                instance.set_result(
                    Result(outcome, Timing(queue_s, done.prepare_s, done.compute_s))
                )

    def _fail_item(self, instance: Instance, error: ItemError) -> None:
        if error.code == "deadline_exceeded":
            self._expire(instance, error.message)
        elif error.code == "invalid_input":
            self._fail(instance, InvalidInputError(error.message))
        else:
            self._fail(instance, ModelFailedError(error.message))

    def _take_back(self, batch: list[Instance], error: WorkerLostError) -> None:
        """Queue again what a lost worker held: alone, if the batch may be what killed it."""
        for instance in reversed(batch):
            if instance.state == _SETTLED:
                continue
            if error.started:
                instance.num_crashes += 1
                instance.is_solo = True
            if instance.num_crashes >= _MAX_CRASHES:
                logger.error(
                    "%s: an input has killed %d workers: not trying it again",
                    self.name,
                    instance.num_crashes,
                    extra={"request_id": instance.ref.request_id},
                )
                self._arena.free(instance.ref.offset)
                self._fail(
                    instance,
                    WorkerCrashedError(
                        f"{instance.num_crashes} workers died while they computed this input "
                        f"(the last: {error})"
                    ),
                )
                continue
            self._metrics.retried += 1
            instance.state = _QUEUED
            self._queue.push_front(instance)

    def _expire(self, instance: Instance, message: str) -> None:
        self._metrics.expired += 1
        self._settle(instance)
        instance.set_exception(DeadlineExceededError(message))

    def _fail(self, instance: Instance, error: ServiceError) -> None:
        self._metrics.failed += 1
        self._settle(instance)
        instance.set_exception(error)

    def _settle(self, instance: Instance) -> None:
        instance.state = _SETTLED
        self._deadlines.discard(instance, instance.tick)
        self._num_unsettled -= 1
        if not self._num_unsettled:
            self._drained.set()
