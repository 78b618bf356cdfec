"""Makes the part that serves as TorchServe does: paths, and addresses of its own."""

import logging
import ssl
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from fastapi import APIRouter, Request, Response

from inferpool.service.api.auth import Guard
from inferpool.service.api.codecs.body import joined
from inferpool.service.api.errors import CALL_KEY
from inferpool.service.api.wire.listening import listen
from inferpool.service.errors import StartError
from inferpool.service.parts.admin import routes as audit
from inferpool.service.parts.torchserve.addresses import (
    Access,
    SideServer,
    router_of,
)
from inferpool.service.parts.torchserve.description import NamedModels, no_resource, not_allowed
from inferpool.service.parts.torchserve.errors import UNCACHED
from inferpool.service.parts.torchserve.management import Management
from inferpool.service.parts.torchserve.metrics import CONTENT_TYPE, TorchServeMetrics
from inferpool.service.parts.torchserve.routes import check_root_path, inference_router
from inferpool.service.parts.torchserve.store import ModelStore
from inferpool.service.service import Part, Service
from inferpool.service.settings.names import SettingsError
from inferpool.service.settings.properties import Address, Properties, address_of, read_properties
from inferpool.service.settings.settings import Settings, is_loopback
from inferpool.service.settings.tls import server_context
from inferpool.service.telemetry.metrics import Metrics

if TYPE_CHECKING:
    import socket

    from inferpool.service.parts.swap.changes import Changes

logger = logging.getLogger(__name__)

_INFERENCE, _MANAGEMENT, _METRICS = "inference_address", "management_address", "metrics_address"
_OWN_METRICS = "/metrics/torchserve"
"""The path of its metrics where they are on the main port."""
_ERRORS = "inferpool.service.parts.torchserve.errors:error_answer"
_SEGMENTS = (
    "predictions", "invocations", "models", "explanations", "wfpredict", "ping", "api-description"
)  # fmt: skip
"""First segments of the paths whose errors are in TorchServe's form."""


def make_torchserve(service: Service, guard: Guard, changes: "Changes | None") -> Part:
    """Make the part, and listen on its addresses; calls are answered once it has started.

    Raises:
        StartError: An address cannot be used, or would be open to other hosts without a key.
        TlsError: The certificate or its key cannot be used.
    """
    settings = service.settings
    assert settings.torchserve is not None
    assert changes is not None
    logging.getLogger(audit.__name__).setLevel(logging.INFO)  # its lines are an audit log
    check_root_path(settings.root_path)
    try:
        properties = read_properties(Path(settings.torchserve))
        store, addresses = ModelStore(properties), _addresses_in(properties)
    except SettingsError as error:
        raise StartError(str(error)) from error
    served = NamedModels(service.catalog)
    management = Management(service.catalog, served, changes, store)
    routes = _Routes(guard, management, TorchServeMetrics(service, served), service.metrics)
    if settings.only_predictions:
        logger.warning("%s and %s are closed (only_predictions)", _MANAGEMENT, _METRICS)
        return _part(service)
    _check_keys(settings, guard, addresses)
    groups: dict[Address, list[str]] = {}
    for key in addresses:
        groups.setdefault(addresses[key], []).append(key)
    on_main = groups.pop(addresses.pop(_INFERENCE))
    servers = _listen(settings, properties, groups, routes)
    routers = [router for key in on_main for router in routes.on_main(key)]
    return _part(
        service, servers, routers, {"/metrics": _OWN_METRICS} if _METRICS in on_main else {}
    )


