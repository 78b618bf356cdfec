"""Builds the service, its front ends and the HTTP application, and connects them.

A part is imported only where the settings ask for it.
"""

import asyncio
import gc
import logging
import multiprocessing
import signal
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from functools import cache as once
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from fastapi import APIRouter

from inferpool.service.api.auth import Guard
from inferpool.service.api.exchange import Predict
from inferpool.service.api.routes.health import health_router
from inferpool.service.api.routes.metrics import metrics_router
from inferpool.service.api.web import App
from inferpool.service.api.wire.budgets import EdgeLimits
from inferpool.service.api.wire.listening import (
    edge_limits,
    listen,
    tls_context,
    url_of,
    warn_if_open,
)
from inferpool.service.api.wire.protocol import PredictProtocol
from inferpool.service.api.wire.server import Server
from inferpool.service.catalog.catalog import ModelVersion
from inferpool.service.checks.memory import needs_of_worker
from inferpool.service.checks.quick import check_quickly
from inferpool.service.endpoint import (
    make_addresses,
    make_cors,
    make_guard,
    make_limits,
    make_predict,
    server_config,
)
from inferpool.service.errors import StartError
from inferpool.service.example import try_or_ask
from inferpool.service.parts.admin.operations import Operations
from inferpool.service.parts.fronts.number import number_of_fronts
from inferpool.service.parts.fronts.only_front import OnlyFront
from inferpool.service.parts.live.alive import alive_router
from inferpool.service.parts.live.events import HostState
from inferpool.service.parts.live.sampler import LiveFeed, events_router
from inferpool.service.parts.speed import SpeedCache, SpeedSearch
from inferpool.service.parts.swap.shown import ShownModels
from inferpool.service.service import ClosableEngine, Part, Service
from inferpool.service.settings.loader import LoadedSettings, json_of
from inferpool.service.settings.paths import OWN_PATHS_BY_PART
from inferpool.service.settings.problems import with_ways
from inferpool.service.settings.settings import Settings
from inferpool.service.settings.state import StateFile
from inferpool.service.settings.tls import TlsError
from inferpool.service.signals import RETRY_SIGNAL
from inferpool.service.telemetry import logs as log_setup
from inferpool.service.telemetry.console import Console
from inferpool.service.telemetry.metrics import Metrics, Reading
from inferpool.service.telemetry.raw_output import RawOutput
from inferpool.service.telemetry.versions import version_of
from inferpool.workers.host.devices import DeviceError, Host, find_host
from inferpool.workers.host.local import LocalEngine
from inferpool.workers.shared.arena import Arena
from inferpool.workers.shared.cgroups import processes_left
from inferpool.workers.speed.host_side import search as find_speed

if TYPE_CHECKING:
    from inferpool.service.parts.admin.operations import HostSpeed
    from inferpool.service.parts.cluster.door import ClusterDoor
    from inferpool.service.parts.cluster.shown import ShownHosts
    from inferpool.service.parts.jobs.jobs import Jobs
    from inferpool.service.parts.open_inference.repository import Repository
    from inferpool.service.parts.swap.changes import Changes
    from inferpool.service.parts.swap.room import Room
    from inferpool.service.parts.tracing.tracer import Tracer

logger = logging.getLogger(__name__)

_PARTS = "inferpool.service.parts"
EXIT_NEVER_SERVED = 3
"""No model could be loaded, and none ever will be."""
EXIT_CANNOT_START = 1


