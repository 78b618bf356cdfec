"""The FastAPI application: routes, docs and errors. Calls to `/predict` go past its machinery."""

import asyncio
import hashlib
import logging
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import is_dataclass
from types import MappingProxyType, ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
from fastapi import APIRouter, FastAPI
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import Lifespan, Receive, Scope, Send

from inferpool.service.api.addresses import (
    Addresses,
    relative_root_for,
    root_for,
    without_last_slash,
)
from inferpool.service.api.asgi import answer
from inferpool.service.api.auth import POLICIES, Guard, Policy, policy_of
from inferpool.service.api.cors import Cors
from inferpool.service.api.errors import (
    CALL_KEY,
    WAS_HEAD,
    NotFoundError,
)
from inferpool.service.api.exchange import (
    PREFIX,
    Call,
    Predict,
    Tracing,
    begin_call,
    common_lines,
    is_job,
    lines_of,
    pairs_of,
    preflight_reply,
    send_reply,
)
from inferpool.service.api.page_headers import (
    POLICY_HEADER,
    file_in_package,
    policy_for,
    with_page_headers,
)
from inferpool.service.api.route_errors import (
    FORM_KEY,
    install_error_handlers,
    problem_response,
)
from inferpool.service.errors import ServiceError, StartError
from inferpool.service.telemetry.logs import LogThrottle

if TYPE_CHECKING:
    from inferpool.models.spec import Interface

logger = logging.getLogger(__name__)

_REFUSALS_PER_S = 5
"""Refused admin calls that are logged one by one."""
_PACKAGE = "inferpool."
_DOCUMENT_PATH = "/openapi.json"
_INFO: Mapping[str, Any] = {
    "title": "inferpool",
    "summary": "PyTorch models behind HTTP.",
    "description": (
        "`POST /predict` asks the default model, `POST /predict/{model}` another one. Errors are "
        "problem documents (RFC 9457) with a stable `code`; every answer has an `X-Request-ID` "
        "that stands in the log, a `traceparent`, and `Server-Timing`."
    ),
    "license_info": {"name": "Apache License 2.0", "identifier": "Apache-2.0"},
}
"""FastAPI's arguments for the head of the document."""
_ASSETS_PATH = "/docs/assets"
_REPEATABLE = b"vary"
"""A header that may stand several times (RFC 9110, 12.5.5)."""
_PARAMETER = re.compile(r"/\{[^}/]*\}$")
"""A parameter at the end of a route's path."""
_ASSETS_PACKAGE = "fastapi_offline"
"""The package with Swagger UI's files, so that `/docs` asks no other host for anything."""


