"""The front end's view of one incarnation of a worker on this host.

A worker is one process. Of a split replica it has one for each device; the lead owns the inbox and
answers the batches: see `workers.ranks.host_side`. `RankProcess` is one of them. `Carrier` sends
batches and canaries, matches the answers, and detects a batch that hangs.

Nothing here blocks the event loop: reads and writes return at once, and data that a pipe has no
room for is written later. The end of file of a process's outbox, or its sentinel, shows its death.

A canary is a batch without items: the worker computes a sample of its model. It passes through the
inbox, the preparation, the model and the outbox like any batch, so an answer proves that they work.
"""

import asyncio
import logging
import signal
import time
from asyncio import Future, Task
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from multiprocessing.connection import Connection, Pipe
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING, Protocol

import msgspec

from inferpool.models.attached import attached
from inferpool.workers.host.attachment import Attachment  # noqa: TC001  # as everywhere else
from inferpool.workers.host.engine import (
    USUAL_PERIODS,
    Cause,
    Ending,
    OnParts,
    Vitals,
    WorkerId,
    WorkerPeriods,
)
from inferpool.workers.host.error_guard import ErrorGuard
from inferpool.workers.host.observed import EXIT_AFTER_EOF_S, ObservedProcess, OomKills
from inferpool.workers.inside import entry
from inferpool.workers.shared.config import WorkerConfig
from inferpool.workers.shared.errors import WorkerLostError, WorkerStartError
from inferpool.workers.shared.heartbeat import HeartbeatReader
from inferpool.workers.shared.log_lines import log_line
from inferpool.workers.shared.messages import (
    UNREADABLE,
    Batch,
    BatchDone,
    FromWorker,
    ItemError,
    ItemRef,
    Leaving,
    LogLine,
    Ready,
    StartFailed,
    StartProgress,
    StreamParts,
)
from inferpool.workers.shared.outputs import OutputRegion, StoredError
from inferpool.workers.shared.queues import FrameError, FrameReader, FrameWriter
from inferpool.workers.shared.stacks import Stacks

if TYPE_CHECKING:
    from inferpool.workers.host.held_streams import HeldStreams

logger = logging.getLogger(__name__)

_decode = msgspec.msgpack.Decoder(FromWorker).decode
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
_PIPE_BYTES = 1 << 20
"""Requested pipe size; the kernel may give less once a user has many pipes open."""
_F_SETPIPE_SZ = 1031
"""linux/fcntl.h; the fcntl module has it on Linux from Python 3.10 on."""
_STALLED_S = 3.0
"""Seconds without a heartbeat; an idle process beats every second."""
PAUSE_S = 0.5
"""Delay of the watch that only a pause of the whole host explains, not one of this loop."""
Program = tuple[Callable[..., None], tuple[object, ...]]
"""Entry point of a process, and its arguments."""


class PrivateQueue:
    """A queue with one end here; the other end goes to the process that it is passed to."""

    def __init__(self) -> None:
        self.reader: Connection
        self.writer: Connection
        self.reader, self.writer = Pipe(duplex=False)
        _widen(self.writer.fileno())

    def __reduce__(self) -> tuple[object, ...]:
        """Become a queue of torch.multiprocessing in the worker."""
        return entry.queue_of, (self.reader, self.writer)

    def close(self) -> None:
        """Close the ends that are still open here."""
        self.reader.close()
        self.writer.close()


class RankListener(Protocol):
    """Listener to a process: the worker that it belongs to."""

    def on_message(self, rank: "RankProcess", message: FromWorker) -> None:
        """Handle a message of the process.

        Raises:
            FrameError: The message makes no sense here.
            StoredError: The message names outputs that do not exist.
        """

    def on_mute(self, rank: "RankProcess", reason: str) -> None:
        """Handle the end of its messages; the reason is empty if it is exiting."""

    def on_exit(self, rank: "RankProcess") -> None:
        """Handle its exit, which is confirmed; all its messages have been handled."""


