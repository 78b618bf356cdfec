"""The front end's view of one connection to the agent of a host, and of the workers there."""

import asyncio
import contextlib
import logging
import time
from asyncio import Future, Task
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count

from inferpool.workers.host.engine import Ending, OnParts, Vitals, WorkerId
from inferpool.workers.host.held_streams import HeldStreams, dropped, share_out
from inferpool.workers.remote.lease import BEAT_S, LEASE_S, Lease
from inferpool.workers.remote.link import HostLink, LinkListener
from inferpool.workers.remote.wire import (
    MAX_MEASURED_BYTES,
    BatchLost,
    BatchOutcomes,
    Beat,
    DropStreams,
    HostFacts,
    HostVitals,
    Measure,
    Measured,
    PartsSent,
    Progress,
    Pulse,
    Refusal,
    RunBatch,
    StartWorker,
    StopWorker,
    ToFrontEnd,
    Views,
    WorkerEnded,
    WorkerNotStarted,
    WorkerPulse,
    WorkerStarted,
    found,
)
from inferpool.workers.shared.config import WorkerConfig
from inferpool.workers.shared.errors import WorkerLostError, WorkerStartError
from inferpool.workers.shared.messages import BatchDone, ItemRef, Ready, StreamPart
from inferpool.workers.shared.queues import FrameError

logger = logging.getLogger(__name__)

_SILENT_S = 3 * BEAT_S
"""Seconds without a sign of life after which nobody counts on a host, while its lease runs on."""
_AVERAGED = 0.2
"""Weight of the latest round trip, or of the latest batch, in the average."""
_END_S = 10.0
"""Seconds beyond the grace that an agent may take to end a worker, by force if need be."""
_MEASURE_S = 60.0
_GIVE_UP_S = 5.0
"""Seconds that an agent may take to end what it was starting."""


@dataclass(slots=True, kw_only=True)
class _Start:
    """A worker that is being started."""

    id: WorkerId
    future: "Future[RemoteWorker]"
    on_progress: Callable[[str], None]


@dataclass(slots=True)
class _RemoteBatch:
    """A batch that a worker there holds."""

    future: "Future[BatchDone]"
    num_items: int
    streams: HeldStreams | None