class _Routes:
    """The routes of management and metrics, at an address of their own or on the main port."""

    def __init__(
        self, guard: Guard, management: Management, metrics: TorchServeMetrics, own: Metrics
    ) -> None:
        self._guard = guard
        self._management = management
        self._metrics = metrics
        self._own = own

    def on_own(self, keys: Sequence[str], *, is_local: bool) -> list[APIRouter]:
        """Return the routes of an address; all other paths lead to an error."""
        routers = []
        access = Access(self._guard, is_local=is_local)
        if _METRICS in keys:
            routers.append(router_of("/metrics", self._show, self._check_metrics))
        if _MANAGEMENT in keys:
            routers.append(router_of("/{path:path}", self._management.answer, access.check))
        else:
            routers.append(router_of("/{path:path}", _nothing, self._check_metrics))
        return routers

    def on_main(self, key: str) -> list[APIRouter]:
        """Return the routes of what is on the main port; there the application checks keys too."""
        if key == _METRICS:
            return [router_of(_OWN_METRICS, self._show_all, self._check_metrics)]
        if key == _MANAGEMENT:
            check = Access(self._guard, is_local=False).check
            answer = self._management.answer
            return [router_of(path, answer, check) for path in ("/models", "/models/{path:path}")]
        return []

    async def _show(self, request: Request) -> Response:
        body = await self._metrics.render(request.query_params.getlist("name[]"))
        response = Response(body, headers={"content-type": CONTENT_TYPE})
        response.raw_headers += UNCACHED
        return response

    async def _show_all(self, request: Request) -> Response:
        """Show ours too, since this takes the place of their path."""
        answer = await self._show(request)
        if "name[]" not in request.query_params:
            answer.body = bytes(answer.body) + self._own.render()[0]
            answer.headers["content-length"] = str(len(answer.body))
        return answer

    def _check_metrics(self, request: Request) -> None:
        self._guard.check("metrics", joined(request.headers.raw))


async def _nothing(request: Request) -> Response:
    raise no_resource() if request.scope[CALL_KEY].path.strip("/") else not_allowed()


def _addresses_in(properties: Properties) -> dict[str, Address]:
    keys = [_INFERENCE, _MANAGEMENT]
    if properties.is_true("enable_metrics_api", default=True):
        keys.append(_METRICS)
    return {key: address_of(properties, key) for key in keys}


def _check_keys(settings: Settings, guard: Guard, addresses: Mapping[str, Address]) -> None:
    """Check that other hosts need a key for all but predictions.

    Raises:
        StartError: They would need none.
    """
    for key, kind in ((_MANAGEMENT, "admin"), (_METRICS, "metrics")):
        address = addresses.get(key)
        if address is None:
            continue
        on_main = address == addresses[_INFERENCE]
        host = settings.host if on_main else address.host
        if not is_loopback(host) and kind not in guard.restricted:
            raise StartError(
                f"{key}: other hosts could reach {host}, and no key would be needed there: set "
                f"INFERPOOL_{kind.upper()}_KEYS (or {kind}_keys_file), or listen on 127.0.0.1"
            )
        if on_main and kind == "admin" and kind not in guard.restricted:
            logger.warning(
                "%s is that of predictions, where management needs an admin key, and there is "
                "none: set INFERPOOL_ADMIN_KEYS, or give it a port of its own",
                key,
            )


def _listen(
    settings: Settings,
    properties: Properties,
    groups: Mapping[Address, Sequence[str]],
    routes: _Routes,
) -> list[SideServer]:
    servers: list[SideServer] = []
    listeners: list[socket.socket] = []
    try:
        for address, keys in groups.items():
            tls = _tls_of(settings, properties, keys[0]) if address.is_tls else None
            listeners.append(listen(address.host, address.port, keys[0]))
            is_local = is_loopback(address.host) and not settings.forwarded_allow_ips
            routers = routes.on_own(keys, is_local=is_local)
            what = " and ".join(key.removesuffix("_address") for key in keys)
            servers.append(SideServer(what, listeners[-1], routers, settings, tls))
    except BaseException:
        for listener in listeners:
            listener.close()
        raise
    return servers


def _tls_of(settings: Settings, properties: Properties, key: str) -> ssl.SSLContext:
    certificate = properties.get("certificate_file") or settings.tls_certificate
    if certificate is None:
        raise StartError(f"{key}: https needs certificate_file and private_key_file")
    return server_context(certificate, properties.get("private_key_file") or settings.tls_key)


def _part(
    service: Service,
    servers: Sequence[SideServer] = (),
    routers: Sequence[APIRouter] = (),
    aliases: Mapping[str, str] = MappingProxyType({}),
) -> Part:
    def start() -> None:
        for server in servers:
            server.start()

    def begin_drain() -> None:
        for server in servers:
            server.begin_stop()

    async def stop() -> None:
        for server in servers:
            await server.stop(at_once=service.is_hurried)

    return Part(
        name="TorchServe",
        start=start,
        begin_drain=begin_drain,
        stop=stop,
        routers=lambda: [inference_router(service.report), *routers],
        forms_of_errors=dict.fromkeys(_SEGMENTS, _ERRORS),
        aliases=aliases,
    )