class RankProcess:
    """One process of a worker, from before its start until its exit is confirmed."""

    def __init__(
        self,
        worker: WorkerId,
        number: int,
        oom_kills: OomKills,
        *,
        is_alone: bool,
        kind: str = "rank",
        periods: WorkerPeriods = USUAL_PERIODS,
    ) -> None:
        """Create the outbox, the heartbeat and the stacks that the process will write to.

        Args:
            worker: The worker that it belongs to.
            number: Its rank, from 0.
            oom_kills: Counter of the kernel's kills for memory.
            is_alone: True if the worker has no other process.
            kind: Name of its kind in the log: "rank" or "decoder".
            periods: Times for looks and waits.

        Raises:
            SharedMemoryError: There is too little memory.
            OSError: There are too few descriptors.
        """
        self.number = number
        self.name = str(worker) if is_alone else f"{worker} {kind} {number}"
        self.labels: dict[str, object] = {"worker": str(worker)}
        """Fields of each line of its log."""
        if not is_alone:
            self.labels[kind] = number
        self._worker = worker
        self._is_alone = is_alone
        self._who = "it" if is_alone else f"{kind} {number}"
        self.outbox = PrivateQueue()
        self.stacks = Stacks(periods.stacks_step_s)
        self.heartbeat = HeartbeatReader()
        self.is_gone = False
        self.has_left = False
        """True once it has exited with code 0, as asked."""
        self._oom_kills = oom_kills
        self._loop = asyncio.get_running_loop()
        self._observed: ObservedProcess | None = None
        self.ending: tuple[Cause, str] = "start", "never started"
        """Kind of its end, and an explanation for people."""
        self._is_read = True
        """True while its messages are read."""

    @property
    def is_attached(self) -> bool:
        """True once it has been started."""
        return self._observed is not None

    @property
    def pid(self) -> int:
        """Process number; 0 before the start."""
        return self._observed.pid if self._observed else 0

    @property
    def rss_bytes(self) -> int:
        """Memory of the process; after its end, the last value measured."""
        return self._observed.rss_bytes if self._observed else 0

    def attach(self, process: BaseProcess, listener: RankListener) -> None:
        """Use the started process: close its end of the queue, and listen."""
        self._listener = listener
        self._observed = ObservedProcess(process, self._oom_kills, self._on_exit)
        self.outbox.writer.close()
        self._reader = FrameReader(self.outbox.reader)
        self._loop.add_reader(self._reader.fd, self._on_readable)

    def look(self) -> None:
        """Record what cannot be read any more after the end; takes some 0.1 ms."""
        if self._observed is not None:
            self._observed.look()

    def about(self, text: str) -> str:
        """Return a text about it for people, with its rank if the worker has others."""
        return text if self._is_alone else f"{self._who}: {text}"

    def signal(self, signum: int) -> None:
        """Send a signal if the process still exists."""
        if self._observed is not None:
            self._observed.signal(signum)

    async def log_stacks(self, reason: str, at_work_on: str) -> None:
        """Log the stacks of its threads before it is killed.

        Args:
            reason: Why it will be killed.
            at_work_on: Text that names the requests which it computes, or empty.
        """
        state, trace = await self.stacks.ask(self.pid)
        self._log(f"{self._worker} {reason}{at_work_on}; {self._who} is {state}: killing it", trace)

    def close(self) -> None:
        """Release what it wrote to. Call it after its exit, or if it was never started."""
        if self._observed is not None:
            self._loop.remove_reader(self._reader.fd)
        self.outbox.close()
        self.stacks.close()
        self.heartbeat.close()

    def log_last_stacks(self, reason: str, at_work_on: str) -> None:
        """Log the stacks that it wrote if it crashed."""
        if trace := self.stacks.take():
            self._log(f"{self.name} left its stacks ({reason}){at_work_on}", trace)

    def _log(self, text: str, trace: str) -> None:
        log_line(LogLine(logging.ERROR, __name__, text, traceback=trace), self.labels)

    def _on_readable(self) -> None:
        try:
            for frame in self._reader.frames():
                self._listener.on_message(self, _decode(frame))
        except EOFError:
            self._mute("")
        except (FrameError, StoredError, *UNREADABLE) as error:
            logger.error("%s wrote an invalid message: %s", self.name, error)
            self._mute("wrote an invalid message")

    def _mute(self, reason: str) -> None:
        self._is_read = False
        self._loop.remove_reader(self._reader.fd)
        self._listener.on_mute(self, reason)
        self._loop.call_later(EXIT_AFTER_EOF_S, self.signal, signal.SIGKILL)

    def _on_exit(self) -> None:
        assert self._observed is not None
        self._reader.is_dry = False
        while self._is_read and not self._reader.is_dry:
            self._on_readable()  # until the pipe is empty: a child of the process may keep it open
        self.is_gone = True
        self.has_left = self._observed.exit_code == 0
        self.ending = self._observed.ending.cause, self._observed.ending.reason
        self._listener.on_exit(self)


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
        self.writer: FrameWriter | None = None
        self._ids = count(1)

    def attach(self, inbox: Connection) -> None:
        """Use the inbox of the started process."""
        self.writer = FrameWriter(inbox)

    def prove(self, warmup_s: float | None) -> None:
        """Send the first canary; `warmup_s` is the time of the longest batch of the warm-up."""
        timeout_s = batch_timeout_s(self._wanted_timeout_s, warmup_s)
        self.held.batch_timeout_s = timeout_s
        self.canary = self._new_canary(timeout_s)
        self.give_canary(timeout_s)

    def give(
        self, items: Sequence[ItemRef], on_parts: OnParts | None = None
    ) -> "Future[BatchDone]":
        """Send a batch; `on_parts` gets its parts if the model answers in parts.

        Raises:
            Exception: It cannot be encoded. Nothing was sent.
        """
        assert items, "a batch without items is a canary"
        future: Future[BatchDone] = self._loop.create_future()
        streams = on_parts and attached("held streams")(len(items), on_parts)
        self._give(HeldBatch(items, future, self.held.batch_timeout_s, streams))
        return future

    def give_canary(self, limit_s: float) -> None:
        """Send a canary, and expect an answer within `limit_s` seconds."""
        self._give(HeldBatch((), None, limit_s))

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
        if batch.streams is not None:
            done = batch.streams.ended(done)
            outcomes = done.outcomes
        if done.num_stored:
            done = self._outputs.find(done)
        now = time.monotonic()
        held.remove(done.id, now)
        if future is None:
            if self.canary.record(done):
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
        assert self.writer is not None
        self.writer.write(_SENTINEL)

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
        if self.writer is not None:
            self.writer.close()

    def _give(self, batch: "HeldBatch") -> None:
        id = next(self._ids)
        body = _encode(Batch(id, list(batch.items)))  # before it is added: encoding may fail
        self.held.add(id, batch, time.monotonic())
        assert self.writer is not None
        self.writer.write(body)


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

    def record(self, done: BatchDone) -> bool:
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
    streams: "HeldStreams | None" = None


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
        self.batches: dict[int, HeldBatch] = {}
        self._oldest_since = self._paused_at = self.answered_at = 0.0

    def __len__(self) -> int:
        """Return the number of batches."""
        return len(self.batches)

    @property
    def has_canary(self) -> bool:
        """True if one of them is a canary."""
        return any(batch.future is None for batch in self.batches.values())

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
        if not self.batches:
            self._oldest_since = self.answered_at = now
        self.batches[id] = batch

    def get(self, id: int) -> HeldBatch | None:
        """Return the batch with that id, if the worker holds it."""
        return self.batches.get(id)

    def remove(self, id: int, now: float) -> None:
        """Remove a batch that has been answered; if it was the oldest, start the time of the next.

        In a pipeline the next may have computed for long already: then the worker's own measurement
        counts, unless it includes a pause of the whole host.
        """
        was_oldest = id == next(iter(self.batches))
        del self.batches[id]
        self.answered_at = now
        has_clock = self._num_at_once > 1 and self._heartbeat.at_work_since > self._paused_at
        if was_oldest and not (has_clock and self.is_any_begun):
            self._oldest_since = now

    def take_all(self) -> dict[int, HeldBatch]:
        """Remove and return all batches."""
        batches, self.batches = self.batches, {}
        return batches

    def discount_pause(self, pause_s: float, now: float) -> None:
        """Do not count a pause of the whole host as time of a batch."""
        self._oldest_since = min(now, self._since() + pause_s)
        self.answered_at = min(now, self.answered_at + pause_s)
        self._paused_at = now

    def oldest_age_s(self, now: float) -> float:
        """Return the seconds since the oldest made progress; 0 if there is none."""
        return max(0.0, now - self._since()) if self.batches else 0.0

    def next_due_s(self, now: float) -> float:
        """Return the seconds until the next check is due; infinite if no batch is held."""
        for id, batch in self._oldest():
            limit_s = self._limit_s(id, batch)
            due_s = self._since() + limit_s - now
            if self._heartbeat.at_work_since:  # the next batch may have used up some of its time
                due_s = min(due_s, limit_s * _LOOK_EVERY)
            return min(due_s, self.answered_at + self._most_s(batch) - now)
        return float("inf")

    def hang(self, now: float) -> str:
        """Return why the worker counts as hung, if the oldest batch takes too long; else ""."""
        for id, batch in self._oldest():
            limit_s, most_s = self._limit_s(id, batch), self._most_s(batch)
            if now - self._since() <= limit_s:
                if now - self.answered_at <= most_s:
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
            for id, batch in self.batches.items()
            if self._is_begun(id)
            for item in batch.items
            if item.request_id
        }
        return list(ids)

    def _oldest(self) -> Iterator[tuple[int, HeldBatch]]:
        for each in self.batches.items():
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


