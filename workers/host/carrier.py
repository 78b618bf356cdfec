"""Sends batches and canaries to one worker, matches its answers, and detects a batch that hangs.

Runs in the front end and never blocks: data that the pipe has no room for is written later.

A canary is a batch without items: the worker computes a sample of its model. It passes through the
inbox, the preparation, the model and the outbox like any batch, so an answer proves that they work.
"""

import asyncio
import time
from asyncio import Future
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from multiprocessing.connection import Connection

import msgspec

from inferpool.workers.host.queues import FrameWriter
from inferpool.workers.shared.errors import WorkerLostError
from inferpool.workers.shared.heartbeat import HeartbeatReader
from inferpool.workers.shared.messages import Batch, BatchDone, FrameError, ItemError, ItemRef
from inferpool.workers.shared.outputs import OutputRegion

_encode = msgspec.msgpack.Encoder().encode
_SENTINEL = _encode(None)
_MAX_NAMED_REQUESTS = 8
_UNKNOWN_TIMEOUT_S = 60.0
_MIN_TIMEOUT_S = 10.0
_SLOWER = 10.0
"""Factor by which a batch may take longer than the longest batch of the warm-up."""
_LEAST_COUNTED = 2
"""Least instances that a batch counts as: two decoders may hang on one."""
_LOOK_EVERY = 0.25
"""Interval of checks while several batches are computed, as a share of a batch's timeout."""
_MAX_SHARE = 0.02
"""Largest share of a worker's time that canaries may take."""
_CANARY_SLOWER = 20.0
"""Factor by which a canary may take longer than the one before, since hosts get busy."""
_MAX_FAILURES = 2


class Carrier:
    """Sender of batches to one incarnation of a worker, and receiver of its answers."""

    def __init__(
        self,
        heartbeat: HeartbeatReader,
        outputs: OutputRegion,
        *,
        wanted_timeout_s: float | None,
        patience_s: float,
        canary_every_s: float,
        num_at_once: int = 1,
    ) -> None:
        """Expect `attach`.

        Args:
            heartbeat: Heartbeat of the worker.
            outputs: Memory with large outputs of the worker.
            wanted_timeout_s: Seconds that a batch may run; None derives them from the warm-up.
            patience_s: Seconds that the worker may take to begin a batch.
            canary_every_s: Seconds between a good answer and the next canary, at least.
            num_at_once: Batches that the worker may compute at once.
        """
        self._new_canary = partial(Canary, every_s=canary_every_s, patience_s=patience_s)
        timeout_s = batch_timeout_s(wanted_timeout_s, None)
        self.canary = self._new_canary(timeout_s)
        self.held = HeldBatches(
            heartbeat, batch_timeout_s=timeout_s, patience_s=patience_s, num_at_once=num_at_once
        )
        self.proven_at = 0.0
        """Time of the last good answer; 0.0 before the first."""
        self.has_worked = False
        """True once it has answered a batch that was no canary."""
        self._heartbeat = heartbeat
        self._outputs = outputs
        self._wanted_timeout_s = wanted_timeout_s
        self._loop = asyncio.get_running_loop()
        self._writer: FrameWriter | None = None
        self._ids = count(1)

    def attach(self, inbox: Connection) -> None:
        """Use the inbox of the started process."""
        self._writer = FrameWriter(inbox)

    def prove(self, warmup_s: float | None) -> None:
        """Send the first canary; `warmup_s` is the time of the longest batch of the warm-up."""
        timeout_s = batch_timeout_s(self._wanted_timeout_s, warmup_s)
        self.held.batch_timeout_s = timeout_s
        self.canary = self._new_canary(timeout_s)
        self.give_canary(timeout_s)

    def give(self, items: Sequence[ItemRef]) -> "Future[BatchDone]":
        """Send a batch.

        Raises:
            Exception: It cannot be encoded. Nothing was sent.
        """
        assert items, "a batch without items is a canary"
        future: Future[BatchDone] = self._loop.create_future()
        self._give(items, future, self.held.batch_timeout_s)
        return future

    def give_canary(self, limit_s: float) -> None:
        """Send a canary, and expect an answer within `limit_s` seconds."""
        self._give((), None, limit_s)

    def is_canary_due(self, now: float) -> bool:
        """Return True if the last good answer is too long ago; False before the first."""
        return bool(self.proven_at) and now - self.proven_at >= self.canary.every_s

    def next_due_s(self, now: float) -> float:
        """Return the seconds until a batch may have timed out or a canary is due."""
        if self.held or not self.proven_at:
            return self.held.next_due_s(now)
        return self.proven_at + self.canary.every_s - now

    def take(self, done: BatchDone) -> bool:
        """Receive an answer, and settle its batch.

        Returns:
            True if it answers a canary; `canary.failure` has the error, if it failed.

        Raises:
            FrameError: The worker holds no such batch.
            StoredError: The answer names outputs that do not exist.
        """
        held = self.held
        batch = held.get(done.id)
        if batch is None:
            raise FrameError(f"an answer to batch {done.id}, which it does not hold")
        outcomes, future = done.outcomes, batch.future
        if future is not None and len(batch.items) != len(outcomes):
            raise FrameError(f"{len(outcomes)} outcomes for {len(batch.items)} items")
        if done.num_stored:
            done = self._outputs.find(done)
        now = time.monotonic()
        held.remove(done.id, now)
        if future is None:
            if self.canary.note(done):
                self.proven_at = now
            return True
        if not all(isinstance(outcome, ItemError) for outcome in outcomes):
            self.proven_at = now
            self.canary.forget_failures()
        elif self.is_canary_due(now) and not held.has_canary:
            # A busy worker gets a canary only if all its answers are errors, with a batch's time.
            self.give_canary(held.batch_timeout_s)
        self.has_worked = True
        if not future.done():  # else nobody waits for it any more
            future.set_result(done)
        return False

    def send_sentinel(self) -> None:
        """Ask the worker to finish its batches and to leave."""
        assert self._writer is not None
        self._writer.write(_SENTINEL)

    def at_work_on(self) -> str:
        """Return a text that names the requests which it computes, for a log line."""
        ids = self.held.request_ids()
        if not ids:
            return ""
        named = ", ".join(ids[:_MAX_NAMED_REQUESTS])
        more = len(ids) - _MAX_NAMED_REQUESTS
        return f", at work on {named}" + (f" and {more} more" if more > 0 else "")

    def lose_all(self, reason: str, *, is_our_doing: bool) -> bool:
        """Fail all batches. Call it after the worker's exit: nothing reads their payloads any more.

        Args:
            reason: How the worker ended, for people.
            is_our_doing: True if we ended it, and not because of its batches.

        Returns:
            True if the worker had begun a batch that may be to blame.
        """
        last_received = self._heartbeat.last_received
        was_at_work = False
        for id, batch in self.held.take_all().items():
            if batch.future is not None:
                is_started = id <= last_received and not is_our_doing
                was_at_work = was_at_work or is_started
                if not batch.future.done():  # else nobody waits for it any more
                    batch.future.set_exception(WorkerLostError(reason, started=is_started))
        return was_at_work

    def close(self) -> None:
        """Stop writing."""
        if self._writer is not None:
            self._writer.close()

    def _give(
        self, items: Sequence[ItemRef], future: "Future[BatchDone] | None", limit_s: float
    ) -> None:
        id = next(self._ids)
        body = _encode(Batch(id, list(items)))  # before it is added: encoding may fail
        self.held.add(id, HeldBatch(items, future, limit_s), time.monotonic())
        assert self._writer is not None
        self._writer.write(body)