def run(
    settings: Settings,
    origins: Mapping[str, str] | None = None,
    raw: RawOutput | None = None,
    warnings: Sequence[str] = (),
    make_engine: Callable[[Arena], ClosableEngine] = LocalEngine,
    until_changed: Callable[[], Awaitable[str]] | None = None,
    state: StateFile | None = None,
) -> int:
    """Serve until a signal, and return the process's exit code. Called in the main thread.

    Workers start sooner if `workers.host.local.start_forkserver` was called before, which can be
    before this module is imported.

    Args:
        settings: The settings.
        origins: The origins of the settings, for /admin/settings; see `LoadedSettings`.
        raw: Captured stdout and stderr, which are logged, and given back at the end.
        warnings: Texts to log first.
        make_engine: Makes the engine that computes the batches.
        until_changed: Waits for a reason to stop, and returns it.
        state: Keeps what is changed of models at run time.
    """
    with _logging(settings, raw) as logs:
        for warning in warnings:
            logger.warning("%s", warning)
        try:
            listener = listen(settings.host, settings.port)
            door = _open_door(settings)
            host = find_host(settings.cuda_visible_devices, settings.cuda_device_order)
            log_quick_checks(settings, host)
            console = Console(logs, is_colored=settings.color == "auto")
            num_fronts, why = number_of_fronts(settings, host.num_cores, len(host.gpus))
            assembly = assemble(settings, host, console, origins, make_engine, state, door)
            assembly.service.metrics.gauge_source(
                lambda: [Reading(name="log_lines_dropped", value=logs.num_dropped)]
            )
            tls = tls_context(settings)
        except (StartError, DeviceError, TlsError) as error:
            logger.critical("%s", with_ways(str(error)))
            return EXIT_CANNOT_START
        warn_if_open(settings, listener)
        try:
            about = {"version": version_of(), "front ends": f"{num_fronts} ({why})"}
            devices: Sequence[str] = host.describe()
            if door is not None:
                about["cluster"] = f"agents join at {door.address}"
                devices = ["those of the hosts that join"]
            console.started(about, devices, assembly.service.catalog.planned)
            return _Serving(assembly, console, listener, tls, num_fronts, until_changed).run()
        finally:
            for process in multiprocessing.active_children():
                process.kill()  # only a hurried shutdown leaves any
            listener.close()


def _open_door(settings: Settings) -> "ClusterDoor | None":
    if settings.cluster_port is None:
        return None
    from inferpool.service.parts.cluster.door import open_door

    return open_door(settings)


@contextmanager
def _logging(settings: Settings, raw: RawOutput | None) -> Iterator[log_setup.Logs]:
    """Configure logging, and log what is written past the log."""
    logs = log_setup.configure(
        settings.log_format,
        settings.log_level,
        raw.stderr if raw else None,
        is_colored=None if settings.color == "auto" else False,
    )
    if raw is not None:
        raw.start()
    try:
        yield logs
    finally:
        if raw is not None:
            raw.close()
        logs.close()


def log_quick_checks(settings: Settings, host: Host) -> None:
    """Log what is wrong with this machine, as the quick checks find it.

    Raises:
        StartError: Nothing could be served.
    """
    for finding in check_quickly(settings, host):
        if finding.is_fatal:
            raise StartError(str(finding))
        if finding.level in ("warning", "error"):
            logger.log(logging.getLevelNamesMapping()[finding.level.upper()], "%s", finding)


@dataclass(frozen=True, slots=True, kw_only=True)
class Assembly:
    """A service with the parts that its settings ask for, not started."""

    service: Service
    guard: Guard
    operations: Operations
    shown: ShownModels
    changes: "Changes | None"
    """Changes of models; None if nothing can ask for one."""
    live: LiveFeed
    jobs: "Jobs | None"
    """Jobs that outlive their connections; None if there is no place to keep them."""
    tracer: "Tracer | None"
    repository: "Callable[[], Repository]"
    """Makes the models as other protocols see them, or returns what it has made."""


