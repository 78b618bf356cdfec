"""All fronts of a service: a supervisor keeps them running, and connections are shared among them.

Lives in the main process's event loop.
"""

import asyncio
import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from multiprocessing import util
from pathlib import Path

from inferpool.service.api.routes.health import FrontHealth
from inferpool.service.api.wire.budgets import EdgeLimits
from inferpool.service.api.wire.held import clear, num_bytes_for
from inferpool.service.catalog.catalog import Catalog
from inferpool.service.parts.fronts.balancer import ConnectionBalancer
from inferpool.service.parts.fronts.front_process import FrontProcess
from inferpool.service.parts.fronts.main_side import ArenaPart
from inferpool.service.parts.fronts.messages import FrontConfig, FrontCounts
from inferpool.service.parts.fronts.only_front import read_fronts
from inferpool.service.settings.settings import Settings
from inferpool.service.telemetry.metrics import Metrics, Reading
from inferpool.workers.host.engine import WorkerId
from inferpool.workers.host.error_guard import ErrorGuard
from inferpool.workers.host.observed import OomKills
from inferpool.workers.host.restart_policy import RestartPolicy
from inferpool.workers.host.slots import Slot
from inferpool.workers.host.supervisor import Supervisor
from inferpool.workers.shared.arena import Arena, slot_bytes
from inferpool.workers.shared.errors import WorkerStartError
from inferpool.workers.shared.guard import HANDLED_SIGNALS
from inferpool.workers.shared.memory import SharedMemory

logger = logging.getLogger(__name__)

_START_S = 60.0
_COUNT_EVERY_S = 0.5
_COUNT_S = 0.5
"""How long a scrape waits for fronts that do not answer."""
_HANG_S = 10.0
"""A front that has sent nothing for so long hangs: it is asked twice a second."""
_HANG_ROUNDS = int(_HANG_S / _COUNT_EVERY_S)
_KEPT_BYTES = 4 * 2**20
"""Bytes of the arena that the main process keeps."""
_POLICY = RestartPolicy(max_restarts=4)
_STATES = {"ready": "up", "failed": "stopped"}
"""The supervisor's states that `/health` calls by other names."""


