"""A front's process as the main process sees it, from its start to its end."""

import asyncio
import signal
import socket
import time
from collections.abc import Callable
from mmap import mmap
from multiprocessing import Pipe, get_context
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import TYPE_CHECKING, Any

from inferpool.service.api.wire.budgets import EdgeUse
from inferpool.service.parts.fronts.main_side import ArenaPart, MainSide
from inferpool.service.parts.fronts.messages import FrontConfig, FrontCounts, Leave, MoveAway
from inferpool.workers.host.engine import Cause, Ending, WorkerId
from inferpool.workers.host.observed import EXIT_AFTER_EOF_S, ObservedProcess, OomKills
from inferpool.workers.shared.errors import WorkerStartError
from inferpool.workers.shared.memory import WritableMemory

if TYPE_CHECKING:  # each front imports this module, and not the catalog
    from inferpool.service.catalog.catalog import Catalog

_LEAVE_S = 4.0
"""How long a front may take to close its connections once no client has anything left to read; half
a request holds it up for 2 s."""
_KILL_S = 1.0


class FrontProcess:
    """One process of a front, its pipes and its connections. Lives in the event loop."""

    has_worked = False
    """A front's answers do not excuse its death: the next one may die as soon of the same call."""

    def __init__(
        self,
        id: WorkerId,
        config: FrontConfig,
        memory: WritableMemory,
        part: ArenaPart,
        models: "Catalog",
        oom_kills: OomKills,
        on_counts: Callable[[FrontCounts], None],
    ) -> None:
        """Start the process. Main thread only: the kernel ends it with the thread that started it.

        Raises:
            OSError: No process or no descriptor is left.
        """
        self.id = id
        self.num_open = 0
        """Connections that it had at its last counts, plus those given to it since."""
        self.edge = EdgeUse()
        """The memory that its connections held at its last counts."""
        self._num_given = 0
        self._loop = asyncio.get_running_loop()
        self._on_counts = on_counts
        self._is_hurried = False
        self._ending: Ending | None = None
        """Why we end it, if we do."""
        self._gone: asyncio.Future[Ending] = self._loop.create_future()
        process, self._channel, reader, writer = _launch(config, memory)
        self.process = ObservedProcess(process, oom_kills, self._on_exit)
        self.main_side = MainSide(
            config.name,
            reader,
            writer,
            part=part,
            models=models,
            on_counts=self._take_counts,
            on_end=self._on_end,
        )

    @property
    def is_gone(self) -> bool:
        """The process has ended."""
        return self._gone.done()

    async def until_up(self, timeout_s: float) -> None:
        """Wait until it accepts connections; kill it if it is late or the wait is cancelled.

        Raises:
            WorkerStartError: It has ended.
        """
        is_up = False
        try:
            await _first_of(self.main_side.is_up, self._gone, timeout_s=timeout_s)
            is_up = self.main_side.is_up.done()
        finally:
            if not is_up:
                self.kill("start", f"it was not up within {timeout_s:g} s")
                await _first_of(self._gone, timeout_s=_KILL_S)
        if not is_up:
            raise WorkerStartError((await self.wait()).reason, permanent=False)

    async def wait(self) -> Ending:
        """Wait until the process has ended, and return how."""
        return await asyncio.shield(self._gone)

    def give(self, connection: socket.socket) -> bool:
        """Send it a connection, so that the caller may close its own; return False if it fails."""
        try:
            socket.send_fds(self._channel, [b"+"], [connection.fileno()])
        except OSError:  # it has gone, or has not looked for a long time
            return False
        self._num_given += 1
        self.num_open += 1
        return True

    async def move_clients_away(self) -> None:
        """Have its answers close their connections, and wait until most clients have gone."""
        self.main_side.link.send(MoveAway())
        await _first_of(self.main_side.has_moved, self._gone)

    async def stop(self, grace_s: float) -> None:
        """Ask it to send its last answers and end; kill it if it takes too long after `grace_s`."""
        flush_until = time.monotonic() + grace_s
        while self.main_side.has_unsettled and not self.is_gone:  # noqa: ASYNC110  # settled, unsent
            await asyncio.sleep(0)
        if self.is_gone:
            return
        self.main_side.link.send_turn()
        self._ending = self._ending or Ending(cause="asked", reason="it was told to leave")
        self.main_side.link.send(Leave(self._is_hurried, flush_until))
        await _first_of(self._gone, timeout_s=_LEAVE_S + grace_s)
        if not self.is_gone:
            self.kill("asked", "it did not leave in time")
            await _first_of(self._gone, timeout_s=_KILL_S)

    def hurry(self) -> None:
        """Have it wait for no client when it leaves, or from now on if it is leaving."""
        self._is_hurried = True
        if self._ending is not None:
            self.main_side.link.send(Leave(True, 0.0))

    def kill(self, cause: Cause, reason: str) -> None:
        """Kill it now."""
        if not self.is_gone:
            self._ending = self._ending or Ending(cause=cause, reason=reason)
            self.process.signal(signal.SIGKILL)

    def _take_counts(self, counts: FrontCounts) -> None:
        self.num_open = counts.num_open + self._num_given - counts.num_taken
        self.edge = counts.edge
        self._on_counts(counts)

    def _on_end(self, reason: str) -> None:
        """Kill it soon: it is ending anyway, or sends what nobody can read."""
        self._loop.call_later(EXIT_AFTER_EOF_S, self.kill, "exit", reason)

    def _on_exit(self) -> None:
        self.main_side.close()
        self._channel.close()
        self._gone.set_result(self._ending or self.process.ending)


def _launch(
    config: FrontConfig, memory: WritableMemory
) -> tuple[SpawnProcess, socket.socket, Connection, Connection]:
    """Start a front, and return it with our ends of the channel and the pipes."""
    from_front, to_main = Pipe(duplex=False)
    from_main, to_front = Pipe(duplex=False)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    try:
        process = get_context("spawn").Process(
            target=_run, name=config.name, args=(config, memory, from_main, to_main, theirs)
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


def _run(
    config: FrontConfig,
    memory: mmap,
    reader: Connection,
    writer: Connection,
    channel: socket.socket,
) -> None:
    from inferpool.service.parts.fronts import (
        front,  # the main process does not need these imports
    )

    front.run(config, memory, reader, writer, channel)


async def _first_of(*futures: "asyncio.Future[Any]", timeout_s: float | None = None) -> None:
    await asyncio.wait(futures, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
