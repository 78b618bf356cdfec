"""Starts the forkserver, replaces it when it fails, and asks it to fork workers. Front end.

Workers outlive the forkserver. It forks each of them through a process in between, which exits at
once, so the front end inherits the worker as its own child and learns its exit code. Each worker
holds one end of a pipe, its lifeline: when the front end closes the other end, or ends, the kernel
kills the worker.
"""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from asyncio import Task
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import resource_tracker, util
from pathlib import Path

import psutil

from inferpool.workers.host.engine import ForkserverHealth
from inferpool.workers.host.error_guard import ErrorGuard
from inferpool.workers.host.observed import describe_exit
from inferpool.workers.host.orphans import Orphans, adopt_orphans
from inferpool.workers.shared.backoff import Backoff
from inferpool.workers.shared.errors import WorkerStartError
from inferpool.workers.shared.guard import HANDLED_SIGNALS
from inferpool.workers.shared.messages import FORKED, MAX_DESCRIPTORS

logger = logging.getLogger(__name__)

_MAX_PAUSE_S = 30.0
_EXIT_S = 1.0
_MAX_CRASHES = 3
"""Crashes in a row before its first import is done, after which waiting starts fail."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkserverPeriods:
    """How often a forkserver is looked at, and how long it is waited for."""

    look_s: float = 1.0
    """Seconds between two looks."""
    answer_s: float = 10.0
    """Seconds to answer. A fork takes 0.02 s, and longer on a busy host."""
    import_s: float = 300.0
    """Seconds to import. torch takes 3 s, and a minute from a slow disk that has not cached it."""
    first_pause_s: float = 0.5
    """Half of the pause after it has crashed before it was ready; each later one is twice as long.
    After it was killed from outside there is none."""
    retry_s: float = 1.0
    """Pause if there are too few processes or descriptors."""


_USUAL_PERIODS = ForkserverPeriods()


def start_interpreter(
    channel_fd: int, modules: Sequence[str], extra: Sequence[str]
) -> "subprocess.Popen[bytes]":
    """Start an interpreter that becomes a forkserver with our other end of the channel.

    Raises:
        OSError: There are too few processes or descriptors.
    """
    root = str(Path(__file__).absolute().parents[3])  # the folder of `inferpool`
    code = (
        f"import sys; sys.path.insert(0, {root!r});"
        "from inferpool.workers.beside.forkserver_process import main;"
        f"main({channel_fd}, {os.getpid()}, {list(modules)!r}, {list(extra)!r})"
    )
    command = [sys.executable, *util._args_from_interpreter_flags(), "-P", "-c", code]  # type: ignore[attr-defined]  # private
    return subprocess.Popen(
        command, stdin=subprocess.DEVNULL, pass_fds=[channel_fd], process_group=0
    )


class ForkserverLostError(Exception):
    """The forkserver ended before it had answered; the next one may answer."""


class ForkserverProcess:
    """One incarnation of the forkserver."""

    def __init__(
        self, modules: Sequence[str], extra: Sequence[str], periods: ForkserverPeriods
    ) -> None:
        """Start it. Main thread only: the kernel ends it with the thread that started it.

        Raises:
            OSError: There are too few processes or descriptors.
        """
        self._periods = periods
        self.is_ready = False
        """True once it has imported its modules and forks at once."""
        self._since = time.monotonic()
        self._asked: list[float] = []
        """Times of the requests without an answer. Each thread adds and removes its own."""
        self._looked_stopped = False
        tracker_fd = resource_tracker.getfd()
        assert tracker_fd is not None, "it has just been started"
        self._tracker_fd = tracker_fd
        self.channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.channel.setblocking(False)
        before = signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED_SIGNALS)
        try:
            self._process = start_interpreter(theirs.fileno(), modules, extra)
        except BaseException:
            self.channel.close()
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            theirs.close()
        self.pid = self._process.pid

    def fork(self, body: bytes, fds: Sequence[int]) -> tuple[int, int]:
        """Ask it to fork a process, and wait for the answer. Any thread may call it.

        Args:
            body: Pickled process object, which the new process runs.
            fds: Descriptors that the new process inherits.

        Returns:
            The number of the process, and our end of its lifeline.

        Raises:
            ForkserverLostError: The forkserver has ended, or has no room for the request.
            OSError: The kernel refused the fork.
        """
        asked_at = time.monotonic()
        self._asked.append(asked_at)
        with contextlib.ExitStack() as stack:
            stack.callback(self._asked.remove, asked_at)
            data_r, lifeline = os.pipe()
            on_failure = stack.enter_context(contextlib.ExitStack())
            on_failure.callback(os.close, lifeline)
            with contextlib.ExitStack() as given:
                given.callback(os.close, data_r)
                answer_r, answer_w = os.pipe()
                stack.callback(os.close, answer_r)
                given.callback(os.close, answer_w)
                sent = [data_r, answer_w, self._tracker_fd, *fds]
                assert len(sent) <= MAX_DESCRIPTORS
                try:
                    socket.send_fds(self.channel, [b"f"], sent)
                except OSError as error:
                    raise ForkserverLostError(f"it takes no requests: {error}") from error
            try:
                with open(os.dup(lifeline), "wb") as file:
                    file.write(body)
            except BrokenPipeError:
                pass  # no answer will come either
            answer = os.read(answer_r, FORKED.size)
            if len(answer) < FORKED.size:
                raise ForkserverLostError("it ended before it had answered")
            pid: int = FORKED.unpack(answer)[0]
            if pid < 0:
                raise OSError(-pid, os.strerror(-pid))
            on_failure.pop_all()
        return pid, lifeline

    async def listen(self, on_ready: Callable[[], None]) -> None:
        """Call `on_ready` when it is ready, and return once it has ended. Event loop only."""
        loop = asyncio.get_running_loop()
        with contextlib.suppress(ConnectionResetError):
            while await loop.sock_recv(self.channel, 1):
                self._since = time.monotonic()
                self.is_ready = True
                on_ready()

    def complaint(self) -> str:
        """Return why it must be replaced although it runs, or "". Call it regularly."""
        now = time.monotonic()
        is_stopped = False
        with contextlib.suppress(psutil.Error, OSError):
            is_stopped = psutil.Process(self.pid).status() == psutil.STATUS_STOPPED
        # One look is not enough: Ctrl-Z and `fg` reach the processes one after the other.
        was_stopped, self._looked_stopped = self._looked_stopped, is_stopped
        if is_stopped and was_stopped:
            return "is stopped"
        if not self.is_ready:
            is_late = now - self._since >= self._periods.import_s
            return "does not finish its imports" if is_late else ""
        waiting_s = max((now - max(at, self._since) for at in [*self._asked]), default=0.0)
        is_late = waiting_s >= self._periods.answer_s
        return f"has not answered for {waiting_s:.0f} s" if is_late else ""

    @property
    def has_unanswered(self) -> bool:
        """True while someone waits for a fork."""
        return bool(self._asked)

    def kill(self) -> None:
        """Kill it; requests without an answer fail."""
        self._process.kill()

    def end(self) -> int | None:
        """Kill it, release its channel, and return its exit code; None if it does not exit."""
        self.is_ready = False
        self.kill()
        self.channel.close()
        try:
            return self._process.wait(_EXIT_S)
        except subprocess.TimeoutExpired:
            logger.critical("the forkserver does not exit after SIGKILL (stuck in the kernel?)")
            return None


class Forkserver:
    """The forkserver of this process; a new one replaces it if it ends or does not answer."""

    def __init__(
        self,
        modules: Sequence[str],
        extra: Sequence[str],
        *,
        is_guest: bool = False,
        periods: ForkserverPeriods = _USUAL_PERIODS,
    ) -> None:
        """Start it. Main thread only.

        Args:
            modules: Modules that it imports.
            extra: More modules. It does without them if they crash it or make forks unsafe.
            is_guest: See `Orphans`.
            periods: Times for looks and waits.

        Raises:
            OSError: There are too few processes or descriptors.
        """
        self._modules = list(modules)
        self._extra = list(extra)
        self._periods = periods
        self._orphans = Orphans(is_guest=is_guest)
        self._error_guard = ErrorGuard("the watch of the forkserver")
        self._num_crashes = 0
        self._incarnation = 0
        self._is_lost = False
        """True from the end of one until the next is ready."""
        self._reason = ""
        self._keeping: Task[None] | None = None
        self._changed = asyncio.Event()
        self._end_adoption = adopt_orphans()
        self.process = self._start()

    @property
    def is_ready(self) -> bool:
        """True if it forks at once."""
        return self.process.is_ready

    @property
    def pid(self) -> int:
        """Process number."""
        return self.process.pid

    def vitals(self) -> ForkserverHealth:
        """Return its present state."""
        process = self.process
        return ForkserverHealth(
            state="ready" if process.is_ready else "starting",
            pid=process.pid,
            incarnation=self._incarnation,
        )

    def keep(self) -> None:
        """Replace it from now on when needed, as long as this event loop runs."""
        if self._keeping is None or self._keeping.done():
            self._keeping = asyncio.create_task(self._keep(), name="keep the forkserver")
            self._keeping.add_done_callback(_on_unkept)

    async def ready(self) -> None:
        """Return once it forks at once.

        Raises:
            WorkerStartError: It crashes again and again.
        """
        self.keep()
        while not self.process.is_ready:
            if self._num_crashes >= _MAX_CRASHES:
                raise WorkerStartError(
                    f"the forkserver crashes as it starts: {self._reason}", permanent=False
                )
            await self._changed.wait()

    async def ready_or_lost(self) -> bool:
        """Return True once it forks at once, False if it has ended and the next is not ready."""
        self.keep()
        while not self.process.is_ready:
            if self._is_lost:
                return False
            await self._changed.wait()
        return True

    async def close(self) -> None:
        """Stop replacing it; kill it if a thread waits for it, which would block our exit."""
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.wait([self._keeping])
        if self.process.has_unanswered:
            logger.error("the forkserver does not answer: killing it")
            self.process.kill()

    def end(self) -> None:
        """End it for good, after all processes that it has forked have ended."""
        self.process.end()
        self._end_adoption()

    def fork(self, body: bytes, fds: Sequence[int]) -> tuple[int, int]:
        """Ask the forkserver to fork a process, and wait for the answer. Any thread may call it."""
        pid, lifeline = self.process.fork(body, fds)
        self.own(pid)
        return pid, lifeline

    def own(self, pid: int) -> None:
        """Leave the wait for a process to other code. Any thread may call it."""
        self._orphans.own(pid)

    def forget(self, pid: int) -> None:
        """Drop a process that someone has waited for."""
        self._orphans.owned.discard(pid)

    async def _keep(self) -> None:
        while True:
            process = self.process
            await self._see_out(process)
            pause_s = self._judge(process)
            self._tell()
            await asyncio.sleep(pause_s)
            while self.process is process:
                try:
                    self.process = self._start()
                    self._incarnation += 1
                except OSError as error:
                    logger.error("no forkserver can be started: %s", error)
                    await asyncio.sleep(self._periods.retry_s)

    async def _see_out(self, process: ForkserverProcess) -> None:
        """Return once it has ended; kill it if it does not answer."""
        listening = asyncio.create_task(
            process.listen(self._on_ready), name="listen to the forkserver"
        )
        try:
            while not listening.done():
                await asyncio.wait([listening], timeout=self._periods.look_s)
                with self._error_guard:
                    self._orphans.reap()
                    if not listening.done() and (complaint := process.complaint()):
                        logger.error("the forkserver %s: killing it", complaint)
                        process.kill()
        finally:
            listening.cancel()

    def _on_ready(self) -> None:
        self._is_lost = False
        self._tell()

    def _judge(self, process: ForkserverProcess) -> float:
        """Record how it ended, and return the seconds to wait before the next start."""
        was_ready = process.is_ready
        self._is_lost = True
        code = process.end()
        self._orphans.owned.discard(process.pid)
        _, reason = describe_exit(code, is_oom=False, rss_bytes=0)
        logger.warning("the forkserver ended: %s; starting another, and the workers go on", reason)
        if was_ready:
            self._num_crashes = 0
            return 0.0
        if code == -signal.SIGKILL:  # killed from outside
            return 0.0
        self._num_crashes += 1
        self._extra, self._reason = [], reason
        return Backoff(self._periods.first_pause_s, _MAX_PAUSE_S).pause_s(self._num_crashes)

    def _tell(self) -> None:
        """Wake up those that wait in `ready`."""
        self._changed.set()
        self._changed = asyncio.Event()

    def _start(self) -> ForkserverProcess:
        process = ForkserverProcess(self._modules, self._extra, self._periods)
        self._orphans.own(process.pid)
        return process


class _Holder:
    forkserver: Forkserver | None = None
    num_guests = 0


def running_forkserver() -> Forkserver:
    """Return the forkserver of this process, which must have been started."""
    assert _Holder.forkserver is not None, "there is a forkserver before there is a process"
    return _Holder.forkserver


def start_forkserver(modules: Sequence[str], extra: Sequence[str]) -> Forkserver:
    """Return the forkserver of this process; start it if there is none. Main thread only.

    Raises:
        OSError: There are too few processes or descriptors.
    """
    if _Holder.forkserver is None:
        _Holder.forkserver = Forkserver(modules, extra)
    return _Holder.forkserver


@contextlib.contextmanager
def guest_forkserver(modules: Sequence[str], extra: Sequence[str]) -> Iterator[None]:
    """Run a forkserver in a process of the user's until the block or this thread ends.

    Blocks may overlap: they share the forkserver, and the last one ends it.

    Raises:
        OSError: There are too few processes or descriptors.
    """
    if _Holder.forkserver is None:
        _Holder.forkserver = Forkserver(modules, extra, is_guest=True)
    _Holder.num_guests += 1
    try:
        yield
    finally:
        _Holder.num_guests -= 1
        if not _Holder.num_guests:
            _Holder.forkserver.end()
            _Holder.forkserver = None


def can_fork() -> bool:
    """Return True if this host can run a forkserver; else workers are spawned."""
    if sys.platform != "linux":
        return False
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError:  # a kernel before 5.3, or a sandbox
        return False
    return True


def _on_unkept(keeping: Task[None]) -> None:
    if not keeping.cancelled() and (error := keeping.exception()):
        logger.critical("the forkserver is no longer supervised", exc_info=error)
