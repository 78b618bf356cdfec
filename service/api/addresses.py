"""Builds the addresses of this service that stand in its answers.

They are relative to the address that a client has asked for, and so are right behind any proxy.
Only a proxy that is trusted can change them, and nothing but them.
"""

from collections.abc import Iterator

from starlette.types import Scope

from inferpool.service.settings.trust import SCHEMES, TrustedPeers, authority_of, prefix_of

_KEY = "inferpool.addresses"
"""A key in the scope of a call, for the `Addresses` that it is answered with."""
_ASKED = "inferpool.asked"
"""A key in the scope of a call, for the path that the client has asked for."""


class Addresses:
    """Builds the service's own address, from headers if they come from a trusted proxy."""

    def __init__(self, peers: TrustedPeers | None = None, root_path: str = "") -> None:
        """Trust some peers, or nobody; the `root_path` stands before all our paths."""
        self._peers = peers or TrustedPeers()
        self._root_path = root_path

    def put_into(self, scope: Scope, asked: str) -> None:
        """Have a call answered with these; `asked` is its path, without that of a mount."""
        scope[_KEY], scope[_ASKED] = self, asked

    def prefix_for(self, scope: Scope) -> str | None:
        """Return the path that stands before ours, if it is known; empty if it is none."""
        told = self._told(scope, b"x-forwarded-prefix")
        prefix = None if told is None else prefix_of(told)
        return self._root_path or None if prefix is None else prefix

    def origin_for(self, scope: Scope) -> str:
        """Return scheme and host of addresses, if a trusted proxy has said one of them."""
        scheme = self._told(scope, b"x-forwarded-proto") or ""
        scheme = scheme if (scheme := scheme.lower()) in SCHEMES else ""
        host = authority_of(self._told(scope, b"x-forwarded-host") or "")
        if host is None and scheme:
            host = authority_of(_last(_values(scope, b"host")) or "")
        return f"{scheme or scope['scheme']}://{host}" if host else ""

    def _told(self, scope: Scope, name: bytes) -> str | None:
        """Return the last value of a header, which the peer itself has added, if it is trusted."""
        client = scope.get("client")
        peer: str | None = client[0] if client else None
        return _last(_values(scope, name)) if peer in self._peers else None


_OF_NOBODY = Addresses()


def root_for(scope: Scope) -> str:
    """Return the address of `/` for the answer to a call, without a slash at its end.

    It is a relative one such as `.` or `..`, unless more is known. The address of one of our paths
    is this and the path.
    """
    addresses: Addresses = scope.get(_KEY, _OF_NOBODY)
    origin, prefix = addresses.origin_for(scope), addresses.prefix_for(scope)
    return relative_root_for(scope) if not origin and prefix is None else f"{origin}{prefix or ''}"


def relative_root_for(scope: Scope) -> str:
    """Return the same for a page, which knows the address that it was loaded from."""
    asked: str = scope.get(_ASKED, scope["path"])
    return "/".join([".."] * (asked.count("/") - 1)) or "."


def prefix_for(scope: Scope) -> str | None:
    """Return the path that stands before ours in the client's address, if it is known."""
    addresses: Addresses = scope.get(_KEY, _OF_NOBODY)
    return addresses.prefix_for(scope)


def without_last_slash(path: str) -> str:
    """Return a path without one slash at its end, which makes no difference to us."""
    if len(path) > 1 and path.endswith("/") and not path.endswith("//"):
        return path[:-1]
    return path


def _values(scope: Scope, name: bytes) -> Iterator[bytes]:
    return (value for each, value in scope["headers"] if each == name)


def _last(values: Iterator[bytes]) -> str | None:
    last = None
    for value in values:
        last = value.decode("latin-1").rpartition(",")[2].strip(" \t")
    return last