class RemoteHost(LinkListener[ToFrontEnd]):
    """One host, from the time at which its agent has joined until the connection ends."""

    def __init__(
        self,
        link: HostLink[ToFrontEnd],
        facts: HostFacts,
        address: str,
        epoch: int,
        arena: memoryview,
        make_beat: Callable[[], Beat],
        on_lost: Callable[["RemoteHost", str], None],
    ) -> None:
        """Serve a connection from now on.

        Args:
            link: The connection; messages must come here from now on.
            facts: What the agent has said of the host.
            address: Address and port of the agent.
            epoch: Number of the connection.
            arena: Memory of the front end's arena, with the payloads.
            make_beat: Returns a sign of life of the front end.
            on_lost: Called with the reason once the host is lost; all its workers have failed by
                then.
        """
        self.facts = facts
        self.address = address
        self.epoch = epoch
        self.joined_at = time.time()
        self.round_trip_s = 0.0
        """Average time of a beat to the agent and back."""
        self.clock_offset_s = 0.0
        """How far the clock of the host is ahead of ours."""
        self.vitals = HostVitals()
        self.is_lost = False
        self.has_left = False
        """True if one side has sent a reason to end the connection: nothing is wrong then."""
        self._link = link
        self._arena = arena
        self._make_beat = make_beat
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self._lease = Lease(time.monotonic())
        self._numbers = count(1)
        self._starting: dict[int, _Start] = {}
        self._workers: dict[int, RemoteWorker] = {}
        self._measuring: dict[int, Future[None]] = {}
        self._watching: Task[None] = self._loop.create_task(
            self._watch(), name=f"watch {self.name}"
        )

    @property
    def name(self) -> str:
        """Name of the host."""
        return self.facts.name

    @property
    def last_beat_age_s(self) -> float:
        """Seconds since the last sign of life."""
        self._lease.renew(self._link.heard_at)
        return self._lease.age_s(time.monotonic())

    @property
    def is_silent(self) -> bool:
        """True if no sign of life has come for longer than usual, or the host is lost."""
        return self.is_lost or self.last_beat_age_s > _SILENT_S

    async def start(
        self, id: WorkerId, config: WorkerConfig, on_progress: Callable[[str], None]
    ) -> "RemoteWorker":
        """Start a worker there; see `Engine.start`.

        Raises:
            WorkerStartError: It did not become ready, or the host was lost meanwhile.
        """
        if self.is_lost:
            raise WorkerStartError(f"{self.name} is not connected", permanent=False)
        number = next(self._numbers)
        start = _Start(id=id, future=self._loop.create_future(), on_progress=on_progress)
        try:
            self._link.send(StartWorker(number, id, config))
        except Exception as error:  # anything that encoding may raise
            text = f"its options cannot be sent to another host: {error}"
            raise WorkerStartError(text, permanent=True) from error
        self._starting[number] = start
        try:
            return await asyncio.shield(start.future)
        except asyncio.CancelledError:
            self._link.send(StopWorker(number, 0.0))
            await asyncio.wait([start.future], timeout=_GIVE_UP_S)
            raise
        finally:
            self._starting.pop(number, None)
            if start.future.done():
                start.future.exception()  # mark it as retrieved

    def order(
        self, message: RunBatch | StopWorker | DropStreams, items: Sequence[ItemRef] = ()
    ) -> None:
        """Send a message, with the payloads of some instances."""
        arena = self._arena
        body = [arena[each.offset : each.offset + each.num_bytes] for each in items]
        self._link.send(message, body)

    async def measure(self, num_bytes: int) -> tuple[float, float]:
        """Measure the connection.

        Args:
            num_bytes: Bytes to send each way, 64 MiB at most.

        Returns:
            Bytes per second to the host, and from it.

        Raises:
            ConnectionError: The host is lost.
            TimeoutError: It took too long.
        """
        num_bytes = min(num_bytes, MAX_MEASURED_BYTES)
        payload = [memoryview(bytes(num_bytes))]
        to_s = await self._timed(0, payload)
        from_s = await self._timed(num_bytes, ())
        return num_bytes / to_s, num_bytes / from_s

    def refuse(self, reason: str) -> None:
        """End the connection, and send the agent the reason."""
        self.has_left = True
        with contextlib.suppress(Exception):
            self._link.send(Refusal(reason))
        self._link.close(reason)

    def close(self, reason: str) -> None:
        """End the connection."""
        self._link.close(reason)

    # Messages

    def room_for(self, message: ToFrontEnd, num_bytes: int) -> Views:
        """Return memory for a body."""
        match message:
            case BatchOutcomes():
                self._worker(message.number)  # which must be there
            case Measured() if num_bytes <= MAX_MEASURED_BYTES:
                pass
            case _:
                raise ValueError(f"{type(message).__name__} with a body of {num_bytes} bytes")
        return [memoryview(bytearray(num_bytes))]

    def on_message(self, message: ToFrontEnd, body: Views) -> None:
        """Handle a message of the agent."""
        if self.is_lost:
            return
        match message:
            case BatchOutcomes():
                worker = self._worker(message.number)
                worker.on_answer(found(message.done, body[0] if body else memoryview(b"")))
                self._forget_if_settled(message.number)
            case PartsSent():
                self._worker(message.number).on_parts(message.parts)
            case Pulse():
                self._on_pulse(message, time.monotonic())
            case BatchLost():
                self._worker(message.number).on_lost(message)
                self._forget_if_settled(message.number)
            case Progress():
                self._on_progress(message)
            case WorkerStarted():
                self._on_started(message)
            case WorkerNotStarted():
                self._on_not_started(message)
            case WorkerEnded():
                # It has answered for all batches that it had received by then. Those that were
                # still on their way come back too, so it stays known until then.
                if message.number in self._workers:
                    self._workers[message.number].on_ended(message.ending)
                    self._forget_if_settled(message.number)
            case Measured():
                if (measuring := self._measuring.get(message.id)) and not measuring.done():
                    measuring.set_result(None)
            case Refusal():
                self.has_left = True
                self._link.close(message.reason)
            case _:
                raise ValueError(f"{type(message).__name__}, which no agent sends")

    def on_closed(self, reason: str) -> None:
        """Fail all workers and starts, since the host is lost."""
        if self.is_lost:
            return
        self.is_lost = True
        self._watching.cancel()
        text = f"{self.name} was lost: {reason}"
        for worker in self._workers.values():
            worker.on_host_lost(text)
        for start in self._starting.values():
            if not start.future.done():
                start.future.set_exception(WorkerStartError(text, permanent=False))
        for measuring in self._measuring.values():
            if not measuring.done():
                measuring.set_exception(ConnectionError(text))
        self._on_lost(self, reason)

    def _worker(self, number: int) -> "RemoteWorker":
        worker = self._workers.get(number)
        if worker is None:
            raise ValueError(f"worker {number}, which was not started")
        return worker

    def _forget_if_settled(self, number: int) -> None:
        if self._workers[number].is_settled:
            del self._workers[number]

    def _on_progress(self, message: Progress) -> None:
        if (start := self._starting.get(message.number)) is not None:
            try:
                start.on_progress(message.stage)
            except Exception:  # it must not end the connection of all workers
                logger.exception("the progress of %s could not be noted", start.id)

    def _on_started(self, message: WorkerStarted) -> None:
        start = self._starting.pop(message.number, None)
        if start is None or start.future.done():
            return  # it was given up, and the agent will hear of that
        worker = RemoteWorker(start.id, message, self)
        self._workers[message.number] = worker
        start.future.set_result(worker)

    def _on_not_started(self, message: WorkerNotStarted) -> None:
        start = self._starting.pop(message.number, None)
        if start is not None and not start.future.done():
            start.future.set_exception(
                WorkerStartError(
                    message.message, permanent=message.permanent, traceback=message.traceback
                )
            )

    def _on_pulse(self, pulse: Pulse, now: float) -> None:
        if pulse.sent_at:
            round_trip_s = max(0.0, now - pulse.sent_at)
            weight = _AVERAGED if self.round_trip_s else 1.0
            self.round_trip_s += weight * (round_trip_s - self.round_trip_s)
            self.clock_offset_s = pulse.vitals.wall_time + round_trip_s / 2 - time.time()
        self.vitals = pulse.vitals
        for each in pulse.workers:
            if (worker := self._workers.get(each.number)) is not None:
                worker.on_pulse(each, now)

    async def _watch(self) -> None:
        """Send beats, and end the connection when the lease has run out."""
        while look_in_s := self._lease.look(time.monotonic(), self._link.heard_at):
            self._link.send(self._make_beat())
            await asyncio.sleep(look_in_s)
        self._link.close(f"no sign of life for {LEASE_S:g} s")

    async def _timed(self, num_bytes: int, body: Views) -> float:
        if self.is_lost:
            raise ConnectionError(f"{self.name} is not connected")
        id = next(self._numbers)
        future = self._measuring[id] = self._loop.create_future()
        began = time.monotonic()
        try:
            self._link.send(Measure(id, num_bytes), body)
            async with asyncio.timeout(_MEASURE_S):
                await future
        finally:
            del self._measuring[id]
        return max(time.monotonic() - began - self.round_trip_s, 1e-6)


