"""`inferpool.asgi_app`: a service inside a user's own ASGI application, in its event loop.

The user's server accepts the connections, and each call passes the user's middleware first. The
rest is as in `inferpool serve`: the same application and service, with its own worker processes.
"""

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from starlette.types import ASGIApp, Receive, Scope, Send

from inferpool.models.errors import SourceError
from inferpool.models.sources.importing import end_import_for_model
from inferpool.service.api.page_headers import with_nosniff
from inferpool.service.api.web import App
from inferpool.service.app import assemble, log_quick_checks, make_app
from inferpool.service.embedded.arguments import ServedModels, read_arguments
from inferpool.service.errors import StartError
from inferpool.service.service import ClosableEngine, Service
from inferpool.service.settings.loader import LoadedSettings
from inferpool.service.settings.model_sources import modules_to_preload
from inferpool.service.settings.names import StateFileError
from inferpool.service.telemetry.console import Console
from inferpool.workers.host.devices import DeviceError, find_host
from inferpool.workers.host.local import LocalEngine, guest_forkserver
from inferpool.workers.shared.arena import Arena

logger = logging.getLogger(__name__)


def asgi_app(
    models: ServedModels | None = None,
    /,
    *,
    config: str | os.PathLike[str] | None = None,
    **settings: object,
) -> "MountedApp":
    """Make an ASGI application that serves models, to be mounted in another one.

    >>> models = inferpool.asgi_app(MyModel, replicas=2)
    >>> app = FastAPI(lifespan=models.lifespan)
    >>> app.mount("/models", models)

    Nothing starts before its lifespan begins, or else before its first call. It logs to `logging`.
    Settings of the server, such as `port` and those of TLS, have no effect.

    Args:
        models: A class, or a source such as "my_nets:MyModel" or "torchvision:resnet18"; or several
            by name, each a class, a source, or a dict of its settings. By default what `config`
            says, or else the packaged classifier.
        config: A file of settings. By default no file is read. Variables such as INFERPOOL_PORT are
            never read.
        **settings: Any setting by its name. Those of a model apply to each model.

    Raises:
        SettingsError: A setting is unknown or invalid.
        SourceError: Worker processes cannot import the class.
    """
    end_import_for_model(starts=False)
    loaded, found = read_arguments(models, config, settings)
    if typed := [each.source for each in found if each.text]:
        name = typed[0].partition(":")[2]
        raise SourceError(f"{name} was typed in: put it into a file and import it from there")
    return MountedApp(loaded)


class MountedApp:
    """An ASGI application with models behind it; `lifespan` starts and stops them."""

    def __init__(
        self, loaded: LoadedSettings, make_engine: Callable[[Arena], ClosableEngine] = LocalEngine
    ) -> None:
        self._loaded = loaded
        self._make_engine = make_engine
        self._app: App | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ready: asyncio.Future[App] | None = None
        """The future of the application; the first call makes it, and others wait for it."""
        self._life: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def lifespan(self, app: ASGIApp | None = None) -> AsyncIterator[None]:
        """Start the workers, wait until models are ready, and stop them at the end of the block.

        It fits the `lifespan` of FastAPI and Starlette. In your own it is
        `async with models.lifespan():`.

        Args:
            app: The application around this one, which is not used.

        Raises:
            StartError: No model could be loaded, or this host has no room for the service.
        """
        async with self._running() as (mounted, service):
            pools = service.pools.items()
            if pools:  # or all were removed at run time
                await service.until_settled()
            if pools and all(pool.is_lost for _, pool in pools):
                reasons = "; ".join(f"{name}: {pool.reason}" for name, pool in pools)
                raise StartError(f"no model could be loaded: {reasons}")
            self._app, self._loop = mounted, asyncio.get_running_loop()
            try:
                yield
            finally:
                self._app = self._loop = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one ASGI call. The first one starts the workers, unless `lifespan` has."""
        if scope["type"] == "lifespan":
            await self._live(receive, send)
            return
        loop = asyncio.get_running_loop()
        if self._loop not in (None, loop):
            raise RuntimeError(
                "the models were started in another event loop: use their `lifespan`, and in tests "
                "`with TestClient(app) as client:`"
            )
        app = self._app
        if app is None:
            if self._ready is None:
                self._loop = loop
                self._ready = loop.create_future()
                self._life = asyncio.create_task(self._run(self._ready), name="life of the models")
            app = await asyncio.shield(self._ready)
        await app(scope, receive, with_nosniff(send))

    async def _run(self, ready: asyncio.Future[App]) -> None:
        """Run without a lifespan, until the event loop ends and cancels its tasks.

        The first calls wait for the models up to the longest time of a call.
        """
        logger.info("started by a call: with `lifespan` the models would be ready before it")
        try:
            async with self._running() as (app, service):
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._loaded.settings.default_timeout_s):
                        await service.until_settled()
                self._app = app
                ready.set_result(app)
                await asyncio.Event().wait()
        except Exception as error:
            if ready.done():
                raise
            self._ready = self._loop = None  # then the next call tries again
            ready.set_exception(error)  # for the waiting calls

    @asynccontextmanager
    async def _running(self) -> AsyncIterator[tuple[App, Service]]:
        """Run a service for the block.

        Raises:
            StartError: This host has no room for it, or the file of changes made at run time
                cannot be used.
        """
        path = self._loaded.settings.state_file
        async with AsyncExitStack() as stack:
            try:
                loaded = self._loaded.with_changes(None if path in ("auto", "none") else Path(path))
                settings = loaded.settings
                for warning in loaded.state.warnings:
                    logger.warning("%s", warning)
                host = find_host(settings.cuda_visible_devices, settings.cuda_device_order)
                if self._make_engine is LocalEngine:
                    log_quick_checks(settings, host)
                    modules = modules_to_preload(settings.sources(), Path.cwd())
                    stack.enter_context(guest_forkserver(modules))
                assembly = assemble(
                    settings, host, Console(None), loaded.origins, self._make_engine, loaded.state
                )
            except (DeviceError, OSError, StateFileError) as error:
                raise StartError(str(error)) from error
            app, _, _ = make_app(assembly)
            await stack.enter_async_context(app.router.lifespan_context(app))
            yield app, assembly.service

    async def _live(self, receive: Receive, send: Send) -> None:
        """Run as the whole application of a server, which sends us its start and its stop."""
        await receive()
        try:
            async with self.lifespan():
                await send({"type": "lifespan.startup.complete"})
                await receive()
        except StartError as error:
            await send({"type": "lifespan.startup.failed", "message": str(error)})
        else:
            await send({"type": "lifespan.shutdown.complete"})
