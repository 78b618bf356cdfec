"""CORS: allows pages of other origins to call this host (https://fetch.spec.whatwg.org).

Off unless `cors_origins` is set. `Access-Control-Allow-Credentials` is never sent: keys come in a
header of the call, not in cookies, so `*` gives no page the rights of its reader.
"""

from collections.abc import Mapping, Sequence

_ALLOWED_METHODS = "GET, POST, PUT, DELETE"
_ALLOWED_HEADERS = (
    "Authorization, Content-Type, X-API-Key, X-Request-ID, X-Timeout-Ms, X-Priority, "
    "X-Model-Version, X-Tensor-Dtype, X-Tensor-Shape, Prefer, Idempotency-Key, traceparent, "
    "tracestate"
)
_EXPOSED_HEADERS = (
    "X-Request-ID, traceparent, tracestate, Server-Timing, Retry-After, X-Tensor-Name, "
    "X-Model-Version, X-Tensor-Dtype, X-Tensor-Shape, Location, Link, Preference-Applied"
)
"""Headers that a page may read besides Content-Type and Content-Length."""
_MAX_AGE_S = 600
"""How long a browser may reuse the answer to a preflight; Chromium allows two hours at most."""

_PREFLIGHT_LINES = (
    f"access-control-allow-methods: {_ALLOWED_METHODS}\r\n"
    f"access-control-allow-headers: {_ALLOWED_HEADERS}\r\n"
    f"access-control-max-age: {_MAX_AGE_S}\r\n"
)


class Cors:
    """The allowed origins, and the headers that say so."""

    def __init__(self, origins: Sequence[str]) -> None:
        """Allow origins as browsers write them; `*` allows all."""
        self._is_open = "*" in origins
        self._origins = frozenset(origin.encode() for origin in origins)

    def lines_for(self, origin: bytes | None) -> str:
        """Return the header lines of an answer to a page of an origin, each with its line break."""
        if self._is_open:
            allowed = "access-control-allow-origin: *\r\n"
        elif origin is None or origin not in self._origins:
            return "vary: Origin\r\n"  # else a cache might give this answer to an allowed page
        else:
            allowed = f"access-control-allow-origin: {origin.decode()}\r\nvary: Origin\r\n"
        return f"{allowed}access-control-expose-headers: {_EXPOSED_HEADERS}\r\n"

    def preflight_lines(self, method: str, headers: Mapping[bytes, bytes]) -> str | None:
        """Return the other header lines of the answer to a preflight; None if the call is none."""
        origin = headers.get(b"origin")
        if method != "OPTIONS" or origin is None or b"access-control-request-method" not in headers:
            return None
        if not self._is_open and origin not in self._origins:
            return ""  # the lack of headers is the refusal
        return _PREFLIGHT_LINES
