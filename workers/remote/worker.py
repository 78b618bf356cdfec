"""The front end's view of one incarnation of a worker on another host."""

import asyncio
import time
from asyncio import Future
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING

from inferpool.workers.host.engine import Ending, Vitals, WorkerId
from inferpool.workers.remote.wire import (
    BatchLost,
    RunBatch,
    StopWorker,
    WorkerPulse,
    WorkerStarted,
)
from inferpool.workers.shared.errors import WorkerLostError
from inferpool.workers.shared.messages import BatchDone, ItemRef, Ready

if TYPE_CHECKING:
    from inferpool.workers.remote.host import RemoteHost

_END_S = 10.0
"""Seconds beyond the grace that an agent may take to end a worker, by force if need be."""
_AVERAGED = 0.2
"""Weight of the latest batch in the average of the time that one takes."""


class RemoteWorker:
    """One incarnation of a worker: what it holds, and what its agent has reported of it."""

    def __init__(self, id: WorkerId, started: WorkerStarted, host: "RemoteHost") -> None:
        self.id = id
        self.ready: Ready = started.ready
        self.has_worked = False
        self._number = started.number
        self._own_credit = started.credit
        self._host = host
        self._loop = asyncio.get_running_loop()
        self._ids = count(1)
        self._held: dict[int, tuple[Future[BatchDone], int]] = {}
        """Batches by number, each with its number of instances."""
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

    def run(self, items: Sequence[ItemRef]) -> "Future[BatchDone]":
        """Send a batch; its future fails with `WorkerLostError` once the worker has ended."""
        assert items, "only the agent sends canaries"
        future: Future[BatchDone] = self._loop.create_future()
        if self._ending_reason:
            future.set_exception(self._lost(started=False))
            return future
        id = next(self._ids)
        self._host.order(RunBatch(self._number, id, time.monotonic(), items), items)
        self._held[id] = future, len(items)
        return future

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
        future, num_items = self._held.get(done.id, (None, 0))
        if future is None:
            raise ValueError(f"an answer to batch {done.id}, which {self.id} does not hold")
        if len(done.outcomes) != num_items:
            raise ValueError(f"{len(done.outcomes)} outcomes for {num_items} instances")
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
        future, _ = self._held.pop(lost.id, (None, 0))
        if future is not None and not future.done():
            future.set_exception(WorkerLostError(lost.reason, started=lost.started))

    def on_ended(self, ending: Ending) -> None:
        """Store how it ended. Batches that are on their way to it come back one by one."""
        self._ending_reason = self._ending_reason or ending.reason or "ended"
        if not self._gone.done():
            self._gone.set_result(ending)

    def on_host_lost(self, reason: str) -> None:
        """Fail all batches: its connection has ended, so no answer can come."""
        self._ending_reason, self._is_lost_with_host = reason, True
        held, self._held = self._held, {}
        for future, _ in held.values():
            if not future.done():
                future.set_exception(self._lost(started=False))
        if not self._gone.done():
            self._gone.set_result(Ending(cause="host", reason=reason))

    def _lost(self, *, started: bool) -> WorkerLostError:
        with_host = self._is_lost_with_host
        return WorkerLostError(self._ending_reason, started=started, with_host=with_host)
