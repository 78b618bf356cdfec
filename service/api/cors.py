"""Which pages of other origins a browser lets ask this host (CORS, https://fetch.spec.whatwg.org).

Off unless `cors_origins` is set. `Access-Control-Allow-Credentials` is never sent: keys come in a
header of the call, not in cookies, so that `*` gives nobody the rights of whoever looks at a page.
"""

from collections.abc import Mapping, Sequence

_ALLOWED_METHODS = "GET, POST, PUT"
_ALLOWED_HEADERS = (
    "Authorization, Content-Type, X-API-Key, X-Request-ID, X-Timeout-Ms, X-Priority, "
    "X-Tensor-Dtype, X-Tensor-Shape, traceparent, tracestate"
)
_EXPOSED_HEADERS = (
    "X-Request-ID, traceparent, tracestate, Server-Timing, Retry-After, X-Tensor-Name, "
    "X-Tensor-Dtype, X-Tensor-Shape"
)
"""What a page may read besides Content-Type and Content-Length."""
_MAX_AGE_S = 600
"""How long a browser need not ask again before it asks; Chromium takes up to two hours."""

_PREFLIGHT_LINES = (
    f"access-control-allow-methods: {_ALLOWED_METHODS}\r\n"
    f"access-control-allow-headers: {_ALLOWED_HEADERS}\r\n"
    f"access-control-max-age: {_MAX_AGE_S}\r\n"
)


class Cors:
    """The origins that may ask, and the headers that say so."""

    def __init__(self, origins: Sequence[str]) -> None:
        """Allow origins, as browsers write them; `*` allows all."""
        self._is_open = "*" in origins
        self._origins = frozenset(origin.encode() for origin in origins)

    def lines_for(self, origin: bytes | None) -> str:
        """The header lines of an answer to a call from an origin, each with its line break."""
        if self._is_open:
            allowed = "access-control-allow-origin: *\r\n"
        elif origin is None or origin not in self._origins:
            return "vary: Origin\r\n"  # or a cache might give this answer to a page that may ask
        else:
            allowed = f"access-control-allow-origin: {origin.decode()}\r\nvary: Origin\r\n"
        return f"{allowed}access-control-expose-headers: {_EXPOSED_HEADERS}\r\n"

    def preflight_lines(self, method: str, headers: Mapping[bytes, bytes]) -> str | None:
        """What an answer needs besides `lines_for`, to a browser that asks whether a page may call.

        Args:
            method: Of the call.
            headers: Names in lower case.

        Returns:
            None if the call asks for something else.
        """
        origin = headers.get(b"origin")
        if method != "OPTIONS" or origin is None or b"access-control-request-method" not in headers:
            return None
        if not self._is_open and origin not in self._origins:
            return ""  # the answer says so by what it lacks
        return _PREFLIGHT_LINES
