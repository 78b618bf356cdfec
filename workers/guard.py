"""Ends processes with the front end, so that nothing outlives it."""

import contextlib
import ctypes
import fcntl
import os
import signal
import sys
import threading
from multiprocessing import connection, parent_process
from pathlib import Path
from typing import NoReturn

_PR_SET_PDEATHSIG = 1
"""linux/prctl.h"""
_F_SETSIG = 10
"""asm-generic/fcntl.h"""
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
    """Make this process, and all that it will fork, end when the front end ends or closes its pipe.

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


def give_way_for_memory() -> None:
    """Make the kernel kill this process before the front end when memory runs out (Linux)."""
    with contextlib.suppress(OSError, ValueError):
        path = Path("/proc/self/oom_score_adj")
        path.write_text(str(min(_MAX_OOM_SCORE_ADJ, int(path.read_text()) + _OOM_SCORE_ADJ)))