class RemoteWorker:
    """One incarnation of a worker: what it holds, and what its agent has reported of it."""

    def __init__(self, id: WorkerId, started: WorkerStarted, host: RemoteHost) -> None:
        self.id = id
        self.ready: Ready = started.ready
        self.has_worked = False
        self._number = started.number
        self._own_credit = started.credit
        self._host = host
        self._loop = asyncio.get_running_loop()
        self._ids = count(1)
        self._held: dict[int, _RemoteBatch] = {}
        """Batches by number."""
        self._gone: Future[Ending] = self._loop.create_future()
        self._ending_reason = ""
        self._is_lost_with_host = False
        self._pulse: WorkerPulse | None = None
        self._pulse_at = self._answered_at = time.monotonic()
        self._num_batches = 0
        self._batch_s = 0.0
        """Average time of computing a batch."""

    @property
    def credit(self) -> int:
        """Number of batches that it may hold: one more if a round trip takes longer than a batch.

        The others would be done before the next one arrives.
        """
        return self._own_credit + (self._host.round_trip_s > self._batch_s > 0.0)

    @property
    def is_stalled(self) -> bool:
        """True if it computes nothing, and it or its host gives no sign of life."""
        if self._gone.done():
            return False
        return self._host.is_silent or (self._pulse is not None and self._pulse.is_stalled)

    def run(self, items: Sequence[ItemRef], on_parts: OnParts | None = None) -> "Future[BatchDone]":
        """Send a batch; its future fails with `WorkerLostError` once the worker has ended."""
        assert items, "only the agent sends canaries"
        future: Future[BatchDone] = self._loop.create_future()
        if self._ending_reason:
            future.set_exception(self._lost(started=False))
            return future
        id = next(self._ids)
        self._host.order(RunBatch(self._number, id, time.monotonic(), items), items)
        streams = on_parts and HeldStreams(len(items), on_parts)
        self._held[id] = _RemoteBatch(future, len(items), streams)
        return future

    def drop(self, batch: "Future[BatchDone]", indices: Sequence[int]) -> None:
        """Have the agent end some streams of a batch."""
        if drop := dropped(self._held, batch, indices):
            self._host.order(DropStreams(self._number, drop))

    def on_parts(self, parts: Sequence[StreamPart]) -> None:
        """Pass on parts of streams.

        Raises:
            ValueError: It holds no such stream.
        """
        try:
            share_out(parts, self._held.get)
        except FrameError as error:
            raise ValueError(str(error)) from error
        self._answered_at = time.monotonic()

    @property
    def is_settled(self) -> bool:
        """True once it has ended and holds nothing, so that nothing more can come from it."""
        return self._gone.done() and not self._held

    async def wait(self) -> Ending:
        """Wait for its end, and return how it ended."""
        return await asyncio.shield(self._gone)

    async def stop(self, grace_s: float) -> None:
        """Have the agent stop it, and wait for its end."""
        if not self._gone.done():
            self._host.order(StopWorker(self._number, grace_s))
            await asyncio.wait([self._gone], timeout=grace_s + _END_S)

    def vitals(self) -> Vitals:
        """Return the state, as the agent reported it up to half a second ago."""
        now = time.monotonic()
        answer_age_s = now - self._answered_at
        if self._gone.done() or self._pulse is None:
            return Vitals(
                pid=self.ready.pid,
                rss_bytes=0,
                last_beat_age_s=0.0,
                num_batches=0 if self._gone.done() else self._num_batches,
                last_answer_age_s=answer_age_s,
            )
        vitals, told_s = self._pulse.vitals, now - self._pulse_at
        return replace(
            vitals,
            last_beat_age_s=vitals.last_beat_age_s + told_s,
            num_batches=self._num_batches,
            last_answer_age_s=min(vitals.last_answer_age_s + told_s, answer_age_s),
            batch_age_s=vitals.batch_age_s + told_s if self._held and vitals.batch_age_s else 0.0,
        )

    def on_pulse(self, pulse: WorkerPulse, now: float) -> None:
        """Store the state that the agent reports."""
        self._pulse, self._pulse_at = pulse, now

    def on_answer(self, done: BatchDone) -> None:
        """Settle a batch.

        Raises:
            ValueError: It holds no such batch, or the batch has another size.
        """
        batch = self._held.get(done.id)
        if batch is None:
            raise ValueError(f"an answer to batch {done.id}, which {self.id} does not hold")
        if len(done.outcomes) != batch.num_items:
            raise ValueError(f"{len(done.outcomes)} outcomes for {batch.num_items} instances")
        if batch.streams is not None:
            try:
                done = batch.streams.ended(done)
            except FrameError as error:
                raise ValueError(str(error)) from error
        future = batch.future
        del self._held[done.id]
        self._answered_at = time.monotonic()
        self._num_batches += 1
        self.has_worked = True
        self._batch_s += (done.compute_s - self._batch_s) * (_AVERAGED if self._batch_s else 1.0)
        if not future.done():  # else nobody waits for it any more
            future.set_result(done)

    def on_lost(self, lost: BatchLost) -> None:
        """Fail a batch that the worker has not answered, and never will."""
        self._ending_reason = self._ending_reason or lost.reason
        batch = self._held.pop(lost.id, None)
        if batch is not None and not batch.future.done():
            batch.future.set_exception(WorkerLostError(lost.reason, started=lost.started))

    def on_ended(self, ending: Ending) -> None:
        """Store how it ended. Batches that are on their way to it come back one by one."""
        self._ending_reason = self._ending_reason or ending.reason or "ended"
        if not self._gone.done():
            self._gone.set_result(ending)

    def on_host_lost(self, reason: str) -> None:
        """Fail all batches: its connection has ended, so no answer can come."""
        self._ending_reason, self._is_lost_with_host = reason, True
        held, self._held = self._held, {}
        for batch in held.values():
            if not batch.future.done():
                batch.future.set_exception(self._lost(started=False))
        if not self._gone.done():
            self._gone.set_result(Ending(cause="host", reason=reason))

    def _lost(self, *, started: bool) -> WorkerLostError:
        with_host = self._is_lost_with_host
        return WorkerLostError(self._ending_reason, started=started, with_host=with_host)
