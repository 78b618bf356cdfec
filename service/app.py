"""The composition root: engine, pools, dispatchers and the HTTP application, wired in one place."""

import asyncio
import gc
import json
import logging
import multiprocessing
import shlex
import socket
import ssl
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from math import prod
from typing import TYPE_CHECKING

import pynvml

from models.spec import Placement
from service import logs as log_setup
from service.admission import Admission
from service.api.admin import admin_router
from service.api.auth import Guard
from service.api.events import HostState, events_router
from service.api.health import HealthReport, health_router
from service.api.metrics import metrics_router
from service.api.predict import PREFIX, Predict
from service.api.protocol import PredictProtocol
from service.api.web import App
from service.cli_config import json_of
from service.console import Console
from service.dispatcher import Dispatcher
from service.doctor.diagnosis import diagnose_quickly
from service.endpoint import (
    make_cors,
    make_guard,
    make_predict,
    server_config,
    set_up_tracing,
)
from service.fronts.alone import OnlyFront
from service.fronts.fronts import Fronts
from service.fronts.number import number_of_fronts
from service.fronts.relayed import relay_path, relayed_config
from service.gpu_gauges import gpu_gauges
from service.listening import StartError, edge_limits, listen, tls_context, url_of, warn_if_open
from service.live import Live
from service.metrics import Metrics, Reading
from service.objective import Objective, ObjectiveAdmission
from service.operations import Operations
from service.pool import Pool
from service.quarantine import Quarantine
from service.raw_output import RawOutput
from service.report import is_host_ready, report_of
from service.server import Server
from service.settings import ModelSettings, Settings, version_of
from service.settings_loader import Loaded
from service.speed_cache import SpeedCache
from service.speed_search import SpeedSearch
from service.tls import TlsError
from workers.arena import Arena
from workers.config import WorkerConfig
from workers.devices import DeviceError, Host, find_host
from workers.gpu_watch import GpuWatch
from workers.local import LocalEngine
from workers.memory import SharedMemoryError
from workers.searching import search
from workers.supervisor import RestartPolicy

if TYPE_CHECKING:
    from service.tracing.tracer import Tracer

logger = logging.getLogger(__name__)

EXIT_NEVER_SERVED = 3
"""No model could be loaded, and none ever will be."""
EXIT_CANNOT_START = 1
_MAX_EXAMPLE_NUMBERS = 32
_STOP_GRACE_S = 5.0
"""How long a worker without work may take to leave."""


