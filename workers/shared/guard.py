"""Ends processes with the front end, so that nothing outlives it, and no others by mistake."""

import contextlib
import ctypes
import fcntl
import os
import signal
import sys
import threading
from collections.abc import Collection
from multiprocessing import connection, parent_process
from pathlib import Path
from typing import NoReturn

_PR_SET_PDEATHSIG = 1
"""linux/prctl.h"""
_F_SETSIG = 10
"""asm-generic/fcntl.h"""
HANDLED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR2)
"""Signals that our processes handle or ignore, since a whole process group or a cgroup may get
them."""
_OOM_SCORE_ADJ = 500
"""Score that makes a process look as if it used half of all memory more than it does."""
_MAX_OOM_SCORE_ADJ = 1000


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel SIGKILL this process when its parent ends (Linux; elsewhere nothing).

    Args:
        parent_pid: Parent at the time of the start. If it is gone already, this process exits.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:
        os._exit(1)


def die_with_front_end() -> None:
    """Have this process, and its later forks, end when the front end ends or closes its pipe.

    It becomes the leader of a process group. On Linux the kernel kills that group when the front
    end's end of the lifeline closes, even if this process holds the GIL, is stopped or ignores
    signals. On other systems a thread ends only this process.
    """
    front_end = parent_process()
    assert front_end is not None, "only a child of the front end has a front end"
    os.setpgid(0, 0)
    lifeline = front_end.sentinel
    if sys.platform != "linux":
        threading.Thread(
            target=_leave_with, args=(lifeline,), name="front-end-watch", daemon=True
        ).start()
        return
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(lifeline, _F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
    if connection.wait([lifeline], 0):  # it was closed before the kernel was asked
        os._exit(1)


def _leave_with(lifeline: int) -> NoReturn:
    with contextlib.suppress(OSError):
        connection.wait([lifeline])
    os._exit(1)


def give_children_defaults(own: Collection[object] | None = None) -> None:
    """Have each fork of this process handle signals as Python does at its start.

    With our handlers it could not be terminated, or would report that to this process.

    Args:
        own: Our handlers, where code of the user's may have set others; None if all are ours.
    """
    handlers = _Handlers(own)
    os.register_at_fork(
        before=handlers.hold, after_in_parent=handlers.release, after_in_child=handlers.give_back
    )


class _Handlers:
    """Our handlers, at a fork. A signal that comes too early waits until they are gone."""

    def __init__(self, own: Collection[object] | None) -> None:
        self._own = own
        self._masks = threading.local()

    def hold(self) -> None:
        """Block the signals in this thread, and so in the process that it forks."""
        self._masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED_SIGNALS)

    def release(self) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._masks.before)

    def give_back(self) -> None:
        """Handle them by default in the forked process, and unblock them."""
        signal.set_wakeup_fd(-1)
        ours = [n for n in HANDLED_SIGNALS if self._own is None or signal.getsignal(n) in self._own]
        for number in ours:
            signal.signal(number, signal.SIG_DFL)
        self.release()  # what has come meanwhile ends this process
        if signal.SIGINT in ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def give_way_for_memory() -> None:
    """Have the kernel kill this process before the front end when memory runs out (Linux)."""
    with contextlib.suppress(OSError, ValueError):
        path = Path("/proc/self/oom_score_adj")
        path.write_text(str(min(_MAX_OOM_SCORE_ADJ, int(path.read_text()) + _OOM_SCORE_ADJ)))
