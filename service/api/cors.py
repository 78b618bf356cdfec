"""Which pages of other origins a browser lets ask this host (CORS, https://fetch.spec.whatwg.org).

Off unless `cors_origins` is set. `Access-Control-Allow-Credentials` is never sent: keys come in a
header of the call, not in cookies, so that `*` gives nobody the rights of whoever looks at a page.
"""

from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from typing import Any

_ALLOWED_METHODS = b"GET, POST, PUT"
_ALLOWED_HEADERS = (
    b"Authorization, Content-Type, X-API-Key, X-Request-ID, X-Timeout-Ms, X-Priority, "
    b"X-Tensor-Dtype, X-Tensor-Shape, traceparent, tracestate"
)
_EXPOSED_HEADERS = (
    "X-Request-ID, traceparent, tracestate, Server-Timing, Retry-After, X-Tensor-Name, "
    "X-Tensor-Dtype, X-Tensor-Shape"
)
"""What a page may read besides Content-Type and Content-Length."""
_MAX_AGE_S = 600
"""How long a browser need not ask again before it asks; Chromium takes up to two hours."""

Pairs = list[tuple[bytes, bytes]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


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

    def pairs_for(self, origin: bytes | None) -> Pairs:
        """The same, as ASGI has them."""
        lines = self.lines_for(origin).encode().splitlines()
        return [(name, value) for name, _, value in (line.partition(b": ") for line in lines)]

    async def answer_preflight(
        self, method: str, headers: Mapping[bytes, bytes], send: Send
    ) -> bool:
        """Answer a browser that asks whether it may; False if the call is something else.

        Args:
            method: Of the call.
            headers: Names in lower case.
            send: As ASGI has it.
        """
        origin = headers.get(b"origin")
        is_preflight = origin is not None and b"access-control-request-method" in headers
        if method != "OPTIONS" or not is_preflight:
            return False
        pairs = self.pairs_for(origin)
        if len(pairs) > 1:  # allowed; where it is not, the answer says so by what it lacks
            pairs += [
                (b"access-control-allow-methods", _ALLOWED_METHODS),
                (b"access-control-allow-headers", _ALLOWED_HEADERS),
                (b"access-control-max-age", b"%d" % _MAX_AGE_S),
            ]
        await send({"type": "http.response.start", "status": 204, "headers": pairs})
        await send({"type": "http.response.body", "body": b""})
        return True
