"""The front end's hold on the forkserver: starts it, replaces it, and has it fork workers.

Workers outlive the forkserver. They are children of the front end, which inherits them when the
process that forked them ends, and each of them holds one end of a pipe, its lifeline: the kernel
ends it when the front end closes the other end, or ends.
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
from multiprocessing import resource_tracker, util
from pathlib import Path

import psutil

from inferpool.workers.beside.forkserver_process import ANSWER, DEAF_TO, MAX_DESCRIPTORS
from inferpool.workers.errors import WorkerStartError
from inferpool.workers.host.endings import describe_exit
from inferpool.workers.host.engine import ForkserverVitals
from inferpool.workers.host.keep_going import KeepGoing
from inferpool.workers.host.orphans import Orphans, adopt_orphans

logger = logging.getLogger(__name__)

_LOOK_S = 1.0
_ANSWER_S = 10.0
"""To fork takes it 0.02 s, and longer where the processors are busy."""
_IMPORT_S = 300.0
"""torch takes 3 s, and a minute from a disk that is slow and cold."""
_FIRST_PAUSE_S = 0.5
_MAX_PAUSE_S = 30.0
_RETRY_S = 1.0
"""Until there is a process or a descriptor to be had."""
_EXIT_S = 1.0
_MAX_CRASHES = 3
"""So many of its lives in a row may crash on their own before a start that waits is told."""


class ForkserverLostError(Exception):
    """The forkserver ended before it had answered; another may."""


class ForkserverProcess:
    """One life of the forkserver."""

    def __init__(self, modules: Sequence[str], extra: Sequence[str]) -> None:
        """Start it. Main thread only: the kernel ends it with the thread that started it.

        Raises:
            OSError: There is no process or no descriptor to be had.
        """
        self.is_ready = False
        """It has imported what it should, and forks at once."""
        self._since = time.monotonic()
        self._asked: list[float] = []
        """When each request came that it has not answered. Any thread adds and removes its own."""
        self._looked_stopped = False
        tracker_fd = resource_tracker.getfd()
        assert tracker_fd is not None, "it has just been started"
        self._tracker_fd = tracker_fd
        self.channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.channel.setblocking(False)
        root = str(Path(__file__).absolute().parents[3])  # where `inferpool` lies
        code = (
            f"import sys; sys.path.insert(0, {root!r});"
            "from inferpool.workers.beside.forkserver_process import main;"
            f"main({theirs.fileno()}, {os.getpid()}, {list(modules)!r}, "
            f"{list(extra)!r})"
        )
        command = [sys.executable, *util._args_from_interpreter_flags(), "-P", "-c", code]  # type: ignore[attr-defined]  # private
        before = signal.pthread_sigmask(signal.SIG_BLOCK, DEAF_TO)
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], process_group=0
            )
        except BaseException:
            self.channel.close()
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            theirs.close()
        self.pid = self._process.pid

    def fork(self, body: bytes, fds: Sequence[int]) -> tuple[int, int]:
        """Have it fork a process that runs a pickled process object. Any thread; blocks.

        Args:
            body: What the process reads.
            fds: What it inherits.

        Returns:
            The process's number, and our end of its lifeline.

        Raises:
            ForkserverLostError: The forkserver has ended, or has no room for the request.
            OSError: The kernel has refused the fork.
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
                pass  # then there is no answer
            answer = os.read(answer_r, ANSWER.size)
            if len(answer) < ANSWER.size:
                raise ForkserverLostError("it ended before it had answered")
            pid: int = ANSWER.unpack(answer)[0]
            if pid < 0:
                raise OSError(-pid, os.strerror(-pid))
            on_failure.pop_all()
        return pid, lifeline

    async def listen(self, on_ready: Callable[[], None]) -> None:
        """Return once it has ended. Event loop."""
        loop = asyncio.get_running_loop()
        with contextlib.suppress(ConnectionResetError):
            while await loop.sock_recv(self.channel, 1):
                self._since = time.monotonic()
                self.is_ready = True
                on_ready()

    def complaint(self) -> str:
        """Why it must be replaced though it has not ended, or nothing. To be asked regularly."""
        now = time.monotonic()
        is_stopped = False
        with contextlib.suppress(psutil.Error, OSError):
            is_stopped = psutil.Process(self.pid).status() == psutil.STATUS_STOPPED
        # Ctrl-Z and `fg` reach the processes of a terminal one after the other.
        was_stopped, self._looked_stopped = self._looked_stopped, is_stopped
        if is_stopped and was_stopped:
            return "is stopped"
        if not self.is_ready:
            return "" if now - self._since < _IMPORT_S else "does not come to an end of its imports"
        waiting_s = max((now - max(at, self._since) for at in [*self._asked]), default=0.0)
        return "" if waiting_s < _ANSWER_S else f"has not answered for {waiting_s:.0f} s"

    @property
    def has_unanswered(self) -> bool:
        """Someone waits for it to fork."""
        return bool(self._asked)

    def kill(self) -> None:
        """End it now; what it was asked for and has not answered is lost."""
        self._process.kill()

    def end(self) -> int | None:
        """Give back what it has, and return its exit code; None if it does not exit."""
        self.is_ready = False
        self.kill()
        self.channel.close()
        try:
            return self._process.wait(_EXIT_S)
        except subprocess.TimeoutExpired:
            logger.critical("the forkserver does not exit after SIGKILL (stuck in the kernel?)")
            return None