class App(FastAPI):
    """FastAPI for everything but `/predict`: it hands on those calls before its own machinery.

    That machinery (middleware stack, router, dependencies) costs several times as much as an
    answer of the endpoint.
    """

    forms_of_errors: Mapping[str, str] = MappingProxyType({})
    """See `Part.forms_of_errors`."""
    aliases: Mapping[str, str] = MappingProxyType({})
    """See `Part.aliases`."""

    def __init__(
        self,
        *,
        version: str,
        routers: Sequence[APIRouter] = (),
        guard: Guard | None = None,
        cors: Cors | None = None,
        docs: bool = True,
        lifespan: Lifespan["App"] | None = None,
    ) -> None:
        """Build the application; `predict` is set once it exists, before the first call.

        Args:
            version: The version of inferpool, for the documentation.
            routers: Health, metrics and the other routes.
            guard: Checks keys; without one everything is open.
            cors: Pages of other origins that may call; None: none.
            docs: Serve the API's documentation.
            lifespan: Runs around the serving, as in FastAPI.

        Raises:
            StartError: Nothing says which key a route needs.
        """
        super().__init__(
            **_INFO,
            version=version,
            generate_unique_id_function=lambda route: route.name,
            openapi_url=None,  # `_show_document` answers there
            docs_url=None,
            redoc_url=None,
            lifespan=lifespan,
            redirect_slashes=False,  # `__call__` drops them
        )
        self.addresses = Addresses()
        self.predict: Predict | None = None
        self.examples: Callable[[], Mapping[str, object]] = dict
        """Returns an instance for each model that shows one."""
        self.interfaces: Callable[[], Mapping[str, Interface]] = dict
        """Returns how clients speak to each model where that is not as usual."""
        self.bodies: Callable[[], Mapping[str, object]] = dict
        """Returns the schemas of the bodies that routes read by themselves, by operation."""
        self.has_jobs = False
        """Calls to `/predict` that prefer `respond-async` go to the routes of jobs."""
        self.later: dict[str, Callable[[], Sequence[APIRouter]]] = {}
        """Makes the routes below a first segment of paths, in a thread: when one is asked for."""
        self._making = asyncio.Lock()
        self.tracing: Tracing | None = None
        """Traces calls to the other routes, but only those with a `traceparent`: not probes."""
        self._guard = guard
        self._cors = cors
        self._document: _Document | None = None
        self._refusals = LogThrottle(_log_more_refusals, most=_REFUSALS_PER_S)
        install_error_handlers(self)
        self._modules: frozenset[ModuleType] = frozenset()
        self.scopes: dict[str, Policy] = {}
        """The key that each route needs, by its path."""
        self._include(routers)
        if docs:
            self._install_docs()
            self._include(())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one ASGI call."""
        if scope["type"] != "http":
            await super().__call__(scope, receive, send)
            return
        asked = _route_path(scope)
        path = self.aliases.get(asked, asked)
        if self.predict is not None and self.predict.takes(path):
            if not (self.has_jobs and is_job(path, scope["headers"], self.predict.own)):
                await answer(self.predict, path, scope, receive, send)
                return
            if (entry := self.predict.own(path)) is not None:
                path = f"{PREFIX}/{entry.name}"  # which the routes of jobs know
        call = begin_call(scope["method"], path, scope["query_string"], scope["headers"])
        if self._cors is not None:
            call.cors_lines = self._cors.lines_for(call.headers.get(b"origin"))
            lines = self._cors.preflight_lines(call.method, call.headers)
            if lines is not None:
                await send_reply(send, preflight_reply(call, lines))
                return
        root = scope["path"].removesuffix(asked)
        scope = {**scope, CALL_KEY: call, "path": root + without_last_slash(path)}
        self.addresses.put_into(scope, asked)
        send = with_call_headers(call, with_page_headers(send))
        if self.tracing is None or not call.parent_id:
            await self._answer(call, scope, receive, send)
            return
        self.tracing.begin(call)
        try:
            await self._answer(call, scope, receive, send)
        finally:
            call.route = getattr(scope.get("route"), "path", "")
            if call.steps is not None:
                self.tracing.take(call, call.status, time.monotonic() - call.started)

    def _include(self, routers: Sequence[APIRouter]) -> None:
        """Add routes.

        Raises:
            StartError: Nothing says which key one needs.
        """
        for router in routers:
            self.include_router(router)
        self._modules |= _modules_of(routers)
        if self._guard is not None:
            self.scopes = dict(_scopes_of(self.routes))

    async def _include_later(self, segment: str) -> None:
        """Add the routes below a first segment of paths, if they are not there yet."""
        async with self._making:
            if (make := self.later.get(segment)) is not None:
                routers = await asyncio.to_thread(make)
                if self.later.pop(segment, None) is not None:  # `openapi` may have added them
                    self._include(routers)

    async def _answer(self, call: Call, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a call to anything but `/predict`."""
        segment = call.path[1:].partition("/")[0]
        if segment in self.forms_of_errors:
            scope[FORM_KEY] = self.forms_of_errors[segment]
        if self._guard is not None:
            try:
                self._guard.check_path(call.path, call.headers)
            except ServiceError as error:
                refusal = problem_response(Request(scope), error)
                if policy_of(call.path) == "admin":
                    self._log_refusal(scope, call, error)
                await refusal(scope, receive, send)
                return
        if segment in self.later:
            await self._include_later(segment)
        if scope["method"] == "HEAD":  # the server drops the body (RFC 9110, 9.3.2)
            scope.update({"method": "GET", WAS_HEAD: True})  # this is our copy
        await super().__call__(scope, receive, send)

    def openapi(self) -> dict[str, object]:
        """Build the OpenAPI document, `/predict` first."""
        from inferpool.service.api.openapi.document import complete

        self.openapi_schema = None
        for segment in list(self.later):
            self._include(self.later.pop(segment)())
        models, default = self._served()
        return complete(
            super().openapi(),
            frozenset() if self._guard is None else self._guard.restricted,
            models=models,
            default=default,
            modules=self._modules,
            examples=self.examples(),
            interfaces=self.interfaces(),
            bodies=self.bodies(),
        )

    def _served(self) -> tuple[list[str] | None, str | None]:
        """Return the models that are served, and the default one unless it was removed."""
        if self.predict is None:
            return None, None
        names, default = self.predict.names, self.predict.default
        return names, default if default in names or not names else None

    async def _show_document(self, request: Request) -> Response:
        document = self._current_document(root_for(request.scope) or "/")
        headers = {"etag": document.etag, "cache-control": "no-cache"}
        if document.etag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        return Response(document.body, media_type="application/json", headers=headers)

    def _current_document(self, root: str) -> "_Document":
        """Return the document as bytes; it is built again only after something in it has changed.

        To build it costs the event loop 50 ms, and no key is needed to ask for it. Only the address
        of the service may differ from call to call, behind a proxy that is trusted.
        """
        origin = (self._served(), dict(self.examples()), dict(self.interfaces()))
        known = self._document
        if known is None or known.origin != origin:
            known = _Document(origin, self.openapi(), "", b"", "")
        if known.root != root:
            server = {"url": root, "description": "This host."}
            body = msgspec.json.encode({**known.schema, "servers": [server]})
            etag = f'W/"{hashlib.sha256(body).hexdigest()[:24]}"'
            known = known._replace(root=root, body=body, etag=etag)
        self._document = known
        return known

    def _log_refusal(self, scope: Scope, call: Call, error: ServiceError) -> None:
        """Show an operator that someone tries keys, without letting that fill the log."""
        if isinstance(error, NotFoundError) or not self._refusals.may_write():
            return
        logger.warning(
            "admin: refused %s %s: %s",
            call.method,
            call.path[:200],
            error.message,
            extra={
                **call.log_ids(),
                "client": scope["client"][0] if scope.get("client") else "unknown",
            },
        )

    def _install_docs(self) -> None:
        assets = StaticFiles(directory=file_in_package(_ASSETS_PACKAGE, "static"))
        self.mount(_ASSETS_PATH, assets, name="assets")
        self.add_route("/docs", self._show_docs, include_in_schema=False)
        self.add_route(_DOCUMENT_PATH, self._show_document, include_in_schema=False)

    async def _show_docs(self, request: Request) -> HTMLResponse:
        root = relative_root_for(request.scope)
        page = get_swagger_ui_html(
            openapi_url=f"{root}{_DOCUMENT_PATH}",
            title=self.title,
            swagger_js_url=f"{root}{_ASSETS_PATH}/swagger-ui-bundle.js",
            swagger_css_url=f"{root}{_ASSETS_PATH}/swagger-ui.css",
            swagger_favicon_url=f"{root}{_ASSETS_PATH}/favicon.png",
            swagger_ui_parameters={
                "validatorUrl": None
            },  # else it sends the document to a validator
        )
        page.headers[POLICY_HEADER] = policy_for(page.body)
        return page


