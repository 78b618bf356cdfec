"""The core of a service: a pool of workers for each model, and the parts around it.

It knows no part by name: `service.app` lists them.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from fastapi import APIRouter

from inferpool.models.spec import Interface
from inferpool.service.api.routes.health import FrontHealth, HealthReport
from inferpool.service.catalog.catalog import Catalog
from inferpool.service.errors import StartError
from inferpool.service.report import is_host_ready, model_health, report_of, status_of
from inferpool.service.settings.settings import Settings
from inferpool.service.settings.state import StateFile
from inferpool.service.telemetry.console import Console
from inferpool.service.telemetry.metrics import Metrics, Reading, gpu_gauges
from inferpool.workers.host.devices import Host
from inferpool.workers.host.engine import Engine, ForkserverHealth
from inferpool.workers.host.gpu_watch import GpuWatch
from inferpool.workers.host.slots import WorkerSlot
from inferpool.workers.shared.arena import Arena
from inferpool.workers.shared.memory import SharedMemoryError

logger = logging.getLogger(__name__)

_STOP_GRACE_S = 5.0
"""How long a worker without work may take to leave."""


class ClosableEngine(Engine, Protocol):
    """An engine that ends with the service."""

    async def close(self) -> None:
        """Remove everything it made. Starts are over."""

    def forkserver_vitals(self) -> ForkserverHealth | None:
        """Return the state of the process that forks workers; None if there is none."""


class FrontEnds(Protocol):
    """The processes that accept connections: only this one, or several others."""

    traced: tuple[int, int]
    """Calls traced by other processes: exported, and dropped."""

    @property
    def used_bytes(self) -> int:
        """Bytes of the arena that other processes use."""

    async def until_up(self) -> None:
        """Wait until one accepts connections."""

    def tell_models(self) -> None:
        """Send the list of versions to other processes."""

    async def until_known(self) -> None:
        """Wait until other processes have received what `tell_models` sent."""

    async def stop(self) -> None:
        """Stop other processes."""

    def health(self) -> Sequence[FrontHealth]:
        """Return the state of each."""

    def read_gauges(self) -> Iterator[Reading]:
        """Return the metrics of all."""


def _nothing() -> None:
    """Do nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A unit that starts and stops with a service, and what it adds to it.

    All is called in the event loop.
    """

    name: str
    """The name, for people."""
    start: Callable[[], None] = _nothing
    begin_stop: Callable[[], None] = _nothing
    """Begins nothing more. It may be called more than once, and before anything has started."""
    begin_drain: Callable[[], None] = _nothing
    """Accepts nothing more from clients. Like `begin_stop`, it may be called more than once."""
    stop: Callable[[], Awaitable[None] | None] = _nothing
    """Ends everything; called in any case after `begin_stop`."""
    on_change: Callable[[], None] = _nothing
    """Called when a worker or a version of a model has come or gone."""
    routers: Callable[[], Sequence[APIRouter]] = tuple
    """Makes the routes. `POLICIES` of `service.api.auth` must say who may ask each."""
    later: Mapping[str, Callable[[], Sequence[APIRouter]]] = field(default_factory=dict)
    """Makes the routes below a first segment of paths, such as "v2", when something there is first
    asked for, in a thread: until then, nothing of it is imported."""
    forms_of_errors: Mapping[str, str] = field(default_factory=dict)
    """Functions that render the errors of all below a first segment of paths, like
    `CallProtocol.problem`; "module:name", imported with the first error. By default errors are
    problem documents."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Paths that stand for others, such as a platform's own for /health/ready."""
    gauges: Callable[[], Iterable[Reading]] | None = None
    """Reads the metrics."""
    health: Callable[[HealthReport], HealthReport] | None = None
    """Returns the report of /health with what this part knows in it."""


