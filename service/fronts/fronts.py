"""All fronts of a service: kept by a supervisor, given connections, counted and seen out.

Lives in the main process's event loop.
"""

import asyncio
import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping

from inferpool.service.api.routes.health import FrontHealth
from inferpool.service.api.wire.connections import EdgeLimits
from inferpool.service.fronts.alone import read_fronts
from inferpool.service.fronts.desk import OwnModel, Part
from inferpool.service.fronts.doorway import Doorway
from inferpool.service.fronts.life import Life
from inferpool.service.fronts.messages import Counts, Job
from inferpool.service.settings.settings import Settings
from inferpool.service.telemetry.metrics import Metrics, Reading
from inferpool.workers.arena import Arena
from inferpool.workers.beside.forkserver_process import DEAF_TO
from inferpool.workers.errors import WorkerStartError
from inferpool.workers.host.endings import OomKills
from inferpool.workers.host.engine import WorkerId
from inferpool.workers.host.keep_going import KeepGoing
from inferpool.workers.host.supervisor import RestartPolicy, Slot, Supervisor

logger = logging.getLogger(__name__)

_START_S = 60.0
_COUNT_EVERY_S = 0.5
_COUNT_S = 0.5
"""How long a scrape waits for fronts that do not answer."""
_HANG_S = 10.0
"""A front that has not said anything for so long hangs: it is asked twice in a second."""
_HANG_ROUNDS = int(_HANG_S / _COUNT_EVERY_S)
_POLICY = RestartPolicy(max_restarts=4)
_STATES = {"ready": "up", "failed": "stopped"}
"""The supervisor's words that `/health` has others for."""


