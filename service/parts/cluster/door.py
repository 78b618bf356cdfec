"""Opens the port at which the agents of other hosts join, and prepares its TLS."""

import logging
import socket
import ssl
from dataclasses import dataclass

from inferpool.service.api.wire.listening import listen
from inferpool.service.errors import StartError
from inferpool.service.settings.settings import Settings
from inferpool.service.settings.tls import CLUSTER, mutual_context
from inferpool.workers.remote.joining import is_private

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterDoor:
    """The listening cluster port of a front end, and the contexts of both its sides."""

    listener: socket.socket
    address: str
    """Address at which agents join, for people."""
    tls: ssl.SSLContext | None
    """The context for agents that dial; None: they join in clear text."""
    dialing_tls: ssl.SSLContext | None
    """The context to dial the other front end with."""


def open_door(settings: Settings) -> ClusterDoor | None:
    """Open the cluster port; None if the settings have none.

    Raises:
        StartError: It is in use or not this host's, or would be open to other networks without TLS.
        TlsError: A certificate or its key cannot be used.
    """
    port = settings.cluster_port
    if port is None:
        return None
    tls, dialing = _contexts(settings)
    listener = listen(settings.cluster_host, port, "--cluster-port")
    host, port = listener.getsockname()[:2]
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    if tls is None and not is_private(host):
        if not settings.cluster_insecure:
            listener.close()
            raise StartError(
                f"agents would join at {address} without TLS, and that address is not private "
                "(cluster_host): set cluster_certificate and cluster_authority, or name the "
                "address of a private network, or set cluster_insecure if nobody else can reach it"
            )
        text = "agents join at %s without TLS (cluster_insecure): whoever is on the way reads along"
        logger.warning(text, address)
    return ClusterDoor(listener=listener, address=address, tls=tls, dialing_tls=dialing)


def _contexts(settings: Settings) -> tuple[ssl.SSLContext | None, ssl.SSLContext | None]:
    certificate, key = settings.cluster_certificate, settings.cluster_key
    if certificate is None:
        return None, None
    authority = settings.cluster_authority
    assert authority is not None, "the settings have checked it"
    return (
        mutual_context(certificate, key, authority, CLUSTER, is_server=True),
        mutual_context(certificate, key, authority, CLUSTER, is_server=False),
    )
