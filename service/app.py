"""Builds the service, its front ends and the HTTP application, and connects them."""

import asyncio
import gc
import logging
import multiprocessing
import signal
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import TYPE_CHECKING

from inferpool.service.api.auth import Guard
from inferpool.service.api.predict import Predict
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
from inferpool.service.checks.quick import check_quickly
from inferpool.service.endpoint import (
    make_addresses,
    make_cors,
    make_guard,
    make_predict,
    server_config,
    set_up_tracing,
)
from inferpool.service.errors import StartError
from inferpool.service.example import try_or_ask
from inferpool.service.parts.admin.routes import admin_router
from inferpool.service.parts.cluster.door import ClusterDoor, open_door
from inferpool.service.parts.fronts.forwarded import forwarded_config
from inferpool.service.parts.fronts.fronts import Fronts
from inferpool.service.parts.fronts.number import number_of_fronts
from inferpool.service.parts.fronts.only_front import OnlyFront
from inferpool.service.parts.jobs.http.routes import jobs_router
from inferpool.service.parts.live.events import events_router
from inferpool.service.parts.live.page import Page
from inferpool.service.parts.swap.requests import request_schemas
from inferpool.service.parts.swap.routes import models_router
from inferpool.service.service import ClosableEngine, Service
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

if TYPE_CHECKING:
    from inferpool.service.parts.tracing.tracer import Tracer

logger = logging.getLogger(__name__)

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
            door = open_door(settings)
            host = find_host(settings.cuda_visible_devices, settings.cuda_device_order)
            log_quick_checks(settings, host)
            console = Console(logs, is_colored=settings.color == "auto")
            num_fronts, why = number_of_fronts(settings, host.num_cores)
            service, tracer = make_service(
                settings, host, console, origins, make_engine, state, door
            )
            service.metrics.gauge_source(
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
            console.started(about, devices, service.catalog.planned)
            return _serve(service, console, listener, tls, num_fronts, tracer, until_changed)
        finally:
            for process in multiprocessing.active_children():
                process.kill()  # only a hurried shutdown leaves any
            listener.close()


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


def make_service(
    settings: Settings,
    host: Host,
    console: Console,
    origins: Mapping[str, str] | None = None,
    make_engine: Callable[[Arena], ClosableEngine] = LocalEngine,
    state: StateFile | None = None,
    door: ClusterDoor | None = None,
) -> "tuple[Service, Tracer | None]":
    """Make a service that is not started, and the tracer of its calls if tracing is on.

    With the `door` of a cluster, other hosts run all workers.

    Raises:
        StartError: It could not start on this host.
    """
    metrics = Metrics(settings.models, {"version": version_of(), "torch": version_of("torch")})
    origin = (origins or {}).get("trace_endpoint", "default")
    settings, tracer = set_up_tracing(settings, origin, metrics.model)
    service = Service(settings, host, metrics, console, origins, make_engine, state, door)
    if service.jobs is not None:
        service.jobs.hold()
    return service, tracer


def make_whole_app(service: Service, tracer: "Tracer | None") -> tuple[App, Predict, EdgeLimits]:
    """Make the HTTP application over a service as its settings say, and its parts."""
    settings, metrics = service.settings, service.metrics.model
    guard = make_guard(settings)
    recorder = None if tracer is None else tracer.recorder
    limits = edge_limits(settings, service.num_processes)
    predict = make_predict(service.catalog.entries, settings, guard, recorder, metrics, limits)
    app = make_app(service, predict, guard)
    app.tracing = recorder
    return app, predict, limits


def make_app(service: Service, predict: Predict, guard: Guard) -> App:
    """Make the HTTP application over a service, whose life is the application's lifespan."""

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
        events_router(service.live, guard),
    ]
    if service.settings.page:
        routers.append(Page(docs=service.settings.docs).router())
    if service.settings.admin_keys:
        routers += [admin_router(service.operations), models_router(service.changes)]
    if service.jobs is not None:
        routers.append(jobs_router(service.jobs, guard, predict.limits))
    app = App(
        version=version_of(),
        routers=routers,
        guard=guard,
        cors=make_cors(service.settings),
        docs=service.settings.docs,
        lifespan=lifespan,
    )
    app.predict = predict
    app.has_jobs = service.jobs is not None
    app.examples = service.examples
    app.bodies = request_schemas
    return app