def assemble(
    settings: Settings,
    host: Host,
    console: Console,
    origins: Mapping[str, str] | None = None,
    make_engine: Callable[[Arena], ClosableEngine] = LocalEngine,
    state: StateFile | None = None,
    door: "ClusterDoor | None" = None,
) -> Assembly:
    """Build a service and all its parts; the program around it calls it.

    With the `door` (port) of a cluster, other hosts run all workers.

    Raises:
        StartError: It could not start on this host.
    """
    metrics = Metrics(settings.models, {"version": version_of(), "torch": version_of("torch")})
    settings, tracer = _set_up_tracing(settings, origins or {}, metrics)
    cache, own_host = SpeedCache(settings), host if door is None else None
    service = Service(
        settings, own_host, metrics, console, OnlyFront(), state=state, cache_dir=cache.folder
    )
    search = None
    if settings.speed_search and own_host:
        search = SpeedSearch(find_speed, grace_s=settings.drain_timeout_s)
    changes = None
    others = settings.watch, settings.sagemaker_models, settings.torchserve
    if settings.admin_keys or any(others):  # which need no operator
        changes = _make_changes(service, search, own_host)
    shown = ShownModels(service.catalog) if changes is None else changes.shown
    service.catalog.on_load.append(_add_policies)
    # The gate knows only the devices of its own host. A single model has them to itself.
    if own_host and (changes is not None or len(settings.models) > 1):
        service.catalog.on_load.append(_gate_of(own_host))
    hosts = None if door is None else _no_hosts()
    jobs = _make_jobs(service) if settings.has_jobs else None
    assembly = Assembly(
        service=service,
        guard=make_guard(settings),
        operations=_make_operations(service, origins or {}, hosts),
        shown=shown,
        changes=changes,
        live=_make_feed(service, shown, jobs),
        jobs=jobs,
        tracer=tracer,
        repository=once(partial(_make_repository, service, changes)),
    )
    workers = (
        _workers_here(service, make_engine)
        if door is None or hosts is None
        else _workers_of_hosts(service, door, hosts)
    )
    service.attach(_in_order(assembly, cache, workers, search))
    return assembly


def _in_order(
    assembly: Assembly, cache: SpeedCache, workers: Sequence[Part], search: SpeedSearch | None
) -> list[Part]:
    """Return all parts: they start in this order, and stop in the other."""
    service, settings, tracer = assembly.service, assembly.service.settings, assembly.tracer
    watch, operations, jobs = service.gpu_watch, assembly.operations, assembly.jobs
    changes = assembly.changes
    return [
        # It stops last, once all calls are over that are traced.
        *([] if tracer is None else [_tracing(tracer, service)]),
        # Workers use both until they have ended, so these come before them.
        Part(name="cache of speed presets", stop=cache.close),
        Part(name="arena", stop=service.arena.close),
        *workers,
        # The drain stops several fronts, but there is none if the start has failed half-way.
        Part(name="front ends", stop=lambda: service.fronts.stop()),
        # All that follow begin nothing more and end what they have begun; what was accepted until
        # then is answered here.
        Part(name="queues", stop=service.drain, gauges=service.read_gauges),
        # These two only observe, so they see the end of the others.
        Part(name="watch of the GPUs", start=watch.start, stop=watch.stop),
        _live_feed(assembly),
        # A restart and a change of a model exclude each other, so their order makes no
        # difference.
        Part(
            name="operations",
            begin_stop=operations.end,
            stop=operations.stop,
            routers=lambda: _admin_routers(operations) if settings.admin_keys else [],
        ),
        # A change begins and ends searches until it has stopped.
        *([] if search is None else [_speed_search(search, service)]),
        Part(name="versions of models", health=assembly.shown.add_to_health),
        *([] if changes is None else [_changes(changes, settings)]),
        # It asks for changes, so it stops before them.
        *([] if changes is None or settings.watch is None else [_watched(changes, settings)]),
        Part(
            name="OpenAI's calls, and KServe's version 1",
            later={"v1": partial(_v1_routers, service)},
            forms_of_errors={"v1": f"{_PARTS}.texts.errors:error_answer"},
        ),
        Part(
            name="Open Inference Protocol",
            later={"v2": partial(_v2_routers, assembly)},
            forms_of_errors={"v2": f"{_PARTS}.open_inference.calls:error_answer"},
        ),
        *([_tei(service)] if settings.tei else []),
        *([] if settings.torchserve is None else [_torchserve(assembly)]),
        *_platforms(assembly),
        # Last, since the routes of the documentation come in this order.
        *([] if jobs is None else [_jobs(jobs, assembly)]),
        # It asks for all of the above, and ends before them.
        *([] if settings.grpc_port is None else [_grpc(assembly)]),
    ]


def _workers_here(service: Service, make_engine: Callable[[Arena], ClosableEngine]) -> list[Part]:
    engine, start = make_engine(service.arena), service.start_workers
    return [
        # It ends what starts workers, so no worker may start any more.
        Part(name="engine", stop=engine.close),
        Part(name="workers", start=partial(start, engine), stop=service.stop_workers),
    ]


