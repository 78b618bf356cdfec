"""Reaps the orphans that the front end inherits: processes with a parent that has ended.

Workers are among them by design (see `workers.beside.forkserver_process`), and so are processes
that a model has forked and left behind. A front end that is the first process of a container
inherits all orphans of the container.
"""

import contextlib
import ctypes
import os
import signal
from collections.abc import Callable
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36
_PR_GET_CHILD_SUBREAPER = 37
"""linux/prctl.h"""


class Orphans:
    """Reaper of the dead children that nobody else waits for, so that none stays a zombie."""

    def __init__(self, *, is_guest: bool = False) -> None:
        """Store whether other code in this process has children too, and may wait for them."""
        self.owned: set[int] = set()
        """Processes that someone else waits for. Any thread adds to it."""
        self._groups: set[int] | None = set() if is_guest else None
        """Process groups with our processes; None if all children are ours."""
        self._dead: set[int] = set()
        """Processes that were dead at the last look."""

    def reap(self) -> None:
        """Reap what was dead at the last look already: its owner had that long to do so."""
        dead = {pid for pid in _children() if self._is_ours(pid) and _is_dead(pid)}
        for pid in dead & self._dead:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        self._dead = dead - self._dead

    def own(self, pid: int) -> None:
        """Leave a process, which leads a process group, to its starter. Any thread may call it."""
        self.owned.add(pid)
        if self._groups is not None:
            self._groups.add(pid)

    def _is_ours(self, pid: int) -> bool:
        """Return True if nobody else waits for this child."""
        if pid in self.owned or self._groups is None:
            return pid not in self.owned
        try:
            return os.getpgid(pid) in self._groups
        except ProcessLookupError:
            return False


class _Adoption:
    """Those that want this process to adopt orphans, and what it did before the first came."""

    num = 0
    before = 0


def adopt_orphans() -> Callable[[], None]:
    """Adopt orphaned descendants in this process instead of the host's first one (prctl(2)).

    Returns:
        A function that ends it. The last one of several restores what was before.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if not _Adoption.num:
        before = ctypes.c_int()
        libc.prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0)
        _Adoption.before = before.value
    _Adoption.num += 1
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # or the kernel forgets all exit codes

    def end() -> None:
        _Adoption.num -= 1
        if not _Adoption.num:
            libc.prctl(_PR_SET_CHILD_SUBREAPER, _Adoption.before, 0, 0, 0)

    return end


def end_group(pid: int) -> None:
    """Kill the process group that a dead process led, before it is waited for.

    That ends all that it has forked, except processes that have left the group.
    """
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _children() -> list[int]:
    """Return the children of the main thread, which inherits all orphans."""
    try:
        return [int(n) for n in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]
    except OSError:  # no free descriptor just now, or the kernel lacks this file
        return []


def _is_dead(pid: int) -> bool:
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return False
