"""Fakes behind the seams, each as small as the seam allows."""

import asyncio
import time
from collections.abc import Callable, Sequence

import msgspec

from inferpool.models.spec import USUAL_INTERFACE, Interface
from inferpool.models.speed_names import SpeedReport
from inferpool.workers.host.engine import Ending, OnParts, Vitals, WorkerId
from inferpool.workers.shared.config import WorkerConfig
from inferpool.workers.shared.errors import WorkerLostError, WorkerStartError
from inferpool.workers.shared.messages import (
    BatchDone,
    ItemError,
    ItemRef,
    Outcome,
    Ready,
    StreamPart,
)


def ref_to(
    payload: bytes, timeout_s: float = 30.0, priority: int = 5, id: str = "", caller: int = 0
) -> ItemRef:
    """Return a reference to an instance whose payload is not in the arena yet."""
    deadline = time.monotonic() + timeout_s
    return ItemRef(
        "bytes", 0, len(payload), deadline, request_id=id, priority=priority, caller=caller
    )


class FakeWorker:
    """A worker that answers when the test says so."""

    def __init__(self, id: WorkerId | None = None, credit: int = 2) -> None:
        self.id = id or WorkerId(model="m", slot=0)
        self.credit = credit
        self.ready = Ready(1, [], [], "cpu", 0.0, None, True, SpeedReport())
        self.has_worked = False
        self.batches: list[tuple[list[ItemRef], asyncio.Future[BatchDone]]] = []
        """Batches that it holds, oldest first."""
        self.may_stop = asyncio.Event()
        """Without it, a stop takes long."""
        self.may_stop.set()
        self._gone: asyncio.Future[Ending] = asyncio.get_running_loop().create_future()

    def run(
        self, items: Sequence[ItemRef], on_parts: OnParts | None = None
    ) -> asyncio.Future[BatchDone]:
        future = asyncio.get_running_loop().create_future()
        if self.is_gone:
            future.set_exception(WorkerLostError("SIGKILL", started=False))
            return future
        self.batches.append((list(items), future))
        return future

    def drop(self, batch: asyncio.Future[BatchDone], indices: Sequence[int]) -> None: ...

    @property
    def is_gone(self) -> bool:
        return self._gone.done()

    @property
    def sizes(self) -> list[int]:
        return [len(items) for items, _ in self.batches]

    def answer(self, outcomes: Sequence[Outcome] | None = None, compute_s: float = 0.002) -> None:
        """Return the oldest batch: by default each item's offset, as JSON."""
        items, future = self.batches.pop(0)
        self.has_worked = True
        values = outcomes or [b"%d" % item.offset for item in items]
        future.set_result(BatchDone(0, list(values), compute_s / 2, compute_s))

    def die(self, *, started: bool = True) -> None:
        """Lose everything that it holds."""
        batches, self.batches = self.batches, []
        for number, (_, future) in enumerate(batches):
            future.set_exception(WorkerLostError("SIGKILL", started=started and number == 0))
        was_at_work = started and bool(batches)
        self._gone.set_result(Ending(cause="signal", reason="SIGKILL", was_at_work=was_at_work))

    def lose_host(self) -> None:
        """Lose everything that it holds, since its host is lost."""
        batches, self.batches = self.batches, []
        for _, future in batches:
            future.set_exception(WorkerLostError("silence", started=False, with_host=True))
        self._gone.set_result(Ending(cause="host", reason="silence"))

    is_stalled = False

    async def wait(self) -> Ending:
        return await asyncio.shield(self._gone)

    async def stop(self, grace_s: float) -> None:
        await self.may_stop.wait()
        if not self._gone.done():
            self._gone.set_result(Ending(cause="exit", reason="stopped"))

    def vitals(self) -> Vitals:
        return Vitals(pid=1, rss_bytes=0, last_beat_age_s=0.0, num_batches=0, last_answer_age_s=0.0)


class StreamingWorker(FakeWorker):
    """A worker whose model answers in parts, which it gives when the test says so."""

    def __init__(self, *, joins: bool = False, credit: int = 1, slot: int = 0) -> None:
        super().__init__(WorkerId(model="m", slot=slot), credit)
        interface = Interface(streams=True, joins=joins)
        self.ready = msgspec.structs.replace(self.ready, interface=interface)
        self.sinks: list[OnParts] = []
        """Readers of the parts of each batch that it was sent."""
        self.dropped: list[tuple[int, int]] = []
        """Streams that it was asked to end: the numbers of their batches, and their places."""
        self._futures: list[asyncio.Future[BatchDone]] = []

    def run(
        self, items: Sequence[ItemRef], on_parts: OnParts | None = None
    ) -> asyncio.Future[BatchDone]:
        assert on_parts is not None
        future = super().run(items)
        self.sinks.append(on_parts)
        self._futures.append(future)
        return future

    def drop(self, batch: asyncio.Future[BatchDone], indices: Sequence[int]) -> None:
        self.dropped += [(self._futures.index(batch), index) for index in indices]

    def give(self, *values: bytes | ItemError | None, index: int = 0, batch: int = 0) -> None:
        """Send parts of one stream; None is its end."""
        self.sinks[batch]([StreamPart(batch, index, value) for value in values])

    def give_back(self, batch: int = 0) -> None:
        """Answer a batch whose streams are over."""
        future = self._futures[batch]
        items = next(items for items, other in self.batches if other is future)
        self.batches.remove((items, future))
        future.set_result(BatchDone(0, [b""] * len(items), 0.001, 0.002))


class FakeEngine:
    """Starts fake workers; `failures` are raised first, one per start."""

    def __init__(self, failures: Sequence[WorkerStartError] = ()) -> None:
        self.failures = list(failures)
        self.interfaces: dict[str, Interface] = {}
        """The interfaces that the classes of models have, by the names of these."""
        self.started: list[FakeWorker] = []

    async def start(
        self, id: WorkerId, config: WorkerConfig, on_progress: Callable[[str], None]
    ) -> FakeWorker:
        if self.failures:
            raise self.failures.pop(0)
        on_progress("loading")
        self.started.append(worker := FakeWorker(id))
        spoken = self.interfaces.get(id.model, USUAL_INTERFACE)
        worker.ready = msgspec.structs.replace(worker.ready, interface=spoken)
        return worker
