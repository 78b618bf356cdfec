"""An engine for debugging: its worker is a thread of this process, so a debugger has the terminal.

It serves `inferpool serve --debug` and unit tests of models. There is no process to kill, so it
does not pass the tests of engines: a model that hangs or crashes takes the service with it.
"""

import asyncio
import logging
import os
import queue
import threading
import time
from asyncio import Future
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from mmap import PAGESIZE, mmap
from typing import Any

import psutil
import torch

from inferpool.models.attached import attached
from inferpool.models.errors import ModelError
from inferpool.models.texts import described
from inferpool.workers.host.engine import Ending, OnParts, Vitals, WorkerId
from inferpool.workers.host.held_streams import HeldStreams, dropped, share_out
from inferpool.workers.inside.compute import Computer
from inferpool.workers.inside.own_process import pin
from inferpool.workers.inside.process import BatchReceiver, load
from inferpool.workers.shared.arena import Arena
from inferpool.workers.shared.config import WorkerConfig
from inferpool.workers.shared.errors import WorkerLostError, WorkerStartError
from inferpool.workers.shared.heartbeat import Heartbeat
from inferpool.workers.shared.messages import (
    Batch,
    BatchDone,
    FromWorker,
    ItemError,
    ItemRef,
    Ready,
    StreamParts,
    ToWorker,
)

logger = logging.getLogger(__name__)


class InProcessEngine:
    """Engine that starts a worker as a thread."""

    def __init__(self, arena: Arena, *, pins: bool = True) -> None:
        self._arena = arena
        self._pins = pins

    async def start(
        self, id: WorkerId, config: WorkerConfig, on_progress: Callable[[str], None]
    ) -> "InProcessWorker":
        """Start a thread, and return once its model is loaded; there is no time limit.

        Raises:
            WorkerStartError: The model cannot be loaded.
        """
        config = replace(config, error_detail="traceback")
        worker = InProcessWorker(id, memoryview(self._arena.memory.map))
        try:
            await worker.load(config, on_progress, pins=self._pins)
        except ModelError as error:
            raise WorkerStartError(str(error), permanent=True) from error
        except Exception as error:
            logger.error("loading failed", exc_info=error)
            reason = f"loading failed: {type(error).__name__}: {error}"
            raise WorkerStartError(reason, permanent=True) from error
        return worker

    async def close(self) -> None:
        """Do nothing: the thread ends with the process."""

    def forkserver_vitals(self) -> None:
        """Return None: there is no forkserver."""


class InProcessWorker:
    """A thread with a model. Everything but `_work` runs in the event loop."""

    credit = 1
    is_stalled = False

    def __init__(self, id: WorkerId, arena: memoryview) -> None:
        self.id = id
        self.has_worked = False
        self._arena = arena
        self._loop = asyncio.get_running_loop()
        self._orders: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = (
            queue.SimpleQueue()
        )
        self._under_way: set[Future[Any]] = set()
        self._gone: Future[Ending] = self._loop.create_future()
        self._streams: StreamsInThread | None = None
        self._num_batches = 0
        self._answered_at = time.monotonic()
        # A daemon: it may wait at a debugger's prompt when the service stops.
        self._thread = threading.Thread(target=self._work, name="model", daemon=True)
        self._thread.start()

    async def load(
        self, config: WorkerConfig, on_progress: Callable[[str], None], *, pins: bool
    ) -> None:
        """Load the model in the thread."""

        def tell(stage: str) -> None:
            self._loop.call_soon_threadsafe(on_progress, stage)

        def load_here() -> tuple[Computer, Ready]:
            if pins:
                pin(config.placement)
            return load(config, tell)

        self._computer, self.ready = await self._order(load_here)
        if self.ready.interface.streams:
            self._streams = StreamsInThread(self._computer, self._arena)
            self.credit = config.max_batch_size if self.ready.interface.joins else 1
            self._orders.put((self._loop.create_future(), self._streams.serve))

    def run(self, items: Sequence[ItemRef], on_parts: OnParts | None = None) -> Future[BatchDone]:
        """Send a batch to the thread."""
        self._num_batches += 1
        if self._streams is not None:
            future = self._awaited()
            self._streams.begin(self._num_batches, items, future, on_parts)
        else:
            future = self._order(partial(self._compute, self._num_batches, items))
        future.add_done_callback(self._on_answer)
        return future

    def drop(self, batch: Future[BatchDone], indices: Sequence[int]) -> None:
        """End some streams of a batch."""
        if self._streams is not None:
            self._streams.drop(batch, indices)

    async def wait(self) -> Ending:
        """Wait for the end of the thread, and return how it ended."""
        return await asyncio.shield(self._gone)

    async def stop(self, grace_s: float) -> None:
        """Wait for batches for `grace_s`, then give them up: a thread cannot be killed."""
        if self._under_way:
            await asyncio.wait(self._under_way, timeout=grace_s)
        if self._streams is not None:
            self._streams.leave()
        self._orders.put(None)
        for future in self._under_way:
            if not future.done():
                future.set_exception(WorkerLostError("stopped", started=True))
        if not self._gone.done():
            self._gone.set_result(Ending(cause="asked", reason="stopped"))

    def vitals(self) -> Vitals:
        """Return the present state."""
        return Vitals(
            pid=os.getpid(),
            rss_bytes=psutil.Process().memory_info().rss,
            last_beat_age_s=0.0,
            num_batches=self._num_batches,
            last_answer_age_s=time.monotonic() - self._answered_at,
        )

    def _order(self, work: Callable[[], Any]) -> Future[Any]:
        future = self._awaited()
        self._orders.put((future, work))
        return future

    def _awaited(self) -> Future[Any]:
        """Return a future that the stop of this worker waits for."""
        future: Future[Any] = self._loop.create_future()
        self._under_way.add(future)
        future.add_done_callback(self._under_way.discard)
        return future

    def _on_answer(self, _: object) -> None:
        self.has_worked = True
        self._answered_at = time.monotonic()

    def _compute(self, number: int, items: Sequence[ItemRef]) -> BatchDone:
        payloads = [self._arena[each.offset : each.offset + each.num_bytes] for each in items]
        began = time.monotonic()
        with torch.inference_mode():  # as in a worker, which also loads outside of it
            prepared = self._computer.prepare(number, items, payloads)
            computed_at = time.monotonic()
            try:
                outcomes = self._computer.compute(prepared)
            except Exception as error:  # those that would end a worker
                logger.exception("this would have ended a worker")
                text = f"the worker would have ended: {described(error)}"
                outcomes = [ItemError("model_error", text)] * len(items)
        compute_s = time.monotonic() - computed_at
        return BatchDone(number, outcomes, prepared.prepare_s, compute_s, 0, began, computed_at)

    def _work(self) -> None:
        while (order := self._orders.get()) is not None:
            future, work = order
            try:
                result = work()
            except BaseException as error:
                failure = error
                if isinstance(error, StopIteration) or not isinstance(error, Exception):
                    # A future cannot hold it, or it would end more than this task.
                    failure = RuntimeError(f"the model raised {described(error)}")
                    failure.__cause__ = error
                settle = partial(_settle, future, None, failure)
            else:
                settle = partial(_settle, future, result, None)
            try:
                self._loop.call_soon_threadsafe(settle)
            except RuntimeError:  # the loop is closed: the service has stopped
                return


