"""`inferpool.testing`: runs a model in this process, for its unit tests.

A call takes the same path as an HTTP request, without the socket and the worker process: it is read
and checked, queued, preprocessed, collated, computed, postprocessed, checked and rendered.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from types import ModuleType

import httpx
from anyio.from_thread import BlockingPortal, start_blocking_portal

from inferpool.service.client.results import Prediction
from inferpool.service.client.sync_client import Client
from inferpool.service.debugging import settings_for
from inferpool.service.embedded.arguments import Served, checked_class, plain_settings
from inferpool.service.embedded.mounted import MountedApp
from inferpool.service.settings.loader import load_arguments
from inferpool.workers.host.in_process import InProcessEngine

_URL = "http://model"
_numbers = count()
"""Numbers for the tested classes, since several clients may be open at a time."""


def predict(model: Served, input: object, /, **parameters: object) -> Prediction:
    """Load a model, and return its prediction for one input, as a service would.

    >>> assert inferpool.testing.predict(MyClassifier, Path("cat.jpg"), top_k=1).top.label == "cat"

    To ask a model several times, or to set its options, use `client`.

    Args:
        model: Any class of a model, or a source.
        input: Input as `Client.predict` takes it.
        **parameters: Parameters of the call, for the model.

    Raises:
        InferpoolError: There is no prediction. A client of a service raises the same error; here
            the detail of a `ModelFailedError` also has the traceback.
        StartError: The model cannot be loaded.
    """
    with client(model) as asking:
        return asking.predict(input, parameters=parameters or None)


@contextmanager
def client(model: Served, /, **settings: object) -> Iterator[Client]:
    """Load a model, and yield a client that asks it in this process.

    A call may take an hour, so a debugger may stop it. The model runs in a thread.

    Args:
        model: Any class of a model, or a source.
        **settings: Any setting by its name, such as `options`. There is one replica, without speed
            presets.

    Raises:
        SettingsError: A setting is unknown or invalid.
        StartError: The model cannot be loaded.
    """
    if "models" in settings:
        raise TypeError("models cannot be set here: one model is tested, the first argument")
    with _importable(model) as source:
        loaded = load_arguments(plain_settings(settings), os.environ, Path.cwd(), model=source)
        chosen = settings_for(loaded.settings)
        if "arena_bytes" not in settings:  # to reserve more would take longer than all the rest
            chosen = chosen.model_copy(update={"arena_bytes": 2 * chosen.max_body_bytes})
        loaded = replace(loaded, settings=chosen)
        app = MountedApp(loaded, partial(InProcessEngine, pins=False))
        with (
            start_blocking_portal(name="inferpool testing") as portal,
            portal.wrap_async_context_manager(app.lifespan()),
        ):
            transport = _PortalTransport(app, portal)
            with Client(_URL, transport=transport, timeout_s=None, retries=0) as asking:
                yield asking


@contextmanager
def _importable(model: Served) -> Iterator[str]:
    """Make a class importable, wherever it is defined, and yield its source."""
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


class _PortalTransport(httpx.BaseTransport):
    """Carries requests to an application in the event loop of another thread."""

    def __init__(self, app: MountedApp, portal: BlockingPortal) -> None:
        self._transport = httpx.ASGITransport(app)
        self._portal = portal

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Carry one request; see httpx."""
        request.read()
        return self._portal.call(self._answer, request)

    async def _answer(self, request: httpx.Request) -> httpx.Response:
        answer = await self._transport.handle_async_request(request)
        content = await answer.aread()
        return httpx.Response(answer.status_code, headers=answer.headers, content=content)