class Forkserver:
    """The forkserver of this process, which is replaced whenever it ends or does not answer."""

    def __init__(
        self, modules: Sequence[str], extra: Sequence[str], *, is_guest: bool = False
    ) -> None:
        """Start it. Main thread only.

        Args:
            modules: What it imports.
            extra: What it also imports, unless it crashes of that or can't be forked after it.
            is_guest: See `Orphans`.

        Raises:
            OSError: There is no process or no descriptor to be had.
        """
        self._modules = list(modules)
        self._extra = list(extra)
        self._orphans = Orphans(is_guest=is_guest)
        self._keep_going = KeepGoing("the watch of the forkserver")
        self._num_crashes = 0
        self._incarnation = 0
        self._reason = ""
        self._keeping: Task[None] | None = None
        self._changed = asyncio.Event()
        adopt_orphans()
        self.process = self._start()

    @property
    def is_ready(self) -> bool:
        """A fork is answered at once."""
        return self.process.is_ready

    @property
    def pid(self) -> int:
        """The number of its process."""
        return self.process.pid

    def vitals(self) -> ForkserverVitals:
        """Its state now."""
        process = self.process
        return ForkserverVitals(
            pid=process.pid, is_ready=process.is_ready, incarnation=self._incarnation
        )

    def keep(self) -> None:
        """From now on replace it where needed, as long as this event loop runs."""
        if self._keeping is None or self._keeping.done():
            self._keeping = asyncio.create_task(self._keep(), name="keep the forkserver")
            self._keeping.add_done_callback(_on_unkept)

    async def ready(self) -> None:
        """Wait until it forks at once.

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

    async def close(self) -> None:
        """Stop replacing it, and kill it if anybody waits for it: it would hold up the end."""
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.wait([self._keeping])
        if self.process.has_unanswered:
            logger.error("the forkserver does not answer: killing it")
            self.process.kill()

    def end(self) -> None:
        """End it for good; all that it has forked has ended."""
        self.process.end()
        adopt_orphans(adopts=False)

    def fork(self, body: bytes, fds: Sequence[int]) -> tuple[int, int]:
        """See `ForkserverProcess.fork`."""
        pid, lifeline = self.process.fork(body, fds)
        self._orphans.own(pid)
        return pid, lifeline

    def forget(self, pid: int) -> None:
        """Someone has waited for that process."""
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
                    await asyncio.sleep(_RETRY_S)

    async def _see_out(self, process: ForkserverProcess) -> None:
        """Return once it has ended; end it if it does not answer."""
        listening = asyncio.create_task(process.listen(self._tell), name="listen to the forkserver")
        try:
            while not listening.done():
                await asyncio.wait([listening], timeout=_LOOK_S)
                with self._keep_going:
                    self._orphans.reap()
                    if not listening.done() and (complaint := process.complaint()):
                        logger.error("the forkserver %s: killing it", complaint)
                        process.kill()
        finally:
            listening.cancel()

    def _judge(self, process: ForkserverProcess) -> float:
        """Note how it ended, and return how long to wait before the next one is started."""
        was_ready = process.is_ready
        code = process.end()
        self._orphans.owned.discard(process.pid)
        _, reason = describe_exit(code, is_oom=False, rss_bytes=0)
        logger.warning("the forkserver ended: %s; starting another, and the workers go on", reason)
        if was_ready:
            self._num_crashes = 0
            return 0.0
        if code == -signal.SIGKILL:  # someone else's doing
            return _FIRST_PAUSE_S
        self._num_crashes += 1
        self._extra, self._reason = [], reason
        return min(_FIRST_PAUSE_S * 2.0**self._num_crashes, _MAX_PAUSE_S)

    def _tell(self) -> None:
        """Wake up those that wait until it is ready."""
        self._changed.set()
        self._changed = asyncio.Event()

    def _start(self) -> ForkserverProcess:
        process = ForkserverProcess(self._modules, self._extra)
        self._orphans.own(process.pid)
        return process


class _Holder:
    """Holds the one forkserver that this process has."""

    forkserver: Forkserver | None = None
    num_guests = 0


def running_forkserver() -> Forkserver:
    """Return this process's forkserver, which has been started."""
    assert _Holder.forkserver is not None, "there is a forkserver before there is a process"
    return _Holder.forkserver


def start_forkserver(modules: Sequence[str], extra: Sequence[str]) -> Forkserver:
    """Return this process's forkserver, which is started unless there is one. Main thread only.

    Args:
        modules: See `Forkserver`.
        extra: See `Forkserver`.

    Raises:
        OSError: There is no process or no descriptor to be had.
    """
    if _Holder.forkserver is None:
        _Holder.forkserver = Forkserver(modules, extra)
    return _Holder.forkserver


@contextlib.contextmanager
def guest_forkserver(modules: Sequence[str], extra: Sequence[str]) -> Iterator[None]:
    """Have a forkserver in a process of the user's, as long as the block and this thread last.

    Several may have it at the same time, and the last one ends it.

    Args:
        modules: See `Forkserver`.
        extra: See `Forkserver`.

    Raises:
        OSError: There is no process or no descriptor to be had.
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
    """Whether this host has what a forkserver needs; else workers are spawned."""
    if sys.platform != "linux":
        return False
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError:  # a kernel before 5.3, or a sandbox
        return False
    return True


def _on_unkept(keeping: Task[None]) -> None:
    if not keeping.cancelled() and (error := keeping.exception()):
        logger.critical("the forkserver is no longer looked after", exc_info=error)
