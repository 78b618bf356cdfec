"""Observes a process that we started: its memory, how it ended, and kills for lack of memory."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path

import psutil

from inferpool.workers.host.engine import Cause, Ending
from inferpool.workers.shared.cgroups import MEMBERSHIP, MOUNT, groups_of

EXIT_AFTER_EOF_S = 0.5
"""Seconds that a process may take to exit after it has closed its pipe."""
_COUNTERS = ("memory.events", "memory.oom_control")
"""Files that count them: of cgroup version 2, and of version 1."""


class ObservedProcess:
    """One process, from its start until its exit is confirmed. Used in the event loop."""

    def __init__(
        self, process: BaseProcess, oom_kills: "OomKills", on_exit: Callable[[], None]
    ) -> None:
        """Observe a started process, which is closed before `on_exit`; its pipes may hold data."""
        assert process.pid is not None
        self.pid = process.pid
        self.exit_code: int | None = None
        """Exit code; None until the exit is confirmed."""
        self.ending = Ending(cause="exit", reason="exit not confirmed")
        self._process = process
        self._on_exit = on_exit
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(process.sentinel, self._confirm_exit)
        self._oom_kills = oom_kills
        self._nums_oom_kills = (oom_kills.count(),) * 2
        """Kills for memory at the last two looks."""
        self._rss_bytes = 0
        self._is_gone = False
        self._memory: psutil.Process | None = None

    @property
    def rss_bytes(self) -> int:
        """Memory of the process; after its end, the last value measured."""
        self._look_at_memory()
        return self._rss_bytes

    def look(self) -> None:
        """Record what cannot be read any more after the end; takes some 0.1 ms."""
        self._look_at_memory()
        self._nums_oom_kills = self._nums_oom_kills[1], self._oom_kills.count()

    def signal(self, signum: int) -> None:
        """Send a signal if the process still exists."""
        if not self._is_gone:
            try:
                os.kill(self.pid, signum)
            except ProcessLookupError:
                return

    def _confirm_exit(self) -> None:
        process = self._process
        self._loop.remove_reader(process.sentinel)
        process.join()
        self._is_gone = True  # another process may have its number now
        # Count from the look before the last: a large process needs a while to exit after a kill.
        is_oom = self._oom_kills.count() > self._nums_oom_kills[0]
        self.exit_code = process.exitcode
        cause, reason = describe_exit(process.exitcode, is_oom=is_oom, rss_bytes=self._rss_bytes)
        self.ending = Ending(cause=cause, reason=reason)
        process.close()
        self._on_exit()

    def _look_at_memory(self) -> None:
        if not self._is_gone:
            with contextlib.suppress(psutil.Error, OSError):  # no free descriptor just now
                self._memory = self._memory or psutil.Process(self.pid)
                # It is 0 for a process that has ended and that nobody has waited for yet.
                self._rss_bytes = self._memory.memory_info().rss or self._rss_bytes


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