class Service:
    """One engine and one pool per model, from start to stop. Lives in the event loop."""

    def __init__(
        self,
        settings: Settings,
        host: Host,
        metrics: Metrics,
        console: Console,
        origins: Mapping[str, str] | None = None,
    ) -> None:
        """Decide what goes where, and start nothing yet.

        Raises:
            StartError: The devices or the memory asked for are not there.
        """
        self.settings = settings
        self.metrics = metrics
        self._engine: LocalEngine | None = None
        self.pools: dict[str, Pool] = {}
        self.is_draining = False
        self._is_stopping = False
        self._is_hurried = False
        self._console = console
        loaded = Loaded(settings=settings, origins=origins or {})
        self.operations = Operations(
            self.pools,
            grace_s=settings.drain_timeout_s,
            drain=self.set_draining,
            settings_json=lambda: json_of(loaded.rows()),
        )
        self.fronts: OnlyFront | Fronts = OnlyFront()
        """Who takes the connections; set before the start."""
        self._speed_cache = SpeedCache(settings)
        self._speed_search = SpeedSearch(self.pools, search, grace_s=settings.drain_timeout_s)
        self._plans = _plan(settings, host, self._speed_cache.folder)
        try:
            self.arena = Arena(settings.arena_bytes)
        except SharedMemoryError as error:
            raise StartError(f"{error} (arena_bytes)") from error
        self._settled = asyncio.Event()
        self._lost = asyncio.Event()
        self._gpu_watch = GpuWatch(host.gpus, pynvml)
        metrics.gauge_source(self._read_gauges)
        self.live = Live(settings, self.pools, metrics, report=self.report, host=self._host_state)

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
        """Of all workers: a split replica has several."""
        return sum(
            config.placement.num_ranks for configs in self._plans.values() for config in configs
        )

    def start(self) -> None:
        """Begin to start every worker."""
        self._engine = engine = LocalEngine(self.arena)
        for name, configs in self._plans.items():
            self.pools[name] = self._make_pool(name, configs, engine)
        for pool in self.pools.values():
            pool.start()
        self._gpu_watch.start()
        self.live.start()
        if self.settings.speed_search:
            self._speed_search.start()

    def begin_stop(self) -> None:
        """Turn readiness red for good; what comes is still answered."""
        self._is_stopping = self.is_draining = True
        self.live.end()

    def set_draining(self, is_draining: bool) -> bool:
        """Turn readiness red, or green again; False where the service is shutting down."""
        if not self._is_stopping:
            self.is_draining = is_draining
        return self.is_draining == is_draining

    async def drain(self) -> None:
        """Admit nothing more, and answer all that was accepted."""
        self.begin_stop()
        grace_s = self.settings.drain_timeout_s
        await asyncio.gather(*(pool.drain(grace_s) for pool in self.pools.values()))

    def cut_off(self) -> None:
        """Wait for nothing any more: answer what is in flight; `stop` will kill the workers."""
        self.begin_stop()
        self._is_hurried = True
        for pool in self.pools.values():
            pool.cut_off("this server was told to stop at once")

    async def stop(self) -> None:
        """See every worker and every front out and give the memory back."""
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

    async def until_lost(self) -> None:
        """Wait until no model can ever be served."""
        await self._lost.wait()

    def report(self) -> HealthReport:
        """The state of everything, for /health."""
        return report_of(
            self.pools,
            self.fronts.health(),
            self._gpu_watch.vitals(),
            self._speed_search,
            is_draining=self.is_draining,
        )

    def _make_pool(self, name: str, configs: list[WorkerConfig], engine: LocalEngine) -> Pool:
        model = self.settings.models[name]
        metrics = self.metrics.model(name)
        p99_ms = model.objective_p99_ms
        objective = Objective(p99_ms / 1000, model=name) if p99_ms else None
        kind = partial(ObjectiveAdmission, objective) if objective else Admission
        admission = kind(
            max_queue_length=self.settings.max_queue_length,
            max_batch_size=model.batch_size,
            rejected=metrics.rejected,
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
        pools = self.pools.values()
        is_default_ready = self.pools[self.settings.default_model].is_ready
        if is_default_ready or all(pool.is_ready or pool.is_lost for pool in pools):
            self._settled.set()
        if all(pool.is_lost for pool in pools):
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


def run(
    settings: Settings,
    origins: Mapping[str, str] | None = None,
    raw: RawOutput | None = None,
    warnings: Sequence[str] = (),
) -> int:
    """Serve until a signal, and return the process's exit code. Called in the main thread.

    Workers start sooner if `workers.local.start_forkserver` was called before, which it can be
    before this module is imported.

    Args:
        settings: What to serve and how.
        origins: Who set each of them, for /admin/settings; see `Loaded`.
        raw: What was taken of stdout and stderr, to be logged, and given back at the end.
        warnings: What to log of them first.
    """
    with _logging(settings, raw) as logs:
        for warning in warnings:
            logger.warning("%s", warning)
        try:
            listener = listen(settings.host, settings.port)
            host = find_host(settings.cuda_visible_devices)
            _look_around(settings, host)
            metrics = Metrics(
                settings.models, {"version": version_of(), "torch": version_of("torch")}
            )
            console = Console(logs, is_colored=settings.color == "auto")
            metrics.gauge_source(
                lambda: [Reading(name="log_lines_dropped", value=logs.num_dropped)]
            )
            num_fronts, why = number_of_fronts(settings, host.num_cores)
            origin = (origins or {}).get("trace_endpoint", "default")
            settings, tracer = set_up_tracing(settings, origin, metrics.model)
            service = Service(settings, host, metrics, console, origins)
            tls = tls_context(settings)
        except (StartError, DeviceError, TlsError) as error:
            logger.critical("%s", error)
            return EXIT_CANNOT_START
        warn_if_open(settings, listener)
        try:
            about = {"version": version_of(), "front ends": f"{num_fronts} ({why})"}
            console.started(about, host.describe(), service.plan)
            return _serve(service, console, listener, tls, num_fronts, tracer)
        finally:
            for process in multiprocessing.active_children():
                process.kill()  # only those that a hurried shutdown has left
            listener.close()


@contextmanager
def _logging(settings: Settings, raw: RawOutput | None) -> Iterator[log_setup.Logs]:
    """Have a log, and in it what is written past it."""
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


def _look_around(settings: Settings, host: Host) -> None:
    """Log what the quick checks of `inferpool doctor` find wrong with this machine.

    Raises:
        StartError: Nothing could be served.
    """
    for finding in diagnose_quickly(settings, host):
        if finding.is_fatal:
            raise StartError(str(finding))
        if finding.level in ("warning", "error"):
            logger.log(logging.getLevelNamesMapping()[finding.level.upper()], "%s", finding)


def make_app(service: Service, predict: Predict, guard: Guard) -> App:
    """The HTTP application over a service, which lives and dies with its lifespan."""

    @asynccontextmanager
    async def lifespan(_: App) -> AsyncIterator[None]:
        service.start()
        try:
            yield
        finally:
            await service.stop()

    routers = [
        health_router(service, guard),
        metrics_router(service.metrics),
        events_router(service.live),
    ]
    if service.settings.admin_keys:
        routers.append(admin_router(service.operations))
    app = App(
        version=version_of(),
        routers=routers,
        guard=guard,
        cors=make_cors(service.settings),
        docs=service.settings.docs,
        page=service.settings.page,
        lifespan=lifespan,
    )
    app.predict = predict
    return app


def _serve(
    service: Service,
    console: Console,
    listener: socket.socket,
    tls: ssl.SSLContext | None,
    num_fronts: int,
    tracer: "Tracer | None",
) -> int:
    settings = service.settings
    url = url_of(listener, is_tls=tls is not None)
    guard = make_guard(settings)
    recorder = None if tracer is None else tracer.recorder
    predict = make_predict(service.pools, settings, guard, recorder, service.metrics.model)
    app = make_app(service, predict, guard)
    app.tracing = recorder
    limits = edge_limits(settings, service.num_processes)
    exit_code = 0

    def on_stopping(reason: str) -> None:
        console.stopping(reason)
        service.begin_stop()

    def fail(what: str, code: int) -> None:
        nonlocal exit_code
        if not server.is_stopping:
            logger.critical("nothing can be served: %s", what)  # the log has said why
            exit_code = code
            server.stop(what)

    if num_fronts == 1:
        only = service.fronts
        assert isinstance(only, OnlyFront)
        config = server_config(app, PredictProtocol.bound_to(predict, limits), settings, tls)
        server = Server(
            config,
            shutdown_delay_s=settings.shutdown_delay_s,
            on_listening=only.up.set,
            on_stopping=on_stopping,
            drain=service.drain,
            cut_off=service.cut_off,
        )
        only.connections = server.server_state.connections
    else:
        fronts = Fronts(
            num=num_fronts,
            settings=settings,
            limits=limits,
            listener=listener,
            relay_path=relay_path(),
            arena=service.arena,
            models=service.pools,
            metrics=service.metrics,
            on_lost=lambda: fail("no front could be started", EXIT_CANNOT_START),
        )
        service.fronts = fronts
        service.metrics.refresh_by(fronts.count)

        async def drain() -> None:
            await service.drain()
            await fronts.stop()

        def cut_off() -> None:
            service.cut_off()
            fronts.hurry()

        config = relayed_config(app, fronts.relay_path)
        server = Server(
            config,
            shutdown_delay_s=settings.shutdown_delay_s,
            on_listening=fronts.start,
            on_stopping=on_stopping,
            drain=drain,
            cut_off=cut_off,
            move_clients_away=fronts.move_clients_away,
        )

    async def announce() -> None:
        await service.until_settled()
        await service.fronts.until_up()
        served = [name for name, pool in service.pools.items() if pool.is_ready]
        if served:
            default = service.pools[settings.default_model]
            first = default if default.is_ready else service.pools[served[0]]
            console.serving(url, served, _example(_from_here(url), first))

    async def leave_when_lost() -> None:
        await service.until_lost()
        fail("no model could be loaded", EXIT_NEVER_SERVED)

    async def main() -> None:
        tasks = [asyncio.create_task(announce()), asyncio.create_task(leave_when_lost())]
        gc.freeze()  # the modules stay: later collections need not walk through them
        await server.serve(sockets=[listener] if num_fronts == 1 else None)
        for task in tasks:
            task.cancel()

    if tracer is not None:
        service.metrics.gauge_source(partial(_read_traces, tracer, service))
        tracer.start()
    with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
        runner.run(main())
    if tracer is not None:
        tracer.stop()
    console.stopped()
    return exit_code


def _read_traces(tracer: "Tracer", service: Service) -> Iterator[Reading]:
    ours, theirs = tracer.counts(), service.fronts.traced
    yield Reading(name="traces_exported", value=ours[0] + theirs[0])
    yield Reading(name="traces_dropped", value=ours[1] + theirs[1])


def _plan(settings: Settings, host: Host, cache_dir: str | None) -> dict[str, list[WorkerConfig]]:
    return {
        name: _configs(name, model, host, settings, cache_dir)
        for name, model in settings.models.items()
    }


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
        )
        for placement in model.placements_on(host)
    ]


