"""One incarnation of a worker of this host, as the front end's event loop sees it.

Nothing here waits for the process: reads and writes are non-blocking, and a death is seen as the
end of file of the output queue.
"""

import asyncio
import fcntl
import logging
import signal
import termios
import time
from array import array
from asyncio import Future, Task
from collections.abc import Callable, Sequence
from itertools import count
from multiprocessing.context import ForkServerProcess
from multiprocessing.process import BaseProcess

import msgspec

from workers.canary import PATIENCE_S, Canary
from workers.config import WorkerConfig
from workers.endings import OomKills
from workers.engine import Cause, Ending, Vitals, WorkerId
from workers.errors import WorkerLostError, WorkerStartError
from workers.heartbeat import HeartbeatReader
from workers.held import Held, HeldBatches, batch_timeout_s
from workers.log_lines import log_line
from workers.messages import (
    UNREADABLE,
    Batch,
    BatchDone,
    FromWorker,
    ItemError,
    ItemRef,
    Leaving,
    LogLine,
    Progress,
    Ready,
    StartFailed,
)
from workers.observed import ObservedProcess
from workers.outputs import OutputRegion, StoredError
from workers.queues import FrameError, FrameReader, FrameWriter, PrivateQueue
from workers.stacks import Stacks

logger = logging.getLogger(__name__)

EXIT_WAIT_S = 5.0
"""How long a SIGKILLed process may take to go before its device is given up."""
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(FromWorker).decode
_SENTINEL = _encode(None)
_LOOK_S = 2.0
_STALLED_S = 3.0
"""A worker that waits for work beats every second."""
"""How often each process is looked at, which costs some 0.1 ms."""
_PAUSE_S = 0.5
"""This loop was not just busy if it comes round so much too late: the whole host paused."""
_RETIRE_S = 5.0
"""How long a worker that is to be replaced may take to finish what it holds."""
_MAX_NAMED_REQUESTS = 8


