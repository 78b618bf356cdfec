"""Records the stacks of a worker that hangs or crashes; the front end logs them.

faulthandler writes them from a signal handler in C, so neither a held GIL nor a lock prevents it.
It writes to anonymous memory, which never blocks and outlives the process.
"""

import asyncio
import contextlib
import faulthandler
import os
import signal
import weakref
from multiprocessing import reduction

import psutil

from inferpool.workers.shared.memory import open_anonymous

DUMP_SIGNAL = signal.SIGUSR1
_STEP_S = 0.01
_NUM_STEPS = 100
"""Steps to wait for a dump. It takes a few milliseconds, and many more on a busy host; a process
that needs longer than all steps is killed without a dump."""
_NUM_QUIET_STEPS = 5
"""Steps without growth after which a dump is complete: its writer may lose the core meanwhile."""
_MAX_BYTES = 1 << 16
"""Longest dump in the log; faulthandler itself stops at 100 threads of 100 frames."""


class Stacks:
    """Memory for the stacks of one process, which gets it as an argument."""

    def __init__(self, step_s: float = _STEP_S) -> None:
        """Allocate it; `step_s` are the seconds between two looks at a dump that is written."""
        self._step_s = step_s
        self._fd = open_anonymous("stacks")
        self._closing = weakref.finalize(self, os.close, self._fd)  # closed also if a start fails
        self._taken = 0

    def __reduce__(self) -> tuple[object, ...]:
        """Become a descriptor for `record` in the worker."""
        return _detach, (reduction.DupFd(self._fileno()),)

    async def ask(self, pid: int) -> tuple[str, str]:
        """Have a process write its stacks, if it can do so within a moment.

        Returns:
            The kernel's name for its state, and the stacks, or "".
        """
        try:
            state = _state_of(pid)
            if state == psutil.STATUS_STOPPED:
                return "stopped, so cannot say where", ""
            os.kill(pid, DUMP_SIGNAL)
        except (psutil.Error, ProcessLookupError):
            return "gone", ""
        size = num_quiet = 0
        for _ in range(_NUM_STEPS):
            await asyncio.sleep(self._step_s)
            if not self._closing.alive:
                return "gone", ""
            before, size = size, self.num_new_bytes
            num_quiet = num_quiet + 1 if size and size == before else 0
            if num_quiet == _NUM_QUIET_STEPS:
                break
        return state, self.take()

    @property
    def num_new_bytes(self) -> int:
        """Number of bytes written since the last `take`."""
        return os.fstat(self._fileno()).st_size - self._taken

    def take(self) -> str:
        """Return the text written since the last call; of a very long text its begin and end."""
        start, size = self._taken, self.num_new_bytes
        self._taken += size
        if size <= _MAX_BYTES:
            return self._text(start, size)
        half = _MAX_BYTES // 2
        return f"{self._text(start, half)}\n...\n{self._text(start + size - half, half)}"

    def close(self) -> None:
        """Release the memory."""
        self._closing()

    def _fileno(self) -> int:
        assert self._closing.alive, "the stacks are closed"
        return self._fd

    def _text(self, start: int, size: int) -> str:
        data = os.pread(self._fileno(), size, start)
        return data.decode(errors="replace").strip()


def record(fd: int) -> None:
    """Have this process write the stacks of all threads on a crash and on `DUMP_SIGNAL`.

    Args:
        fd: Descriptor that stays open as long as the process lives.
    """
    faulthandler.enable(file=fd, all_threads=True)
    with contextlib.suppress(AttributeError):  # a system without such signals
        faulthandler.register(DUMP_SIGNAL, file=fd, all_threads=True, chain=False)


def _state_of(pid: int) -> str:
    try:
        state: str = psutil.Process(pid).status()
    except OSError as error:  # no free descriptor just now
        return f"in a state that cannot be seen ({error.strerror})"
    return state


def _detach(descriptor: object) -> int:
    fd: int = descriptor.detach()  # type: ignore[attr-defined]  # DupFd is a factory of two classes
    return fd
