"""One life of a front, as the main process sees it: its process, its desk, its connections."""

import asyncio
import signal
import socket
import time
from collections.abc import Callable, Sequence
from multiprocessing import Pipe, get_context
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any

from inferpool.service.api.wire.budgets import EdgeUse
from inferpool.service.fronts import entry
from inferpool.service.fronts.desk import Desk, OwnModel, Part
from inferpool.service.fronts.messages import Counts, Job, Leave, MoveAway
from inferpool.workers.errors import WorkerStartError
from inferpool.workers.host.endings import OomKills
from inferpool.workers.host.engine import Cause, Ending, WorkerId
from inferpool.workers.host.observed import EXIT_AFTER_EOF_S, ObservedProcess
from inferpool.workers.memory import WritableMemory

_LEAVE_S = 4.0
"""How long a front may take to see its connections off, once nobody has anything left to read; half
a request holds it up for 2 s."""
_KILL_S = 1.0


class Life:
    """A front from its start to its end. Lives in the event loop."""

    has_worked = False
    """Answers prove nothing: a call that ends this life may end the next one as soon."""

    def __init__(
        self,
        id: WorkerId,
        job: Job,
        memory: WritableMemory,
        part: Part,
        models: Sequence[OwnModel],
        oom_kills: OomKills,
        on_counts: Callable[[Counts], None],
    ) -> None:
        """Start the process. Main thread only: the kernel ends it with the thread that started it.

        Args:
            id: Which front, and which of its lives.
            job: What the front is to do.
            memory: The arena.
            part: Its part of that.
            models: In the order of the settings.
            oom_kills: Where the kernel's kills for memory are counted.
            on_counts: Told what the front has counted.

        Raises:
            OSError: There is no process or no descriptor to be had.
        """
        self.id = id
        self.num_open = 0
        """Connections that it had when it last said so, and has been given since."""
        self.edge = EdgeUse()
        """What those held when it last said so."""
        self._num_given = 0
        self._loop = asyncio.get_running_loop()
        self._on_counts = on_counts
        self._is_hurried = False
        self._ending: Ending | None = None
        """Why we end it, if we do."""
        self._gone: asyncio.Future[Ending] = self._loop.create_future()
        process, self._channel, reader, writer = _launch(job, memory)
        self.process = ObservedProcess(process, oom_kills, self._on_exit)
        self.desk = Desk(
            job.name,
            reader,
            writer,
            part=part,
            models=models,
            on_counts=self._take_counts,
            on_end=self._on_end,
        )

    @property
    def is_gone(self) -> bool:
        """Its process has ended."""
        return self._gone.done()

    async def until_up(self, timeout_s: float) -> None:
        """Wait until it takes connections; end it where it does not, or nobody waits any more.

        Raises:
            WorkerStartError: It has ended.
        """
        is_up = False
        try:
            await _first_of(self.desk.is_up, self._gone, timeout_s=timeout_s)
            is_up = self.desk.is_up.done()
        finally:
            if not is_up:
                self.kill("start", f"it was not up within {timeout_s:g} s")
                await _first_of(self._gone, timeout_s=_KILL_S)
        if not is_up:
            raise WorkerStartError((await self.wait()).reason, permanent=False)

    async def wait(self) -> Ending:
        """Wait until the process has ended, and say how."""
        return await asyncio.shield(self._gone)

    def give(self, connection: socket.socket) -> bool:
        """Hand a connection over, which can then be closed here; False where it takes none."""
        try:
            socket.send_fds(self._channel, [b"+"], [connection.fileno()])
        except OSError:  # it has gone, or has not looked for a long time
            return False
        self._num_given += 1
        self.num_open += 1
        return True

    async def move_clients_away(self) -> None:
        """Have its answers close their connections; returns when most clients have gone."""
        self.desk.link.send(MoveAway())
        await _first_of(self.desk.has_moved, self._gone)

    async def stop(self, grace_s: float) -> None:
        """Let it send its last answers and end; kill it if that takes too long.

        Args:
            grace_s: How long clients may take to read their answers.
        """
        flush_until = time.monotonic() + grace_s
        while self.desk.has_unsettled and not self.is_gone:  # noqa: ASYNC110  # settled, not sent
            await asyncio.sleep(0)
        if self.is_gone:
            return
        self.desk.flush()
        self._ending = self._ending or Ending(cause="asked", reason="it was told to leave")
        self.desk.link.send(Leave(self._is_hurried, flush_until))
        await _first_of(self._gone, timeout_s=_LEAVE_S + grace_s)
        if not self.is_gone:
            self.kill("asked", "it did not leave in time")
            await _first_of(self._gone, timeout_s=_KILL_S)

    def hurry(self) -> None:
        """Have it wait for no client when it is told to leave, or no longer."""
        self._is_hurried = True
        if self._ending is not None:
            self.desk.link.send(Leave(True, 0.0))

    def kill(self, cause: Cause, reason: str) -> None:
        """End it now."""
        if not self.is_gone:
            self._ending = self._ending or Ending(cause=cause, reason=reason)
            self.process.signal(signal.SIGKILL)

    def _take_counts(self, counts: Counts) -> None:
        self.num_open = counts.num_open + self._num_given - counts.num_taken
        self.edge = counts.edge
        self._on_counts(counts)

    def _on_end(self, reason: str) -> None:
        """Nothing more will be read: it is ending, or has gone mad."""
        self._loop.call_later(EXIT_AFTER_EOF_S, self.kill, "exit", reason)

    def _on_exit(self) -> None:
        self.desk.close()
        self._channel.close()
        self._gone.set_result(self._ending or self.process.ending)


def _launch(
    job: Job, memory: WritableMemory
) -> tuple[SpawnProcess, socket.socket, Connection, Connection]:
    """Start a front with its ends of the pipes, and return it with ours."""
    from_front, to_main = Pipe(duplex=False)
    from_main, to_front = Pipe(duplex=False)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    try:
        process = get_context("spawn").Process(
            target=entry.run, name=job.name, args=(job, memory, from_main, to_main, theirs)
        )
        process.start()
    except BaseException:
        for end in (from_front, to_front, ours):
            end.close()
        raise
    finally:
        for end in (to_main, from_main, theirs):
            end.close()
    return process, ours, from_front, to_front


async def _first_of(*futures: "asyncio.Future[Any]", timeout_s: float | None = None) -> None:
    await asyncio.wait(futures, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
