"""The engine of this host: one process per worker, started by a forkserver that holds torch.

Everything here runs in the front end's event loop, which never waits for a worker: reads and writes
are non-blocking, and a death is seen as the end of file of the output queue.
"""

import asyncio
import errno
import logging
import multiprocessing
import os
import signal
import time
from asyncio import Future
from collections.abc import Callable, Sequence
from itertools import count
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess

import msgspec
import psutil

from workers.arena import Arena
from workers.config import WorkerConfig
from workers.engine import Cause, Ending, Vitals, WorkerId
from workers.errors import WorkerLostError, WorkerStartError
from workers.heartbeat import HeartbeatReader
from workers.memory import SharedMemoryError
from workers.messages import (
    Batch,
    BatchDone,
    FromWorker,
    ItemRef,
    LogLine,
    Progress,
    Ready,
    StartFailed,
)
from workers.queues import FrameError, FrameReader, FrameWriter, PrivateQueue

logger = logging.getLogger(__name__)

_PRELOAD = ("workers.forkserver_guard", "workers.preload")
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(FromWorker).decode
_SENTINEL = _encode(None)
_START_DESCRIPTORS = 16
"""More than a start needs: two queues, a heartbeat, a socket, two pipes and a copy make 12."""
_BEAT_CHECK_S = 2.0
_SILENCE_S = 10.0
"""An idle worker beats every second; one that has not for this long would take no batch."""
_EXIT_WAIT_S = 5.0
"""How long a SIGKILLed process may take to go before its device is given up."""


def start_forkserver(extra: Sequence[str] = ()) -> None:
    """Start the process that forks workers, which imports torch meanwhile. Main thread only.

    The kernel ends it with the thread that started it, so that thread must be the one that lives as
    long as the front end. Where there is no forkserver this does nothing, and workers are spawned.

    Args:
        extra: Modules that it should import besides.

    Raises:
        OSError: There is no process, no descriptor or no writable temporary folder to be had.
    """
    if _start_method() == "forkserver":
        multiprocessing.get_context("forkserver").set_forkserver_preload([*_PRELOAD, *extra])
        _ensure_forkserver()


def _ensure_forkserver() -> None:
    """Start it unless it runs, without the current directory in front of its `sys.path`.

    A user's project nearly always has a package `models` of its own, which must not pass for ours.
    """
    before = os.environ.get("PYTHONSAFEPATH")
    os.environ["PYTHONSAFEPATH"] = "1"
    try:
        forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ["PYTHONSAFEPATH"]
        else:
            os.environ["PYTHONSAFEPATH"] = before


def _require_descriptors() -> None:
    """Raise OSError now where descriptors would run out halfway, which leaks those opened by then.

    `multiprocessing` does so between the two pipes that it makes for a process.
    """
    taken: list[int] = []
    try:
        while len(taken) < _START_DESCRIPTORS:
            taken.extend(os.pipe())
    finally:
        for descriptor in taken:
            os.close(descriptor)


def _start_method() -> str:
    return "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"


