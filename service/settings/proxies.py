"""Finds the proxy for a URL in the environment, as curl does. A service on this host has none."""

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from urllib.parse import urlsplit

from inferpool.service.settings.names import FlagError
from inferpool.service.settings.urls import without_password

_SCHEMES = ("http", "https", "socks5", "socks5h")


class UnusableProxyError(FlagError):
    """A proxy cannot be used; the message says why, and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceWay:
    """The way to a service."""

    proxy: str | None = None
    """URL of the proxy; None: straight."""
    through: str = ""
    """Words for a person that name the proxy and who set it; empty if there is none."""


def way_to(url: str, proxy: str | None, environ: Mapping[str, str]) -> ServiceWay:
    """Return the way to a URL.

    Args:
        url: URL of a service.
        proxy: URL of a proxy; None: what the environment says; empty: none.
        environ: The environment.

    Raises:
        UnusableProxyError: The proxy cannot be used.
    """
    origin, given = "proxy", proxy
    if proxy is None:
        origin, given = _proxy_in(environ, url)
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
    if is_loopback(host) or _is_exempt(host, parts.port, _value(environ, "no_proxy")[1]):
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
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    return address.is_loopback or address.is_unspecified


def _is_exempt(host: str, port: int | None, no_proxy: str) -> bool:
    """Return whether `NO_PROXY` has a host: its name or a domain, an address or a network, or *."""
    return any(_is_named(host, port, each.strip().lower()) for each in no_proxy.split(","))


def _is_named(host: str, port: int | None, entry: str) -> bool:
    if entry == "*":
        return True
    entry = entry.partition("://")[2] or entry
    try:
        return ipaddress.ip_address(host) in ipaddress.ip_network(entry.strip("[]"), strict=False)
    except ValueError:
        pass  # one of them is a name, or the entry has a port
    if not entry.endswith("]"):
        name, colon, end = entry.rpartition(":")
        if colon and end.isdecimal():
            if int(end) != port:
                return False
            entry = name
    domain = entry.strip("[]").removeprefix("*").removeprefix(".")
    return bool(domain) and (host == domain or host.endswith(f".{domain}"))


def _problem_of(address: str) -> str:
    try:
        parts = urlsplit(address)
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        return str(error)
    if parts.scheme not in _SCHEMES:
        return f"a proxy's URL begins with one of {', '.join(f'{each}://' for each in _SCHEMES)}"
    if not host:
        return "it names no host"
    if parts.scheme.startswith("socks") and find_spec("socksio") is None:
        return "it needs the package socksio (`pip install 'httpx[socks]'`)"
    return ""