def _placement_text(placement: Placement) -> str:
    return f"{placement} ({placement.split})" if placement.split else str(placement)


def _from_here(url: str) -> str:
    """The URL as this host can ask for it: "every address" is none to connect to."""
    return url.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")


def _example(url: str, pool: Pool) -> str:
    """A command that asks a model for a prediction; empty where nobody knows what it takes."""
    if any(not spec.shape for spec in pool.inputs):
        return ""
    post = f"curl {url}{PREFIX}/{pool.name} -H 'Content-Type: "
    if pool.example is not None:
        body = json.dumps({"instances": [pool.example]}, ensure_ascii=False)
        return f"{post}application/json' -d {shlex.quote(body)}"
    if not pool.inputs:
        return f"{post}application/octet-stream' --data-binary hello"
    first = pool.inputs[0]
    if first.name == "image" and first.dtype == "uint8":
        return f"{post}image/jpeg' --data-binary @photo.jpg"
    shape = [max(size, 1) for size in first.instance_shape]
    if len(pool.inputs) > 1 or prod(shape) > _MAX_EXAMPLE_NUMBERS:
        return f"{post}application/safetensors' --data-binary @inputs.safetensors"
    numbers: object = 0
    for size in reversed(shape):
        numbers = [numbers] * size
    return f"{post}application/json' -d '{json.dumps({'instances': [numbers]})}'"
