"""The proxies that the service trusts, and checks of what they say about its address."""

import re
from collections.abc import Sequence
from ipaddress import IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Annotated
from urllib.parse import unquote

from pydantic import AfterValidator

from inferpool.service.settings.bounds import Text, Texts
from inferpool.service.settings.paths import OWN_PATHS

ANYONE = "*"
SCHEMES = frozenset({"http", "https"})
_MAX_PREFIX_LENGTH = 1024
_MAX_HOST_LENGTH = 255
_PREFIX = re.compile(r"(/([A-Za-z0-9._~!$&'()*+,;=:@-]|%[0-9A-Fa-f]{2})+)+")
"""An absolute path without empty segments (RFC 3986, 3.3)."""
_AUTHORITY = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._~-]+)(:[0-9]{1,5})?")
"""A host and a port without a user (RFC 3986, 3.2), of the characters that names of hosts have."""


_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://([a-z0-9_.-]+|\[[0-9a-f:.]+\])(:\d{1,5})?")
"""An origin as browsers write it (RFC 6454, 6.1)."""


class TrustedPeers:
    """The addresses and networks that may set headers about the service's address."""

    def __init__(self, texts: Sequence[str] = ()) -> None:
        """Read addresses and networks; `*` is everyone.

        Raises:
            ValueError: A text is none of these.
        """
        self._is_anyone = ANYONE in texts
        self._networks = [_network_of(text) for text in texts if text != ANYONE]

    def __contains__(self, host: str | None) -> bool:
        """Return whether a peer is trusted; one without an IP address is only if everyone is."""
        if self._is_anyone or host is None or not self._networks:
            return self._is_anyone
        try:
            address = ip_address(host.partition("%")[0])
        except ValueError:
            return False
        if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
            address = address.ipv4_mapped  # a socket that listens on :: shows IPv4 so
        return any(address in network for network in self._networks)


def prefix_of(text: str) -> str | None:
    """Return a path for the beginning of addresses, empty for the root; None if it is no such path.

    It has no "/" at its end. In an address it could not name another host, nor leave its folder.
    """
    if len(text) > _MAX_PREFIX_LENGTH:
        return None
    path = text.removesuffix("/")
    if not path:
        return path
    if not _PREFIX.fullmatch(path):
        return None
    decoded = unquote(path)
    if not decoded.isprintable() or "\\" in decoded or {".", ".."} & set(decoded.split("/")):
        return None
    return path


def authority_of(text: str) -> str | None:
    """Return a text if it is a host, perhaps with a port; else None."""
    found = _AUTHORITY.fullmatch(text)
    if found is None or len(text) > _MAX_HOST_LENGTH:
        return None
    host, port = found.groups()
    if port is not None and int(port[1:]) > 65535:
        return None
    if host.startswith("["):
        try:
            IPv6Address(host[1:-1])
        except ValueError:
            return None
    return text


def _network_of(text: str) -> IPv4Network | IPv6Network:
    try:
        return ip_network(text)
    except ValueError:
        pass
    raise ValueError(
        f"has {text[:80]!r}, which is neither an address nor a network: write such as 10.0.0.5, "
        "10.0.0.0/8 (without bits after the mask) or fd00::/8; or * for everyone"
    )


def _check_origins(origins: Sequence[str]) -> Sequence[str]:
    for origin in origins:
        if origin != "*" and not _ORIGIN.fullmatch(origin):
            raise ValueError(
                f"has {origin!r}, which is not an origin: write only scheme, host and port, in "
                "lower case, as browsers send them, such as https://app.example or "
                "http://localhost:3000"
            )
    return tuple(origins)


def _check_root_path(root_path: str) -> str:
    prefix = prefix_of(root_path)
    if prefix is None:
        raise ValueError(
            f"is {root_path[:80]!r}, which is not the beginning of a path: write such as "
            "/models or /teams/vision, as it stands in addresses, without '//' and '..'"
        )
    first = prefix[1:].partition("/")[0]
    if first in OWN_PATHS:
        raise ValueError(
            f"begins with /{first}, which is a path of the service itself: have the proxy "
            "remove its path, and leave this out"
        )
    return prefix


def _check_peers(peers: Sequence[str]) -> Sequence[str]:
    TrustedPeers(peers)
    return tuple(peers)


Origins = Annotated[Texts, AfterValidator(_check_origins)]
RootPath = Annotated[Text, AfterValidator(_check_root_path)]
Peers = Annotated[Texts, AfterValidator(_check_peers)]
