"""One process of a worker as the front end's event loop sees it: what it writes, and its end.

A worker has one such process for each of its devices. Nothing here waits for the process: reads are
non-blocking, and a death is seen as the end of file of its output queue and by its sentinel.
"""

import asyncio
import logging
import signal
from multiprocessing.process import BaseProcess
from typing import Protocol

import msgspec

from inferpool.workers.heartbeat import HeartbeatReader
from inferpool.workers.host.endings import OomKills
from inferpool.workers.host.engine import Cause, WorkerId
from inferpool.workers.host.observed import EXIT_AFTER_EOF_S, ObservedProcess
from inferpool.workers.host.queues import FrameReader, PrivateQueue
from inferpool.workers.inside.stacks import Stacks
from inferpool.workers.log_lines import log_line
from inferpool.workers.messages import UNREADABLE, FrameError, FromWorker, LogLine
from inferpool.workers.outputs import StoredError

logger = logging.getLogger(__name__)

_decode = msgspec.msgpack.Decoder(FromWorker).decode


class Owner(Protocol):
    """The worker that a process belongs to."""

    def on_message(self, rank: "RankProcess", message: FromWorker) -> None:
        """The process has written one.

        Raises:
            FrameError: It cannot have meant that.
            StoredError: It has named outputs that are none.
        """

    def on_mute(self, rank: "RankProcess", reason: str) -> None:
        """Nothing more will be read of it: for that reason, or because it is exiting."""

    def on_exit(self, rank: "RankProcess") -> None:
        """Its exit is confirmed, and all that it wrote before was read."""


class RankProcess:
    """One process, from before its start until its exit is confirmed."""

    def __init__(
        self, worker: WorkerId, number: int, oom_kills: OomKills, *, is_alone: bool
    ) -> None:
        """Make what it writes to.

        Args:
            worker: Whose process it is.
            number: Its rank, from 0.
            oom_kills: Where the kernel's kills for memory are counted.
            is_alone: Whether the worker has no other.

        Raises:
            SharedMemoryError: There is no page to be had.
            OSError: There are no descriptors to be had.
        """
        self.number = number
        self.name = str(worker) if is_alone else f"{worker} rank {number}"
        """For people."""
        self.labels: dict[str, object] = {"worker": str(worker)}
        """What each line of its log carries."""
        if not is_alone:
            self.labels["rank"] = number
        self._worker = worker
        self._who = "it" if is_alone else f"rank {number}"
        self.outbox = PrivateQueue()
        self.stacks = Stacks()
        self.heartbeat = HeartbeatReader()
        self.is_gone = False
        self.has_left = False
        """It has ended of its own accord, as it was told to."""
        self._oom_kills = oom_kills
        self._loop = asyncio.get_running_loop()
        self._observed: ObservedProcess | None = None
        self._ending: tuple[Cause, str] = "start", "never started"
        self._is_unread = True
        """What it writes is still read."""

    @property
    def is_attached(self) -> bool:
        """There is a process."""
        return self._observed is not None

    @property
    def pid(self) -> int:
        """Its number; 0 before it is started."""
        return self._observed.pid if self._observed else 0

    @property
    def rss_bytes(self) -> int:
        """The memory that it holds, or held when last looked at."""
        return self._observed.rss_bytes if self._observed else 0

    @property
    def ending(self) -> tuple[Cause, str]:
        """How it ended, once it is gone, and why for a person."""
        return self._ending

    def attach(self, process: BaseProcess, owner: Owner) -> None:
        """Take charge of the started process: keep our end of its queue, and listen."""
        self._owner = owner
        self._observed = ObservedProcess(process, self._oom_kills, self._on_exit)
        self.outbox.writer.close()
        self._reader = FrameReader(self.outbox.reader)
        self._loop.add_reader(self._reader.fd, self._on_readable)

    def look(self) -> None:
        """Take note of what will be asked for when it is too late to look; some 0.1 ms."""
        if self._observed is not None:
            self._observed.look()

    def signal(self, signum: int) -> None:
        """Send it a signal, if it is still there."""
        if self._observed is not None:
            self._observed.signal(signum)

    async def log_stacks(self, reason: str, at_work_on: str) -> None:
        """Have it write the stacks of its threads into the log, which is to be its last word.

        Args:
            reason: Why it is to be killed.
            at_work_on: The requests that it is computing, or nothing.
        """
        state, trace = await self.stacks.ask(self.pid)
        self._log(f"{self._worker} {reason}{at_work_on}; {self._who} is {state}: killing it", trace)

    def close(self) -> None:
        """Give back what it wrote to; it is gone, or was never started."""
        if self._observed is not None:
            self._loop.remove_reader(self._reader.fd)
        self.outbox.close()
        self.stacks.close()
        self.heartbeat.close()

    def log_last_stacks(self, reason: str, at_work_on: str) -> None:
        """Log the stacks that it left when it crashed, if it did."""
        if trace := self.stacks.take():
            self._log(f"{self.name} left its stacks ({reason}){at_work_on}", trace)

    def _log(self, text: str, trace: str) -> None:
        log_line(LogLine(logging.ERROR, __name__, text, traceback=trace), self.labels)

    def _on_readable(self) -> None:
        try:
            for frame in self._reader.frames():
                self._owner.on_message(self, _decode(frame))
        except EOFError:
            self._mute("")
        except (FrameError, StoredError, *UNREADABLE) as error:
            logger.error("%s wrote what is no message: %s", self.name, error)
            self._mute("wrote what is no message")

    def _mute(self, reason: str) -> None:
        self._is_unread = False
        self._loop.remove_reader(self._reader.fd)
        self._owner.on_mute(self, reason)
        self._loop.call_later(EXIT_AFTER_EOF_S, self.signal, signal.SIGKILL)

    def _on_exit(self) -> None:
        assert self._observed is not None
        self._reader.is_dry = False
        while self._is_unread and not self._reader.is_dry:
            self._on_readable()  # a process that it forked may keep the pipe open
        self.is_gone = True
        self.has_left = self._observed.exit_code == 0
        self._ending = self._observed.ending.cause, self._observed.ending.reason
        self._owner.on_exit(self)
