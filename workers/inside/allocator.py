"""How the C library keeps and returns memory. Runs in a worker process.

Left to itself, glibc maps large buffers anew for each batch and unmaps them after it, which for
resnet18 at batch 8 makes 12,500 page faults and 6 % of the CPU time. So it is told to keep them;
and what it has kept without need, after large inputs or since the loading, is given back.
"""

import ctypes
import os
from functools import cache
from pathlib import Path

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -2, -3, -8
"""malloc.h of glibc"""
_MMAP_THRESHOLDS = (1 << 30, 1 << 25)
"""Buffers up to this size are kept. Before 2.35, glibc takes no more than half of a heap."""
_TRIM_THRESHOLD = 1 << 28
_TOP_PAD = 1 << 24
_IDLE_S = 5.0
_CHECK_S = 10.0
_SLACK_BYTES = 1 << 28
"""A working set may be exceeded by this before memory is given back under load."""
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def keep_large_buffers() -> bool:
    """Have glibc reuse large buffers rather than map and unmap them for every batch.

    Returns:
        Whether it agreed; another C library does not.
    """
    try:
        mallopt = _libc().mallopt
    except AttributeError:
        return False
    return bool(
        any(mallopt(_M_MMAP_THRESHOLD, size) for size in _MMAP_THRESHOLDS)
        and mallopt(_M_TRIM_THRESHOLD, _TRIM_THRESHOLD)
        and mallopt(_M_TOP_PAD, _TOP_PAD)
        # An arena of the preparing thread's own would keep what is free at its top for good: 50
        # MiB after large images, and 17 before. Sharing one costs nothing that could be measured.
        and mallopt(_M_ARENA_MAX, 1)
    )


def give_back() -> None:
    """Return the pages of all that is free to the kernel: 5 to 20 ms, and as much to get it again.

    Unlike what falls below the thresholds, that is also what lies between buffers in use.
    """
    try:
        _libc().malloc_trim(0)
    except AttributeError:
        return  # another C library


class SpareMemory:
    """Decides when memory is given back: once idle, and where far more is held than is worked with.

    The worker's main thread calls it between batches.
    """

    def __init__(self, now: float) -> None:
        """Begin with nothing to give back."""
        self._worked_at = now
        self._is_given_back = True
        self._checked_at = now
        self._usual_bytes: int | None = None
        """What the process held when it had worked for a while since memory was given back."""

    def worked(self, now: float) -> None:
        """A batch is done."""
        self._worked_at = now
        self._is_given_back = False
        if now < self._checked_at + _CHECK_S:
            return
        self._checked_at = now
        held = held_bytes()
        if self._usual_bytes is None:
            self._usual_bytes = held
        elif held > self._usual_bytes + _SLACK_BYTES:
            give_back()
            self._usual_bytes = None  # inputs may be larger from now on: the next check tells
        else:
            self._usual_bytes = min(self._usual_bytes, held)

    def idle(self, now: float) -> None:
        """No batch is there."""
        if not self._is_given_back and now >= self._worked_at + _IDLE_S:
            self._is_given_back = True
            give_back()


def held_bytes() -> int:
    """Memory that this process has in use, in the kernel's eyes, without that of files."""
    try:
        _, resident, shared, *_ = map(int, Path("/proc/self/statm").read_text().split())
    except OSError:
        return 0
    return (resident - shared) * _PAGE_BYTES


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)
