"""Finds the proxy for a URL in the environment, like curl. A service on this host has none."""

import ipaddress
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from urllib.parse import urlsplit

from .urls import problem_of_url, without_password
from .usage import FlagError

_SCHEMES = ("http", "https", "socks5", "socks5h")
_PORTS = {"http": 80, "https": 443}
_OWN_NAMES = ("localhost", "localhost.localdomain", "ip6-localhost", "ip6-loopback")
"""Names that the hosts files of Linux distributions give this host."""


class UnusableProxyError(FlagError):
    """A proxy cannot be used; the message says why, and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceWay:
    """The way to a service."""

    proxy: str | None = None
    """URL of the proxy; None: no proxy."""
    through: str = ""
    """Text that names the proxy and its setting; empty if there is none."""


def way_to(url: str, proxy: str | None, environ: Mapping[str, str]) -> ServiceWay:
    """Return the way to a URL.

    Args:
        url: URL of a service.
        proxy: URL of a proxy; None: that of the environment; empty: none.
        environ: The environment.

    Raises:
        UnusableProxyError: The proxy cannot be used.
    """
    origin, given = "proxy", proxy
    if proxy is None:
        origin, given = _proxy_in(environ, url)
    given = (given or "").strip()
    if not given:
        return ServiceWay()
    address = given if "://" in given else f"http://{given}"
    shown = without_password(address)
    cure = "unset it, or name the service in NO_PROXY" if proxy is None else "give another"
    if problem := _problem_of(address):
        raise UnusableProxyError(f"{origin}: {shown} cannot be used: {problem}; {cure}")
    advice = "; NO_PROXY names hosts to reach without it" if proxy is None else ""
    return ServiceWay(proxy=address, through=f" through the proxy {shown} ({origin}{advice})")


def _proxy_in(environ: Mapping[str, str], url: str) -> tuple[str, str]:
    """Return the variable that sets the proxy for a URL, and its value; or two empty texts."""
    parts = urlsplit(url)
    host = (parts.hostname or "").rstrip(".")
    port = parts.port or _PORTS.get(parts.scheme)
    if is_loopback(host) or _is_exempt(host, port, _value(environ, "no_proxy")[1]):
        return "", ""
    for name in (f"{parts.scheme}_proxy", "all_proxy"):
        variable, text = _value(environ, name)
        if text:
            return variable, text
    return "", ""


def _value(environ: Mapping[str, str], name: str) -> tuple[str, str]:
    for variable in (name, name.upper()):
        if variable == "HTTP_PROXY" and "REQUEST_METHOD" in environ:
            continue  # in CGI it is a header of the request (https://httpoxy.org)
        if text := environ.get(variable, "").strip():
            return variable, text
    return "", ""


def is_loopback(host: str) -> bool:
    """Return whether a host's name or address means this host."""
    if host in _OWN_NAMES or host.endswith(".localhost"):
        return True
    address = _address_of(host)
    return address is not None and (address.is_loopback or address.is_unspecified)


def _address_of(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return the address in a host's text, in any form that connects to it; None for names."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        try:
            return ipaddress.IPv4Address(socket.inet_aton(host))  # 127.1, for one
        except (OSError, ValueError):
            return None
    return getattr(address, "ipv4_mapped", None) or address


def _is_exempt(host: str, port: int | None, no_proxy: str) -> bool:
    """Return whether `NO_PROXY` has a host: its name or a domain, an address or a network, or *."""
    return any(_is_named(host, port, each) for each in re.split(r"[,\s]+", no_proxy.lower()))


def _is_named(host: str, port: int | None, entry: str) -> bool:
    if entry == "*":
        return True
    entry = (entry.partition("://")[2] or entry).rstrip("/")
    address = _address_of(host)
    try:
        plain = re.sub(r"^\[([^]]*)\](?=/|$)", r"\1", entry)
        network = ipaddress.ip_network(plain, strict=False)
        return address is not None and address in network
    except ValueError:
        pass  # it is a name, or has a port
    if not entry.endswith("]"):
        name, colon, end = entry.rpartition(":")
        if colon and end.isdecimal():
            if int(end) != port:
                return False
            entry = name
    domain = entry.strip("[]").removeprefix("*").removeprefix(".").rstrip(".")
    if address is not None:
        return _address_of(domain) == address
    return bool(domain) and (host == domain or host.endswith(f".{domain}"))


def _problem_of(address: str) -> str:
    scheme, _, rest = address.partition("://")
    scheme = scheme.lower()
    if scheme not in _SCHEMES:
        return f"a proxy's URL begins with one of {', '.join(f'{each}://' for each in _SCHEMES)}"
    user, at, place = rest.rpartition("@")
    if problem := problem_of_url(f"http://{user.replace(' ', '%20')}{at}{place}"):
        return problem
    if scheme.startswith("socks") and find_spec("socksio") is None:
        return "it needs the package socksio (`pip install 'httpx[socks]'`)"
    return ""
