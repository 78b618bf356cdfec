"""The gRPC server: its port, its limits, and which key each method needs. Main process, event loop.

grpcio does HTTP/2, TLS and compression in threads of its own; all that is here runs in the event
loop of the service.
"""

import asyncio
import logging
import socket
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import grpc
from grpc import aio

from inferpool.service.api.auth import Guard
from inferpool.service.api.codecs.body import joined
from inferpool.service.api.errors import NotFoundError
from inferpool.service.api.wire.budgets import EdgeLimits
from inferpool.service.errors import OverShareError, ServiceError, StartError
from inferpool.service.parts.open_inference.grpc.reading import client_of
from inferpool.service.parts.open_inference.grpc.statuses import headers_of, internal, refuse
from inferpool.service.settings.settings import Settings
from inferpool.service.settings.tls import server_context

logger = logging.getLogger(__name__)

MAX_CALLS = 4096
"""Calls at once, over all connections; more than the queues of a service hold."""
_MAX_CALLS_OF_CONNECTION = 1024
_MAX_METADATA_BYTES = 16 * 1024
_IDLE_S = 300
"""A connection without calls is closed after this time; clients open another one when needed."""
_AGE_S = 2 * 3600
"""A connection is closed after this time, and calls on it end `max_timeout_s` later: nothing else
ends a call whose client does not read its answer."""
_PING_S = 60
"""How often a silent client with calls under way is asked whether it is there."""
_LAST_WORDS_S = 2.0
"""How long clients may take to read their answers after all is answered."""

_HURRY_S = 0.5
"""The same where the service does not wait for clients."""

Handler = Callable[[Any], Awaitable[bytes | None]]
"""Answers a call, given grpcio's context: it reads and writes messages as bytes."""


class Endpoint(NamedTuple):
    """A method of a service, as the server calls it."""

    path: str
    """The path of the same call over HTTP, which decides about its key."""
    handler: Handler
    is_streaming: bool = False
    """It answers with several messages, which it writes itself; else it returns the answer."""


class Servicer(Protocol):
    """A service."""

    def endpoints(self) -> Mapping[str, Endpoint]:
        """Return the endpoint of each method, by `/SERVICE/METHOD`."""

    def begin_drain(self) -> None:
        """Begin to end what goes on without an end: this process shuts down."""


class GrpcServer:
    """Serves services of gRPC at a port."""

    def __init__(
        self,
        settings: Settings,
        guard: Guard,
        servicers: Sequence[Servicer],
        max_connections: int = EdgeLimits().max_connections,
        is_hurried: Callable[[], bool] = lambda: False,
    ) -> None:
        """Reserve the port, and listen from `start` on.

        Args:
            settings: Those of the service.
            guard: Checks keys.
            servicers: The services.
            max_connections: Connections at once.
            is_hurried: Says whether the service stops without waiting for clients.

        Raises:
            StartError: The port is in use, or the address is not this host's.
            TlsError: The certificate or its key cannot be used.
        """
        assert settings.grpc_port is not None
        self._settings = settings
        self._servicers = servicers
        self._router = _Router(guard, servicers)
        self._max_connections = max_connections
        self._is_hurried = is_hurried
        self._pem = None if settings.tls_certificate is None else _pem_of(settings)
        self._held = hold_port(settings.host, settings.grpc_port)
        host, self.port = self._held[0].getsockname()[:2]
        self.address = f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"
        self._server: Any = None
        self._drained: Any = None
        """The server, once it accepts no more calls."""
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begin to listen."""
        server = aio.server(
            handlers=(self._router,), options=self._options(), maximum_concurrent_rpcs=MAX_CALLS
        )
        try:
            if self._pem is None:
                server.add_insecure_port(self.address)
            else:
                server.add_secure_port(self.address, grpc.ssl_server_credentials([self._pem]))
        except RuntimeError as error:
            raise StartError(f"gRPC cannot listen on {self.address} (grpc_port)") from error
        self._server = server
        self._tasks.append(asyncio.create_task(self._start(server), name="gRPC"))

    def begin_drain(self) -> None:
        """Accept no more calls, and answer those that have been accepted. Clients are sent away."""
        for servicer in self._servicers:
            servicer.begin_drain()
        if self._server is not None:
            self._drained, self._server = self._server, None
            task = self._drain(self._drained)
            self._tasks.append(asyncio.create_task(task, name="drain of gRPC"))

    async def stop(self) -> None:
        """Close the port, and end calls that are left: their clients do not read."""
        self.begin_drain()
        if self._drained is not None:  # the wait that goes on ends with this one
            await self._tasks[0]
            await self._drained.stop(_HURRY_S if self._is_hurried() else _LAST_WORDS_S)
        await asyncio.gather(*self._tasks)
        for held in self._held:
            held.close()

    async def _start(self, server: Any) -> None:
        await server.start()
        scheme = "without TLS" if self._pem is None else "with TLS"
        logger.info("gRPC is served at %s, %s", self.address, scheme)

    async def _drain(self, server: Any) -> None:
        await self._tasks[0]
        await server.stop(self._settings.drain_timeout_s + _LAST_WORDS_S)

    def _options(self) -> list[tuple[str, int]]:
        settings = self._settings
        return [
            ("grpc.so_reuseport", 1),  # beside the socket that holds the port
            ("grpc.max_receive_message_length", settings.max_body_bytes),
            ("grpc.max_send_message_length", -1),  # as answers over HTTP
            ("grpc.max_metadata_size", _MAX_METADATA_BYTES),
            ("grpc.absolute_max_metadata_size", _MAX_METADATA_BYTES),
            ("grpc.max_concurrent_streams", _MAX_CALLS_OF_CONNECTION),
            ("grpc.max_allowed_incoming_connections", self._max_connections),
            ("grpc.server_handshake_timeout_ms", int(settings.head_timeout_s * 1000)),
            ("grpc.max_connection_idle_ms", _IDLE_S * 1000),
            ("grpc.max_connection_age_ms", _AGE_S * 1000),
            ("grpc.max_connection_age_grace_ms", int(settings.max_timeout_s * 1000)),
            ("grpc.keepalive_time_ms", _PING_S * 1000),
            ("grpc.keepalive_timeout_ms", int(settings.write_timeout_s * 1000)),
            ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
        ]


class _Router(grpc.GenericRpcHandler):  # type: ignore[misc]  # it has no types
    """Finds the handler of a call, and checks its key before any message is read."""

    def __init__(self, guard: Guard, servicers: Sequence[Servicer]) -> None:
        self._guard = guard
        self._handlers: dict[str, tuple[str, Any]] = {}
        calls = _Calls(guard) if guard.share < 1 else None
        for servicer in servicers:
            for method, endpoint in servicer.endpoints().items():
                self._handlers[method] = endpoint.path, _handler_of(endpoint, calls)

    def service(self, handler_call_details: Any) -> Any:
        """Return the handler of a call; None if there is no such method."""
        found = self._handlers.get(handler_call_details.method)
        if found is None:
            return None
        path, handler = found
        try:
            headers = headers_of(handler_call_details.invocation_metadata)
            self._guard.check_path(path, joined(headers))
        except NotFoundError:
            return _refusal(NotFoundError("nobody may call this here: there is no admin key"))
        except ServiceError as error:
            return _refusal(error)
        except Exception:
            logger.exception("a call of %s failed", handler_call_details.method)
            return _refusal(internal())
        return handler


class _Calls:
    """Gives each key its share of the calls at once, where keys are told apart."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        self._owners: Counter[str] = Counter()
        self._num = 0

    def hold(self, context: Any) -> None:
        """Count a call until it is over.

        Raises:
            OverShareError: Its key has its share.
        """
        headers = joined(headers_of(context.invocation_metadata()))
        owner = self._guard.owner_of("predict", headers, client_of(context.peer()))
        own = self._owners[owner]
        if own >= self._guard.share * (MAX_CALLS - (self._num - own)):
            raise OverShareError(
                f"the calls of this key or address have their share of {MAX_CALLS} at once "
                f"(per_key_share = {self._guard.share:g} of what others leave)",
                retry_after_s=1,
            )
        self._add(owner, 1)
        context.add_done_callback(lambda _: self._add(owner, -1))

    def _add(self, owner: str, num: int) -> None:
        self._num += num
        self._owners[owner] += num
        if not self._owners[owner]:
            del self._owners[owner]


