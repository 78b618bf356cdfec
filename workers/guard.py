"""Ties the life of a process to another's, so that nothing outlives the front end."""

import contextlib
import ctypes
import os
import signal
import sys
import threading
from multiprocessing import connection, parent_process
from pathlib import Path

_PR_SET_PDEATHSIG = 1
"""linux/prctl.h"""
_OOM_SCORE_ADJ = 500
"""As if it held half of all memory more than it does."""
_MAX_OOM_SCORE_ADJ = 1000


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel SIGKILL this process when its parent ends (Linux; elsewhere nothing).

    Args:
        parent_pid: Who the parent was when this process was started; if it is gone already, this
            process ends here.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:
        os._exit(1)


def die_with_front_end() -> None:
    """End this process when the process that asked for it ends, whoever forked it.

    The kernel's signal follows the forking process, which is the forkserver; this thread watches
    the front end itself, and serves where there is no such signal.
    """
    front_end = parent_process()
    assert front_end is not None, "only a child of the front end has a front end"
    sentinel = front_end.sentinel

    def watch() -> None:
        with contextlib.suppress(OSError):
            connection.wait([sentinel])
        os._exit(1)

    threading.Thread(target=watch, name="front-end-watch", daemon=True).start()


def give_way_for_memory() -> None:
    """Have the kernel end this process before the front end when memory runs out (Linux)."""
    with contextlib.suppress(OSError, ValueError):
        path = Path("/proc/self/oom_score_adj")
        path.write_text(str(min(_MAX_OOM_SCORE_ADJ, int(path.read_text()) + _OOM_SCORE_ADJ)))
