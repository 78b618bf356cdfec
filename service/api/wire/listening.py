"""The listening socket, and the checks and warnings about it at the start."""

import errno
import logging
import socket
import ssl
from ipaddress import ip_address

from inferpool.service.api.wire.budgets import EdgeLimits
from inferpool.service.api.wire.descriptors import max_connections, raise_limit
from inferpool.service.errors import StartError
from inferpool.service.settings.settings import Settings
from inferpool.service.settings.tls import expiry_warning, server_context

logger = logging.getLogger(__name__)

BACKLOG = 2048
"""Connections that the kernel accepts for us before we do."""


def listen(host: str, port: int, flag: str = "--port") -> socket.socket:
    """Bind the address and listen, before anything else is started.

    Args:
        host: Name or address of this host.
        port: The TCP port; 0 lets the system choose one.
        flag: The flag that chooses another port, for errors.

    Raises:
        StartError: It is in use, or is not this host's.
    """
    listener = None
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        if listener is not None:
            listener.close()
        in_use = error.errno == errno.EADDRINUSE
        hint = f"; is another service running? Choose another with {flag}" if in_use else ""
        raise StartError(f"cannot listen on {host}:{port}: {error.strerror}{hint}") from error
    return listener


def url_of(listener: socket.socket, *, is_tls: bool) -> str:
    """Return the URL at which clients find a socket."""
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    return f"{'https' if is_tls else 'http'}://{shown}:{port}"


def warn_if_open(settings: Settings, listener: socket.socket) -> None:
    """Warn if other hosts may use the service without a key."""
    address = listener.getsockname()[0]
    if settings.predict_keys or ip_address(address.partition("%")[0]).is_loopback:
        return
    logger.warning(
        "whoever reaches %s may use this service: no API key is set. Put one into "
        "INFERPOOL_PREDICT_KEYS or a file named by --predict-keys-file, or listen on 127.0.0.1",
        address,
    )


def tls_context(settings: Settings) -> ssl.SSLContext | None:
    """Return the context for HTTPS; None if the service speaks HTTP.

    Raises:
        TlsError: The certificate or its key cannot be used.
    """
    if settings.tls_certificate is None:
        return None
    context = server_context(settings.tls_certificate, settings.tls_key)
    if warning := expiry_warning(settings.tls_certificate):
        logger.warning("%s", warning)
    return context


def edge_limits(settings: Settings, num_processes: int) -> EdgeLimits:
    """Return the limits of connections, and raise this process's limit of descriptors for them."""
    num_files = raise_limit()
    fitting = max_connections(num_files, num_processes)
    wanted = settings.max_connections
    if wanted != "auto" and wanted > fitting:
        logger.warning(
            "max_connections: %d do not fit: this process may open %d files, some of which the "
            "workers need; %d connections are allowed. Raise the limit (ulimit -n)",
            wanted,
            num_files,
            fitting,
        )
    return EdgeLimits(
        max_connections=fitting if wanted == "auto" else min(wanted, fitting),
        head_timeout_s=settings.head_timeout_s,
        write_timeout_s=settings.write_timeout_s,
        max_unfinished_bytes=settings.max_unfinished_bytes,
        max_unread_bytes=settings.max_unread_bytes,
    )
