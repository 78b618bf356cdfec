"""The service as a whole: the engine, a pool for each model, and the front ends."""

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Protocol

from inferpool.models.spec import Placement
from inferpool.service.api.routes.events import HostState
from inferpool.service.api.routes.health import HealthReport
from inferpool.service.errors import StartError
from inferpool.service.fronts.only_front import OnlyFront
from inferpool.service.live import LiveFeed
from inferpool.service.operations import Operations
from inferpool.service.queue.admission import Admission
from inferpool.service.queue.dispatcher import Dispatcher
from inferpool.service.queue.objective import Objective, ObjectiveAdmission
from inferpool.service.queue.pool import Pool
from inferpool.service.queue.quarantine import Quarantine
from inferpool.service.report import is_host_ready, report_of
from inferpool.service.settings.loader import LoadedSettings, json_of
from inferpool.service.settings.model import ModelSettings
from inferpool.service.settings.settings import Settings
from inferpool.service.speed import SpeedCache, SpeedSearch
from inferpool.service.telemetry.console import Console
from inferpool.service.telemetry.metrics import Metrics, Reading, gpu_gauges
from inferpool.workers.arena import Arena
from inferpool.workers.beside.searching import search
from inferpool.workers.config import WorkerConfig
from inferpool.workers.host.devices import Host
from inferpool.workers.host.engine import Engine, ForkserverVitals
from inferpool.workers.host.gpu_watch import GpuWatch
from inferpool.workers.host.local import LocalEngine
from inferpool.workers.host.supervisor import RestartPolicy
from inferpool.workers.memory import SharedMemoryError

if TYPE_CHECKING:
    from inferpool.service.fronts.fronts import Fronts

logger = logging.getLogger(__name__)

_STOP_GRACE_S = 5.0
"""How long a worker without work may take to leave."""


class ClosableEngine(Engine, Protocol):
    """An engine of this host."""

    async def close(self) -> None:
        """Remove everything it made. Starts are over."""

    def forkserver_vitals(self) -> ForkserverVitals | None:
        """Return the state of the process that forks workers; None if there is none."""


