"""The front end's view of one incarnation of a worker on this host.

A worker is one process. Of a split replica it has one for each device; the lead owns the inbox and
answers the batches: see `workers.ranks.host_side`.
Nothing here blocks the event loop: reads and writes return at once, and the end of file of a
process's outbox, or its sentinel, shows its death.
"""

import asyncio
import logging
import signal
import time
from asyncio import Future, Task
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.process import BaseProcess

from inferpool.workers.host.attachment import Attachment  # noqa: TC001  # as everywhere else
from inferpool.workers.host.carrier import Carrier, batch_timeout_s
from inferpool.workers.host.engine import Cause, Ending, Vitals, WorkerId, WorkerPeriods
from inferpool.workers.host.error_guard import ErrorGuard
from inferpool.workers.host.observed import OomKills
from inferpool.workers.host.queues import PrivateQueue
from inferpool.workers.host.rank_process import RankProcess
from inferpool.workers.shared.config import WorkerConfig
from inferpool.workers.shared.errors import WorkerLostError, WorkerStartError
from inferpool.workers.shared.log_lines import log_line
from inferpool.workers.shared.messages import (
    BatchDone,
    FrameError,
    FromWorker,
    ItemRef,
    Leaving,
    LogLine,
    Ready,
    StartFailed,
    StartProgress,
)
from inferpool.workers.shared.outputs import OutputRegion

logger = logging.getLogger(__name__)

_STALLED_S = 3.0
"""Seconds without a heartbeat; an idle process beats every second."""
PAUSE_S = 0.5
"""Delay of the watch that only a pause of the whole host explains, not one of this loop."""
Program = tuple[Callable[..., None], tuple[object, ...]]
"""Entry point of a process, and its arguments."""


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
        from inferpool.workers.inside import entry

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

    def run(self, items: Sequence[ItemRef]) -> "Future[BatchDone]":
        """Send a batch; its future fails with `WorkerLostError` once the worker has ended."""
        if self._is_ending:
            future: Future[BatchDone] = self._loop.create_future()
            future.set_exception(WorkerLostError(self._reason, started=False))
            return future
        return self.carrier.give(items)

    async def wait(self) -> Ending:
        """Wait for its exit, and return how it ended."""
        return await asyncio.shield(self._gone)

    async def stop(self, grace_s: float) -> None:
        """Send the sentinel and wait; after `grace_s` send SIGTERM, then SIGKILL."""
        if self._gone.done():
            return
        if grace_s <= 0:
            self._note_our_doing()
            await self.kill("stopped in a hurry")
            return
        self._reason = self._reason or "stopped"
        self.carrier.send_sentinel()
        if await self._is_gone_within(grace_s):
            return
        logger.warning("%s did not stop within %g s: terminating it", self.id, grace_s)
        self._note_our_doing()
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
                await self._log_stacks(reason)
        await self._kill_all()

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
            case StartProgress():
                self._on_progress(message.stage)
            case LogLine():
                log_line(message, rank.labels)
            case Ready():
                if not message.preloaded and self.id.incarnation == 0:
                    logger.info("%s was started without a preloaded torch", self.id)
                self._ready = message
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
        self._note_end(rank)
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

    def _note_end(self, rank: RankProcess) -> None:
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
            self.carrier.held.forgive(late_s, now)
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

    async def _kill_all(self) -> None:
        self._signal(signal.SIGKILL)
        if not await self._is_gone_within(self._periods.exit_s):
            logger.critical("%s does not exit after SIGKILL (stuck in the kernel?)", self.id)

    def _living(self) -> Iterator[RankProcess]:
        return (rank for rank in self.ranks if not rank.is_gone)

    def _signal(self, signum: int) -> None:
        for rank in self._living():
            rank.signal(signum)

    async def _is_gone_within(self, timeout_s: float) -> bool:
        done, _ = await asyncio.wait([self._gone], timeout=timeout_s)
        return bool(done)

    def _note_our_doing(self) -> None:
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

    async def _log_stacks(self, reason: str) -> None:
        at_work_on = self.carrier.at_work_on()
        await asyncio.gather(*(rank.log_stacks(reason, at_work_on) for rank in self._living()))

    def _close(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
        self._end_attached()
        self.carrier.close()
        for rank in self.ranks:
            rank.close()
        self.inbox.close()
        self.outputs.close()
