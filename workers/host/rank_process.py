"""The front end's view of one process of a worker: it reads its messages and detects its end.

A worker has one process for each of its devices. Reads never block the event loop; the end of file
of the process's outbox, or its sentinel, shows its death.
"""

import asyncio
import logging
import signal
from multiprocessing.process import BaseProcess
from typing import Protocol

import msgspec

from inferpool.workers.host.engine import USUAL_PERIODS, Cause, WorkerId, WorkerPeriods
from inferpool.workers.host.observed import EXIT_AFTER_EOF_S, ObservedProcess, OomKills
from inferpool.workers.host.queues import FrameReader, PrivateQueue
from inferpool.workers.shared.heartbeat import HeartbeatReader
from inferpool.workers.shared.log_lines import log_line
from inferpool.workers.shared.messages import UNREADABLE, FrameError, FromWorker, LogLine
from inferpool.workers.shared.outputs import StoredError
from inferpool.workers.shared.stacks import Stacks

logger = logging.getLogger(__name__)

_decode = msgspec.msgpack.Decoder(FromWorker).decode


class RankListener(Protocol):
    """Listener to a process: the worker that it belongs to."""

    def on_message(self, rank: "RankProcess", message: FromWorker) -> None:
        """Handle a message of the process.

        Raises:
            FrameError: The message makes no sense here.
            StoredError: The message names outputs that do not exist.
        """

    def on_mute(self, rank: "RankProcess", reason: str) -> None:
        """Handle the end of its messages; the reason is empty if it is exiting."""

    def on_exit(self, rank: "RankProcess") -> None:
        """Handle its exit, which is confirmed; all its messages have been handled."""


class RankProcess:
    """One process of a worker, from before its start until its exit is confirmed."""

    def __init__(
        self,
        worker: WorkerId,
        number: int,
        oom_kills: OomKills,
        *,
        is_alone: bool,
        kind: str = "rank",
        periods: WorkerPeriods = USUAL_PERIODS,
    ) -> None:
        """Create the outbox, the heartbeat and the stacks that the process will write to.

        Args:
            worker: The worker that it belongs to.
            number: Its rank, from 0.
            oom_kills: Counter of the kernel's kills for memory.
            is_alone: True if the worker has no other process.
            kind: Name of its kind in the log: "rank" or "decoder".
            periods: Times for looks and waits.

        Raises:
            SharedMemoryError: There is too little memory.
            OSError: There are too few descriptors.
        """
        self.number = number
        self.name = str(worker) if is_alone else f"{worker} {kind} {number}"
        self.labels: dict[str, object] = {"worker": str(worker)}
        """Fields of each line of its log."""
        if not is_alone:
            self.labels[kind] = number
        self._worker = worker
        self._is_alone = is_alone
        self._who = "it" if is_alone else f"{kind} {number}"
        self.outbox = PrivateQueue()
        self.stacks = Stacks(periods.stacks_step_s)
        self.heartbeat = HeartbeatReader()
        self.is_gone = False
        self.has_left = False
        """True once it has exited with code 0, as asked."""
        self._oom_kills = oom_kills
        self._loop = asyncio.get_running_loop()
        self._observed: ObservedProcess | None = None
        self._ending: tuple[Cause, str] = "start", "never started"
        self._is_read = True
        """True while its messages are read."""

    @property
    def is_attached(self) -> bool:
        """True once it has been started."""
        return self._observed is not None

    @property
    def pid(self) -> int:
        """Process number; 0 before the start."""
        return self._observed.pid if self._observed else 0

    @property
    def rss_bytes(self) -> int:
        """Memory of the process; after its end, the last value measured."""
        return self._observed.rss_bytes if self._observed else 0

    @property
    def ending(self) -> tuple[Cause, str]:
        """Kind of its end, and an explanation for people."""
        return self._ending

    def attach(self, process: BaseProcess, listener: RankListener) -> None:
        """Use the started process: close its end of the queue, and listen."""
        self._listener = listener
        self._observed = ObservedProcess(process, self._oom_kills, self._on_exit)
        self.outbox.writer.close()
        self._reader = FrameReader(self.outbox.reader)
        self._loop.add_reader(self._reader.fd, self._on_readable)

    def look(self) -> None:
        """Record what cannot be read any more after the end; takes some 0.1 ms."""
        if self._observed is not None:
            self._observed.look()

    def about(self, text: str) -> str:
        """Return a text about it for people, with its rank if the worker has others."""
        return text if self._is_alone else f"{self._who}: {text}"

    def signal(self, signum: int) -> None:
        """Send a signal if the process still exists."""
        if self._observed is not None:
            self._observed.signal(signum)

    async def log_stacks(self, reason: str, at_work_on: str) -> None:
        """Log the stacks of its threads before it is killed.

        Args:
            reason: Why it will be killed.
            at_work_on: Text that names the requests which it computes, or empty.
        """
        state, trace = await self.stacks.ask(self.pid)
        self._log(f"{self._worker} {reason}{at_work_on}; {self._who} is {state}: killing it", trace)

    def close(self) -> None:
        """Release what it wrote to. Call it after its exit, or if it was never started."""
        if self._observed is not None:
            self._loop.remove_reader(self._reader.fd)
        self.outbox.close()
        self.stacks.close()
        self.heartbeat.close()

    def log_last_stacks(self, reason: str, at_work_on: str) -> None:
        """Log the stacks that it wrote if it crashed."""
        if trace := self.stacks.take():
            self._log(f"{self.name} left its stacks ({reason}){at_work_on}", trace)

    def _log(self, text: str, trace: str) -> None:
        log_line(LogLine(logging.ERROR, __name__, text, traceback=trace), self.labels)

    def _on_readable(self) -> None:
        try:
            for frame in self._reader.frames():
                self._listener.on_message(self, _decode(frame))
        except EOFError:
            self._mute("")
        except (FrameError, StoredError, *UNREADABLE) as error:
            logger.error("%s wrote an invalid message: %s", self.name, error)
            self._mute("wrote an invalid message")

    def _mute(self, reason: str) -> None:
        self._is_read = False
        self._loop.remove_reader(self._reader.fd)
        self._listener.on_mute(self, reason)
        self._loop.call_later(EXIT_AFTER_EOF_S, self.signal, signal.SIGKILL)

    def _on_exit(self) -> None:
        assert self._observed is not None
        self._reader.is_dry = False
        while self._is_read and not self._reader.is_dry:
            self._on_readable()  # until the pipe is empty: a child of the process may keep it open
        self.is_gone = True
        self.has_left = self._observed.exit_code == 0
        self._ending = self._observed.ending.cause, self._observed.ending.reason
        self._listener.on_exit(self)
