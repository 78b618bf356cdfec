"""The agent's side of one connection to a front end: follows its orders, and answers."""

import asyncio
import logging
import time
from asyncio import Future, Task
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from inferpool.workers.host.engine import Ending, GpuHealth
from inferpool.workers.remote.hosted import HostedWorker, HostedWorkers
from inferpool.workers.remote.lease import BEAT_S, LEASE_S, Lease
from inferpool.workers.remote.link import HostLink, LinkListener
from inferpool.workers.remote.wire import (
    MAX_MEASURED_BYTES,
    BatchLost,
    BatchOutcomes,
    Beat,
    DropStreams,
    FrameTooLargeError,
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
    ToAgent,
    Views,
    WorkerEnded,
    WorkerNotStarted,
    WorkerPulse,
    WorkerStarted,
    placed,
)
from inferpool.workers.shared.arena import Arena
from inferpool.workers.shared.errors import WorkerLostError, WorkerStartError
from inferpool.workers.shared.messages import BatchDone, ItemError, StreamPart

if TYPE_CHECKING:
    from inferpool.workers.host.engine import WorkerHandle

logger = logging.getLogger(__name__)

_LEAVING = "its host is leaving"
_LATE_BEATS = 1.5
"""Beats without a request for a pulse after which the agent sends one all the same."""
_FLUSH_S = LEASE_S
"""Seconds that the front end may take for the last answers, before the connection is closed."""


@dataclass(slots=True)
class _Batch:
    """A batch that has come, and where its payloads lie."""

    order: RunBatch
    ahead_s: float
    """How far the clock of this host is ahead of the front end's."""
    offsets: list[int]
    """Slots in the arena, one for each instance; empty while it waits for room."""
    payload: memoryview | None = None
    """The payloads, if there was no room in the arena."""
    dropped: list[int] = field(default_factory=list)
    """Streams that nobody waits for any more, while it waits for room."""