class Service:
    """The pools of all models, from start to stop. Lives in the event loop."""

    def __init__(
        self,
        settings: Settings,
        host: Host | None,
        metrics: Metrics,
        console: Console,
        fronts: FrontEnds,
        *,
        state: StateFile | None = None,
        cache_dir: str | None = None,
    ) -> None:
        """Place the workers, and start nothing yet. There are no parts before `attach`.

        Args:
            settings: The settings.
            host: The devices of this host; None: other hosts that join run all workers.
            metrics: The counters of each model.
            console: Shows people what happens.
            fronts: The front ends.
            state: Stores changes of models at run time.
            cache_dir: The folder of verdicts on speed; None for none.

        Raises:
            StartError: A requested device is missing, or there is too little memory.
        """
        self.settings = settings
        self.metrics = metrics
        self.fronts = fronts
        """The front ends, which accept the connections. Set before the start."""
        self.parts: Sequence[Part] = ()
        self.is_draining = False
        self._may_get_hosts = host is None
        self._is_stopping = False
        self.is_hurried = False
        self._has_served = False
        """A model has been ready, maybe one that was removed since."""
        self._engine: ClosableEngine | None = None
        self.state = state = state or StateFile(None, settings.models)
        if state.origins:
            logger.info("%s: models are served as they were changed at run time", state.path)
        self.catalog = Catalog(
            settings,
            host,
            metrics,
            console,
            cache_dir=cache_dir,
            on_change=self._on_change,
            until_known=lambda: self.fronts.until_known(),
            state=state,
        )
        self.pools = self.catalog.serving
        try:
            self.arena = Arena(settings.arena_bytes)
        except SharedMemoryError as error:
            raise StartError(f"{error} (arena_bytes)") from error
        # The agents of other hosts watch theirs.
        self.gpu_watch = GpuWatch(host.gpus if host else (), host and host.accelerator.library)
        self._settled = asyncio.Event()
        self._changed = asyncio.Event()
        self._lost = asyncio.Event()

    def attach(self, parts: Sequence[Part]) -> None:
        """Start and stop these parts with the service, and show what they show."""
        self.parts = parts
        for part in reversed(parts):
            if part.gauges is not None:
                self.metrics.gauge_source(part.gauges)

    @property
    def num_processes(self) -> int:
        """The processes of all workers. A split replica has several, and decoders come on top."""
        return sum(
            config.placement.num_ranks + config.decoders
            for configs in self.catalog.plans.values()
            for config in configs
        )

    @property
    def arena_used_bytes(self) -> int:
        """Bytes of the arena that hold payloads, in all processes."""
        return self.arena.used_bytes + self.fronts.used_bytes

    def start(self) -> None:
        """Start all parts, in their order."""
        for part in self.parts:
            part.start()

    def start_workers(self, engine: ClosableEngine) -> None:
        """Begin to start every worker."""
        self._engine = engine
        self.catalog.start(engine, self.arena)

    def begin_stop(self) -> None:
        """Turn readiness red for good. New calls are still answered."""
        self._is_stopping = self.is_draining = True
        for part in reversed(self.parts):
            part.begin_stop()

    def set_draining(self, is_draining: bool) -> bool:
        """Turn readiness red or green; return False if the service is shutting down."""
        if not self._is_stopping:
            self.is_draining = is_draining
        return self.is_draining == is_draining

    async def drain(self) -> None:
        """Admit nothing more, and answer everything that was accepted."""
        self.begin_stop()
        for part in reversed(self.parts):
            part.begin_drain()
        grace_s, loaded = self.settings.drain_timeout_s, self.catalog.loaded.values()
        await asyncio.gather(*(each.pool.dispatcher.drain(grace_s) for each in loaded))

    def cut_off(self) -> None:
        """Answer everything in flight now, and let `stop` kill the workers."""
        self.begin_stop()
        self.is_hurried = True
        for version in self.catalog.loaded.values():
            version.pool.dispatcher.cut_off("this server was told to stop at once")

    async def stop(self) -> None:
        """Stop all parts, the last one first. One that fails does not keep the others."""
        self.begin_stop()
        for part in reversed(self.parts):
            try:
                stopping = part.stop()
                if stopping is not None:
                    await stopping
            except Exception:
                logger.exception("%s: this did not stop in order", part.name)

    async def stop_workers(self) -> None:
        """Stop every worker."""
        grace_s = 0.0 if self.is_hurried else _STOP_GRACE_S
        loaded = self.catalog.loaded.values()
        await asyncio.gather(*(version.pool.stop(grace_s) for version in loaded))
        await self.catalog.stop()

    async def until_settled(self) -> None:
        """Wait until the default model is ready, or each is ready or given up."""
        await self._settled.wait()

    def loading(self) -> list[str]:
        """Return the models that have not been ready yet and may still become so."""
        return [
            name
            for name, pool in self.pools.items()
            if not pool.is_lost and not any(slot.was_ever_ready for slot in pool.slots)
        ]

    def examples(self) -> dict[str, object]:
        """Return an example input of each model that shows one."""
        pools = self.pools.items()
        return {name: pool.example for name, pool in pools if pool.example is not None}

    def interfaces(self) -> dict[str, Interface]:
        """Return how clients speak to each model where that is not as usual."""
        pools = self.pools.items()
        return {name: each.interface for name, each in pools if not each.interface.is_usual}

    async def until_changed(self) -> None:
        """Wait until a worker has come or gone. Only one task may wait."""
        self._changed.clear()
        await self._changed.wait()

    async def until_lost(self) -> None:
        """Wait until it is clear that no model can ever be served, and none ever was."""
        await self._lost.wait()

    def report(self) -> HealthReport:
        """Return the state of everything, for /health."""
        is_ready = is_host_ready(self.pools.values()) and not self.is_draining
        report = report_of(
            [
                model_health(name, pool, [each.pool for each in self.catalog.versions(name)])
                for name, pool in self.pools.items()
            ],
            self.fronts.health(),
            self.gpu_watch.vitals(),
            self._engine.forkserver_vitals() if self._engine else None,
            is_ready=is_ready,
            is_draining=self.is_draining,
        )
        for part in self.parts:
            if part.health is not None:
                report = part.health(report)
        return replace(report, status=status_of(report))

    def slots(self) -> list[WorkerSlot]:
        """Return the workers of all models."""
        return [slot for each in self.catalog.loaded.values() for slot in each.pool.slots]

    def read_gauges(self) -> Iterator[Reading]:
        """Yield the gauges of the service itself."""
        is_ready = is_host_ready(self.pools.values()) and not self.is_draining
        yield Reading(name="ready", value=is_ready)
        yield Reading(name="draining", value=self.is_draining)
        yield Reading(name="arena_bytes", value=self.arena.num_bytes)
        yield Reading(name="arena_used_bytes", value=self.arena_used_bytes)
        yield from self.fronts.read_gauges()
        yield from gpu_gauges(self.gpu_watch.vitals())
        yield from self.catalog.read_gauges()

    def _on_change(self) -> None:
        self.fronts.tell_models()
        for part in self.parts:
            part.on_change()
        self._changed.set()
        pools = self.pools.values()
        default = self.pools.get(self.settings.default_model)
        is_default_ready = default is not None and default.is_ready
        if is_default_ready or all(pool.is_ready or pool.is_lost for pool in pools):
            self._settled.set()
        self._has_served = self._has_served or any(pool.has_served for pool in pools)
        is_final = not any(pool.is_refused for pool in pools)  # /health says why
        is_final = is_final and not self._may_get_hosts
        if is_final and pools and not self._has_served and all(pool.is_lost for pool in pools):
            self._lost.set()