class LocalEngine:
    """Starts workers as processes of this host."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._context = multiprocessing.get_context(_start_method())

    async def start(
        self, id: WorkerId, config: WorkerConfig, on_progress: Callable[[str], None]
    ) -> "LocalWorker":
        """Start a process and wait until its model is loaded and warm.

        Raises:
            WorkerStartError: It ended, failed or took too long before that.
        """
        try:
            _require_descriptors()
            worker = LocalWorker(id, config, on_progress)
        except SharedMemoryError as error:
            raise WorkerStartError(str(error), permanent=False) from error
        except OSError as error:
            hint = " (ulimit -n)" if error.errno == errno.EMFILE else ""
            message = f"no queues for it: {error.strerror}{hint}"
            raise WorkerStartError(message, permanent=False) from error
        launch = asyncio.ensure_future(self._launch(worker, config))
        try:
            async with asyncio.timeout(config.load_timeout_s):
                await asyncio.shield(launch)
                await asyncio.shield(worker.started)
        except TimeoutError:
            await worker.kill(f"not ready after {config.load_timeout_s:g} s")
            raise WorkerStartError(
                f"the model was not loaded within {config.load_timeout_s:g} s (load_timeout_s)",
                permanent=False,
            ) from None
        except (WorkerStartError, asyncio.CancelledError):
            # A process that is half started cannot be killed yet.
            await asyncio.wait([launch], timeout=_EXIT_WAIT_S)
            await worker.kill("the start was given up")
            raise
        except Exception as error:  # whatever the start of a process may raise
            await worker.kill("could not be started")
            raise WorkerStartError(
                f"the process could not be started: {error!r}", permanent=False
            ) from error
        return worker

    async def _launch(self, worker: "LocalWorker", config: WorkerConfig) -> None:
        from workers import entry

        process = self._context.Process(  # type: ignore[attr-defined]  # BaseContext lacks it
            target=entry.run,
            name=str(worker.id),
            args=(
                config,
                worker.inbox,
                worker.outbox,
                self._arena.memory,
                worker.heartbeat.memory,
            ),
        )
        if self._context.get_start_method() == "forkserver":
            _ensure_forkserver()  # here, since the kernel ties it to this thread
            # The forkserver answers only when it has imported torch: wait for that off the loop.
            # The fork happens over there, so no signal of the kernel follows this thread.
            await asyncio.to_thread(process.start)
        else:
            process.start()
        worker.attach(process)


class LocalWorker:
    """One incarnation: its process, its two queues, and the batches that it holds."""

    def __init__(
        self, id: WorkerId, config: WorkerConfig, on_progress: Callable[[str], None]
    ) -> None:
        self.id = id
        self.credit = config.credit
        self.inbox = PrivateQueue()
        self.outbox = PrivateQueue()
        self.heartbeat = HeartbeatReader()
        self._batch_timeout_s = config.batch_timeout_s
        self._on_progress = on_progress
        self._loop = asyncio.get_running_loop()
        self.started: Future[Ready] = self._loop.create_future()
        self._gone: Future[Ending] = self._loop.create_future()
        self._process: BaseProcess | None = None
        self._pid = 0
        self._check_s = min(_BEAT_CHECK_S, config.batch_timeout_s / 4)
        self._awake_since = time.monotonic()
        """Since when the front end has not been paused."""
        self._ids = count(1)
        self._batches: dict[int, tuple[int, Future[BatchDone]]] = {}
        """By id: how many items, and the future."""
        self._head_since = 0.0
        self._hang_timer: asyncio.TimerHandle | None = None
        self._cause: Cause | None = None
        self._reason = ""
        self._is_ending = False
        self.has_worked = False

    @property
    def ready(self) -> Ready:
        """What the worker said of itself when it was ready."""
        return self.started.result()

    def attach(self, process: BaseProcess) -> None:
        """Take charge of the started process: keep our ends of its queues, and listen."""
        self._process = process
        self._pid = process.pid or 0
        self._watch(self._check_s)
        self.inbox.reader.close()
        self.outbox.writer.close()
        self._reader = FrameReader(self.outbox.reader)
        self._writer = FrameWriter(self.inbox.writer)
        self._loop.add_reader(self._reader.fd, self._on_readable)
        self._loop.add_reader(process.sentinel, self._on_exit)

    def run(self, items: Sequence[ItemRef]) -> "Future[BatchDone]":
        """Send a batch; see `WorkerHandle.run`."""
        future: Future[BatchDone] = self._loop.create_future()
        if self._is_ending:
            future.set_exception(WorkerLostError(self._reason, started=False))
            return future
        id = next(self._ids)
        if not self._batches:
            self._head_since = time.monotonic()
        self._batches[id] = len(items), future
        self._send(_encode(Batch(id, list(items))))
        return future

    async def wait(self) -> Ending:
        """Wait until the process is gone, and say how it ended."""
        return await asyncio.shield(self._gone)

    async def stop(self, grace_s: float) -> None:
        """Send the sentinel and wait; then SIGTERM, then SIGKILL."""
        if self._gone.done():
            return
        if grace_s <= 0:
            await self.kill("stopped in a hurry")
            return
        self._reason = self._reason or "stopped"
        self._send(_SENTINEL)
        if await self._is_gone_within(grace_s):
            return
        logger.warning("%s did not stop within %g s: terminating it", self.id, grace_s)
        self.heartbeat.tell_to_leave()
        self._signal(signal.SIGTERM)
        if not await self._is_gone_within(1.0):
            await self.kill(f"did not stop within {grace_s:g} s")

    async def kill(self, reason: str) -> None:
        """SIGKILL the process, if there is one, and wait for its exit."""
        self._reason = self._reason or reason
        if self._process is None:
            self._close()
            return
        self._signal(signal.SIGKILL)
        if not await self._is_gone_within(_EXIT_WAIT_S):
            logger.critical("%s does not exit after SIGKILL (stuck in the kernel?)", self.id)

    def vitals(self) -> Vitals:
        """The process as seen from here."""
        pid = self._pid
        try:
            rss_bytes = psutil.Process(pid).memory_info().rss if pid else 0
        except psutil.Error:
            rss_bytes = 0
        return Vitals(
            pid=pid,
            rss_bytes=rss_bytes,
            last_beat_age_s=0.0 if self._gone.done() else self.heartbeat.age_s,
            num_batches=0 if self._gone.done() else self.heartbeat.num_batches,
        )

    def _on_readable(self) -> None:
        try:
            for frame in self._reader.frames():
                self._take(_decode(frame))
        except EOFError:
            self._end()
        except (FrameError, msgspec.MsgspecError) as error:
            logger.error("%s wrote what is no message: %s", self.id, error)
            self._end("wrote what is no message")

    def _take(self, message: FromWorker) -> None:
        match message:
            case BatchDone():
                num_items, future = self._batches.pop(message.id, (0, None))
                if future is None:
                    raise FrameError(f"an answer to batch {message.id}, which it does not hold")
                if num_items != len(message.outcomes):
                    self._batches[message.id] = num_items, future
                    raise FrameError(f"{len(message.outcomes)} outcomes for {num_items} items")
                self._head_since = time.monotonic()
                self.has_worked = True
                future.set_result(message)
            case Progress():
                self._on_progress(message.stage)
            case LogLine():
                extra = {"worker": str(self.id)}
                if message.request_id:
                    extra["request_id"] = message.request_id
                _log(message, extra)
            case Ready():
                if not message.preloaded and self.id.incarnation == 0:
                    logger.info("%s was started without a preloaded torch", self.id)
                if not self.started.done():
                    self.started.set_result(message)
            case StartFailed():
                self._fail_start(message.message, permanent=message.permanent)

    def _send(self, body: bytes) -> None:
        if not self._writer.write(body):
            self._loop.add_writer(self._writer.fd, self._on_writable)

    def _on_writable(self) -> None:
        if self._writer.flush():
            self._loop.remove_writer(self._writer.fd)

    def _on_exit(self) -> None:
        """The process has ended: read what it wrote before, then settle all that it held."""
        assert self._process is not None
        self._loop.remove_reader(self._process.sentinel)
        self._process.join()
        self._reader.is_dry = False
        while not self._is_ending and not self._reader.is_dry:
            self._on_readable()  # a process that the worker forked may keep the pipe open
        self._is_ending = True
        exitcode = self._process.exitcode
        reason = self._reason or _describe_exit(exitcode)
        last_received = self.heartbeat.last_received
        self._fail_start(f"the process ended before it was ready: {reason}", permanent=False)
        self._process.close()
        self._close()
        batches, self._batches = self._batches, {}
        for id, (_, future) in batches.items():
            future.set_exception(WorkerLostError(reason, started=id <= last_received))
        cause = self._cause or ("signal" if (exitcode or 0) < 0 else "exit")
        was_at_work = any(id <= last_received for id in batches)
        self._gone.set_result(Ending(cause=cause, reason=reason, was_at_work=was_at_work))

    def _end(self, reason: str = "") -> None:
        """No more will be read: make sure that the process goes, if it is not going already."""
        self._is_ending = True
        self._loop.remove_reader(self._reader.fd)
        self._reason = self._reason or reason
        # At its end of file the process is exiting; a moment later it has no excuse.
        self._loop.call_later(0.5, self._signal, signal.SIGKILL)

    def _fail_start(self, message: str, *, permanent: bool) -> None:
        if not self.started.done():
            self.started.set_exception(WorkerStartError(message, permanent=permanent))
            self.started.exception()  # it is retrieved, even if the start was cancelled

    def _watch(self, delay_s: float) -> None:
        self._check_due = time.monotonic() + delay_s
        self._hang_timer = self._loop.call_later(delay_s, self._check_for_hang)

    def _check_for_hang(self) -> None:
        """Kill the process if its oldest batch takes too long, or if it is idle and does not beat.

        Where this check itself comes late, the whole host or all of us were paused, and nobody is
        to blame for the time that passed meanwhile.
        """
        self._hang_timer = None
        if self._is_ending:
            return
        now = time.monotonic()
        if now - self._check_due > self._check_s:
            self._awake_since = now
        if self._batches:
            left_s = max(self._head_since, self._awake_since) + self._batch_timeout_s - now
            if left_s <= 0:
                self._give_up(f"hung: a batch ran for more than {self._batch_timeout_s:g} s")
                return
            self._watch(min(left_s + 0.001, self._check_s))
            return
        silence_s = min(self.heartbeat.age_s, now - self._awake_since)
        if self.started.done() and silence_s > _SILENCE_S:
            self._give_up(f"hung: idle, and no sign of life for {silence_s:.0f} s")
            return
        self._watch(self._check_s)

    def _give_up(self, reason: str) -> None:
        self._cause, self._reason = "hang", reason
        logger.error("%s %s: killing it", self.id, reason)
        self._signal(signal.SIGKILL)

    def _signal(self, signum: int) -> None:
        if self._pid and not self._gone.done():
            try:
                os.kill(self._pid, signum)
            except ProcessLookupError:
                return

    async def _is_gone_within(self, timeout_s: float) -> bool:
        done, _ = await asyncio.wait([self._gone], timeout=timeout_s)
        return bool(done)

    def _close(self) -> None:
        if self._hang_timer:
            self._hang_timer.cancel()
        if self._process is not None:
            self._loop.remove_writer(self._writer.fd)
            self._loop.remove_reader(self._reader.fd)
        self.inbox.close()
        self.outbox.close()
        self.heartbeat.close()


def _log(line: LogLine, extra: dict[str, str]) -> None:
    """Log what a worker logged, its traceback as one."""
    source = logging.getLogger(line.logger)
    if source.isEnabledFor(line.level):
        record = source.makeRecord(
            line.logger, line.level, "", 0, "%s", (line.text,), None, extra=extra
        )
        record.exc_text = line.trace or None
        source.handle(record)


def _describe_exit(exitcode: int | None) -> str:
    if exitcode is None:
        return "exit not confirmed"
    if exitcode >= 0:
        return f"exit code {exitcode}"
    try:
        name = signal.Signals(-exitcode).name
    except ValueError:
        name = f"signal {-exitcode}"
    return f"{name}, likely out of memory or killed by hand" if name == "SIGKILL" else name
