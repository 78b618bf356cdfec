"""Rank 0 of a group, in its process: a worker with a model that calls the other ranks.

The lead of a pipeline computes several batches at once, so that all stages are busy.

Each batch is computed in a thread of its own. Models need not be thread-safe: a thread must hold
the *model lock* to run the model's code (`forward`, `postprocess`, `render_batch`), and holds it
until its batch is answered. It releases the lock only while a call of the network passes through
the stages of the pipeline. So batches share only the state that `forward` keeps on the model across
its call of the network. The clock of a batch measures its own time: it stands still while the batch
waits for the lock, or for other batches in the stages before it.

On an accelerator each batch has a stream of its own, or its answer would wait for the first stage
of the batches behind it. The device does the model's work in the order of the lock.
"""

import math
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch

from inferpool.models.accelerator.order import OwnStream
from inferpool.models.base import Model
from inferpool.models.split.turnstile import BatchClock, FairLock
from inferpool.workers.inside.pools import started_pool
from inferpool.workers.inside.preparing import Prepared
from inferpool.workers.inside.process import BEAT_S, WorkerLoop
from inferpool.workers.ranks.group import Group
from inferpool.workers.ranks.wiring import RankEnds
from inferpool.workers.shared.config import WorkerConfig


class Lead:
    """Steps of a worker that differ in the process of a lead."""

    def __init__(self, ends: RankEnds) -> None:
        self._ends = ends

    def build(self, config: WorkerConfig) -> Model:
        """Connect to the other ranks, and build the model; this may initialise CUDA.

        Raises:
            RuntimeError: The ranks cannot reach each other.
            ModelError: The model cannot be built.
        """
        self._group = Group(self._ends, config.placement)
        self._num_at_once = config.placement.num_at_once
        return self._group.build_model(config)

    def make_loop(self, *parts: Any) -> "LeadLoop":
        """Return the main loop of its process, from the parts of a `WorkerLoop`."""
        return LeadLoop(self._group, self._num_at_once, *parts)


class LeadLoop(WorkerLoop):
    """Main loop of a lead: it has as many batches under way as its group can compute at once."""

    def __init__(self, group: Group, num_at_once: int, *parts: Any) -> None:
        super().__init__(*parts)
        self._group = group
        self._num_at_once = num_at_once

    def serve(self) -> None:
        """Answer batches until the sentinel arrives."""
        if self._num_at_once == 1:
            self.run()
        else:
            lock = ModelLock(self._heartbeat.at_work_since)
            self._group.giving_way = lock.released
            self._computer.on_progress = lock.progressed
            self._run_overlapping(lock)
        self._group.let_go()

    def _run_overlapping(self, lock: "ModelLock") -> None:
        """Answer batches, several at once, each in a thread."""
        under_way = OverlappingBatches(self._num_at_once, lock, self._answer_own)
        coming = self._ahead.submit(self._receive_ahead)
        while True:
            has_worked = under_way.wait(coming, BEAT_S)
            now = time.monotonic()
            if has_worked:
                self._spare_memory.worked(now)
            if not under_way:  # or a batch that hangs would look alive
                self._heartbeat.beat()
                self._spare_memory.idle(now)
            if not coming.done() or under_way.is_full:
                continue
            prepared = coming.result()
            if prepared is None:
                break
            under_way.begin(prepared)
            coming = self._ahead.submit(self._receive_ahead)
        while under_way:
            under_way.wait(None, BEAT_S)

    def _answer_own(self, prepared: Prepared, own_time: BatchClock) -> None:
        self._answer(prepared, lambda: own_time.waited_s)


class ModelLock:
    """Lock for the model's code, which also measures the time that each batch computes."""

    def __init__(self, tell: Callable[[float], None]) -> None:
        """Store the listener to the begin of the batch that has computed longest (or to now)."""
        self._lock = FairLock()
        self._owner: int | None = None
        self._own_time = BatchClock()
        """Clock of the batch that holds the lock."""
        self._own_stream = OwnStream()
        self._told = self._own_stream.mark()
        """Mark behind all work that was queued under the lock."""
        self._tell = tell
        self._telling = threading.Lock()
        self._clocks: dict[int, float] = {}
        """Begins of the clocks that run now, by thread."""

    @contextmanager
    def held(self) -> Iterator[BatchClock]:
        """Wait for the lock and hold it for a batch; the batch's clock begins then."""
        self._acquire()
        self._own_time = own_time = BatchClock(partial(self._show, threading.get_ident()))
        try:
            yield own_time
        finally:
            own_time.end()
            self._release()

    @contextmanager
    def released(self) -> Iterator[BatchClock]:
        """Release the lock in the block; do nothing in a thread that does not hold it."""
        if self._owner != threading.get_ident():
            yield BatchClock()
            return
        own_time = self._own_time
        self._release()
        try:
            yield own_time
        finally:
            with own_time.stopped():
                self._acquire()
            self._own_time = own_time

    def progressed(self) -> None:
        """Restart the clock of the batch that holds the lock, for its next part."""
        self._own_time.progressed()

    def _acquire(self) -> None:
        self._lock.acquire()
        self._owner = threading.get_ident()
        self._own_stream.follow(self._told)

    def _release(self) -> None:
        self._owner = None
        try:
            self._told = self._own_stream.mark()
        finally:
            self._lock.release()

    def _show(self, thread: int, since: float) -> None:
        with self._telling:
            if since == math.inf:
                self._clocks.pop(thread, None)
            else:
                self._clocks[thread] = since
            self._tell(min(self._clocks.values(), default=time.monotonic()))


class OverlappingBatches:
    """Batches that are computed at the same time. Used by the worker's main thread."""

    def __init__(
        self,
        num_at_once: int,
        lock: ModelLock,
        answer: Callable[[Prepared, BatchClock], None],
    ) -> None:
        self._num_at_once = num_at_once
        self._model_lock = lock
        self._answer = answer
        self._pool = started_pool(num_at_once, "compute")
        self._free_streams: SimpleQueue[OwnStream] = SimpleQueue()
        for _ in range(num_at_once):
            self._free_streams.put(OwnStream())
        self._under_way: set[Future[bool]] = set()
        """Computations; their results are True, or False for canaries."""

    def __len__(self) -> int:
        """Return the number of batches."""
        return len(self._under_way)

    @property
    def is_full(self) -> bool:
        """True if no more batches may begin."""
        return len(self._under_way) >= self._num_at_once

    def begin(self, prepared: Prepared) -> None:
        """Begin to compute a batch."""
        assert not self.is_full
        self._under_way.add(self._pool.submit(self._compute, prepared))

    def wait(self, coming: "Future[Prepared | None] | None", timeout_s: float) -> bool:
        """Wait until a batch is answered, or until `coming` is done and may begin.

        Returns:
            True if a batch was answered that was no canary.

        Raises:
            BaseException: A computation failed; this process cannot go on.
        """
        awaited: set[Future[Any]] = {*self._under_way}
        if coming is not None and not self.is_full:
            awaited.add(coming)
        wait(awaited, timeout_s, FIRST_COMPLETED)
        done = {each for each in self._under_way if each.done()}
        self._under_way -= done
        answered = [each.result() for each in done]  # of all of them, so that errors are raised
        return any(answered)

    def _compute(self, prepared: Prepared) -> bool:
        stream = self._free_streams.get()
        try:
            with (
                torch.inference_mode(),
                stream.used(),
                self._model_lock.held() as own_time,
            ):
                self._answer(prepared, own_time)
        finally:
            self._free_streams.put(stream)
        return not prepared.is_canary
