"""A process that we started, as the kernel tells of it: memory, signals, how it ended."""

import asyncio
import contextlib
import os
from collections.abc import Callable
from multiprocessing.process import BaseProcess

import psutil

from inferpool.workers.host.endings import OomKills, describe_exit
from inferpool.workers.host.engine import Ending

EXIT_AFTER_EOF_S = 0.5
"""At the end of file of its pipe a process is exiting; a moment later it has no excuse."""


class ObservedProcess:
    """One process, from its start until its exit is confirmed. Lives in the event loop."""

    def __init__(
        self, process: BaseProcess, oom_kills: OomKills, on_exit: Callable[[], None]
    ) -> None:
        """Watch a process that has been started.

        Args:
            process: Closed once its exit is confirmed.
            oom_kills: Where the kernel's kills for memory are counted.
            on_exit: Called then; its pipes may still hold what it wrote before.
        """
        assert process.pid is not None
        self.pid = process.pid
        self.exit_code: int | None = None
        """Known once its exit is confirmed."""
        self.ending = Ending(cause="exit", reason="exit not confirmed")
        self._process = process
        self._on_exit = on_exit
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(process.sentinel, self._confirm_exit)
        self._oom_kills = oom_kills
        self._nums_oom_kills = (oom_kills.count(),) * 2
        """At the look before the last one, and at the last one."""
        self._rss_bytes = 0
        self._is_gone = False
        self._memory: psutil.Process | None = None
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

    def _confirm_exit(self) -> None:
        process = self._process
        self._loop.remove_reader(process.sentinel)
        process.join()
        self._is_gone = True  # its number may be another's now
        # From the look before the last one: a large process takes a while to be gone.
        is_oom = self._oom_kills.count() > self._nums_oom_kills[0]
        self.exit_code = process.exitcode
        cause, reason = describe_exit(process.exitcode, is_oom=is_oom, rss_bytes=self._rss_bytes)
        self.ending = Ending(cause=cause, reason=reason)
        process.close()
        self._on_exit()

    def _look_at_memory(self) -> None:
        if not self._is_gone:
            with contextlib.suppress(psutil.Error, OSError):  # there is no descriptor just now
                self._memory = self._memory or psutil.Process(self.pid)
                # Of a process that has ended, and that nobody has waited for yet, it is 0.
                self._rss_bytes = self._memory.memory_info().rss or self._rss_bytes