class _Document(NamedTuple):
    """The OpenAPI document in memory."""

    origin: object
    """The objects it was made from, for comparison."""
    schema: dict[str, object]
    root: str
    """The address of `/` in it."""
    body: bytes
    etag: str


def with_call_headers(call: Call, send: Send) -> Send:
    """Return an ASGI `send` that adds ids and times to an answer, like those of `/predict`."""

    async def sending(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            call.status = message["status"]
            headers = list(message.get("headers", ()))
            there = {name for name, _ in headers}
            ours = pairs_of(common_lines(call, None).encode())
            headers += [pair for pair in ours if pair[0] not in there or pair[0] == _REPEATABLE]
            lines_of(headers)  # raises before anything of the answer is sent
            message = {**message, "headers": headers}
        await send(message)

    return sending


def _scopes_of(routes: Iterable[BaseRoute]) -> Iterator[tuple[str, Policy]]:
    """Yield the paths of routes and the keys that they need.

    Raises:
        StartError: Nothing says which key one needs, or it is open because it lies below a path
            that is.
    """
    for route in routes:
        included = getattr(route, "original_router", None)
        if included is not None:
            yield from _scopes_of(included.routes)
            continue
        if not isinstance(route, Route | Mount):  # calls to others are not checked here
            raise StartError(f"{route} cannot be served: no key is asked for there")
        policy = policy_of(route.path)
        if policy is None or (policy == "open" and _PARAMETER.sub("", route.path) not in POLICIES):
            raise StartError(
                f"{route.path} cannot be served: POLICIES of service.api.auth do not say which key "
                "it needs"
            )
        yield route.path, policy


def _modules_of(routers: Sequence[APIRouter]) -> frozenset[ModuleType]:
    """Return the modules of routes and of their answers; the latter have docstrings of fields."""
    routes = [each for router in routers for each in router.routes if isinstance(each, APIRoute)]
    parts = [part for route in routes for part in (route.endpoint, route.response_model)]
    names = {getattr(part, "__module__", "") for part in parts}
    ours = [sys.modules[name] for name in names if name.startswith(_PACKAGE)]
    shown = (each for module in ours for each in vars(module).values() if is_dataclass(each))
    names |= {each.__module__ for each in shown}  # states of workers come as their room has them
    return frozenset(sys.modules[name] for name in names if name.startswith(_PACKAGE))


def _log_more_refusals(num: int) -> None:
    logger.warning("admin: refused %d more calls in the last second", num)


def _route_path(scope: Scope) -> str:
    """Return the path of an ASGI call without the path that the server is mounted under."""
    path: str = scope["path"]
    root = scope.get("root_path")
    return path.removeprefix(root) if root else path
