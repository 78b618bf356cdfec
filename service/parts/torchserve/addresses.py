"""TorchServe's addresses besides that of predictions: who may call there, and their servers.

The main process serves them in its event loop, with the same bounds of connections, heads and
bodies as the main port.
"""

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterator, Sequence

import uvicorn
from fastapi import APIRouter, Request, Response

from inferpool.service.api.auth import Guard
from inferpool.service.api.codecs.body import Limits, joined
from inferpool.service.api.errors import CALL_KEY
from inferpool.service.api.exchange import Predict
from inferpool.service.api.web import App
from inferpool.service.api.wire.budgets import EdgeLimits
from inferpool.service.api.wire.listening import url_of
from inferpool.service.api.wire.protocol import PredictProtocol
from inferpool.service.api.wire.server import DrainingServer
from inferpool.service.endpoint import server_config
from inferpool.service.errors import ServiceError
from inferpool.service.parts.torchserve.description import ManagementRefusedError
from inferpool.service.parts.torchserve.errors import UNCACHED, error_answer
from inferpool.service.parts.torchserve.json import error_body
from inferpool.service.settings.settings import Settings, is_loopback
from inferpool.service.telemetry.logs import LogThrottle
from inferpool.service.telemetry.versions import version_of

logger = logging.getLogger(__name__)

MAX_CONNECTIONS = 64
"""Connections to one of these addresses at once."""
_MAX_BYTES = 1 << 20
"""Bytes of unfinished requests, and of unread answers, of all of them."""
_METHODS = ["GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS"]
_REFUSALS_PER_S = 5
_FORWARDED = (
    "forwarded", "via", "x-forwarded-for", "x-forwarded-host", "x-forwarded-proto", "x-real-ip"
)  # fmt: skip
"""Headers of proxies: the client is on another host than its connection says."""

Answerer = Callable[[Request], Awaitable[Response]]


class Access:
    """Decides who may manage models.

    On a loopback address, anybody may describe, list and scale, as with TorchServe; all else needs
    an admin key. No page in a browser may change anything.
    """

    def __init__(self, guard: Guard, *, is_local: bool) -> None:
        """Know the keys; `is_local` says that only this host can connect."""
        self._guard = guard
        self._is_local = is_local
        self._refusals = LogThrottle(_log_more_refusals, most=_REFUSALS_PER_S)

    def check(self, request: Request) -> None:
        """Check that a call may be made.

        Raises:
            ManagementRefusedError: It may not, by nobody or from here.
            UnauthorizedError: It needs a key, and has no known one.
            ForbiddenError: Its key is for something else.
        """
        try:
            self._check(request)
        except (ServiceError, ManagementRefusedError) as error:
            if self._refusals.may_write():
                call = request.scope[CALL_KEY]
                logger.warning(
                    "admin: refused %s %s: %s",
                    call.method,
                    call.path[:200],
                    error,
                    extra={
                        **call.log_ids(),
                        "client": request.client.host if request.client else "unknown",
                    },
                )
            raise

    def _check(self, request: Request) -> None:
        headers = request.headers
        is_reading = request.method in ("GET", "HEAD")
        by_page = "origin" in headers or headers.get("sec-fetch-site", "none") != "none"
        if by_page and not is_reading:
            text = "a page in a browser may change nothing here"
            raise ManagementRefusedError(403, "ForbiddenException", text)
        is_near = self._is_local and not any(each in headers for each in _FORWARDED)
        is_default = request.scope[CALL_KEY].path.rstrip("/").endswith("/set-default")
        is_free = request.method not in ("POST", "DELETE") and (is_reading or not is_default)
        if is_near and is_free and _names_this_host(headers.get("host", "")):
            return
        if "admin" not in self._guard.restricted:
            raise ManagementRefusedError(
                403,
                "InvalidKeyException",
                "this needs an admin key, and there is none: set INFERPOOL_ADMIN_KEYS or "
                "admin_keys_file",
            )
        self._guard.check("admin", joined(headers.raw))


def router_of(path: str, answer: Answerer, check: Callable[[Request], None]) -> APIRouter:
    """Return a route that answers all methods of a path, once a check allows it."""
    router = APIRouter()

    async def endpoint(request: Request) -> Response:
        try:
            check(request)
            return await answer(request)
        except ManagementRefusedError as error:
            body = error_body(error.status, error.kind, error.message)
            response = Response(body, error.status, media_type="application/json")
            response.raw_headers += UNCACHED
            return response
        except ServiceError as error:
            status, headers, body = error_answer(error, request.scope[CALL_KEY])
            response = Response(body, status)
            response.raw_headers = headers
            return response

    router.add_api_route(
        path, endpoint, methods=_METHODS, include_in_schema=False, response_model=None
    )
    return router


class SideServer(DrainingServer):
    """Serves an application at an address of its own, as long as it is told to."""

    def __init__(
        self,
        what: str,
        listener: socket.socket,
        routers: Sequence[APIRouter],
        settings: Settings,
        tls: ssl.SSLContext | None,
    ) -> None:
        """Take over a socket that listens, and answer nothing yet.

        Args:
            what: Names the address for people.
            listener: The socket.
            routers: The routes.
            settings: Those of the service.
            tls: The context for HTTPS; None for HTTP.
        """
        self.what = what
        self.url = url_of(listener, is_tls=tls is not None)
        self._listener = listener
        self._task: asyncio.Task[None] | None = None
        app = App(version=version_of(), routers=routers, docs=False)
        limits = Limits(max_body_bytes=_MAX_BYTES, max_json_bytes=_MAX_BYTES)
        edge = EdgeLimits(
            max_connections=MAX_CONNECTIONS,
            head_timeout_s=settings.head_timeout_s,
            write_timeout_s=settings.write_timeout_s,
            max_unfinished_bytes=_MAX_BYTES,
            max_unread_bytes=_MAX_BYTES,
        )
        http = PredictProtocol.bound_to(Predict({}, limits=limits), edge)
        super().__init__(server_config(app, http, settings, tls, lifespan="off"))

    def start(self) -> None:
        """Begin to answer calls."""
        serving = self.serve(sockets=[self._listener])
        self._task = asyncio.create_task(serving, name=f"TorchServe's {self.what}")
        logger.info("TorchServe's %s: %s", self.what, self.url)

    def begin_stop(self) -> None:
        """Accept nothing more, and answer what has been accepted."""
        self.should_exit = True
        for server in getattr(self, "servers", ()):  # uvicorn's, once it has started
            server.close()
        if self._task is None:
            self._listener.close()

    async def stop(self, *, at_once: bool) -> None:
        """Wait until all is answered and read, or not `at_once`."""
        self.begin_stop()
        self.force_exit = at_once
        if self._task is not None:
            await self._task
            self._listener.close()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen with one handle of the socket, since few clients connect."""
        await uvicorn.Server.startup(self, sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the main server."""
        yield

    def _log_started_message(self, listeners: object) -> None:
        """Say nothing: the part does."""


def _names_this_host(host: str) -> bool:
    """Return whether a `Host` header names a loopback address; others may be of pages."""
    name = host.rpartition(":")[0] if not host.endswith("]") and ":" in host else host
    return is_loopback(name.strip("[]").lower())


def _log_more_refusals(num: int) -> None:
    logger.warning("admin: refused %d more calls in the last second", num)
