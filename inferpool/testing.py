"""`inferpool.testing`: the whole path of a model in this process, for its unit tests.

A call takes the way of one that comes by HTTP, but for the socket and the worker process: it is
read and checked, queued, preprocessed, collated, computed, postprocessed, checked and rendered.
"""

import asyncio
import os
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from types import ModuleType

import httpx

from inferpool.service.client.results import Prediction
from inferpool.service.client.sync_client import Client
from inferpool.service.debugging import settings_for
from inferpool.service.embedded.arguments import Served, checked_class, plain_settings
from inferpool.service.embedded.mounted import MountedApp
from inferpool.service.settings.loader import load_arguments
from inferpool.workers.host.in_process import InProcessEngine

_URL = "http://model"
_numbers = count()
"""One for each class that is tested: clients may be open side by side."""


def predict(model: Served, input: object, /, **parameters: object) -> Prediction:
    """Load a model and have it predict on one input, as a service would.

    >>> assert inferpool.testing.predict(MyClassifier, Path("cat.jpg"), top_k=1).top.label == "cat"

    To ask a model more than once, or to set its options, see `client`.

    Args:
        model: A class, wherever it is defined, or a source.
        input: As `Client.predict` takes it.
        **parameters: Parameters of the call, for the model.

    Raises:
        InferpoolError: There is no prediction: what the client of a service would raise, but that
            the detail of a `ModelFailedError` has the traceback.
        StartError: The model cannot be loaded.
    """
    with client(model) as asking:
        return asking.predict(input, parameters=parameters or None)


@contextmanager
def client(model: Served, /, **settings: object) -> Iterator[Client]:
    """Load a model, and yield a client that asks it in this process.

    Calls may take an hour, so that a debugger may hold them. The model computes in a thread.

    Args:
        model: A class, wherever it is defined, or a source.
        **settings: Any setting by its name, such as `options`. There is one replica, without
            presets of speed.

    Raises:
        SettingsError: A setting is misspelt, or has a value that cannot be.
        StartError: The model cannot be loaded.
    """
    if "models" in settings:
        raise TypeError("models cannot be set here: one model is tested, the first argument")
    with _importable(model) as source:
        loaded = load_arguments(plain_settings(settings), os.environ, Path.cwd(), model=source)
        chosen = settings_for(loaded.settings)
        if "arena_bytes" not in settings:  # to reserve more takes longer than all the rest
            chosen = chosen.model_copy(update={"arena_bytes": 2 * chosen.max_body_bytes})
        loaded = replace(loaded, settings=chosen)
        app = MountedApp(loaded, partial(InProcessEngine, pins=False))
        with _alive(app) as loop:
            transport = _InLoop(app, loop)
            with Client(_URL, transport=transport, timeout_s=None, retries=0) as asking:
                yield asking


@contextmanager
def _importable(model: Served) -> Iterator[str]:
    """The source of a class of this process, wherever it is defined."""
    if isinstance(model, str):
        yield model
        return
    found = checked_class(model)
    name = f"inferpool_tested_{next(_numbers)}"
    module = ModuleType(name)
    setattr(module, found.__name__, found)
    sys.modules[name] = module
    try:
        yield f"{name}:{found.__name__}"
    finally:
        sys.modules.pop(name, None)


@contextmanager
def _alive(app: MountedApp) -> Iterator[asyncio.AbstractEventLoop]:
    """Run an application in a thread, with an event loop of its own: the caller's may run."""
    begun: Future[tuple[asyncio.AbstractEventLoop, asyncio.Task[None] | None]] = Future()
    ready: Future[None] = Future()

    async def live() -> None:
        begun.set_result((asyncio.get_running_loop(), asyncio.current_task()))
        async with app.lifespan():
            ready.set_result(None)
            await asyncio.Event().wait()  # until this task is cancelled

    def run() -> None:
        try:
            asyncio.run(live())
        except asyncio.CancelledError:
            return
        except BaseException as error:
            if ready.done():
                raise
            ready.set_exception(error)

    # A daemon: Ctrl-C may end this process while the model loads, which nothing can interrupt.
    thread = threading.Thread(target=run, name="inferpool testing", daemon=True)
    thread.start()
    loop, task = begun.result()
    assert task is not None
    try:
        ready.result()
        yield loop
    finally:
        with suppress(RuntimeError):  # the loop has ended, as no model could be loaded
            loop.call_soon_threadsafe(task.cancel)
        thread.join()


class _InLoop(httpx.BaseTransport):
    """Carries calls of a client to an application in the event loop of another thread."""

    def __init__(self, app: MountedApp, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = httpx.ASGITransport(app)
        self._loop = loop

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Carry one; see httpx."""
        request.read()
        return asyncio.run_coroutine_threadsafe(self._answer(request), self._loop).result()

    async def _answer(self, request: httpx.Request) -> httpx.Response:
        answer = await self._transport.handle_async_request(request)
        content = await answer.aread()
        return httpx.Response(answer.status_code, headers=answer.headers, content=content)
