"""The service as a whole: the engine, a pool for each model, and the front ends."""

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from inferpool.service.api.routes.health import HealthReport
from inferpool.service.catalog.catalog import Catalog
from inferpool.service.checks.memory import needs_of_worker
from inferpool.service.errors import StartError
from inferpool.service.parts.admin.operations import Operations
from inferpool.service.parts.cluster.door import ClusterDoor
from inferpool.service.parts.cluster.hosts import Cluster
from inferpool.service.parts.cluster.shown import ShownHosts
from inferpool.service.parts.fronts.only_front import OnlyFront
from inferpool.service.parts.jobs.jobs import Jobs
from inferpool.service.parts.jobs.records import StoreLimits
from inferpool.service.parts.jobs.webhooks import Webhooks, read_secret
from inferpool.service.parts.live.events import HostState
from inferpool.service.parts.live.sampler import LiveFeed
from inferpool.service.parts.objective import add_objective
from inferpool.service.parts.speed import SpeedCache, SpeedSearch
from inferpool.service.parts.swap.changes import Changes
from inferpool.service.parts.swap.room import Room
from inferpool.service.parts.turns.gate import DeviceGate
from inferpool.service.parts.watched.model_folder import ModelFolder
from inferpool.service.queue.pool import Pool
from inferpool.service.report import is_host_ready, report_of
from inferpool.service.settings.loader import LoadedSettings, json_of
from inferpool.service.settings.settings import Settings
from inferpool.service.settings.state import StateFile
from inferpool.service.telemetry.console import Console
from inferpool.service.telemetry.metrics import Metrics, Reading, gpu_gauges
from inferpool.workers.host.device_memory import DeviceMemory
from inferpool.workers.host.devices import Host
from inferpool.workers.host.engine import Engine, ForkserverHealth
from inferpool.workers.host.gpu_watch import GpuWatch
from inferpool.workers.host.local import LocalEngine
from inferpool.workers.host.slots import WorkerSlot
from inferpool.workers.shared.arena import Arena
from inferpool.workers.shared.cgroups import processes_left
from inferpool.workers.shared.memory import SharedMemoryError
from inferpool.workers.speed.host_side import search

if TYPE_CHECKING:
    from inferpool.service.parts.fronts.fronts import Fronts

logger = logging.getLogger(__name__)

_STOP_GRACE_S = 5.0
"""How long a worker without work may take to leave."""


