"""A worker's process as the kernel tells of it, to the front end: memory, signals, how it ended."""

import contextlib
import os

import psutil

from workers.endings import OomKills, describe_exit
from workers.engine import Cause


class ObservedProcess:
    """One process, from its start until its exit is confirmed."""

    def __init__(self, pid: int, oom_kills: OomKills) -> None:
        self.pid = pid
        self._oom_kills = oom_kills
        self._nums_oom_kills = (oom_kills.count(),) * 2
        """At the look before the last one, and at the last one."""
        self._rss_bytes = 0
        self._is_gone = False
        self._process: psutil.Process | None = None
        """Once it could be looked at."""

    @property
    def rss_bytes(self) -> int:
        """The memory that it holds; after its end, what it held when last looked at."""
        self._look_at_memory()
        return self._rss_bytes

    def look(self) -> None:
        """Take note of what will be asked for when it is too late to look; some 0.1 ms."""
        self._look_at_memory()
        self._nums_oom_kills = self._nums_oom_kills[1], self._oom_kills.count()

    def signal(self, signum: int) -> None:
        """Send it a signal, if it is still there."""
        if not self._is_gone:
            try:
                os.kill(self.pid, signum)
            except ProcessLookupError:
                return

    def end(self, exitcode: int | None) -> tuple[Cause, str]:
        """Its exit is confirmed, so its number may be another's now. Why it ended, for a person.

        Kills for memory count from the look before the last one: a large process takes a while to
        be gone.
        """
        self._is_gone = True
        is_oom = self._oom_kills.count() > self._nums_oom_kills[0]
        return describe_exit(exitcode, is_oom=is_oom, rss_bytes=self._rss_bytes)

    def _look_at_memory(self) -> None:
        if not self._is_gone:
            with contextlib.suppress(psutil.Error, OSError):  # there is no descriptor just now
                self._process = self._process or psutil.Process(self.pid)
                # Of a process that has ended, and that nobody has waited for yet, it is 0.
                self._rss_bytes = self._process.memory_info().rss or self._rss_bytes