class AgentSession(LinkListener[ToAgent]):
    """One connection, from the welcome to its end. Used in the agent's event loop."""

    def __init__(
        self,
        link: HostLink[ToAgent],
        arena: Arena,
        workers: HostedWorkers,
        gpus: Callable[[], Sequence[GpuHealth]],
    ) -> None:
        """Serve a connection from now on.

        Args:
            link: The connection; messages must come here from now on.
            arena: Gets the payloads.
            workers: The workers of this host.
            gpus: Returns the state of its GPUs.
        """
        self.is_leaving = False
        """No batch and no start is accepted any more."""
        self._link = link
        self._arena = arena
        self._memory = memoryview(arena.memory.map)
        self._workers = workers
        self._gpus = gpus
        self._loop = asyncio.get_running_loop()
        self._lease = Lease(time.monotonic())
        self._over: Future[str] = self._loop.create_future()
        self._hosted: dict[int, HostedWorker] = {}
        self._running: dict[int, WorkerHandle] = {}
        self._tasks: dict[int, Task[None]] = {}
        """Tasks that run each worker from its start to its end, by number."""
        self._stopping: set[Task[None]] = set()
        self._held: dict[Future[BatchDone], WorkerHandle] = {}
        """Batches that workers compute."""
        self._streamed: dict[tuple[int, int], Future[BatchDone]] = {}
        """Those among them that are answered in parts, by the numbers of worker and batch."""
        self._told_at = time.monotonic()
        """Time of the last pulse."""
        self._arriving: _Batch | None = None
        self._waiting: deque[_Batch] = deque()
        """Batches that wait for room in the arena."""
        self._watching = self._loop.create_task(self._watch())

    async def until_over(self) -> str:
        """Wait for the end of the connection; return the reason."""
        return await asyncio.shield(self._over)

    async def wind_up(self) -> None:
        """Wait for batches under way after the end, and end workers that take too long.

        A lease later the front end has given their batches to others.
        """
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._held:
            await asyncio.wait(list(self._held), timeout=LEASE_S)
        late = set(self._held.values())
        if late:
            logger.warning("%d workers were still at work after the lease: ending them", len(late))
            await asyncio.gather(*(worker.stop(0) for worker in late))
        self._workers.release()

    async def leave(self, grace_s: float, reason: str) -> None:
        """Refuse new work, finish what is held, and end the connection."""
        self.is_leaving = True
        tasks = dict(self._tasks)
        for number, task in tasks.items():
            if number not in self._hosted:
                task.cancel()  # it has not begun to start
        await asyncio.gather(*(each.stop(grace_s) for each in self._hosted.values()))
        await asyncio.gather(*tasks.values(), return_exceptions=True)
        self._link.send(Refusal(reason))
        # The front end closes it once it has read all answers: data that crosses a close is lost.
        await asyncio.wait([self._over], timeout=_FLUSH_S)
        self._link.close(reason)

    # Messages

    def room_for(self, message: ToAgent, num_bytes: int) -> Views:
        """Return memory for a body: slots of the arena for the payloads of a batch."""
        if isinstance(message, Measure):
            return [memoryview(bytearray(min(num_bytes, MAX_MEASURED_BYTES)))]
        if not isinstance(message, RunBatch):
            raise ValueError(f"{type(message).__name__} with a body")
        self._arriving = batch = self._receive(message)
        if batch.payload is not None:
            return [batch.payload]
        places = zip(batch.offsets, message.items, strict=True)
        return [self._memory[offset : offset + item.num_bytes] for offset, item in places]

    def on_message(self, message: ToAgent, body: Views) -> None:
        """Handle a message of the front end."""
        match message:
            case RunBatch():
                batch, self._arriving = self._arriving or self._receive(message), None
                self._waiting.append(batch)
                self._run_waiting()
            case Beat():
                self._tell(message.sent_at)
            case StartWorker():
                self._start(message)
            case StopWorker():
                self._stop(message)
            case DropStreams():
                self._drop(message)
            case Measure():
                num_bytes = min(message.num_bytes, MAX_MEASURED_BYTES)
                self._link.send(Measured(message.id), [memoryview(bytes(num_bytes))])
            case Refusal():
                self._link.close(message.reason)
            case _:
                raise ValueError(f"{type(message).__name__}, which no front end sends now")

    def on_closed(self, reason: str) -> None:
        """Drop batches that no worker has, and end the session."""
        self._watching.cancel()
        if self._arriving is not None:
            self._free(self._arriving)
            self._arriving = None
        self._waiting.clear()
        if not self._over.done():
            self._over.set_result(reason)

    async def _watch(self) -> None:
        """End the connection when the lease has run out; give signs of life while beats tarry."""
        while look_in_s := self._lease.look(now := time.monotonic(), self._link.heard_at):
            if now - self._told_at > _LATE_BEATS * BEAT_S:  # payloads are on the way before them
                self._tell(0.0)
            await asyncio.sleep(look_in_s)
        self._link.close(f"no sign of life from the front end for {LEASE_S:g} s")

    def _tell(self, sent_at: float) -> None:
        """Send the state of this host to the front end."""
        self._told_at = time.monotonic()
        vitals = HostVitals(
            forkserver=self._workers.forkserver,
            arena_bytes=self._arena.num_bytes,
            arena_used_bytes=self._arena.used_bytes,
            wall_time=time.time(),
            gpus=list(self._gpus()),
        )
        workers = [
            WorkerPulse(number, worker.is_stalled, worker.vitals())
            for number, worker in self._running.items()
        ]
        self._link.send(Pulse(sent_at, vitals, workers))

    # Workers

    def _start(self, order: StartWorker) -> None:
        if self.is_leaving:
            self._link.send(WorkerNotStarted(order.number, _LEAVING, permanent=False))
            return
        task = asyncio.create_task(self._see_to(order), name=f"see to {order.id}")
        self._tasks[order.number] = task
        task.add_done_callback(lambda _: self._forget(order.number))

    def _stop(self, order: StopWorker) -> None:
        hosted = self._hosted.get(order.number)
        if hosted is None:  # it is not even begun, or has ended
            if (task := self._tasks.get(order.number)) is not None:
                task.cancel()
                text = "the start was given up"
                given_up = WorkerNotStarted(order.number, text, permanent=False)
                self._link.send(given_up)
            return
        stopping = asyncio.create_task(hosted.stop(order.grace_s))
        self._stopping.add(stopping)
        stopping.add_done_callback(self._stopping.discard)

    async def _see_to(self, order: StartWorker) -> None:
        """Start a worker, and report its start and its end."""
        number = order.number

        def on_progress(stage: str) -> None:
            self._link.send(Progress(number, stage))

        try:
            hosted = await self._workers.claim(order.id, order.config, on_progress)
            self._hosted[number] = hosted
            try:
                worker = await asyncio.shield(hosted.loading)
            except asyncio.CancelledError:
                if not hosted.loading.cancelled():
                    raise  # the connection has ended: the start goes on
                raise WorkerStartError("the start was given up", permanent=False) from None
            files = await self._workers.files_of(worker)
            ready = msgspec.structs.replace(worker.ready, files=files)
            self._link.send(WorkerStarted(number, worker.credit, ready))
        except WorkerStartError as error:
            self._link.send(
                WorkerNotStarted(number, str(error), error.permanent, traceback=error.traceback)
            )
            return
        except Exception as error:  # the front end must hear of it
            logger.exception("%s could not be started", order.id)
            self._link.send(
                WorkerNotStarted(number, f"a mistake of the agent: {error!r}", permanent=False)
            )
            return
        self._running[number] = worker
        ending = await worker.wait()
        self._forget(number)
        if self.is_leaving:
            ending = Ending(cause="host", reason=_LEAVING)
        self._link.send(WorkerEnded(number, ending))

    def _forget(self, number: int) -> None:
        for table in (self._hosted, self._running, self._tasks):
            table.pop(number, None)

    # Batches

    def _receive(self, order: RunBatch) -> _Batch:
        """Find room for the payloads of a batch. It waits its turn if others wait for room."""
        batch = _Batch(order, time.monotonic() - order.sent_at, [])
        if self._waiting or not self._find_room(batch):
            batch.payload = memoryview(bytearray(sum(item.num_bytes for item in order.items)))
        return batch

    def _find_room(self, batch: _Batch) -> bool:
        for item in batch.order.items:
            offset = self._arena.put((), item.num_bytes)
            if offset is None:
                self._free(batch)
                return False
            batch.offsets.append(offset)
        return True

    def _free(self, batch: _Batch) -> None:
        for offset in batch.offsets:
            self._arena.free(offset)
        batch.offsets.clear()

    def _run_waiting(self) -> None:
        """Pass batches to their workers in the order of their arrival, while there is room."""
        while self._waiting:
            batch = self._waiting[0]
            if batch.payload is not None and not self._find_room(batch):
                if self._held:
                    return  # until that has come back
                self._waiting.popleft()
                self._refuse(batch, "the arena of its host is too small for it (arena_bytes)")
            else:
                self._waiting.popleft()
                self._run(batch)

    def _run(self, batch: _Batch) -> None:
        order = batch.order
        if batch.payload is not None:
            self._move_in(batch)
        worker = self._running.get(order.number)
        if worker is None or self.is_leaving:
            self._free(batch)
            reason = _LEAVING if self.is_leaving else "the worker had ended"
            self._link.send(BatchLost(order.number, order.id, reason, started=False))
            return
        for item, offset in zip(order.items, batch.offsets, strict=True):
            item.offset = offset
            item.deadline += batch.ahead_s
        try:
            if worker.ready.interface.streams:
                future = worker.run(order.items, partial(self._send_parts, order))
                self._streamed[order.number, order.id] = future
            else:
                future = worker.run(order.items)
        except Exception as error:  # anything that encoding may raise
            self._refuse(batch, f"it cannot be given to a worker: {error}")
            return
        self._held[future] = worker
        future.add_done_callback(partial(self._on_done, batch))
        if batch.dropped:
            worker.drop(future, batch.dropped)

    def _send_parts(self, order: RunBatch, parts: Sequence[StreamPart]) -> None:
        """Send on parts of streams, by the number that the front end has given their batch."""
        named = [StreamPart(order.id, part.index, part.value) for part in parts]
        self._link.send(PartsSent(order.number, named))

    def _drop(self, message: DropStreams) -> None:
        """End streams that nobody waits for any more, unless their batch is over."""
        indices, key = message.drop.indices, (message.number, message.drop.id)
        for batch in self._waiting:
            if (batch.order.number, batch.order.id) == key:
                batch.dropped += indices
        future = self._streamed.get(key)
        if future is not None:
            self._held[future].drop(future, indices)

    def _move_in(self, batch: _Batch) -> None:
        """Copy payloads that had to wait outside into the arena."""
        assert batch.payload is not None
        position = 0
        for item, offset in zip(batch.order.items, batch.offsets, strict=True):
            end = position + item.num_bytes
            self._memory[offset : offset + item.num_bytes] = batch.payload[position:end]
            position = end
        batch.payload = None

    def _refuse(self, batch: _Batch, reason: str) -> None:
        self._free(batch)
        order = batch.order
        outcomes = [ItemError("exhausted", reason) for _ in order.items]
        done = BatchDone(order.id, [*outcomes], 0.0, 0.0)
        self._link.send(BatchOutcomes(order.number, done))

    def _on_done(self, batch: _Batch, future: "Future[BatchDone]") -> None:
        """Send the outcomes of a batch, and use its slots again."""
        order = batch.order
        del self._held[future]
        self._streamed.pop((order.number, order.id), None)
        self._free(batch)
        error = future.exception()
        if error is None:
            done, body = placed(future.result(), order.id, batch.ahead_s)
            try:
                self._link.send(BatchOutcomes(order.number, done), body)
            except FrameTooLargeError as too_large:
                self._refuse(batch, f"the outputs of its batch are too large: {too_large}")
        else:
            started = isinstance(error, WorkerLostError) and error.started
            self._link.send(BatchLost(order.number, order.id, str(error), started=started))
        self._run_waiting()