def _workers_of_hosts(service: Service, door: "ClusterDoor", shown: "ShownHosts") -> list[Part]:
    from inferpool.service.parts.cluster.hosts import Cluster

    cluster = Cluster(service.settings, door, service.arena, service.catalog, shown)
    start = service.start_workers
    return [
        Part(name="workers", start=partial(start, cluster), stop=service.stop_workers),
        # Hosts get workers as soon as they join, so there must be pools. The hosts are left before
        # the workers are stopped, so that agents keep what they have loaded.
        Part(
            name="hosts",
            start=cluster.open,
            stop=cluster.close,
            gauges=lambda: shown.read_gauges(service.slots()),
            health=lambda report: shown.add_to_health(report, service.slots()),
        ),
    ]


def _tracing(tracer: "Tracer", service: Service) -> Part:
    return Part(
        name="traces",
        start=tracer.start,
        stop=partial(asyncio.to_thread, tracer.stop),  # it waits for the collector
        gauges=partial(_read_traces, tracer, service),
    )


def _live_feed(assembly: Assembly) -> Part:
    live, settings = assembly.live, assembly.service.settings

    def routers() -> list[APIRouter]:
        routers = [events_router(live, assembly.guard), alive_router()]
        if settings.page:
            from inferpool.service.parts.live.page import Page

            routers.append(Page(docs=settings.docs).router())
        return routers

    return Part(
        name="live feed",
        start=live.start,
        begin_stop=live.end,
        stop=live.stop,
        routers=routers,
    )


def _v2_routers(assembly: Assembly) -> list[APIRouter]:
    from inferpool.service.parts.open_inference.routes import v2_router
    from inferpool.service.parts.texts.ranking_routes import ranking_router

    service = assembly.service
    has_operators = bool(service.settings.admin_keys)
    protocol = v2_router(assembly.repository(), service.report, has_operators=has_operators)
    return [protocol, ranking_router(2)]


def _make_repository(service: Service, changes: "Changes | None") -> "Repository":
    from inferpool.service.parts.open_inference.repository import Repository

    configured = {**service.state.configured, **service.settings.models}
    return Repository(service.catalog, configured, changes if service.settings.admin_keys else None)


def _v1_routers(service: Service) -> list[APIRouter]:
    from inferpool.service.parts.kserve_v1.routes import v1_router
    from inferpool.service.parts.texts.ranking_routes import ranking_router
    from inferpool.service.parts.texts.routes import texts_router

    return [v1_router(service.catalog.entries), texts_router(), ranking_router(1)]


def _tei(service: Service) -> Part:
    def of_default() -> list[APIRouter]:
        from inferpool.service.parts.tei.routes import info_router

        return [info_router(service.catalog.entries, service.settings)]

    def of_any() -> list[APIRouter]:
        from inferpool.service.parts.tei.routes import tei_router

        return [tei_router(service.catalog.entries, service.settings)]

    def of_root() -> list[APIRouter]:
        from inferpool.service.parts.tei.routes import root_router

        return [root_router()]

    name = "Text Embeddings Inference"
    return Part(
        name=name,
        later={"": of_root, "info": of_default, "tei": of_any},
        forms_of_errors=dict.fromkeys(
            OWN_PATHS_BY_PART[name], f"{_PARTS}.tei.answers:error_answer"
        ),
    )


def _torchserve(assembly: Assembly) -> Part:
    from inferpool.service.parts.torchserve.part import make_torchserve

    return make_torchserve(assembly.service, assembly.guard, assembly.changes)


def _platforms(assembly: Assembly) -> list[Part]:
    settings = assembly.service.settings
    if not (settings.sagemaker or settings.sagemaker_models or settings.vertex_health_route):
        return []
    from inferpool.service.parts.platforms.part import parts_of_platforms

    return parts_of_platforms(settings, assembly.service.catalog, assembly.changes)


def _speed_search(search: SpeedSearch, service: Service) -> Part:
    return Part(
        name="search for speed",
        start=partial(search.start, service.pools.values()),
        stop=search.stop,
        on_change=search.on_change,
        health=search.add_to_health,
    )