@dataclass(slots=True)
class _StreamsUnderWay:
    future: Future[BatchDone]
    streams: HeldStreams | None


class StreamsInThread:
    """Both ends of the queues of a model that answers in parts.

    The loop of such a worker runs in the model's thread: see `serve`. All else runs in the event
    loop, but for the two methods that this loop calls, `get` and `put`.
    """

    def __init__(self, computer: Computer, arena: memoryview) -> None:
        self._computer = computer
        self._arena = arena
        self._loop = asyncio.get_running_loop()
        self._inbox: queue.SimpleQueue[ToWorker] = queue.SimpleQueue()
        self.get = self._inbox.get
        self._held: dict[int, _StreamsUnderWay] = {}

    def serve(self) -> None:
        """Answer streams until the sentinel comes."""
        heartbeat = Heartbeat(mmap(-1, PAGESIZE))
        receiver = BatchReceiver(self._computer, self, self._arena, heartbeat)  # type: ignore[arg-type]  # the loop only calls `get`
        try:
            attached("stream loop")(self._computer, receiver, self, heartbeat, None).serve()
        except Exception as error:  # those that would end a worker
            logger.exception("this would have ended a worker")
            reason = f"the worker would have ended: {described(error)}"
            self._tell(self._lose_all, reason)

    def wait(self, timeout_s: float) -> bool:
        """Return False: the loop for streams waits for its queue by itself."""
        return False

    def put(self, message: FromWorker) -> None:
        """Send a message from the model's thread."""
        self._tell(self._on_message, message)

    def begin(
        self,
        id: int,
        items: Sequence[ItemRef],
        future: Future[BatchDone],
        on_parts: OnParts | None,
    ) -> None:
        """Send a batch."""
        streams = on_parts and HeldStreams(len(items), on_parts)
        self._held[id] = _StreamsUnderWay(future, streams)
        self._inbox.put(Batch(id, [*items]))

    def drop(self, batch: Future[BatchDone], indices: Sequence[int]) -> None:
        """End some streams of a batch."""
        if (message := dropped(self._held, batch, indices)) is not None:
            self._inbox.put(message)

    def leave(self) -> None:
        """Have the model's thread leave the loop once all streams are over."""
        self._inbox.put(None)

    def _tell(self, do: Callable[..., None], what: object) -> None:
        with suppress(RuntimeError):  # the loop is closed: the service has stopped
            self._loop.call_soon_threadsafe(do, what)

    def _on_message(self, message: FromWorker) -> None:
        match message:
            case StreamParts():
                share_out(message.parts, self._held.get)
            case BatchDone():
                batch = self._held.pop(message.id)
                if batch.streams is not None:
                    message = batch.streams.ended(message)
                _settle(batch.future, message, None)

    def _lose_all(self, reason: str) -> None:
        held, self._held = self._held, {}
        for batch in held.values():
            _settle(batch.future, None, WorkerLostError(reason, started=True))


def _settle(future: Future[Any], result: object, error: BaseException | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)