class ClosableEngine(Engine, Protocol):
    """An engine that ends with the service."""

    async def close(self) -> None:
        """Remove everything it made. Starts are over."""

    def forkserver_vitals(self) -> ForkserverHealth | None:
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
        state: StateFile | None = None,
        door: ClusterDoor | None = None,
    ) -> None:
        """Decide what goes where, and start nothing yet.

        Args:
            settings: The settings.
            host: The devices of this host.
            metrics: The counters of each model.
            console: Tells people what happens.
            origins: The origins of the settings, for /admin/settings.
            make_engine: Makes the engine of this host.
            state: Keeps what is changed of models at run time.
            door: The port at which agents join, whose hosts run all workers then; None: they run on
                this host.

        Raises:
            StartError: A requested device is missing, or there is too little memory.
        """
        self.settings = settings
        self.metrics = metrics
        self._door = door
        self._make_engine = make_engine if door is None else self._make_cluster
        self._engine: ClosableEngine | None = None
        self.is_draining = False
        self._is_stopping = False
        self._is_hurried = False
        self._has_served = False
        """A model has been ready, maybe one that was removed since."""
        self._console = console
        loaded = LoadedSettings(settings=settings, origins=origins or {})
        self.fronts: OnlyFront | Fronts = OnlyFront()
        """The front ends, which take the connections. Set before the start."""
        self._speed_cache = SpeedCache(settings)
        state = state or StateFile(None, settings.models)
        if state.origins:
            logger.info("%s: models are served as they were changed at run time", state.path)
        self.catalog = Catalog(
            settings,
            host if door is None else None,
            metrics,
            console,
            cache_dir=self._speed_cache.folder,
            on_change=self._on_change,
            until_known=lambda: self.fronts.until_known(),
            state=state,
        )
        self.catalog.on_load.append(add_objective)
        if door is None:  # the gate knows only the devices of its own host
            self.catalog.on_load.append(DeviceGate(host.num_cores).add)
        self.pools = self.catalog.serving
        try:
            self.arena = Arena(settings.arena_bytes)
        except SharedMemoryError as error:
            raise StartError(f"{error} (arena_bytes)") from error
        self.hosts = ShownHosts()
        """Hosts of a cluster, as they are shown."""
        self.operations = Operations(
            self.pools,
            self.catalog.claims,
            grace_s=settings.drain_timeout_s,
            drain=self.set_draining,
            settings_json=lambda: json_of(loaded.rows()),
            measure_host=self.hosts.measure,
        )
        self._searches_speed = settings.speed_search and door is None
        self._speed_search = SpeedSearch(search, grace_s=settings.drain_timeout_s)
        self.changes = Changes(
            self.catalog,
            metrics,
            self._speed_search if self._searches_speed else None,
            _room_on(host) if door is None else Room.of_other_hosts(),
            grace_s=settings.drain_timeout_s,
        )
        self.jobs: Jobs | None = None
        """Jobs that outlive their connections; None if there is no place to keep them."""
        if settings.has_jobs:
            limits = StoreLimits(
                retention_s=settings.job_retention_s,
                max_jobs=settings.max_jobs,
                max_bytes=settings.max_job_bytes,
                share=settings.key_share,
            )
            hooks = Webhooks(settings.webhook_hosts, _webhook_secret(settings), settings.key_share)
            default = settings.default_model
            self.jobs = Jobs(settings.job_store, limits, self.pools, default, hooks)
            metrics.gauge_source(self.jobs.read_gauges)
            metrics.job_durations = self.jobs.durations
        self._watching: asyncio.Task[None] | None = None
        self._settled = asyncio.Event()
        self._changed = asyncio.Event()
        self._lost = asyncio.Event()
        gpus = host.gpus if door is None else ()  # agents watch theirs
        self._gpu_watch = GpuWatch(gpus, host.accelerator.library)
        metrics.gauge_source(self._read_gauges)
        self.live = LiveFeed(
            settings,
            self.pools,
            metrics,
            report=self.report,
            host=self._host_state,
            changes=self.changes.steps,
            jobs=self.jobs,
        )

    @property
    def num_processes(self) -> int:
        """The processes of all workers. A split replica has several, and decoders come on top."""
        return sum(
            config.placement.num_ranks + config.decoders
            for configs in self.catalog.plans.values()
            for config in configs
        )

    def start(self) -> None:
        """Begin to start every worker."""
        self._engine = engine = self._make_engine(self.arena)
        self.catalog.start(engine, self.arena)
        if isinstance(engine, Cluster):
            engine.open()  # not before, since hosts get workers as soon as they join
        self._gpu_watch.start()
        self.live.start()
        if self.jobs is not None:
            self.jobs.start()
        if self.settings.watch is not None:
            folder = ModelFolder(
                Path(self.settings.watch), self.changes, self.settings.watch_policy
            )
            self._watching = asyncio.create_task(folder.run(), name="watch the folder of models")
        if self._searches_speed:
            for pool in self.pools.values():
                self._speed_search.add(pool)

    def begin_stop(self) -> None:
        """Turn readiness red for good. New calls are still answered."""
        self._is_stopping = self.is_draining = True
        self.operations.end()
        self.changes.end()
        self.live.end()
        if self.jobs is not None:
            self.jobs.end()

    def set_draining(self, is_draining: bool) -> bool:
        """Turn readiness red or green; return False if the service is shutting down."""
        if not self._is_stopping:
            self.is_draining = is_draining
        return self.is_draining == is_draining

    async def drain(self) -> None:
        """Admit nothing more, and answer everything that was accepted."""
        self.begin_stop()
        grace_s, loaded = self.settings.drain_timeout_s, self.catalog.loaded.values()
        await asyncio.gather(*(each.pool.dispatcher.drain(grace_s) for each in loaded))

    def cut_off(self) -> None:
        """Answer everything in flight now, and let `stop` kill the workers."""
        self.begin_stop()
        self._is_hurried = True
        for version in self.catalog.loaded.values():
            version.pool.dispatcher.cut_off("this server was told to stop at once")

    async def stop(self) -> None:
        """Stop every worker and front end, and free the memory."""
        self._gpu_watch.stop()
        await self.live.stop()
        await self.operations.stop()
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        await self.changes.stop()
        await self._speed_search.stop()
        if self.jobs is not None:
            await self.jobs.stop()
        await self.drain()
        await self.fronts.stop()
        if self._door is not None and self._engine is not None:
            await self._engine.close()  # first, so that agents keep what they have loaded
        grace_s = 0.0 if self._is_hurried else _STOP_GRACE_S
        loaded = self.catalog.loaded.values()
        await asyncio.gather(*(version.pool.stop(grace_s) for version in loaded))
        await self.catalog.stop()
        if self._door is None and self._engine is not None:
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
            [(info, self._loaded(info.name)) for info in self.changes.list_models()],
            self.fronts.health(),
            self._gpu_watch.vitals(),
            self._speed_search,
            self._engine.forkserver_vitals() if self._engine else None,
            is_draining=self.is_draining,
            cluster=self.hosts.report(self._slots()),
            job_store=None if self.jobs is None else self.jobs.store_health(),
        )

    def _make_cluster(self, arena: Arena) -> Cluster:
        assert self._door is not None
        return Cluster(self.settings, self._door, arena, self.catalog, self.hosts)

    def _slots(self) -> list[WorkerSlot]:
        return [slot for each in self.catalog.loaded.values() for slot in each.pool.slots]

    def _loaded(self, name: str) -> list[Pool]:
        return [version.pool for version in self.catalog.versions(name)]

    def _on_change(self) -> None:
        self.fronts.tell_models()
        self._speed_search.on_change()
        self._changed.set()
        pools = self.pools.values()
        default = self.pools.get(self.settings.default_model)
        is_default_ready = default is not None and default.is_ready
        if is_default_ready or all(pool.is_ready or pool.is_lost for pool in pools):
            self._settled.set()
        self._has_served = self._has_served or any(pool.has_served for pool in pools)
        is_final = self._door is None  # other hosts may join
        is_final = is_final and not any(pool.is_refused for pool in pools)  # /health says why
        if is_final and pools and not self._has_served and all(pool.is_lost for pool in pools):
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
        yield from self.catalog.read_gauges()
        yield from self.hosts.read_gauges(self._slots())


def _room_on(host: Host) -> Room:
    memory = DeviceMemory(host.gpus, host.accelerator.library)
    estimate = partial(needs_of_worker, gpus=host.gpus)
    return Room(estimate, memory.free, memory.used_by, processes_left)


def _webhook_secret(settings: Settings) -> bytes:
    """Read the key that signs webhooks; empty if there are none.

    Raises:
        StartError: It cannot be used.
    """
    file = settings.webhook_secret_file
    if not settings.webhook_hosts:
        return b""
    if file is None:
        raise StartError("calls to webhook_hosts are signed: name a file in webhook_secret_file")
    try:
        return read_secret(Path(file).read_text())
    except (OSError, ValueError) as error:
        raise StartError(f"webhook_secret_file, {file}: {error}") from error
