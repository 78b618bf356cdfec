"""Opens the HTTP connections of the client and of the commands."""

import os
import ssl

import httpx

from .proxies import ServiceWay, way_to

STRAIGHT = ServiceWay()
"""The way of operators, which are on the network of the service: no proxy gets their keys."""
_NO_LIMITS = httpx.Limits()
_TIMEOUT = httpx.Timeout(5.0)


def find_way(url: str, proxy: str | None) -> ServiceWay:
    """Return the way to a service, through a proxy of the environment if `proxy` is None.

    Raises:
        UnusableProxyError: The proxy cannot be used.
    """
    return way_to(url, proxy, os.environ)


def open_client(
    way: ServiceWay,
    *,
    verify: bool | ssl.SSLContext,
    transport: httpx.BaseTransport | None = None,
    limits: httpx.Limits = _NO_LIMITS,
    timeout: httpx.Timeout = _TIMEOUT,
    headers: dict[str, str] | None = None,
) -> httpx.Client:
    """Return an HTTP client for a way; `transport` replaces the network (see httpx)."""
    if transport is None:  # its trust_env is for SSL_CERT_FILE, the client's for proxies
        transport = httpx.HTTPTransport(verify=verify, limits=limits, proxy=way.proxy)
    return httpx.Client(transport=transport, timeout=timeout, headers=headers, trust_env=False)


def open_async_client(
    way: ServiceWay,
    *,
    verify: bool | ssl.SSLContext,
    transport: httpx.AsyncBaseTransport | None = None,
    limits: httpx.Limits = _NO_LIMITS,
    timeout: httpx.Timeout = _TIMEOUT,
    headers: dict[str, str] | None = None,
) -> httpx.AsyncClient:
    """Return an HTTP client for an event loop, like `open_client`."""
    if transport is None:
        transport = httpx.AsyncHTTPTransport(verify=verify, limits=limits, proxy=way.proxy)
    return httpx.AsyncClient(transport=transport, timeout=timeout, headers=headers, trust_env=False)


def is_untrusted(error: BaseException | None) -> bool:
    """Return whether a bad certificate is the cause, as it would be for a retry."""
    while error is not None:
        if isinstance(error, ssl.SSLCertVerificationError):
            return True
        error = error.__cause__ or error.__context__
    return False
