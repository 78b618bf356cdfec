"""Computes several batches at once, so that all stages of a pipeline are busy. Worker processes.

Each batch is computed in a thread of its own. Models need not be thread-safe: a thread must hold
the *model lock* to run the model's code (`forward`, `postprocess`, `render_batch`), and holds it
until its batch is answered. It releases the lock only while a call of the network passes through
the stages of the pipeline. So batches share only the state that `forward` keeps on the model across
its call of the network. The clock of a batch measures its own time: it stands still while the batch
waits for the lock, or for other batches in the stages before it.

On an accelerator each batch has a stream of its own, or its answer would wait for the first stage
of the batches behind it. What the model's code tells the device is done in the order of the lock.
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
from inferpool.models.split.turnstile import BatchClock, FairLock
from inferpool.workers.inside.pools import started_pool
from inferpool.workers.inside.preparing import Prepared


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
        """Mark behind all that the device was told under the lock."""
        self._tell = tell
        self._telling = threading.Lock()
        self._clocks: dict[int, float] = {}
        """Begins of the clocks that run now, by thread."""

    @contextmanager
    def held(self) -> Iterator[BatchClock]:
        """Wait for the lock and hold it for a batch, whose clock begins then."""
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
        """Note that the next part of the batch begins that holds the lock."""
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
        """See `BatchClock`."""
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
