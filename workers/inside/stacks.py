"""The stacks of a worker that hangs or crashes: the worker writes them, the front end logs them.

faulthandler writes from a signal handler in C, so neither a held GIL nor a lock keeps it from doing
so. It writes to anonymous memory, which never blocks and is still there when the process is not.
"""

import asyncio
import contextlib
import faulthandler
import os
import signal
import weakref
from multiprocessing import reduction

import psutil

from inferpool.workers.memory import open_anonymous

DUMP_SIGNAL = signal.SIGUSR1
_STEP_S = 0.01
_NUM_STEPS = 100
"""A dump takes a few milliseconds, and on a busy host many more; a process that needs longer than
all of them is killed without."""
_NUM_QUIET_STEPS = 5
"""A dump that has not grown for so long is whole: who writes it may lose the core in between."""
_MAX_BYTES = 1 << 16
"""Of one dump in the log; faulthandler itself stops at 100 threads of 100 frames."""


class Stacks:
    """The front end's side; pass it to the process whose stacks it is to hold."""

    def __init__(self) -> None:
        self._fd = open_anonymous("stacks")
        self._closing = weakref.finalize(self, os.close, self._fd)  # a start may fail
        self._taken = 0

    def __reduce__(self) -> tuple[object, ...]:
        """In a worker it is a descriptor for `record`."""
        return _detach, (reduction.DupFd(self._fileno()),)

    async def ask(self, pid: int) -> tuple[str, str]:
        """Have a process write its stacks, if it can do so within a moment.

        Returns:
            Its state in the kernel's words, and the stacks, or nothing.
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
            await asyncio.sleep(_STEP_S)
            if not self._closing.alive:
                return "gone", ""
            before, size = size, self.num_new_bytes
            num_quiet = num_quiet + 1 if size and size == before else 0
            if num_quiet == _NUM_QUIET_STEPS:
                break
        return state, self.take()

    @property
    def num_new_bytes(self) -> int:
        """What was written since the last `take`."""
        return os.fstat(self._fileno()).st_size - self._taken

    def take(self) -> str:
        """What was written since the last call; of very much, its beginning and its end."""
        start, size = self._taken, self.num_new_bytes
        self._taken += size
        if size <= _MAX_BYTES:
            return self._text(start, size)
        half = _MAX_BYTES // 2
        return f"{self._text(start, half)}\n...\n{self._text(start + size - half, half)}"

    def close(self) -> None:
        """Give the memory back."""
        self._closing()

    def _fileno(self) -> int:
        assert self._closing.alive, "the stacks are closed"
        return self._fd

    def _text(self, start: int, size: int) -> str:
        data = os.pread(self._fileno(), size, start)
        return data.decode(errors="replace").strip()


def record(fd: int) -> None:
    """In a worker: write the stacks of all threads there on a crash, and when `DUMP_SIGNAL` comes.

    Args:
        fd: Open for as long as the process lives.
    """
    faulthandler.enable(file=fd, all_threads=True)
    with contextlib.suppress(AttributeError):  # only where there are such signals
        faulthandler.register(DUMP_SIGNAL, file=fd, all_threads=True, chain=False)


def _state_of(pid: int) -> str:
    try:
        state: str = psutil.Process(pid).status()
    except OSError as error:  # there is no descriptor just now
        return f"in a state that cannot be seen ({error.strerror})"
    return state


def _detach(descriptor: object) -> int:
    fd: int = descriptor.detach()  # type: ignore[attr-defined]  # DupFd is a factory of two classes
    return fd