def _admin_routers(operations: Operations) -> list[APIRouter]:
    from inferpool.service.parts.admin.routes import admin_router

    return [admin_router(operations)]


def _changes(changes: "Changes", settings: Settings) -> Part:
    def routers() -> list[APIRouter]:
        from inferpool.service.parts.swap.routes import models_router

        return [models_router(changes)]

    return Part(
        name="changes of models",
        begin_stop=changes.end,
        stop=changes.stop,
        routers=routers if settings.admin_keys else tuple,
    )


def _watched(changes: "Changes", settings: Settings) -> Part:
    from inferpool.service.parts.watched.model_folder import ModelFolder

    assert settings.watch is not None
    folder = ModelFolder(Path(settings.watch), changes, settings.watch_policy)
    return Part(name="watched folder", start=folder.start, stop=folder.stop)


def _jobs(jobs: "Jobs", assembly: Assembly) -> Part:
    from inferpool.service.parts.jobs.http.routes import jobs_router

    limits = make_limits(assembly.service.settings)
    return Part(
        name="jobs",
        start=jobs.start,
        begin_stop=jobs.end,
        stop=jobs.stop,
        routers=lambda: [jobs_router(jobs, assembly.guard, limits)],
        gauges=jobs.read_gauges,
        health=lambda report: replace(report, job_store=jobs.keeper.health()),
    )


def _grpc(assembly: Assembly) -> Part:
    try:
        from inferpool.service.parts.open_inference.grpc.inference import make_grpc
    except ModuleNotFoundError as error:
        raise StartError(
            f"grpc_port: {error.name} is not installed: pip install 'inferpool[grpc]'"
        ) from error
    assembly.repository()  # once, before the thread that makes the routes asks for it
    tracer = assembly.tracer
    recorder = None if tracer is None else tracer.recorder
    server = make_grpc(assembly.service, assembly.guard, recorder, assembly.repository)
    return Part(name="gRPC", start=server.start, begin_drain=server.begin_drain, stop=server.stop)


def _set_up_tracing(
    settings: Settings, origins: Mapping[str, str], metrics: Metrics
) -> "tuple[Settings, Tracer | None]":
    if settings.trace_endpoint is None:  # nothing of it is imported
        return settings, None
    from inferpool.service.parts.tracing.setup import set_up_tracing

    return set_up_tracing(settings, origins.get("trace_endpoint", "default"), metrics.model)


def _make_operations(
    service: Service, origins: Mapping[str, str], hosts: "ShownHosts | None"
) -> Operations:
    loaded = LoadedSettings(settings=service.settings, origins=origins)

    async def measure_host(name: str) -> "HostSpeed":
        return await (hosts or _no_hosts()).measure(name)

    return Operations(
        service.pools,
        service.catalog.busy,
        grace_s=service.settings.drain_timeout_s,
        drain=service.set_draining,
        settings_json=lambda: json_of(loaded.rows()),
        measure_host=measure_host,
    )


def _no_hosts() -> "ShownHosts":
    from inferpool.service.parts.cluster.shown import ShownHosts

    return ShownHosts()


def _make_feed(service: Service, shown: ShownModels, jobs: "Jobs | None") -> LiveFeed:
    def host_state() -> HostState:
        gauges = {each.name: each.value for each in service.fronts.read_gauges()}
        return HostState(
            connections=int(gauges["connections"]),
            arena_bytes=service.arena.num_bytes,
            arena_used_bytes=service.arena_used_bytes,
        )

    return LiveFeed(
        service.settings,
        service.pools,
        service.metrics,
        report=service.report,
        host=host_state,
        changes=shown.history.steps,
        jobs=jobs,
    )


def _add_policies(version: ModelVersion) -> None:
    if version.settings.objective_p99_ms:
        from inferpool.service.parts.objective import add_objective

        add_objective(version)
    if version.settings.max_batch_tokens:
        from inferpool.service.parts.token_bound import add_token_bound

        add_token_bound(version)


def _gate_of(host: Host) -> Callable[[ModelVersion], None]:
    from inferpool.service.parts.turns.gate import DeviceGate

    return DeviceGate(host.num_cores).add