class Fronts:
    """Runs a number of fronts, and replaces those that die, until it is stopped."""

    def __init__(
        self,
        *,
        num: int,
        settings: Settings,
        limits: EdgeLimits,
        listener: socket.socket,
        arena: Arena,
        models: Catalog,
        metrics: Metrics,
        on_lost: Callable[[], None],
    ) -> None:
        """Divide the arena, which must be empty, and start nothing yet.

        The limits are for the connections of all fronts together. `on_lost` is called when no front
        can ever be started; the log has said why.
        """
        self._settings = settings
        self._limits = limits.share(num)
        self._family = listener.family
        self.forwarding_path = str(Path(util.get_temp_dir()) / "relay")
        """Socket for calls that fronts forward, in a folder that `multiprocessing` removes."""
        self._memory = arena.memory.writable
        self._counted = SharedMemory(num_bytes_for(num), name="counts of fronts", writable=False)
        self._models = models
        self._metrics = metrics
        self._on_lost = on_lost
        # What is kept is for the inputs of comparisons. Each part must hold the largest body.
        spare = arena.num_bytes - num * slot_bytes(settings.max_body_bytes)
        parts = arena.give_away(num, max(0, min(spare, _KEPT_BYTES)))
        self._parts = [ArenaPart(arena.memory.map, where) for where in parts]
        self._supervisor = Supervisor[ArenaPart, FrontProcess](self._bring_up, self, _POLICY)
        self._balancer = ConnectionBalancer(listener, self._open)
        self._watching: asyncio.Task[None] | None = None
        self._started: list[FrontProcess] = []
        self.traced = (0, 0)
        """Calls that the fronts have traced: exported, and dropped."""
        self._up = asyncio.Event()
        self._oom_kills = OomKills()
        self._is_hurried = False
        self._is_stopped = False

    @property
    def used_bytes(self) -> int:
        """Bytes of the arena that the fronts use."""
        return sum(part.used_bytes for part in self._parts)

    def start(self) -> None:
        """Start them."""
        self._supervisor.start("front", self._parts)
        self._watching = asyncio.create_task(self._watch(), name="watch fronts")

    async def until_up(self) -> None:
        """Wait until one accepts connections."""
        await self._up.wait()

    def tell_models(self) -> None:
        """Send the versions and their inputs to the fronts."""
        for front in self._living():
            front.main_side.tell_models()

    async def until_known(self) -> None:
        """Wait until the fronts have received what `tell_models` sent, or hang for too long."""
        knowing = [front.main_side.until_known() for front in self._living()]
        if knowing:
            await asyncio.wait(knowing, timeout=_HANG_S)

    async def count(self) -> None:
        """Add what the fronts have counted to the metrics; wait for that only for a moment."""
        counting = [front.main_side.count() for front in self._open()]
        if counting:
            await asyncio.wait(counting, timeout=_COUNT_S)

    async def move_clients_away(self) -> None:
        """Accept no more connections, and have each answer close its connection.

        A front that ends from now on is not started again: it would have nothing to do.
        """
        await self._balancer.accept_last()
        self._supervisor.start_no_more()
        await asyncio.gather(*(front.move_clients_away() for front in self._open()))

    def hurry(self) -> None:
        """Wait for no client when the fronts are stopped, or from now on if they are stopping."""
        self._is_hurried = True
        for front in self._open():
            front.hurry()

    async def stop(self, flush_until: float = 0.0) -> None:
        """Stop the fronts once their instances are settled; clients may read until a moment.

        Both the drain and the end of the service call it: there may have been no drain.
        """
        if self._is_stopped:
            return  # closing a descriptor twice closes what has its number by then
        self._is_stopped = True
        self._balancer.close()
        await self._supervisor.stop(max(0.0, flush_until - time.monotonic()))
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait([self._watching])
        for part in self._parts:
            part.close()
        self._counted.close()

    def health(self) -> list[FrontHealth]:
        """Return the state of each front."""
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
        """Return the metrics of the fronts."""
        return read_fronts(self.health(), [front.edge for front in self._open()])

    def on_progress(self, slot: Slot[ArenaPart, FrontProcess]) -> None:
        """Do nothing: a start's progress is not shown."""

    def on_ready(self, slot: Slot[ArenaPart, FrontProcess]) -> None:
        """Start to pass connections to a front that is ready."""
        if self._is_hurried and slot.handle:
            slot.handle.hurry()
        self._up.set()
        self._balancer.open()

    def on_gone(self, handle: FrontProcess) -> None:
        """Do nothing: `on_down` follows."""

    def on_down(self, slot: Slot[ArenaPart, FrontProcess]) -> None:
        """Clear the counts of a front that is down."""
        clear(self._counted.map, slot.id.slot)  # what it kept for its clients is gone
        if slot.state == "failed":
            logger.error("%s is given up: %s", slot.id.worker, slot.reason)
        if all(each.state == "failed" for each in self._supervisor.slots):
            self._on_lost()

    def _open(self) -> list[FrontProcess]:
        return [slot.handle for slot in self._supervisor.slots if slot.handle]

    def _living(self) -> list[FrontProcess]:
        """Return all fronts, also those that know the models and accept no connections yet."""
        self._started = [front for front in self._started if not front.is_gone]
        return self._started

    async def _bring_up(
        self, id: WorkerId, part: ArenaPart, _on_progress: Callable[[str], None]
    ) -> FrontProcess:
        """Start a front, and wait until it accepts connections."""
        config = FrontConfig(
            name=id.worker,
            main_pid=os.getpid(),
            settings=self._settings,
            limits=self._limits,
            part=part.where,
            held=dict(part.held),
            forwarding_path=self.forwarding_path,
            family=self._family,
            log_level=logging.getLogger().level,
            number=id.slot,
            counted=self._counted.writable,
        )
        # The new process inherits this: it ignores these signals from the start, and we end it.
        signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED_SIGNALS)
        try:
            front = FrontProcess(
                id, config, self._memory, part, self._models, self._oom_kills, self._take_counts
            )
        except OSError as error:
            text = f"it could not be started: {error}"
            raise WorkerStartError(text, permanent=False) from error
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED_SIGNALS)
        self._started.append(front)
        await front.until_up(_START_S)
        return front

    async def _watch(self) -> None:
        """Ask for counts twice a second, and replace fronts that do not answer."""
        silent_since: dict[FrontProcess, int] = {}
        num_rounds = 0
        error_guard = ErrorGuard("the watch of the fronts")
        while True:
            await asyncio.sleep(_COUNT_EVERY_S)
            num_rounds += 1
            for front in self._open():
                with error_guard:
                    # Count rounds, not seconds: a host that paused has paused us as well.
                    if front.main_side.has_been_heard():
                        silent_since[front] = num_rounds
                    elif num_rounds - silent_since.setdefault(front, num_rounds) > _HANG_ROUNDS:
                        front.kill("hang", f"it has not answered for {_HANG_S:g} s")
                    front.main_side.count()
                    front.process.look()
            for front in [each for each in silent_since if each.is_gone]:
                del silent_since[front]

    def _take_counts(self, counts: FrontCounts) -> None:
        for label, status, num in counts.calls:
            self._metrics.model(label).requests[status] += num
        for label, answers, errors in counts.durations:
            self._metrics.model(label).answer_duration.add(*answers)
            self._metrics.model(label).error_duration.add(*errors)
        for label, exemplars in counts.exemplars:
            self._metrics.model(label).exemplars.add(exemplars)
        for name, reason, num in counts.rejected:
            self._metrics.model(name).rejected[reason] += num
        self.traced = self.traced[0] + counts.traced[0], self.traced[1] + counts.traced[1]
