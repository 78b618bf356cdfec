"""Describes how a process ended: its exit code, and whether it was killed for memory."""

import contextlib
import signal
from pathlib import Path

from inferpool.workers.cgroups import MEMBERSHIP, MOUNT, groups_of
from inferpool.workers.host.engine import Cause

_COUNTERS = ("memory.events", "memory.oom_control")
"""Files that count them: of cgroup version 2, and of version 1."""


class OomKills:
    """Counter of the processes that the kernel has killed for memory.

    It reads the count of our own cgroup if there is one, else that of the whole host.
    """

    def __init__(
        self,
        mount: Path = MOUNT,
        membership: Path = MEMBERSHIP,
        vmstat: Path = Path("/proc/vmstat"),
    ) -> None:
        try:
            groups = list(groups_of(mount, membership.read_text(), "memory"))
        except OSError:
            groups = []
        files = [group / name for group in groups for name in _COUNTERS]
        files.append(vmstat)
        self._file = next((file for file in files if _read(file) is not None), None)

    def count(self) -> int:
        """Return the number of kills so far; 0 if nothing counts them."""
        return (_read(self._file) or 0) if self._file else 0


def describe_exit(exitcode: int | None, *, is_oom: bool, rss_bytes: int) -> tuple[Cause, str]:
    """Describe for people how a process ended that we did not kill.

    Args:
        exitcode: The exit code, in multiprocessing's form: negative for a signal.
        is_oom: True if the kernel killed a process for memory at about that time.
        rss_bytes: Memory that the process had when last measured, or 0.
    """
    if exitcode is None:
        return "exit", "exit not confirmed"
    if exitcode >= 0:
        return "exit", f"exit code {exitcode}"
    try:
        name = signal.Signals(-exitcode).name
    except ValueError:
        name = f"signal {-exitcode}"
    if name != "SIGKILL":
        return "signal", name
    held = f" (last RSS {_size(rss_bytes)})" if rss_bytes else ""
    if is_oom:
        return "memory", f"SIGKILL, likely out of memory{held}"
    return "signal", f"SIGKILL from outside, or by the kernel for memory{held}"


def _read(file: Path) -> int | None:
    with contextlib.suppress(OSError, ValueError):
        for line in file.read_text().splitlines():
            key, _, value = line.partition(" ")
            if key == "oom_kill":
                return int(value)
    return None


def _size(num_bytes: int) -> str:
    if num_bytes < 1 << 30:
        return f"{num_bytes / (1 << 20):.0f} MiB"
    return f"{num_bytes / (1 << 30):.1f} GiB"