class Canary:
    """Results of the canaries of one incarnation."""

    def __init__(self, batch_timeout_s: float, *, every_s: float, patience_s: float) -> None:
        """Expect the first canary.

        Args:
            batch_timeout_s: Seconds that a batch may take.
            every_s: Seconds between a good answer and the next canary, at least.
            patience_s: Seconds that a quick canary may take.
        """
        self._batch_timeout_s = batch_timeout_s
        self._least_every_s = every_s
        self._patience_s = patience_s
        self._num_failures = 0
        self.every_s = every_s
        """Seconds between a good answer and the next canary."""
        self.limit_s = batch_timeout_s
        """Seconds that the next canary may take; the first may take as long as a batch."""
        self.failure = ""
        """Error of the last canary that failed."""

    @property
    def is_ill(self) -> bool:
        """True if several in a row have failed: a new incarnation may do better."""
        return self._num_failures >= _MAX_FAILURES

    def note(self, done: BatchDone) -> bool:
        """Count the answer to a canary; return True if it is a good one."""
        took_s = done.prepare_s + done.compute_s
        self.limit_s = min(self._batch_timeout_s, max(self._patience_s, took_s * _CANARY_SLOWER))
        self.every_s = max(self._least_every_s, took_s / _MAX_SHARE)
        errors = [outcome for outcome in done.outcomes if isinstance(outcome, ItemError)]
        if not errors:
            self.forget_failures()
            return True
        self._num_failures += 1
        self.failure = errors[0].message
        return False

    def forget_failures(self) -> None:
        """Count failures anew, after a good answer to a batch or a canary."""
        self._num_failures, self.failure = 0, ""


def batch_timeout_s(wanted_s: float | None, warmup_s: float | None) -> float:
    """Return the seconds that a batch may run.

    Args:
        wanted_s: The user's setting; None derives it from the warm-up.
        warmup_s: Seconds of the longest batch of the warm-up; None if there was none (yet).
    """
    if wanted_s is not None:
        return wanted_s
    if warmup_s is None:
        return _UNKNOWN_TIMEOUT_S
    return max(_MIN_TIMEOUT_S, warmup_s * _SLOWER)


@dataclass(frozen=True, slots=True)
class HeldBatch:
    """A batch that a worker holds; a canary if it has no future."""

    items: Sequence[ItemRef]
    future: "Future[BatchDone] | None"
    limit_s: float