def _make_jobs(service: Service) -> "Jobs":
    from inferpool.service.parts.jobs.jobs import make_jobs

    jobs = make_jobs(service.settings, service.pools)
    service.metrics.job_durations = jobs.durations
    jobs.keeper.hold()
    return jobs


def _make_changes(service: Service, search: SpeedSearch | None, host: Host | None) -> "Changes":
    from inferpool.service.parts.swap.changes import Changes
    from inferpool.service.parts.swap.room import Room

    room = _room_on(host) if host else Room.of_other_hosts()
    grace_s = service.settings.drain_timeout_s
    return Changes(service.catalog, service.metrics, search, room, grace_s=grace_s)


def _room_on(host: Host) -> "Room":
    from inferpool.service.parts.swap.room import Room
    from inferpool.workers.host.device_memory import DeviceMemory

    memory = DeviceMemory(host.gpus, host.accelerator.library)
    estimate = partial(needs_of_worker, gpus=host.gpus)
    return Room(estimate, memory.free, memory.used_by, processes_left)


def _read_traces(tracer: "Tracer", service: Service) -> Iterator[Reading]:
    ours, theirs = tracer.counts(), service.fronts.traced
    yield Reading(name="traces_exported", value=ours[0] + theirs[0])
    yield Reading(name="traces_dropped", value=ours[1] + theirs[1])


def make_app(assembly: Assembly) -> tuple[App, Predict, EdgeLimits]:
    """Build the HTTP application; its lifespan starts and stops the service."""
    service, guard, settings = assembly.service, assembly.guard, assembly.service.settings
    limits = edge_limits(settings, service.num_processes)
    recorder = None if assembly.tracer is None else assembly.tracer.recorder
    predict = make_predict(
        service.catalog.entries, settings, guard, recorder, service.metrics.model, limits
    )

    @asynccontextmanager
    async def lifespan(_: App) -> AsyncIterator[None]:
        service.start()
        try:
            yield
        finally:
            await service.stop()

    routers = [health_router(service.report, guard), metrics_router(service.metrics)]
    later: dict[str, Callable[[], Sequence[APIRouter]]] = {}
    forms: dict[str, str] = {}
    aliases: dict[str, str] = {}
    for part in service.parts:
        routers += part.routers()
        later |= part.later
        forms |= part.forms_of_errors
        aliases |= part.aliases
    app = App(
        version=version_of(),
        routers=routers,
        guard=guard,
        cors=make_cors(settings),
        docs=settings.docs,
        lifespan=lifespan,
    )
    app.predict, app.tracing, app.later = predict, recorder, later
    app.forms_of_errors, app.aliases = forms, aliases
    app.has_jobs = assembly.jobs is not None
    app.examples, app.interfaces = service.examples, service.interfaces
    if assembly.changes is not None:
        from inferpool.service.parts.swap.requests import request_schemas

        app.bodies = request_schemas
    return app, predict, limits