class Fronts:
    """Keeps so many of them until told to stop."""

    def __init__(
        self,
        *,
        num: int,
        settings: Settings,
        limits: EdgeLimits,
        listener: socket.socket,
        relay_path: str,
        arena: Arena,
        models: Mapping[str, OwnModel],
        metrics: Metrics,
        on_lost: Callable[[], None],
    ) -> None:
        """Divide the arena, and start nothing yet.

        Args:
            num: How many.
            settings: Of the service.
            limits: What connections may cost, all fronts together.
            listener: Where clients connect.
            relay_path: The Unix socket on which the main process answers.
            arena: Empty; nothing can be put there afterwards but by the fronts.
            models: What takes instances, in the order of the settings.
            metrics: What counts them.
            on_lost: Told that no front can ever be started; the log has said why.
        """
        self._settings = settings
        self._limits = limits.share(num)
        self._family = listener.family
        self.relay_path = relay_path
        self._memory = arena.memory.writable
        self._models = models
        self._metrics = metrics
        self._on_lost = on_lost
        self._parts = [Part(arena.memory.map, where) for where in arena.give_away(num)]
        self._supervisor = Supervisor[Part, Life](self._bring_up, self, _POLICY)
        self._doorway = Doorway(listener, self._open)
        self._watching: asyncio.Task[None] | None = None
        self.traced = (0, 0)
        """Calls that they have traced: exported, and dropped."""
        self._up = asyncio.Event()
        self._oom_kills = OomKills()
        self._is_hurried = False

    @property
    def used_bytes(self) -> int:
        """Of the arena."""
        return sum(part.used_bytes for part in self._parts)

    def start(self) -> None:
        """Begin to keep them."""
        self._supervisor.start("front", self._parts)
        self._watching = asyncio.create_task(self._watch(), name="watch fronts")

    async def until_up(self) -> None:
        """Wait until one takes connections."""
        await self._up.wait()

    def tell_inputs(self) -> None:
        """What the models take may have become known."""
        for life in self._open():
            life.desk.tell_inputs()

    async def count(self) -> None:
        """Have all that they counted by now in the metrics, if they say it soon."""
        counting = [life.desk.count() for life in self._open()]
        if counting:
            await asyncio.wait(counting, timeout=_COUNT_S)

    async def move_clients_away(self) -> None:
        """Accept no more connections, and have answers close those that there are.

        A front that ends from now on is not started again: it would have nothing to do.
        """
        await self._doorway.see_last_in()
        self._supervisor.start_no_more()
        await asyncio.gather(*(life.move_clients_away() for life in self._open()))

    def hurry(self) -> None:
        """Wait for no client when they are stopped, or no longer where that has begun."""
        self._is_hurried = True
        for life in self._open():
            life.hurry()

    async def stop(self, flush_until: float = 0.0) -> None:
        """See them out; all that they asked for must be settled.

        Args:
            flush_until: The moment until which clients may read their answers.
        """
        self._doorway.close()
        await self._supervisor.stop(max(0.0, flush_until - time.monotonic()))
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait([self._watching])
        for part in self._parts:
            part.close()

    def health(self) -> list[FrontHealth]:
        """Each of them now."""
        return [
            FrontHealth(
                name=slot.id.worker,
                state=_STATES.get(slot.state, slot.state),
                pid=slot.handle.process.pid if slot.handle else None,
                num_connections=slot.handle.num_open if slot.handle else 0,
                restarts=slot.num_restarts,
                reason="" if slot.handle else slot.reason,
            )
            for slot in self._supervisor.slots
        ]

    def read_gauges(self) -> Iterator[Reading]:
        """What `/metrics` shows of them now."""
        return read_fronts(self.health(), [life.edge for life in self._open()])

    def on_progress(self, slot: Slot[Part, Life]) -> None:
        """See `Watcher`."""

    def on_ready(self, slot: Slot[Part, Life]) -> None:
        """See `Watcher`."""
        if self._is_hurried and slot.handle:
            slot.handle.hurry()
        self._up.set()
        self._doorway.open()

    def on_gone(self, handle: Life) -> None:
        """See `Watcher`."""

    def on_down(self, slot: Slot[Part, Life]) -> None:
        """See `Watcher`."""
        if slot.state == "failed":
            logger.error("%s is given up: %s", slot.id.worker, slot.reason)
        if all(each.state == "failed" for each in self._supervisor.slots):
            self._on_lost()

    def _open(self) -> list[Life]:
        """Those that take connections."""
        return [slot.handle for slot in self._supervisor.slots if slot.handle]

    async def _bring_up(
        self, id: WorkerId, part: Part, _on_progress: Callable[[str], None]
    ) -> Life:
        """Start a front, and wait until it takes connections.

        Raises:
            WorkerStartError: It does not.
        """
        job = Job(
            name=id.worker,
            main_pid=os.getpid(),
            settings=self._settings,
            limits=self._limits,
            part=part.where,
            held=dict(part.held),
            relay_path=self.relay_path,
            family=self._family,
            log_level=logging.getLogger().level,
        )
        models = list(self._models.values())
        # What we start inherits this and is deaf to them at once: it is for us to end it.
        signal.pthread_sigmask(signal.SIG_BLOCK, DEAF_TO)
        try:
            life = Life(id, job, self._memory, part, models, self._oom_kills, self._take_counts)
        except OSError as error:
            text = f"it could not be started: {error}"
            raise WorkerStartError(text, permanent=False) from error
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, DEAF_TO)
        await life.until_up(_START_S)
        return life

    async def _watch(self) -> None:
        """Twice in a second: have them count, and see that they answer."""
        silent_since: dict[Life, int] = {}
        num_rounds = 0
        keep_going = KeepGoing("the watch of the fronts")
        while True:
            await asyncio.sleep(_COUNT_EVERY_S)
            num_rounds += 1
            for life in self._open():
                with keep_going:
                    # Rounds and not seconds: a host that paused has paused us as well.
                    if life.desk.take_sign_of_life():
                        silent_since[life] = num_rounds
                    elif num_rounds - silent_since.setdefault(life, num_rounds) > _HANG_ROUNDS:
                        life.kill("hang", f"it has not answered for {_HANG_S:g} s")
                    life.desk.count()
                    life.process.look()
            for life in [each for each in silent_since if each.is_gone]:
                del silent_since[life]

    def _take_counts(self, counts: Counts) -> None:
        for label, status, num in counts.calls:
            self._metrics.model(label).requests[status] += num
        for label, answers, errors in counts.durations:
            self._metrics.model(label).answer_duration.add(*answers)
            self._metrics.model(label).error_duration.add(*errors)
        for label, exemplars in counts.exemplars:
            self._metrics.model(label).exemplars.add(exemplars)
        for name, num in counts.num_full:
            self._metrics.model(name).rejected["arena_full"] += num
        self.traced = self.traced[0] + counts.traced[0], self.traced[1] + counts.traced[1]