class LocalWorker:
    """One incarnation of a worker: its processes, its queues, and its batches."""

    def __init__(
        self,
        id: WorkerId,
        config: WorkerConfig,
        on_progress: Callable[[str], None],
        oom_kills: OomKills,
        periods: WorkerPeriods,
    ) -> None:
        """Create the queues and the shared memory of an incarnation.

        Raises:
            SharedMemoryError: There is too little memory.
            OSError: There are too few descriptors.
        """
        self.id = id
        self.is_given_up = False
        """True once nobody waits for its start any more."""
        self._config = config
        self._periods = periods
        num_ranks = config.placement.num_ranks
        self.ranks = [
            RankProcess(id, rank, oom_kills, is_alone=num_ranks == 1, periods=periods)
            for rank in range(num_ranks)
        ]
        self._loop = asyncio.get_running_loop()
        self.started: Future[Ready] = self._loop.create_future()
        """Done once it may be used."""
        self._gone: Future[Ending] = self._loop.create_future()
        self.credit = config.credit
        self.inbox = PrivateQueue()
        self.outputs = OutputRegion()
        self.lead = self.ranks[0]
        self.attachments: dict[str, Attachment] = {}
        """Processes of parts that start once it is loaded, by the part's name."""
        timeout_s = batch_timeout_s(config.batch_timeout_s, None)
        self.patience_s = min(periods.patience_s, timeout_s)
        """Seconds that it may take to begin a batch, or an idle follower to show a sign of life."""
        self.carrier = Carrier(
            self.lead.heartbeat,
            self.outputs,
            wanted_timeout_s=config.batch_timeout_s,
            patience_s=self.patience_s,
            canary_every_s=periods.canary_every_s,
            num_at_once=config.placement.num_at_once,
        )
        self._on_progress = on_progress
        self._ready: Ready | None = None
        self._watching: Task[None] | None = None
        self._cause: Cause | None = None
        self._reason = ""
        self._is_ending = False
        """True once it accepts no more batches."""
        self._is_our_doing = False
        """True if we end it, and not because of its batches."""
        self._error_guard = ErrorGuard(f"the watch of {id}")

    @property
    def ready(self) -> Ready:
        """Message that announced the worker as ready."""
        return self.started.result()

    @property
    def has_worked(self) -> bool:
        """True once it has answered a batch that was no canary."""
        return self.carrier.has_worked

    @property
    def is_stalled(self) -> bool:
        """True if it computes nothing and one of its processes gives no sign of life."""
        if self._gone.done() or self.carrier.held.is_any_begun:
            return False
        return max(rank.heartbeat.age_s for rank in self.ranks) > _STALLED_S

    def program_of(self, rank: RankProcess, arena: object) -> Program:
        """Return what one of its processes runs; the arena is the memory with the payloads."""
        queues = self.inbox, rank.outbox
        memory = arena, rank.heartbeat.memory, self.outputs.memory
        ends = {name: each.worker_end for name, each in self.attachments.items()}
        return entry.run, (self._config, *queues, *memory, rank.stacks, ends)

    def attach(self, processes: Sequence[BaseProcess]) -> None:
        """Use the started processes: close their ends of the queues, listen, and watch."""
        self.inbox.reader.close()
        for each in self.attachments.values():
            each.on_started()
        self.carrier.attach(self.inbox.writer)
        for rank, process in zip(self.ranks, processes, strict=True):
            rank.attach(process, self)
        self._watching = self._loop.create_task(self._watch(), name=f"watch {self.id}")
        self._watching.add_done_callback(self._on_unwatched)

    def run(self, items: Sequence[ItemRef], on_parts: OnParts | None = None) -> "Future[BatchDone]":
        """Send a batch; its future fails with `WorkerLostError` once the worker has ended."""
        if self._is_ending:
            future: Future[BatchDone] = self._loop.create_future()
            future.set_exception(WorkerLostError(self._reason, started=False))
            return future
        return self.carrier.give(items, on_parts)

    def drop(self, batch: "Future[BatchDone]", indices: Sequence[int]) -> None:
        """Ask the worker to end some streams of a batch."""
        attached("drop streams")(self.carrier, batch, indices)

    async def wait(self) -> Ending:
        """Wait for its exit, and return how it ended."""
        return await asyncio.shield(self._gone)

    async def stop(self, grace_s: float) -> None:
        """Send the sentinel and wait; after `grace_s` send SIGTERM, then SIGKILL."""
        if self._gone.done():
            return
        if grace_s <= 0:
            self._set_our_doing()
            await self.kill("stopped in a hurry")
            return
        self._reason = self._reason or "stopped"
        self.carrier.send_sentinel()
        if await self._is_gone_within(grace_s):
            return
        logger.warning("%s did not stop within %g s: terminating it", self.id, grace_s)
        self._set_our_doing()
        for rank in self.ranks:
            rank.heartbeat.tell_to_leave()
        self._signal(signal.SIGTERM)
        if not await self._is_gone_within(1.0):
            await self.kill(f"did not stop within {grace_s:g} s", with_stacks=True)

    async def kill(self, reason: str, *, with_stacks: bool = False) -> None:
        """Kill the processes, if there are any, and wait for their exits.

        Args:
            reason: Explanation for people.
            with_stacks: Log the stacks of their threads first.
        """
        self._reason = self._reason or reason
        self._is_ending = True
        if not self.lead.is_attached:
            self._close()
            return
        if with_stacks:
            with self._error_guard:  # an error must not keep it from being killed
                named = self.carrier.at_work_on()
                await asyncio.gather(*(rank.log_stacks(reason, named) for rank in self._living()))
        self._signal(signal.SIGKILL)
        if not await self._is_gone_within(self._periods.exit_s):
            logger.critical("%s does not exit after SIGKILL (stuck in the kernel?)", self.id)

    def vitals(self) -> Vitals:
        """Return the present state."""
        is_gone = self._gone.done()
        now = time.monotonic()
        proven_at = self.carrier.proven_at
        decoders = [each for part in self.attachments.values() for each in part.vitals()]
        return Vitals(
            pid=self.lead.pid,
            rss_bytes=sum(rank.rss_bytes for rank in self.ranks)
            + sum(decoder.rss_bytes for decoder in decoders),
            last_beat_age_s=0.0 if is_gone else self.lead.heartbeat.age_s,
            num_batches=0 if is_gone else self.lead.heartbeat.num_batches,
            last_answer_age_s=now - proven_at if proven_at else 0.0,
            failure=self.carrier.canary.failure,
            batch_age_s=0.0 if is_gone else self.carrier.held.oldest_age_s(now),
            decoders=decoders,
        )

    def on_message(self, rank: RankProcess, message: FromWorker) -> None:
        """Handle a message of a process."""
        match message:
            case BatchDone():
                if self.carrier.take(message):
                    self._judge_canary()
            case StreamParts():
                attached("pass on parts")(self.carrier, message.parts)
            case StartProgress():
                self._on_progress(message.stage)
            case LogLine():
                log_line(message, rank.labels)
            case Ready():
                if not message.preloaded and self.id.incarnation == 0:
                    logger.info("%s was started without a preloaded torch", self.id)
                self._ready = message
                if message.interface.streams:  # one that joins others need not wait for their end
                    self.credit = self._config.max_batch_size if message.interface.joins else 1
                self.credit += message.num_ahead
                self.credit += sum(each.begin(message) for each in self.attachments.values())
                self._prove()
            case Leaving():
                self._cause = self._cause or message.cause
                self._reason = self._reason or rank.about(message.reason)
            case StartFailed():
                text = rank.about(message.message)
                self._fail_start(text, permanent=message.permanent, traceback=message.traceback)
            case _:
                raise FrameError(f"{type(message).__name__}, which this process may not send")

    def on_mute(self, rank: RankProcess, reason: str) -> None:
        """Handle the end of a process's messages."""
        self._is_ending = True
        self._reason = self._reason or (rank.about(reason) if reason else "")

    def on_exit(self, rank: RankProcess) -> None:
        """Handle the confirmed exit of a process."""
        self._is_ending = True
        self._record_end(rank)
        rank.log_last_stacks(self._reason, self.carrier.at_work_on())
        self._end_attached()
        self.settle()

    def _prove(self) -> None:
        """Send the first canary."""
        assert self._ready is not None
        self.carrier.prove(self._ready.warmup_s)

    def _judge_canary(self) -> None:
        failure = self.carrier.canary.failure
        if not failure:
            if not self.started.done():
                assert self._ready is not None
                self.started.set_result(self._ready)
        elif not self.started.done():
            self._fail_start(f"it failed on a sample of its own: {failure}")
        else:
            logger.warning("%s failed on a sample of its own: %s", self.id, failure)

    def _record_end(self, rank: RankProcess) -> None:
        cause, reason = rank.ending
        if self._reason:  # the worker has announced it, or we have caused it
            self._cause = self._cause or ("exit" if cause == "exit" else "signal")
        else:
            self._cause, self._reason = cause, rank.about(reason)
        self._fail_start(f"the process ended before it was ready: {self._reason}")

    def _end_attached(self) -> None:
        for each in self.attachments.values():
            each.end()

    def settle(self) -> None:
        """Fail all batches once no process is left that could read their payloads."""
        are_ranks_gone = all(rank.is_gone for rank in self.ranks)
        is_over = are_ranks_gone and all(each.is_gone for each in self.attachments.values())
        if self._gone.done() or not is_over:
            return
        assert self._cause is not None
        was_at_work = self.carrier.lose_all(self._reason, is_our_doing=self._is_our_doing)
        self._close()
        self._gone.set_result(
            Ending(cause=self._cause, reason=self._reason, was_at_work=was_at_work)
        )

    async def _watch(self) -> None:
        """Check the processes regularly: send canaries, and end a worker that hangs."""
        while True:
            now = time.monotonic()
            look_s = min(self._periods.look_s, self.patience_s)
            wake_at = now + max(0.001, min(look_s, self.carrier.next_due_s(now)))
            await asyncio.sleep(wake_at - now)
            now = time.monotonic()
            with self._error_guard:
                if self._is_ending:
                    return
                await self._look_after(now, now - wake_at)

    async def _look_after(self, now: float, late_s: float) -> None:
        """Check the processes once, `late_s` later than planned."""
        if late_s > PAUSE_S:
            self.carrier.held.discount_pause(late_s, now)
        for rank in self.ranks:
            rank.look()
        for each in self.attachments.values():
            each.look()
        if reason := self.carrier.held.hang(now):
            self._cause = "hang"
            self._is_our_doing = self.carrier.held.is_oldest_canary
            await self.kill(reason, with_stacks=True)
        elif self.carrier.canary.is_ill:
            await self._retire(f"it failed on a sample of its own: {self.carrier.canary.failure}")
        elif self.carrier.is_canary_due(now) and not self.carrier.held:
            self.carrier.give_canary(self.carrier.canary.limit_s)

    def _fail_start(self, message: str, *, permanent: bool = False, traceback: str = "") -> None:
        if not self.started.done():
            error = WorkerStartError(message, permanent=permanent, traceback=traceback)
            self.started.set_exception(error)
            self.started.exception()  # mark it as retrieved: the start may have been cancelled

    def _living(self) -> Iterator[RankProcess]:
        return (rank for rank in self.ranks if not rank.is_gone)

    def _signal(self, signum: int) -> None:
        for rank in self._living():
            rank.signal(signum)

    async def _is_gone_within(self, timeout_s: float) -> bool:
        done, _ = await asyncio.wait([self._gone], timeout=timeout_s)
        return bool(done)

    def _set_our_doing(self) -> None:
        """Blame no batch for its end from now on, unless one has hung already."""
        self._is_our_doing = self._is_our_doing or self._cause != "hang"

    def _on_unwatched(self, watching: Task[None]) -> None:
        if not watching.cancelled() and (error := watching.exception()):
            logger.critical("%s is no longer watched", self.id, exc_info=error)

    async def _retire(self, reason: str) -> None:
        """Ask it to leave after its batches, each within its timeout; then it is replaced."""
        logger.error("%s: %s; replacing it", self.id, reason)
        self._cause, self._reason, self._is_ending = "canary", reason, True
        self.carrier.send_sentinel()
        while self.carrier.held and not self.carrier.held.hang(now := time.monotonic()):
            if await self._is_gone_within(max(0.001, self.carrier.held.next_due_s(now))):
                return
        if self.carrier.held or not await self._is_gone_within(self._periods.retire_s):
            self._is_our_doing = True
            await self.kill(reason, with_stacks=True)

    def _close(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
        self._end_attached()
        self.carrier.close()
        for rank in self.ranks:
            rank.close()
        self.inbox.close()
        self.outputs.close()


def _widen(fd: int) -> None:
    try:
        import fcntl

        fcntl.fcntl(fd, _F_SETPIPE_SZ, _PIPE_BYTES)
    except (ImportError, OSError):
        return  # the default of 64 KiB works too, with more reads