class _Serving:
    """One run of the command: the server, and what waits for its events."""

    def __init__(
        self,
        assembly: Assembly,
        console: Console,
        listener: socket.socket,
        tls: ssl.SSLContext | None,
        num_fronts: int,
        until_changed: Callable[[], Awaitable[str]] | None,
    ) -> None:
        self._service = assembly.service
        self._settings = assembly.service.settings
        self._operations = assembly.operations
        self._console = console
        self._until_changed = until_changed
        self._url = url_of(listener, is_tls=tls is not None)
        self._exit_code = 0
        self._make_server = partial(
            Server,
            shutdown_delay_s=self._settings.shutdown_delay_s,
            drain_timeout_s=self._settings.drain_timeout_s,
            on_stopping=self._on_stopping,
        )
        app, predict, limits = make_app(assembly)
        app.addresses = make_addresses(self._settings)
        if num_fronts == 1:
            self._listeners = [listener]
            self._server = self._make_only_server(app, predict, limits, tls)
        else:
            self._listeners = []
            self._server = self._make_server_of_fronts(app, num_fronts, limits, listener)

    def run(self) -> int:
        """Serve until told to stop, and return the exit code."""
        with asyncio.Runner(loop_factory=self._server.config.get_loop_factory()) as runner:
            runner.run(self._main())
        self._console.stopped()
        return self._exit_code

    def _make_only_server(
        self, app: App, predict: Predict, limits: EdgeLimits, tls: ssl.SSLContext | None
    ) -> Server:
        """Build the server of this process as the only front."""
        service, only = self._service, OnlyFront(is_up=False)
        service.fronts = only
        predict.slots = service.arena
        http = PredictProtocol.bound_to(predict, limits)
        server = self._make_server(
            server_config(app, http, self._settings, tls),
            on_listening=only.up.set,
            drain=service.drain,
            cut_off=service.cut_off,
        )
        only.connections = server.server_state.connections
        only.use = http.connection_limits.use
        return server

    def _make_server_of_fronts(
        self, app: App, num: int, limits: EdgeLimits, listener: socket.socket
    ) -> Server:
        """Build the server that answers what several fronts forward."""
        from inferpool.service.parts.fronts.forwarded import forwarded_config
        from inferpool.service.parts.fronts.fronts import Fronts

        service = self._service
        fronts = Fronts(
            num=num,
            settings=self._settings,
            limits=limits,
            listener=listener,
            arena=service.arena,
            models=service.catalog,
            metrics=service.metrics,
            on_lost=lambda: self._fail("no front could be started", EXIT_CANNOT_START),
        )
        service.fronts = fronts
        service.metrics.refresh_by(fronts.count)

        async def drain() -> None:
            await service.drain()
            await fronts.stop(self._server.flush_until)

        def cut_off() -> None:
            service.cut_off()
            fronts.hurry()

        return self._make_server(
            forwarded_config(app, fronts.forwarding_path),
            on_listening=fronts.start,
            drain=drain,
            cut_off=cut_off,
            move_clients_away=fronts.move_clients_away,
        )

    def _on_stopping(self, reason: str) -> None:
        self._console.stopping(reason)
        self._service.begin_stop()

    def _fail(self, what: str, code: int) -> None:
        if not self._server.is_stopping:
            logger.critical("nothing can be served: %s", what)  # the reasons are in the log above
            self._exit_code = code
            self._server.stop(what)

    async def _main(self) -> None:
        waits = (self._announce(), self._leave_when_lost(), self._leave_when_changed())
        tasks = [asyncio.create_task(each) for each in waits]
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(RETRY_SIGNAL, self._operations.retry_lost)
        gc.freeze()  # modules are never freed, so later collections can skip them
        await self._server.serve(sockets=self._listeners or None)
        loop.remove_signal_handler(RETRY_SIGNAL)
        signal.signal(RETRY_SIGNAL, signal.SIG_IGN)  # or a late one would end this process at once
        for task in tasks:
            task.cancel()

    async def _announce(self) -> None:
        service, settings, url = self._service, self._settings, self._url
        if not settings.models:  # they come later
            await service.fronts.until_up()
            logger.info("no model is served yet at %s", url)
        await service.until_settled()
        await service.fronts.until_up()
        served = [name for name, pool in service.pools.items() if pool.is_ready]
        if served:
            served.sort(key=lambda name: name != settings.default_model)
            lines = [try_or_ask(url, service.pools[name], settings) for name in served]
            is_closed = service.settings.only_predictions
            self._console.serving(url, served, lines, service.loading(), is_closed=is_closed)
        elif any(pool.is_refused for pool in service.pools.values()):
            logger.error("no model is ready; /health says why, at %s", url)
        while True:  # models come and go later too
            await service.until_changed()
            served = [name for name in served if name in service.pools]
            for name, pool in service.pools.items():
                if pool.is_ready and name not in served:
                    served.append(name)
                    line = try_or_ask(url, pool, settings)
                    self._console.joined(name, line, service.loading())

    async def _leave_when_lost(self) -> None:
        await self._service.until_lost()
        self._fail("no model could be loaded", EXIT_NEVER_SERVED)

    async def _leave_when_changed(self) -> None:
        if self._until_changed is not None:
            self._server.stop(await self._until_changed())
