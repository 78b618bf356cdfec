"""The main process's end of what fronts relay: it answers on a Unix socket as if on its port.

It runs without the client that a front needs for this, whose import takes a tenth of a second.
"""

from multiprocessing import util
from pathlib import Path

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

CLIENT, SCHEME = b"x-inferpool-client", b"x-inferpool-scheme"
"""What only the front knows of a call; taken off before the application sees it."""
IDLE_S = 5.0
"""How long a front keeps a connection to the main process that is not used."""


class Relayed:
    """Gives the application calls that a front has relayed, as if they had come to it."""

    def __init__(self, app: ASGIApp) -> None:
        """Stand before an application."""
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Hand on one ASGI call."""
        if scope["type"] == "http":
            told = {name: value for name, value in scope["headers"] if name in (CLIENT, SCHEME)}
            scope = dict(scope)
            scope["headers"] = [each for each in scope["headers"] if each[0] not in told]
            host, _, port = told.get(CLIENT, b"").decode("latin-1").rpartition(" ")
            scope["client"] = (host, int(port)) if host else None
            scope["scheme"] = told.get(SCHEME, b"http").decode("latin-1")
        await self._app(scope, receive, send)


def relay_path() -> str:
    """Where the main process's socket goes: a folder that nobody else may look into.

    It is that of `multiprocessing`, which removes it at the end.
    """
    return str(Path(util.get_temp_dir()) / "relay")


def relayed_config(app: ASGIApp, path: str) -> uvicorn.Config:
    """How the main process serves an application to its fronts."""
    return uvicorn.Config(
        Relayed(app),
        uds=path,
        loop="uvloop",
        http="httptools",
        ws="none",
        lifespan="on",
        log_config=None,
        log_level="warning",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        date_header=False,
        timeout_keep_alive=int(10 * IDLE_S),  # or it may close one that a call is on its way by
    )
