"""Turns instances into batches and results into answers, for one model, in the event loop.

The states of an instance, the owner of its arena slot in each, and what ends it:

    queued    the dispatcher    it is sent, expires, is cancelled, quarantined or abandoned
    sent      the worker        its batch returns, or the worker's exit is confirmed
    settled   nobody            -

An instance that expires, is cancelled, quarantined or abandoned while it is sent is settled at
once. Its slot stays the worker's until the batch returns or the worker's exit is confirmed, since
the worker may still read it.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

from inferpool.models.attached import attached
from inferpool.models.speed_names import ANY_SIZE
from inferpool.service.errors import (
    InternalError,
    OverloadedError,
    ServiceError,
    StreamBrokenError,
    TooLargeError,
    UnavailableError,
    WorkerCrashedError,
)
from inferpool.service.queue.admission import Admission
from inferpool.service.queue.batch_sizing import SizeLimit
from inferpool.service.queue.batcher import Batcher
from inferpool.service.queue.instance import (
    BACKGROUND,
    QUEUED,
    SENT,
    SETTLED,
    Buffer,
    ComparedInstance,
    Instance,
    InstanceSteps,
    SlotOwner,
    StreamReader,
)
from inferpool.service.queue.ledger import Ledger
from inferpool.service.queue.quarantine import MAX_CRASHES, Quarantine, Suspects
from inferpool.service.queue.scheduling.background import Background, TurnsQueue
from inferpool.service.queue.scheduling.lanes import Lane, Lanes
from inferpool.service.queue.scheduling.scheduler import BatchFiller, BatchScheduler
from inferpool.service.telemetry.metrics import ModelMetrics
from inferpool.workers.host.engine import WorkerHandle
from inferpool.workers.shared.arena import Arena
from inferpool.workers.shared.errors import WorkerLostError
from inferpool.workers.shared.messages import BatchDone, ItemError, ItemRef

if TYPE_CHECKING:
    from inferpool.service.queue.streams import Streams

logger = logging.getLogger(__name__)

MAX_HOSTS_LOST = 5
"""Hosts that may be lost with one instance before it is given up."""
_BACKGROUND_SHARE = 0.5
"""Work in the background is refused while more of the arena than this is taken."""


class Dispatcher:
    """Admits the instances of one model, batches them, sends them, and settles each exactly once.

    Used by the event loop's thread alone.
    """

    streams: "Streams | None" = None
    """The streams, if the model answers in parts."""

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
        job_share: float = 0.0,
    ) -> None:
        self.name = name
        self.loop = asyncio.get_running_loop()
        self.arena = arena
        self.metrics = metrics
        self._observers: dict[Callable[[int, BatchDone], None], None] = {}
        self._admission = admission
        self._quarantine = quarantine
        self._suspects = Suspects(quarantine, arena, metrics)
        self._limit = SizeLimit(max_batch_size)
        self._queue: Batcher[Instance] = Batcher()
        work = Background(job_share)
        self._background = work.queue
        self._lanes = Lanes()
        self._ledger = Ledger(metrics, self._on_deadline, self._unsettled)
        self._traced = self._ledger.traced
        self._compared = self._ledger.beside()  # for instances that no client sent
        self.scheduler = BatchScheduler(
            self._queue,
            work,
            self._lanes,
            self._limit,
            batch_wait_ms / 1000,
            BatchFiller(self._queue, work, self._limit, admission.rate),
            self._give,
        )
        self._entrance = Entrance(admission, self._queue, self.scheduler, arena)

    @property
    def num_queued(self) -> int:
        """Instances of clients that wait for a worker."""
        num = self._queue.num_waiting
        return sum(1 for _ in self._traffic()) if self._compared.metrics.in_flight else num

    @property
    def num_background(self) -> int:
        """Instances that wait until a worker is idle."""
        return self._background.num_waiting

    @property
    def max_queue_length(self) -> int:
        """Instances that may wait; more are refused."""
        return self._admission.max_queue_length

    @property
    def queued_bytes(self) -> int:
        """Payload bytes of the instances of clients that wait for a worker."""
        return sum(instance.ref.num_bytes for instance in self._traffic())

    @property
    def max_batch_size(self) -> int:
        """The largest size of the next batch."""
        return self._limit.now

    @property
    def num_quarantined(self) -> int:
        """Inputs that are refused because they have killed workers."""
        return self._quarantine.num_inputs(time.monotonic())

    @property
    def num_unsettled(self) -> int:
        """Instances that have no answer yet."""
        return self.metrics.in_flight + self._compared.metrics.in_flight

    @property
    def is_draining(self) -> bool:
        """Nothing more is admitted."""
        return self._admission.is_draining

    @property
    def num_responsive(self) -> int:
        """Workers that take batches and show signs of life, or are at work."""
        return sum(not lane.worker.is_stalled for lane in self._lanes.open)

    @property
    def num_ready(self) -> int:
        """Workers that take batches."""
        return len(self._lanes.open)

    def submit(
        self,
        ref: ItemRef,
        chunks: Sequence[Buffer],
        steps: InstanceSteps | None = None,
        owner: SlotOwner | None = None,
        *,
        reader: StreamReader | None = None,
        is_compared: bool = False,
    ) -> Instance:
        """Admit one instance: copy its payload into the arena, if it is not there, and queue it.

        Without a worker it waits for one. The pool knows whether one will come. With the priority
        `BACKGROUND` it goes to a worker that is idle while nothing else waits.

        Args:
            ref: Belongs to the instance from now on. Its offset is set here.
            chunks: The payload in the pieces in which it came; the arena gets the only copy.
            steps: Notes what happens to the instance, if its call is traced.
            owner: The owner of the payload's slot, if it is in the arena already.
            reader: Gets the parts, where the model answers in parts; None collects them.
            is_compared: A comparison sends it: alone in its batch, in a full queue too, uncounted.

        Returns:
            The future of its result, which may raise a `ServiceError`. Cancelling it gives it up.

        Raises:
            QuarantinedError: This input has killed workers.
            DeadlineExceededError: Its deadline has passed.
            OverShareError: Its key has its share of the queue or the arena.
            OverloadedError: The queue or the arena is full, or the deadline cannot be met.
            UnavailableError: The service is draining.
        """
        now = time.monotonic()
        num_bytes = ref.num_bytes
        quarantine = self._quarantine
        is_suspect = (
            num_bytes in quarantine.lengths or num_bytes in quarantine.suspect_lengths
        ) and self._suspects.check(ref, chunks, now, is_traffic=not is_compared)
        owner = self._entrance.enter(ref, chunks, owner, now, is_compared=is_compared)
        ledger = self._compared if is_compared else self._ledger
        if self.streams is not None:
            instance = self.streams.instance(ref, owner, now, reader, is_compared=is_compared)
        else:
            instance = (ComparedInstance if is_compared else Instance)(self, ref, owner, now)
        if is_compared or is_suspect:
            instance.is_solo = True
            instance.num_crashes = int(is_suspect)
        ledger.open(instance, now, steps)
        self._queue_of(ref).push(instance, now)
        if not self.scheduler.is_due:
            self.scheduler.soon()
        return instance

    def observe(self, callback: Callable[[int, BatchDone], None]) -> Callable[[], None]:
        """Call back with the size and answers of each computed batch; return what ends that."""
        self._observers[callback] = None
        return partial(self._observers.pop, callback, None)

    def attach(self, worker: WorkerHandle) -> None:
        """Send a ready worker its share of the work, until it is detached."""
        if worker.ready.is_accelerated:
            self._limit.accelerate()  # presets are made for all sizes up to the largest there
        elif worker.ready.speed.preset not in ANY_SIZE:
            self._limit.hold()
        self.expect_streams(worker)
        self._lanes.attach(worker)
        self.scheduler.soon()

    def expect_streams(self, worker: WorkerHandle) -> None:
        """Treat all instances from now on as streams, if the model of a worker answers in parts."""
        if worker.ready.interface.streams and self.streams is None:
            interface = worker.ready.interface
            self.streams = attached("streams")(self, self._admission, self._limit, interface)

    def detach(self, worker: WorkerHandle) -> None:
        """Send nothing more to a worker, which is gone or about to go."""
        self._lanes.detach(worker)

    def abandon(self, error: Callable[[], ServiceError]) -> None:
        """Answer everything in flight with errors: no worker or no time is left for it."""
        for instance in tuple(self._unsettled()):
            self.end(instance, error())

    def end(self, instance: Instance, error: ServiceError) -> None:
        """Answer an unsettled instance with an error, wherever it is."""
        self._unqueue(instance)
        self.ledger_of(instance).fail(instance, error)

    def cut_off(self, reason: str) -> None:
        """Admit nothing more, and answer everything in flight."""
        self._admission.is_draining = True
        self.abandon(lambda: UnavailableError(reason, retry_after_s=1))

    async def settled(self, most_s: float) -> None:
        """Wait until everything is settled, for `most_s` at most."""
        with contextlib.suppress(TimeoutError):
            await self._drained(most_s)

    async def drain(self, grace_s: float) -> None:
        """Admit nothing more, wait until all is settled, and fail the rest after `grace_s`."""
        self._admission.is_draining = True
        try:
            await self._drained(grace_s)
        except TimeoutError:
            logger.warning("%s: %d requests cut off", self.name, self.num_unsettled)
            self.cut_off("this server is shutting down and ran out of time")

    def on_cancelled(self, instance: Instance) -> None:
        """Settle an instance after its caller has gone."""
        self._unqueue(instance)
        self.ledger_of(instance).cancel(instance)

    async def _drained(self, grace_s: float) -> None:
        await asyncio.gather(self._ledger.drained(grace_s), self._compared.drained(grace_s))

    def _traffic(self) -> Iterator[Instance]:
        return (instance for instance in self._queue if not instance.is_compared)

    def ledger_of(self, instance: Instance) -> Ledger:
        """Return the ledger that has the account of an instance."""
        return self._compared if instance.is_compared else self._ledger

    def _unsettled(self) -> Iterator[Instance]:
        yield from (*self._queue, *self._background)
        for instance in self._lanes.held():
            if instance.state != SETTLED:
                yield instance

    def _on_deadline(self, instance: Instance) -> None:
        if instance.state == SETTLED:
            return
        where = "in the queue" if instance.state == QUEUED else "in a worker"
        self._unqueue(instance)
        self.ledger_of(instance).expire(instance, f"the deadline passed {where}")

    def _queue_of(self, ref: ItemRef) -> Batcher[Instance] | TurnsQueue:
        return self._background if ref.priority >= BACKGROUND else self._queue

    def _unqueue(self, instance: Instance) -> None:
        if instance.state == QUEUED:
            self._queue_of(instance.ref).remove(instance)
            instance.owner.free(instance.ref.offset)

    def _give(self, lane: Lane, batch: list[Instance], now: float) -> None:
        try:
            if self.streams is None:
                future = lane.worker.run([instance.ref for instance in batch])
            else:
                future = self.streams.run(lane.worker, batch, now)
        except Exception as error:
            self._keep_back(batch, error)
            return
        for instance in batch:
            instance.state = SENT
        self._lanes.give(lane, batch, now)
        future.add_done_callback(partial(self._on_batch_done, lane, batch))
        if self._traced:
            self._traced.send(batch, lane.worker, now)
        for policy in self.scheduler.policies:
            policy.begin(lane, batch, now)
            policy.plan(now)

    def _keep_back(self, batch: list[Instance], error: Exception) -> None:
        """Fail an instance that cannot be sent, or send each of several alone to find it."""
        if len(batch) > 1:
            for instance in reversed(batch):
                instance.is_solo = True
                self._queue_of(instance.ref).push_front(instance)
            return
        (instance,) = batch
        text, ids = "%s: an instance cannot be sent to a worker", instance.ref.log_ids()
        logger.error(text, self.name, exc_info=error, extra=ids)
        instance.owner.free(instance.ref.offset)
        text = "this input cannot be sent to a worker; see the log"
        self.ledger_of(instance).fail(instance, InternalError(text))

    def _on_batch_done(
        self, lane: Lane, batch: list[Instance], future: "asyncio.Future[BatchDone]"
    ) -> None:
        now, waited_s = time.monotonic(), 0.0
        error = future.exception()
        for policy in self.scheduler.policies:
            done = None if error else future.result()
            waited_s += policy.end(lane, batch, done, now)
        if error is None:
            self._take_answers(lane, batch, future.result(), now, waited_s)
        elif isinstance(error, WorkerLostError):
            self._take_back(lane, batch, error, now)
        else:
            raise error
        if self._queue.can_be_rearranged:
            self._entrance.arrange(now)
        if self._queue.num_waiting or self._background.num_waiting:
            self.scheduler.soon()

    def _take_answers(
        self, lane: Lane, batch: list[Instance], done: BatchDone, now: float, waited_s: float
    ) -> None:
        """Learn how fast a worker is from a batch that has come back, and answer its instances."""
        num, took_s = len(batch), now - lane.busy_since + waited_s
        was_computed = not isinstance(done.outcomes[0], ItemError)  # or it may not have been
        if self.streams is None:
            self.scheduler.learn(lane, batch, done, now, was_computed=was_computed)
            self._admission.rate.learn(num, took_s, now, lane.worker.id.slot)
        else:
            self.streams.answered(self._lanes, lane, batch, done, now)
        if was_computed:
            for observer in tuple(self._observers):
                observer(num, done)
        for policy in self.scheduler.policies:
            policy.plan(now)
        if batch[0].is_solo or self._quarantine.recent or ItemError in map(type, done.outcomes):
            self._suspects.record_answers(batch, done.outcomes)
        self.ledger_of(batch[0]).settle_batch(batch, done, now)

    def _refuse_quarantined(self) -> None:
        """Refuse queued instances with an input that has just been quarantined."""
        for instance in (*self._queue, *self._background):
            if refusal := self._suspects.refusal(instance):
                self.end(instance, refusal)

    def _take_back(
        self, lane: Lane, batch: list[Instance], error: WorkerLostError, now: float
    ) -> None:
        """Queue again what a lost worker held, except what is settled or may have killed it."""
        # Settled instances are judged too: their payloads are still in their slots.
        if error.with_host:
            for instance in batch:
                instance.num_hosts_lost += 1
        elif error.started and self._suspects.blame(batch, now):
            self._refuse_quarantined()
        self._lanes.take(lane, batch)
        self._lanes.detach(lane.worker)
        if self._traced:
            self._traced.lose(batch, str(error), now)
        if self.streams is not None:
            self.streams.lost(batch)
        for instance in reversed(batch):
            if instance.state == SETTLED:
                instance.owner.free(instance.ref.offset)
            elif end := _given_up(instance, error) or self._suspects.refusal(instance):
                self.ledger_of(instance).metrics.faults += instance.num_crashes >= MAX_CRASHES
                instance.owner.free(instance.ref.offset)
                self.ledger_of(instance).fail(instance, end)
            else:
                self.ledger_of(instance).metrics.retried += 1
                instance.state = QUEUED
                self._queue_of(instance.ref).push_front(instance)


def _given_up(instance: Instance, error: WorkerLostError) -> ServiceError | None:
    """Return the error of an instance if too many workers or hosts were lost with it."""
    if instance.num_parts:  # they have been sent, and other ones might not continue them
        return StreamBrokenError(
            f"the worker died after part {instance.num_parts} of this stream ({error})"
        )
    if instance.num_crashes >= MAX_CRASHES:
        return WorkerCrashedError(
            f"{instance.num_crashes} workers died while they computed this input "
            f"(the last: {error})"
        )
    if instance.num_hosts_lost >= MAX_HOSTS_LOST:
        return WorkerCrashedError(
            f"{MAX_HOSTS_LOST} hosts were lost while they held it (the last: {error})"
        )
    return None


class Entrance:
    """Decides about each instance that comes, by what waits, the workers and the arena."""

    def __init__(
        self,
        admission: Admission,
        queue: Batcher[Instance],
        scheduler: BatchScheduler,
        arena: Arena,
    ) -> None:
        self._admission = admission
        self._queue = queue
        self._lanes = scheduler.lanes
        self._arena = arena
        self._policies = scheduler.policies

    def enter(
        self,
        ref: ItemRef,
        chunks: Sequence[Buffer],
        owner: SlotOwner | None,
        now: float,
        *,
        is_compared: bool,
    ) -> SlotOwner:
        """Refuse an instance that there is no room or no time for, or store its payload.

        Returns:
            The owner of the payload's slot in the arena: the one given if it is stored already.

        Raises:
            OverShareError: Its key has its share of the queue.
            OverloadedError: The queue is full, the deadline cannot be met, or a policy refuses it.
            UnavailableError: The service is draining.
        """
        if ref.priority >= BACKGROUND:
            self._check_background(ref)
        elif not is_compared:
            self._check(ref, now)
        if owner is not None:
            return owner
        arena = self._arena
        if ref.caller:
            self._admission.key_share.check_bytes(arena, ref)
        offset = arena.put(chunks, ref.num_bytes, ref.caller)
        if offset is None:
            self._admission.rejected["arena_full"] += not is_compared
            raise OverloadedError("the arena for payloads is full", retry_after_s=1)
        ref.offset = offset
        return arena

    def arrange(self, now: float) -> None:
        """Order waiting instances by priority, unless some would then miss their deadlines."""
        free_s, num_workers = self._lanes.free_in(now), len(self._lanes.open) or 1
        are_in_time = self._admission.are_in_time
        self._queue.arrange(
            lambda deadline, num: are_in_time(num, free_s, num_workers, deadline - now, now)
        )

    def _check(self, ref: ItemRef, now: float) -> None:
        admission, queue, lanes = self._admission, self._queue, self._lanes
        num_queued = queue.num_waiting
        left_s = ref.deadline - now
        num_workers = len(lanes.open) or 1
        # If there are several kinds, all that wait may be of this one's. Its kind may take half of
        # the time until its deadline, so each counts twice.
        num_counted = 2 * num_queued if queue.is_mixed else num_queued
        if num_queued and ref.caller:  # in the same way, all may be of this one's key
            num_counted = max(num_counted, int((num_queued + 1) * admission.key_share.weight))
        num_ahead = num_counted + lanes.num_sent
        is_welcome = admission.is_welcome(num_counted, num_ahead, num_workers, left_s)
        for policy in self._policies:
            is_welcome = policy.is_welcome(num_counted, now) and is_welcome
        if is_welcome:
            return
        admission.check(num_queued, num_workers, left_s)
        position = queue.position(ref.priority, ref.deadline, now, ref.caller)
        admission.check_share(position, num_queued, num_workers)
        admission.check_time(position, lanes.free_in(now), num_workers, left_s, now)
        for policy in self._policies:
            policy.check(position, admission, now)

    def _check_background(self, ref: ItemRef) -> None:
        """Refuse an instance of the background that would leave others too little memory."""
        if self._admission.is_draining:
            raise UnavailableError("this server is shutting down", retry_after_s=1)
        arena = self._arena
        most = int(_BACKGROUND_SHARE * arena.num_bytes)
        if ref.num_bytes > most:
            raise TooLargeError(
                f"an instance of a job may have {most:,} bytes here, which is half of arena_bytes"
            )
        if arena.used_bytes + ref.num_bytes > most:
            raise OverloadedError("the arena has little room left", retry_after_s=1)
