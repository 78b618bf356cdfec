"""Processes that the forkserver forks, or stands for, with multiprocessing's interface."""

import contextlib
import io
import os
import signal
import threading
from multiprocessing import (
    popen_forkserver,
    popen_spawn_posix,
    reduction,
    resource_tracker,
    spawn,
    util,
)
from multiprocessing.context import set_spawning_popen
from multiprocessing.process import BaseProcess

from inferpool.workers.host.forkserver import running_forkserver
from inferpool.workers.host.orphans import end_group
from inferpool.workers.inside.entry import StartedProcess
from inferpool.workers.shared.guard import HANDLED_SIGNALS

_UNKNOWN = 255
"""Exit code if the true one is lost, as in multiprocessing."""


class ForkedProcess(BaseProcess):
    """A process that the forkserver forks; then it is a child of this process."""

    def __reduce__(self) -> tuple[object, ...]:
        """Become a process in which nothing of the front end's side is imported."""
        return object.__new__, (StartedProcess,), self.__dict__

    @staticmethod
    def _Popen(process: BaseProcess) -> "_Popen":  # noqa: N802  # as `BaseProcess.start` has it
        return _Popen(process)


class SpawnedProcess(ForkedProcess):
    """A process with an interpreter of its own, which imports torch for seconds.

    It takes the place of one that would be forked while there is no forkserver.
    """

    @staticmethod
    def _Popen(process: BaseProcess) -> "_SpawnedPopen":  # noqa: N802  # as above
        return _SpawnedPopen(process)


_polling = threading.Lock()
"""Lock for waiting for a dead process: its exit code can be read only once."""


class _Popen(popen_forkserver.Popen):
    """Starts a `ForkedProcess` and waits for it. The exit code comes from the kernel."""

    def _launch(self, process: BaseProcess) -> None:
        self._forkserver = forkserver = running_forkserver()
        body = io.BytesIO()
        set_spawning_popen(self)
        try:
            reduction.dump(_preparation_for(process), body)
            reduction.dump(process, body)
        finally:
            set_spawning_popen(None)
        self.pid, lifeline = self._begin(body.getvalue())
        try:
            self.sentinel = os.pidfd_open(self.pid)
        except BaseException:
            os.close(lifeline)
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)  # nobody else will wait for it
            forkserver.forget(self.pid)
            raise
        self.finalizer = util.Finalize(self, _close, (lifeline, self.sentinel))

    def _begin(self, body: bytes) -> tuple[int, int]:
        """Start the process that runs a pickled object; return its number and its lifeline."""
        return self._forkserver.fork(body, self._fds)  # type: ignore[attr-defined]  # private

    def poll(self, flag: int = os.WNOHANG) -> int | None:
        # This needs no descriptor, since there may be none left.
        if self.returncode is None and not flag & os.WNOHANG:
            with contextlib.suppress(ChildProcessError):
                os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        # `BaseProcess.start` polls all processes, so two threads may see the same exit.
        with _polling:
            return self._poll()

    def _poll(self) -> int | None:
        if self.returncode is None:
            try:
                if os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
                    return None
                # Kill before waiting: after that another process may get the number.
                end_group(self.pid)
                self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            except ChildProcessError:  # other code has waited for it
                self.returncode = _UNKNOWN
            self._forkserver.forget(self.pid)
        return self.returncode


class _SpawnedPopen(_Popen):
    method = "spawn"
    DupFd = popen_spawn_posix.Popen.DupFd  # type: ignore[assignment]  # of the other method

    def duplicate_for_child(self, fd: int) -> int:
        self._fds.append(fd)  # type: ignore[attr-defined]  # private
        return fd

    def _begin(self, body: bytes) -> tuple[int, int]:
        tracker_fd = resource_tracker.getfd()
        data_r, lifeline = os.pipe()
        # Until it handles them, it must not end by what a whole process group or cgroup gets.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED_SIGNALS)
        try:
            command = spawn.get_command_line(tracker_fd=tracker_fd, pipe_handle=data_r)
            command.insert(1, "-P")  # else modules of the models' folder would replace Python's
            fds = {data_r, tracker_fd, *self._fds}  # type: ignore[attr-defined]  # private
            pid = util.spawnv_passfds(os.fsencode(spawn.get_executable()), command, [*fds])
        except BaseException:
            os.close(lifeline)
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            os.close(data_r)
        self._forkserver.own(pid)
        with contextlib.suppress(BrokenPipeError), open(lifeline, "wb", closefd=False) as file:
            file.write(body)
        return pid, lifeline


def _preparation_for(process: BaseProcess) -> dict[str, object]:
    """Return the preparation data without the main module, which the process would run again."""
    told = spawn.get_preparation_data(process.name)
    return {name: value for name, value in told.items() if not name.startswith("init_main")}


def _close(*fds: int) -> None:
    for fd in fds:
        os.close(fd)