def hold_port(host: str, port: int) -> list[socket.socket]:
    """Reserve a port for gRPC, which can then bind it too; nothing else can.

    Returns the socket that does so first, and maybe others that are to be kept as long.

    Args:
        host: Name or address of this host.
        port: The TCP port; 0 lets the system choose one.

    Raises:
        StartError: It is in use, or is not this host's.
    """
    held = None
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        held = socket.socket(family, kind, protocol)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(address)
        # Not before `bind`, which would share the port of a service that listens there.
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        # Or another one could bind it until something listens there.
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
        if address[0] == "0.0.0.0":
            return [held, *_without_ipv6(held.getsockname()[1])]
    except OSError as error:
        if held is not None:
            held.close()
        raise StartError(
            f"gRPC cannot listen on {host}:{port}: {error.strerror}; choose another port with "
            "--grpc-port"
        ) from error
    return [held]


def _without_ipv6(port: int) -> list[socket.socket]:
    """Reserve the port for IPv6 too, or else grpcio listens there for every IPv4 address."""
    try:
        held = socket.socket(socket.AF_INET6)
    except OSError:  # there is no IPv6
        return []
    try:
        held.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        held.bind(("::", port))
    except OSError:  # it is reserved already
        held.close()
        return []
    return [held]


def _pem_of(settings: Settings) -> tuple[bytes, bytes]:
    """Return the key and the certificates that lead to it.

    Raises:
        TlsError: A file cannot be used.
    """
    certificate = settings.tls_certificate
    assert certificate is not None
    server_context(certificate, settings.tls_key)  # it explains what is wrong
    return Path(settings.tls_key or certificate).read_bytes(), Path(certificate).read_bytes()


def _handler_of(endpoint: Endpoint, calls: _Calls | None) -> Any:
    async def answer(_: object, context: Any) -> bytes | None:
        try:
            if calls is not None:
                calls.hold(context)
            return await endpoint.handler(context)
        except ServiceError as error:
            await refuse(context, error)
        except aio.AbortError:
            raise
        except Exception:
            logger.exception("a call of gRPC failed: %s", endpoint.path)
            await refuse(context, internal())

    # The handler itself reads the message of a call, even if there is only one: a slow client then
    # waits in it, where its time is bounded.
    if endpoint.is_streaming:
        return grpc.stream_stream_rpc_method_handler(answer)
    return grpc.stream_unary_rpc_method_handler(answer)


def _refusal(error: ServiceError) -> Any:
    """Return a handler that refuses a call, and reads nothing of it."""

    async def answer(_: object, context: Any) -> None:
        await refuse(context, error)

    return grpc.stream_unary_rpc_method_handler(answer)