def _serve(
    service: Service,
    console: Console,
    listener: socket.socket,
    tls: ssl.SSLContext | None,
    num_fronts: int,
    tracer: "Tracer | None",
    until_changed: Callable[[], Awaitable[str]] | None,
) -> int:
    settings = service.settings
    url = url_of(listener, is_tls=tls is not None)
    app, predict, limits = make_whole_app(service, tracer)
    app.addresses = make_addresses(settings)
    exit_code = 0

    def on_stopping(reason: str) -> None:
        console.stopping(reason)
        service.begin_stop()

    def fail(what: str, code: int) -> None:
        nonlocal exit_code
        if not server.is_stopping:
            logger.critical("nothing can be served: %s", what)  # the reasons are in the log above
            exit_code = code
            server.stop(what)

    make_server = partial(
        Server,
        shutdown_delay_s=settings.shutdown_delay_s,
        drain_timeout_s=settings.drain_timeout_s,
        on_stopping=on_stopping,
    )
    if num_fronts == 1:
        only = service.fronts
        assert isinstance(only, OnlyFront)
        http = PredictProtocol.bound_to(predict, limits)
        config = server_config(app, http, settings, tls)
        server = make_server(
            config, on_listening=only.up.set, drain=service.drain, cut_off=service.cut_off
        )
        only.connections = server.server_state.connections
        only.use = http.connection_limits.use
    else:
        fronts = Fronts(
            num=num_fronts,
            settings=settings,
            limits=limits,
            listener=listener,
            arena=service.arena,
            models=service.catalog,
            metrics=service.metrics,
            on_lost=lambda: fail("no front could be started", EXIT_CANNOT_START),
        )
        service.fronts = fronts
        service.metrics.refresh_by(fronts.count)

        async def drain() -> None:
            await service.drain()
            await fronts.stop(server.flush_until)

        def cut_off() -> None:
            service.cut_off()
            fronts.hurry()

        config = forwarded_config(app, fronts.forwarding_path)
        server = make_server(
            config,
            on_listening=fronts.start,
            drain=drain,
            cut_off=cut_off,
            move_clients_away=fronts.move_clients_away,
        )

    async def announce() -> None:
        if not settings.models:  # they come later
            await service.fronts.until_up()
            logger.info("no model is served yet at %s", url)
        await service.until_settled()
        await service.fronts.until_up()
        served = [name for name, pool in service.pools.items() if pool.is_ready]
        if served:
            served.sort(key=lambda name: name != settings.default_model)
            lines = [try_or_ask(url, service.pools[name], settings) for name in served]
            console.serving(url, served, lines, service.loading())
        elif any(pool.is_refused for pool in service.pools.values()):
            logger.error("no model is ready; /health says why, at %s", url)
        while True:  # models come and go later too
            await service.until_changed()
            served = [name for name in served if name in service.pools]
            for name, pool in service.pools.items():
                if pool.is_ready and name not in served:
                    served.append(name)
                    console.joined(name, try_or_ask(url, pool, settings), service.loading())

    async def leave_when_lost() -> None:
        await service.until_lost()
        fail("no model could be loaded", EXIT_NEVER_SERVED)

    async def leave_when_changed() -> None:
        if until_changed is not None:
            server.stop(await until_changed())

    async def main() -> None:
        tasks = [asyncio.create_task(announce()), asyncio.create_task(leave_when_lost())]
        tasks.append(asyncio.create_task(leave_when_changed()))
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(RETRY_SIGNAL, service.operations.retry_lost)
        gc.freeze()  # modules are never freed, so later collections can skip them
        await server.serve(sockets=[listener] if num_fronts == 1 else None)
        loop.remove_signal_handler(RETRY_SIGNAL)
        signal.signal(RETRY_SIGNAL, signal.SIG_IGN)  # or a late one would end this process at once
        for task in tasks:
            task.cancel()

    if tracer is not None:
        start_tracing(tracer, service)
    with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
        runner.run(main())
    if tracer is not None:
        tracer.stop()
    console.stopped()
    return exit_code


def start_tracing(tracer: "Tracer", service: Service) -> None:
    """Begin to export traces, and count them."""
    service.metrics.gauge_source(partial(_read_traces, tracer, service))
    tracer.start()


def _read_traces(tracer: "Tracer", service: Service) -> Iterator[Reading]:
    ours, theirs = tracer.counts(), service.fronts.traced
    yield Reading(name="traces_exported", value=ours[0] + theirs[0])
    yield Reading(name="traces_dropped", value=ours[1] + theirs[1])