class LocalWorker:
    """One incarnation: its process, its two queues, and the batches that it holds."""

    def __init__(
        self,
        id: WorkerId,
        config: WorkerConfig,
        on_progress: Callable[[str], None],
        oom_kills: OomKills,
    ) -> None:
        self.id = id
        self.credit = config.credit
        self.inbox = PrivateQueue()
        self.outbox = PrivateQueue()
        self.stacks = Stacks()
        self.heartbeat = HeartbeatReader()
        self.outputs = OutputRegion()
        self._wanted_timeout_s = config.batch_timeout_s
        timeout_s = batch_timeout_s(config.batch_timeout_s, None)
        self._patience_s = min(PATIENCE_S, timeout_s)
        self._canary = Canary(timeout_s)
        self._held = HeldBatches(
            self.heartbeat, batch_timeout_s=timeout_s, patience_s=self._patience_s
        )
        self._on_progress = on_progress
        self._oom_kills = oom_kills
        self._loop = asyncio.get_running_loop()
        self.started: Future[Ready] = self._loop.create_future()
        """Done once it has answered a canary."""
        self._gone: Future[Ending] = self._loop.create_future()
        self._process: BaseProcess | None = None
        self._observed: ObservedProcess | None = None
        self._ready: Ready | None = None
        self._ids = count(1)
        self._proven_at = 0.0
        self._watching: Task[None] | None = None
        self._cause: Cause | None = None
        self._reason = ""
        self._is_ending = False
        """It takes no more batches."""
        self._is_our_doing = False
        """It is ended for another reason than what it does with its batches."""
        self._is_unread = True
        """What it writes is still read."""
        self.has_worked = False

    @property
    def ready(self) -> Ready:
        """What the worker said of itself when it was ready."""
        return self.started.result()

    @property
    def is_stalled(self) -> bool:
        """It is not at work, and shows no sign of life."""
        if self._gone.done() or self._held.is_any_begun:
            return False
        return self.heartbeat.age_s > _STALLED_S

    def attach(self, process: BaseProcess) -> None:
        """Take charge of the started process: keep our ends of its queues, and listen."""
        self._process = process
        assert process.pid is not None
        self._observed = ObservedProcess(process.pid, self._oom_kills)
        self.inbox.reader.close()
        self.outbox.writer.close()
        self._reader = FrameReader(self.outbox.reader)
        self._writer = FrameWriter(self.inbox.writer)
        self._loop.add_reader(self._reader.fd, self._on_readable)
        self._loop.add_reader(process.sentinel, self._on_exit)
        self._watching = self._loop.create_task(self._watch(), name=f"watch {self.id}")
        self._watching.add_done_callback(self._on_unwatched)

    def run(self, items: Sequence[ItemRef]) -> "Future[BatchDone]":
        """Send a batch; see `WorkerHandle.run`."""
        assert items, "a batch without items is a canary"
        future: Future[BatchDone] = self._loop.create_future()
        if self._is_ending:
            future.set_exception(WorkerLostError(self._reason, started=False))
            return future
        self._give(items, future, self._held.batch_timeout_s)
        return future

    async def wait(self) -> Ending:
        """Wait until the process is gone, and say how it ended."""
        return await asyncio.shield(self._gone)

    async def stop(self, grace_s: float) -> None:
        """Send the sentinel and wait; then SIGTERM, then SIGKILL."""
        if self._gone.done():
            return
        if grace_s <= 0:
            self._take_blame()
            await self.kill("stopped in a hurry")
            return
        self._reason = self._reason or "stopped"
        self._send(_SENTINEL)
        if await self._is_gone_within(grace_s):
            return
        logger.warning("%s did not stop within %g s: terminating it", self.id, grace_s)
        self._take_blame()
        self.heartbeat.tell_to_leave()
        self._signal(signal.SIGTERM)
        if not await self._is_gone_within(1.0):
            await self.kill(f"did not stop within {grace_s:g} s", with_stacks=True)

    async def kill(self, reason: str, *, with_stacks: bool = False) -> None:
        """SIGKILL the process, if there is one, and wait for its exit.

        Args:
            reason: Why, for a person.
            with_stacks: Have it write the stacks of its threads into the log first.
        """
        self._reason = self._reason or reason
        self._is_ending = True
        if self._process is None:
            self._close()
            return
        if with_stacks:
            await self._log_stacks(reason)
        self._signal(signal.SIGKILL)
        if not await self._is_gone_within(EXIT_WAIT_S):
            logger.critical("%s does not exit after SIGKILL (stuck in the kernel?)", self.id)

    def vitals(self) -> Vitals:
        """The process as seen from here."""
        is_gone = self._gone.done()
        now = time.monotonic()
        return Vitals(
            pid=self._observed.pid if self._observed else 0,
            rss_bytes=self._observed.rss_bytes if self._observed else 0,
            last_beat_age_s=0.0 if is_gone else self.heartbeat.age_s,
            num_batches=0 if is_gone else self.heartbeat.num_batches,
            last_answer_age_s=now - self._proven_at if self._proven_at else 0.0,
        )

    def _give(
        self, items: Sequence[ItemRef], future: "Future[BatchDone] | None", limit_s: float
    ) -> None:
        id = next(self._ids)
        self._held.add(id, Held(items, future, limit_s), time.monotonic())
        self._send(_encode(Batch(id, list(items))))

    def _on_readable(self) -> None:
        try:
            for frame in self._reader.frames():
                self._take(_decode(frame))
        except EOFError:
            self._end()
        except (FrameError, StoredError, *UNREADABLE) as error:
            logger.error("%s wrote what is no message: %s", self.id, error)
            self._end("wrote what is no message")

    def _take(self, message: FromWorker) -> None:
        match message:
            case BatchDone():
                self._take_answer(message)
            case Progress():
                self._on_progress(message.stage)
            case LogLine():
                log_line(message, {"worker": str(self.id)})
            case Ready():
                if not message.preloaded and self.id.incarnation == 0:
                    logger.info("%s was started without a preloaded torch", self.id)
                self._ready = message
                timeout_s = batch_timeout_s(self._wanted_timeout_s, message.warmup_s)
                self._held.batch_timeout_s = timeout_s
                self._canary = Canary(timeout_s)
                self._give((), None, self._canary.limit_s)
            case Leaving():
                self._cause = self._cause or message.cause
                self._reason = self._reason or message.reason
            case StartFailed():
                self._fail_start(message.message, permanent=message.permanent)

    def _take_answer(self, done: BatchDone) -> None:
        batch = self._held.get(done.id)
        if batch is None:
            raise FrameError(f"an answer to batch {done.id}, which it does not hold")
        outcomes = done.outcomes
        if batch.future is not None and len(batch.items) != len(outcomes):
            raise FrameError(f"{len(outcomes)} outcomes for {len(batch.items)} items")
        if done.num_stored:
            done = self.outputs.find(done)
        now = time.monotonic()
        self._held.remove(done.id, now)
        if batch.future is None:
            self._take_canary(done, now)
            return
        if not all(isinstance(outcome, ItemError) for outcome in outcomes):
            self._proven_at = now
            self._canary.forget_failures()
        elif self._is_canary_due(now) and not self._held.has_canary:
            # A busy worker is asked only if all its answers are errors, and then has all the time.
            self._give((), None, self._held.batch_timeout_s)
        self.has_worked = True
        batch.future.set_result(done)

    def _take_canary(self, done: BatchDone, now: float) -> None:
        if self._canary.note(done):
            self._proven_at = now
            if not self.started.done():
                assert self._ready is not None
                self.started.set_result(self._ready)
        elif not self.started.done():
            failure = self._canary.failure
            self._fail_start(f"it failed on a sample of its own: {failure}", permanent=False)
        else:
            logger.warning("%s failed on a sample of its own: %s", self.id, self._canary.failure)

    def _send(self, body: bytes) -> None:
        if not self._writer.write(body):
            self._loop.add_writer(self._writer.fd, self._on_writable)

    def _on_writable(self) -> None:
        if self._writer.flush():
            self._loop.remove_writer(self._writer.fd)

    def _on_exit(self) -> None:
        """The process has ended: read what it wrote before, then settle all that it held."""
        assert self._process is not None
        assert self._observed is not None
        self._loop.remove_reader(self._process.sentinel)
        if _has_lost_forkserver(self._process):
            self._is_our_doing = True
            self._cause = self._cause or "signal"
            self._reason = self._reason or "the process that forks workers ended, and they with it"
        self._process.join()
        self._reader.is_dry = False
        while self._is_unread and not self._reader.is_dry:
            self._on_readable()  # a process that the worker forked may keep the pipe open
        self._is_ending = True
        cause, reason = self._observed.end(self._process.exitcode)
        if self._reason:  # it or we have said why
            self._cause = self._cause or ("exit" if cause == "exit" else "signal")
        else:
            self._cause, self._reason = cause, reason
        if trace := self.stacks.take():
            text = f"{self.id} left its stacks ({self._reason}){self._at_work_on()}"
            log_line(LogLine(logging.ERROR, __name__, text, trace=trace), {"worker": str(self.id)})
        last_received = self.heartbeat.last_received
        self._fail_start(f"the process ended before it was ready: {self._reason}", permanent=False)
        self._process.close()
        self._close()
        was_at_work = False
        for id, batch in self._held.take_all().items():
            if batch.future is not None:
                is_started = id <= last_received and not self._is_our_doing
                was_at_work = was_at_work or is_started
                batch.future.set_exception(WorkerLostError(self._reason, started=is_started))
        self._gone.set_result(
            Ending(cause=self._cause, reason=self._reason, was_at_work=was_at_work)
        )

    def _end(self, reason: str = "") -> None:
        """No more will be read: make sure that the process goes, if it is not going already."""
        self._is_ending, self._is_unread = True, False
        self._loop.remove_reader(self._reader.fd)
        self._reason = self._reason or reason
        # At its end of file the process is exiting; a moment later it has no excuse.
        self._loop.call_later(0.5, self._signal, signal.SIGKILL)

    def _fail_start(self, message: str, *, permanent: bool) -> None:
        if not self.started.done():
            self.started.set_exception(WorkerStartError(message, permanent=permanent))
            self.started.exception()  # it is retrieved, even if the start was cancelled

    async def _watch(self) -> None:
        """Look at the process now and then: have it prove itself, and end it when it cannot."""
        observed = self._observed
        assert observed is not None
        while True:
            now = time.monotonic()
            wake_at = now + max(0.001, min(_LOOK_S, self._patience_s, self._next_due_s(now)))
            await asyncio.sleep(wake_at - now)
            now = time.monotonic()
            if now - wake_at > _PAUSE_S:
                self._held.forgive(now - wake_at, now)
            if self._is_ending:
                return
            observed.look()
            if reason := self._held.hang(now):
                self._cause = "hang"
                self._is_our_doing = self._held.is_oldest_canary
                await self.kill(reason, with_stacks=True)
            elif self._canary.is_ill:
                await self._retire(f"it failed on a sample of its own: {self._canary.failure}")
            elif self._is_canary_due(now) and not self._held:
                self._give((), None, self._canary.limit_s)

    def _is_canary_due(self, now: float) -> bool:
        return self.started.done() and now - self._proven_at >= self._canary.every_s

    def _next_due_s(self, now: float) -> float:
        """How soon the watch may have something to do."""
        if self._held or not self.started.done():
            return self._held.next_due_s(now)
        return self._proven_at + self._canary.every_s - now

    def _take_blame(self) -> None:
        """What ends it from now on is no batch, unless one of them has hung already."""
        self._is_our_doing = self._is_our_doing or self._cause != "hang"

    def _on_unwatched(self, watching: Task[None]) -> None:
        if not watching.cancelled() and (error := watching.exception()):
            logger.critical("%s is no longer watched", self.id, exc_info=error)

    async def _retire(self, reason: str) -> None:
        """Have it finish what it holds, in the time of batches, and leave to be replaced."""
        logger.error("%s: %s; replacing it", self.id, reason)
        self._cause, self._reason, self._is_ending = "canary", reason, True
        self._send(_SENTINEL)
        while self._held and not self._held.hang(now := time.monotonic()):
            if await self._is_gone_within(max(0.001, self._held.next_due_s(now))):
                return
        if self._held or not await self._is_gone_within(_RETIRE_S):
            self._is_our_doing = True
            await self.kill(reason, with_stacks=True)

    async def _log_stacks(self, reason: str) -> None:
        assert self._observed is not None
        at_work = self._at_work_on()
        state, trace = await self.stacks.ask(self._observed.pid)
        text = f"{self.id} {reason}{at_work}; it is {state}: killing it"
        log_line(LogLine(logging.ERROR, __name__, text, trace=trace), {"worker": str(self.id)})

    def _at_work_on(self) -> str:
        """The requests that it is computing, for a log line."""
        ids = self._held.request_ids()
        if not ids:
            return ""
        named = ", ".join(ids[:_MAX_NAMED_REQUESTS])
        more = len(ids) - _MAX_NAMED_REQUESTS
        return f", at work on {named}" + (f" and {more} more" if more > 0 else "")

    def _signal(self, signum: int) -> None:
        if self._observed is not None:
            self._observed.signal(signum)

    async def _is_gone_within(self, timeout_s: float) -> bool:
        done, _ = await asyncio.wait([self._gone], timeout=timeout_s)
        return bool(done)

    def _close(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
        if self._process is not None:
            self._loop.remove_writer(self._writer.fd)
            self._loop.remove_reader(self._reader.fd)
        self.inbox.close()
        self.outbox.close()
        self.stacks.close()
        self.heartbeat.close()
        self.outputs.close()


def _has_lost_forkserver(process: BaseProcess) -> bool:
    """Whether a process that has ended has nobody left to report how: its sentinel has no code."""
    if not isinstance(process, ForkServerProcess):
        return False
    num_bytes = array("i", [0])
    fcntl.ioctl(process.sentinel, termios.FIONREAD, num_bytes)
    return num_bytes[0] == 0
