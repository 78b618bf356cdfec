"""All fronts of a service: started, restarted, given connections, counted and seen out.

Lives in the main process's event loop.
"""

import asyncio
import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from service.api.call import ModelEntry
from service.api.connections import EdgeLimits
from service.api.health import FrontHealth
from service.fronts.doorway import Doorway
from service.fronts.edge import readings_of
from service.fronts.job import Job
from service.fronts.life import Life
from service.fronts.messages import Counts
from service.fronts.part import Part
from service.metrics import Metrics, Reading
from service.settings import Settings
from workers.arena import Arena
from workers.forkserver_process import DEAF_TO
from workers.keep_going import KeepGoing
from workers.supervisor import pause_after

logger = logging.getLogger(__name__)

_START_S = 60.0
_STABLE_S = 60.0
"""A life that lasted so long was of use."""
_COUNT_EVERY_S = 0.5
_COUNT_S = 0.5
"""How long a scrape waits for fronts that do not answer."""
_HANG_S = 10.0
"""A front that has not said anything for so long hangs: it is asked twice in a second."""
_HANG_ROUNDS = int(_HANG_S / _COUNT_EVERY_S)
_MAX_FAILURES = 5
"""A front that has never been up is given up after so many starts."""


@dataclass(slots=True, kw_only=True)
class _Slot:
    """One front over all its lives."""

    number: int
    part: Part
    state: str = "starting"
    reason: str = ""
    num_failures: int = 0
    num_restarts: int = 0
    was_ever_up: bool = False
    life: Life | None = None
    """Its life now; None between two."""

    @property
    def name(self) -> str:
        return f"front {self.number}"


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
        models: Mapping[str, ModelEntry],
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
        self._slots = [
            _Slot(number=number, part=Part(arena.memory.map, where))
            for number, where in enumerate(arena.give_away(num))
        ]
        self._doorway = Doorway(listener, self._open)
        self._tasks: list[asyncio.Task[None]] = []
        self._is_stopping = False
        self.traced = (0, 0)
        """Calls that they have traced: exported, and dropped."""
        self._is_hurried = False
        self._leaving: list[Life] = []
        """Those that were told to go."""
        self._up = asyncio.Event()

    @property
    def used_bytes(self) -> int:
        """Of the arena."""
        return sum(slot.part.used_bytes for slot in self._slots)

    def start(self) -> None:
        """Begin to keep them."""
        for slot in self._slots:
            self._tasks.append(asyncio.create_task(self._keep(slot), name=f"keep {slot.name}"))
        self._tasks.append(asyncio.create_task(self._watch(), name="watch fronts"))

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
        """Accept no more connections, and have answers close those that there are."""
        await self._doorway.see_last_in()
        self._is_stopping = True
        await asyncio.gather(*(life.move_clients_away() for life in self._open()))

    def hurry(self) -> None:
        """Wait for no client when they are stopped, or no longer where that has begun."""
        self._is_hurried = True
        for life in self._leaving:
            life.hurry()

    async def stop(self, flush_until: float = 0.0) -> None:
        """See them out; all that they asked for must be settled.

        Args:
            flush_until: The moment until which clients may read their answers.
        """
        self._doorway.close()
        self._is_stopping = True
        self._leaving = [slot.life for slot in self._slots if slot.life is not None]
        leave = partial(Life.leave, is_hurried=self._is_hurried, flush_until=flush_until)
        await asyncio.gather(*map(leave, self._leaving))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for slot in self._slots:
            slot.part.close()

    def health(self) -> list[FrontHealth]:
        """Each of them now."""
        return [
            FrontHealth(
                name=slot.name,
                state=slot.state,
                pid=slot.life.pid if slot.life else None,
                num_connections=slot.life.num_open if slot.life else 0,
                restarts=slot.num_restarts,
                reason="" if slot.state == "up" else slot.reason,
            )
            for slot in self._slots
        ]

    def read_gauges(self) -> Iterator[Reading]:
        """What `/metrics` shows of them now."""
        total = 0
        for slot in self._slots:
            labels = (str(slot.number),)
            num_open = slot.life.num_open if slot.life else 0
            total += num_open
            yield Reading(name="front_up", value=slot.state == "up", labels=labels)
            yield Reading(name="front_connections", value=num_open, labels=labels)
            yield Reading(name="front_restarts", value=slot.num_restarts, labels=labels)
        yield Reading(name="connections", value=total)
        yield from readings_of([slot.life.edge for slot in self._slots if slot.life])

    def _open(self) -> list[Life]:
        """Those that take connections."""
        return [slot.life for slot in self._slots if slot.life and slot.state == "up"]

    async def _keep(self, slot: _Slot) -> None:
        try:
            while True:
                began = time.monotonic()
                slot.reason = await self._live_once(slot)
                slot.life = None
                if self._is_stopping:
                    break
                is_of_use = slot.state == "up" and time.monotonic() - began > _STABLE_S
                slot.num_failures = 0 if is_of_use else slot.num_failures + 1
                logger.error("%s ended: %s", slot.name, slot.reason)
                if not slot.was_ever_up and slot.num_failures >= _MAX_FAILURES:
                    self._on_lost()
                    break
                slot.state = "backoff"
                await asyncio.sleep(pause_after(slot.num_failures))
                slot.num_restarts += 1
        except Exception as error:
            slot.reason = f"it is no longer watched: {error!r}"
            logger.critical("%s: %s", slot.name, slot.reason, exc_info=error)
        finally:
            slot.state = "stopped"

    async def _live_once(self, slot: _Slot) -> str:
        """One life of a front, from its start to its end; why it ended."""
        slot.state = "starting"
        try:
            slot.life = life = self._launch(slot)
        except OSError as error:
            return f"it could not be started: {error}"
        if not await life.until_up(_START_S):
            life.kill(f"it was not up within {_START_S:g} s")
            return await life.wait()
        slot.state, slot.was_ever_up = "up", True
        self._up.set()
        self._doorway.open()
        return await life.wait()

    def _launch(self, slot: _Slot) -> Life:
        job = Job(
            name=slot.name,
            main_pid=os.getpid(),
            settings=self._settings,
            limits=self._limits,
            part=slot.part.where,
            held=dict(slot.part.held),
            relay_path=self.relay_path,
            family=self._family,
            log_level=logging.getLogger().level,
        )
        # What we start inherits this and is deaf to them at once: it is for us to end it.
        signal.pthread_sigmask(signal.SIG_BLOCK, DEAF_TO)
        try:
            models = list(self._models.values())
            return Life(job, self._memory, slot.part, models, self._take_counts)
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, DEAF_TO)

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
                        life.kill(f"it has not answered for {_HANG_S:g} s")
                    life.desk.count()
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
