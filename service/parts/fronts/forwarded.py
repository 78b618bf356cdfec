"""The main process's end of forwarding: it answers fronts on a Unix socket as if on its port.

It does without the fronts' HTTP client, since to import that takes a tenth of a second.
"""

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

CLIENT, SCHEME = b"x-inferpool-client", b"x-inferpool-scheme"
"""Headers for what only the front knows of a call; the application does not see them."""
IDLE_S = 5.0
"""How long a front keeps an unused connection to the main process."""


class ForwardedApp:
    """Passes the calls that fronts forward to an application, as if clients had sent them."""

    def __init__(self, app: ASGIApp) -> None:
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


def forwarded_config(app: ASGIApp, path: str) -> uvicorn.Config:
    """Return the configuration of the server that answers fronts."""
    return uvicorn.Config(
        ForwardedApp(app),
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
        timeout_keep_alive=int(10 * IDLE_S),  # else it may close a connection with a call under way
    )
