"""The processes that the front end inherits: those whose own parent has ended.

Workers are among them by design: see `workers.beside.forkserver_process`. So is what the code of a
model has forked and left. A front end that is the first process of a container inherits all others
too.
"""

import contextlib
import ctypes
import os
import signal
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36
"""linux/prctl.h"""


class Orphans:
    """Waits for the dead processes that nobody else waits for, so that none stays a zombie."""

    def __init__(self, *, is_guest: bool = False) -> None:
        """Know of none yet.

        Args:
            is_guest: Other code of this process has children too, and may wait for them later.
        """
        self.owned: set[int] = set()
        """Someone waits for these however long it takes. Any thread adds."""
        self._groups: set[int] | None = set() if is_guest else None
        """Where only those are ours that belong to one of these process groups."""
        self._dead: set[int] = set()
        """Those that were dead already at the last look."""

    def reap(self) -> None:
        """Wait for what has been dead since the last look: its owner, if any, had that long."""
        dead = {pid for pid in _children() if self._is_ours(pid) and _is_dead(pid)}
        for pid in dead & self._dead:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        self._dead = dead - self._dead

    def own(self, pid: int) -> None:
        """Leave a process, which leads a process group, to who started it. Any thread."""
        self.owned.add(pid)
        if self._groups is not None:
            self._groups.add(pid)

    def _is_ours(self, pid: int) -> bool:
        """Whether nobody else waits for a child of this process."""
        if pid in self.owned or self._groups is None:
            return pid not in self.owned
        try:
            return os.getpgid(pid) in self._groups
        except ProcessLookupError:
            return False


def adopt_orphans(*, adopts: bool = True) -> None:
    """Have this process, and not the host's first, inherit the orphans among its descendants."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, int(adopts), 0, 0, 0)
    if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # or the kernel forgets all exit codes


def end_group(pid: int) -> None:
    """Kill what a process has forked, after its end and before it is waited for.

    That is all in the process group that it leads; a process that left the group escapes.
    """
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _children() -> list[int]:
    """The children of the main thread, which inherits all orphans."""
    try:
        return [int(n) for n in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]
    except OSError:  # no descriptor just now, or a kernel without it
        return []


def _is_dead(pid: int) -> bool:
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return False
