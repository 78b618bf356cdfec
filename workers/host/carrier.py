"""Sends batches and canaries to one worker, and matches its answers to them.

Runs in the front end and never blocks: data that the pipe has no room for is written later.
"""

import asyncio
import time
from asyncio import Future
from collections.abc import Sequence
from functools import partial
from itertools import count
from multiprocessing.connection import Connection

import msgspec

from inferpool.workers.host.canary import Canary
from inferpool.workers.host.held import HeldBatch, HeldBatches, batch_timeout_s
from inferpool.workers.host.queues import FrameWriter
from inferpool.workers.shared.errors import WorkerLostError
from inferpool.workers.shared.heartbeat import HeartbeatReader
from inferpool.workers.shared.messages import Batch, BatchDone, FrameError, ItemError, ItemRef
from inferpool.workers.shared.outputs import OutputRegion

_encode = msgspec.msgpack.Encoder().encode
_SENTINEL = _encode(None)
_MAX_NAMED_REQUESTS = 8


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
        """Send a canary, which must be answered within so many seconds."""
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
        """Take an answer, and settle its batch.

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
        """Tell the worker to finish its batches and to leave."""
        self._send(_SENTINEL)

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
            is_our_doing: True if we ended it for a reason that its batches are not to blame for.

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
            self._loop.remove_writer(self._writer.fd)

    def _give(
        self, items: Sequence[ItemRef], future: "Future[BatchDone] | None", limit_s: float
    ) -> None:
        id = next(self._ids)
        body = _encode(Batch(id, list(items)))  # before it is added: encoding may fail
        self.held.add(id, HeldBatch(items, future, limit_s), time.monotonic())
        self._send(body)

    def _send(self, body: bytes) -> None:
        writer = self._writer
        assert writer is not None
        if not writer.write(body):
            self._loop.add_writer(writer.fd, self._on_writable, writer)

    def _on_writable(self, writer: FrameWriter) -> None:
        if writer.flush():
            self._loop.remove_writer(writer.fd)