class HeldBatches:
    """Batches of one worker by id, oldest first.

    The time of a batch runs only while it is the oldest. A pipeline computes several at once: there
    the worker measures the time that each of them has computed, not waited, and reports the longest
    in its heartbeat. So a batch that hangs is found even if others pass it, and a batch that waits
    behind many others still has its whole time.

    The worker's process writes the reports, and a model's code may overwrite them. A second bound
    ignores them: the timeout of a batch, times the instances of the oldest batch, times the batches
    that may be computed at once.
    """

    def __init__(
        self,
        heartbeat: HeartbeatReader,
        *,
        batch_timeout_s: float,
        patience_s: float,
        num_at_once: int = 1,
    ) -> None:
        self.batch_timeout_s = batch_timeout_s
        self._heartbeat = heartbeat
        self.patience_s = patience_s
        self._num_at_once = num_at_once
        self._batches: dict[int, HeldBatch] = {}
        self._oldest_since = self._forgiven_at = self._answered_at = 0.0

    def __len__(self) -> int:
        """Return the number of batches."""
        return len(self._batches)

    @property
    def has_canary(self) -> bool:
        """True if one of them is a canary."""
        return any(batch.future is None for batch in self._batches.values())

    @property
    def is_oldest_canary(self) -> bool:
        """True if the oldest batch is a canary."""
        return any(batch.future is None for _, batch in self._oldest())

    @property
    def is_any_begun(self) -> bool:
        """True if the worker has begun the oldest batch."""
        return any(self._is_begun(id) for id, _ in self._oldest())

    def add(self, id: int, batch: HeldBatch, now: float) -> None:
        """Add a batch that has been sent."""
        if not self._batches:
            self._oldest_since = self._answered_at = now
        self._batches[id] = batch

    def get(self, id: int) -> HeldBatch | None:
        """Return the batch with that id, if the worker holds it."""
        return self._batches.get(id)

    def remove(self, id: int, now: float) -> None:
        """Remove a batch that has been answered; if it was the oldest, start the time of the next.

        In a pipeline the next may have computed for long already: then the worker's own measurement
        counts, unless it includes a pause of the whole host.
        """
        was_oldest = id == next(iter(self._batches))
        del self._batches[id]
        self._answered_at = now
        has_clock = self._heartbeat.at_work_since > self._forgiven_at
        if was_oldest and not (has_clock and self.is_any_begun):
            self._oldest_since = now

    def take_all(self) -> dict[int, HeldBatch]:
        """Remove and return all batches."""
        batches, self._batches = self._batches, {}
        return batches

    def forgive(self, pause_s: float, now: float) -> None:
        """Do not count a pause of the whole host as time of a batch."""
        self._oldest_since = min(now, self._since() + pause_s)
        self._answered_at = min(now, self._answered_at + pause_s)
        self._forgiven_at = now

    def oldest_age_s(self, now: float) -> float:
        """Return the seconds since the oldest made progress; 0 if there is none."""
        return max(0.0, now - self._since()) if self._batches else 0.0

    def next_due_s(self, now: float) -> float:
        """Return the seconds until the next check is due; infinite if no batch is held."""
        for id, batch in self._oldest():
            limit_s = self._limit_s(id, batch)
            due_s = self._since() + limit_s - now
            if self._heartbeat.at_work_since:  # the next batch may have used up some of its time
                due_s = min(due_s, limit_s * _LOOK_EVERY)
            return min(due_s, self._answered_at + self._most_s(batch) - now)
        return float("inf")

    def hang(self, now: float) -> str:
        """Return why the worker counts as hung, if the oldest batch takes too long; else ""."""
        for id, batch in self._oldest():
            limit_s, most_s = self._limit_s(id, batch), self._most_s(batch)
            if now - self._since() <= limit_s:
                if now - self._answered_at <= most_s:
                    return ""
                return f"hung: it reports progress, and has answered nothing for {most_s:g} s"
            if not self._is_begun(id):
                return f"hung: it was idle, and took up no work for {limit_s:g} s"
            what = "a sample of its own" if batch.future is None else "a batch"
            return f"hung: {what} ran for more than {limit_s:g} s"
        return ""

    def request_ids(self) -> list[str]:
        """Return the ids of the requests that the worker has begun, each once."""
        ids = {
            item.request_id: None
            for id, batch in self._batches.items()
            if self._is_begun(id)
            for item in batch.items
            if item.request_id
        }
        return list(ids)

    def _oldest(self) -> Iterator[tuple[int, HeldBatch]]:
        for each in self._batches.items():
            yield each
            return

    def _is_begun(self, id: int) -> bool:
        return id <= self._heartbeat.last_received

    def _since(self) -> float:
        # A batch may be computed in parts: each part has the time of a batch.
        heartbeat = self._heartbeat
        return max(self._oldest_since, heartbeat.progressed_at, heartbeat.at_work_since)

    def _limit_s(self, id: int, batch: HeldBatch) -> float:
        if not self._is_begun(id):
            return self.patience_s
        if batch.future is None and id < self._heartbeat.last_received:
            return self.batch_timeout_s  # preparing a later batch may delay it
        return batch.limit_s

    def _most_s(self, batch: HeldBatch) -> float:
        """Return the most seconds for the oldest batch, independent of the worker's reports."""
        return self.batch_timeout_s * max(_LEAST_COUNTED, len(batch.items)) * self._num_at_once