class Service:
    """One engine and one pool per model, from start to stop. Lives in the event loop."""

    def __init__(
        self,
        settings: Settings,
        host: Host,
        metrics: Metrics,
        console: Console,
        origins: Mapping[str, str] | None = None,
        make_engine: Callable[[Arena], ClosableEngine] = LocalEngine,
    ) -> None:
        """Decide what goes where, and start nothing yet.

        Raises:
            StartError: A requested device is missing, or there is too little memory.
        """
        self.settings = settings
        self.metrics = metrics
        self._make_engine = make_engine
        self._engine: ClosableEngine | None = None
        self.pools: dict[str, Pool] = {}
        self.is_draining = False
        self._is_stopping = False
        self._is_hurried = False
        self._console = console
        loaded = LoadedSettings(settings=settings, origins=origins or {})
        self.operations = Operations(
            self.pools,
            grace_s=settings.drain_timeout_s,
            drain=self.set_draining,
            settings_json=lambda: json_of(loaded.rows()),
        )
        self.fronts: OnlyFront | Fronts = OnlyFront()
        """The front ends, which take the connections. Set before the start."""
        self._speed_cache = SpeedCache(settings)
        self._speed_search = SpeedSearch(search, grace_s=settings.drain_timeout_s)
        self._plans = _plan(settings, host, self._speed_cache.folder)
        try:
            self.arena = Arena(settings.arena_bytes)
        except SharedMemoryError as error:
            raise StartError(f"{error} (arena_bytes)") from error
        self._settled = asyncio.Event()
        self._changed = asyncio.Event()
        self._lost = asyncio.Event()
        self._gpu_watch = GpuWatch(host.gpus, host.accelerator.library)
        metrics.gauge_source(self._read_gauges)
        self.live = LiveFeed(
            settings, self.pools, metrics, report=self.report, host=self._host_state
        )

    @property
    def plan(self) -> list[tuple[str, str]]:
        """Each worker and its placement, for people."""
        return [
            (f"{name}/{number}", _placement_text(config.placement))
            for name, configs in self._plans.items()
            for number, config in enumerate(configs)
        ]

    @property
    def num_processes(self) -> int:
        """The processes of all workers. A split replica has several, and decoders come on top."""
        return sum(
            config.placement.num_ranks + config.decoders
            for configs in self._plans.values()
            for config in configs
        )

    def start(self) -> None:
        """Begin to start every worker."""
        self._engine = engine = self._make_engine(self.arena)
        for name, configs in self._plans.items():
            self.pools[name] = self._make_pool(name, configs, engine)
        for pool in self.pools.values():
            pool.start()
        self._gpu_watch.start()
        self.live.start()
        if self.settings.speed_search:
            for pool in self.pools.values():
                self._speed_search.add(pool)

    def begin_stop(self) -> None:
        """Turn readiness red for good. New calls are still answered."""
        self._is_stopping = self.is_draining = True
        self.operations.end()
        self.live.end()

    def set_draining(self, is_draining: bool) -> bool:
        """Turn readiness red or green; return False if the service is shutting down."""
        if not self._is_stopping:
            self.is_draining = is_draining
        return self.is_draining == is_draining

    async def drain(self) -> None:
        """Admit nothing more, and answer everything that was accepted."""
        self.begin_stop()
        grace_s = self.settings.drain_timeout_s
        await asyncio.gather(*(pool.dispatcher.drain(grace_s) for pool in self.pools.values()))

    def cut_off(self) -> None:
        """Answer everything in flight now, and let `stop` kill the workers."""
        self.begin_stop()
        self._is_hurried = True
        for pool in self.pools.values():
            pool.dispatcher.cut_off("this server was told to stop at once")

    async def stop(self) -> None:
        """Stop every worker and front end, and free the memory."""
        self._gpu_watch.stop()
        await self.live.stop()
        await self.operations.stop()
        await self._speed_search.stop()
        await self.drain()
        await self.fronts.stop()
        grace_s = 0.0 if self._is_hurried else _STOP_GRACE_S
        await asyncio.gather(*(pool.stop(grace_s) for pool in self.pools.values()))
        if self._engine is not None:
            await self._engine.close()
        self.arena.close()
        self._speed_cache.close()

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

    async def until_changed(self) -> None:
        """Wait until a worker has come or gone. Only one task may wait."""
        self._changed.clear()
        await self._changed.wait()

    async def until_lost(self) -> None:
        """Wait until it is clear that no model can ever be served, and none ever was."""
        await self._lost.wait()

    def report(self) -> HealthReport:
        """Return the state of everything, for /health."""
        return report_of(
            self.pools,
            self.fronts.health(),
            self._gpu_watch.vitals(),
            self._speed_search,
            self._engine.forkserver_vitals() if self._engine else None,
            is_draining=self.is_draining,
        )

    def _make_pool(self, name: str, configs: list[WorkerConfig], engine: Engine) -> Pool:
        model = self.settings.models[name]
        metrics = self.metrics.model(name)
        p99_ms = model.objective_p99_ms
        objective = Objective(p99_ms / 1000, model=name) if p99_ms else None
        kind = partial(ObjectiveAdmission, objective) if objective else Admission
        admission = kind(
            max_queue_length=self.settings.max_queue_length,
            max_batch_size=model.batch_size,
            rejected=metrics.rejected,
            key_share=self.settings.key_share,
        )
        dispatcher = Dispatcher(
            name=name,
            arena=self.arena,
            admission=admission,
            quarantine=Quarantine(name=name, duration_s=self.settings.quarantine_s),
            metrics=metrics,
            max_batch_size=None if model.max_batch_size == "auto" else model.max_batch_size,
            batch_wait_ms=model.batch_wait_ms,
            objective=objective,
        )
        return Pool(
            name=name,
            configs=configs,
            engine=engine,
            dispatcher=dispatcher,
            policy=RestartPolicy(max_restarts=model.max_restarts),
            metrics=metrics,
            announcer=self._console,
            on_change=self._on_change,
        )

    def _on_change(self) -> None:
        self.fronts.tell_inputs()
        self._speed_search.on_change()
        self._changed.set()
        pools = self.pools.values()
        is_default_ready = self.pools[self.settings.default_model].is_ready
        if is_default_ready or all(pool.is_ready or pool.is_lost for pool in pools):
            self._settled.set()
        if all(pool.is_lost and not pool.has_served for pool in pools):
            self._lost.set()

    def _host_state(self) -> HostState:
        connections = {each.name: each.value for each in self.fronts.read_gauges()}["connections"]
        return HostState(
            connections=int(connections),
            arena_bytes=self.arena.num_bytes,
            arena_used_bytes=self.arena.used_bytes + self.fronts.used_bytes,
        )

    def _read_gauges(self) -> Iterator[Reading]:
        host = self._host_state()
        is_ready = is_host_ready(self.pools.values()) and not self.is_draining
        yield Reading(name="ready", value=is_ready)
        yield Reading(name="draining", value=self.is_draining)
        yield Reading(name="arena_bytes", value=host.arena_bytes)
        yield Reading(name="arena_used_bytes", value=host.arena_used_bytes)
        yield from self.fronts.read_gauges()
        yield from gpu_gauges(self._gpu_watch.vitals())
        for pool in self.pools.values():
            yield from pool.read_gauges()


def _plan(settings: Settings, host: Host, cache_dir: str | None) -> dict[str, list[WorkerConfig]]:
    plans = {
        name: _configs(name, model, host, settings, cache_dir)
        for name, model in settings.models.items()
    }
    if len(plans) > 1:
        shares = [f"{name} {_threads_text(configs)}" for name, configs in plans.items()]
        text = "%d models share %d cores; replicas x threads: %s"
        logger.info(text, len(plans), host.num_cores, ", ".join(shares))
    return plans


def _threads_text(configs: Sequence[WorkerConfig]) -> str:
    most = max(config.placement.num_threads * config.placement.num_ranks for config in configs)
    return f"{len(configs)} x {most}"


def _configs(
    name: str, model: ModelSettings, host: Host, settings: Settings, cache_dir: str | None
) -> list[WorkerConfig]:
    if model.split and model.speed == "auto":
        logger.info("%s speed: exact, as a split model is served", name)
    return [
        model.worker_config_for(
            name,
            placement,
            max_image_pixels=settings.max_image_pixels,
            cache_dir=cache_dir,
            error_detail="text" if settings.show_errors else "name",
        )
        for placement in settings.placements_of(name, host)
    ]


def _placement_text(placement: Placement) -> str:
    return f"{placement} ({placement.split})" if placement.split else str(placement)
