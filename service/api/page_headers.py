"""Headers that forbid pages what they do not need: scripts of others, frames, forms.

Every answer has them but those to `/predict`, also where there is no page.
"""

import base64
import hashlib
import re
from collections.abc import MutableMapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from starlette.datastructures import MutableHeaders
from starlette.types import Send

POLICY_HEADER = "content-security-policy"
_SOURCES = (
    "default-src 'none'; connect-src 'self'; img-src 'self' data:; font-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
POLICY = f"{_SOURCES}; script-src 'self'; style-src 'self'"
"""Everything comes from files of this host, and nothing may frame it."""
_INLINE_SCRIPT = re.compile(rb"<script>(.*?)</script>", re.DOTALL)

_HEADERS = {
    POLICY_HEADER: POLICY,
    "referrer-policy": "no-referrer",
    "x-frame-options": "DENY",  # for browsers that do not know frame-ancestors
    "cross-origin-opener-policy": "same-origin",
}
"""Security headers of pages; the server adds `X-Content-Type-Options` to every answer."""


def file_in_package(package: str, name: str) -> Path:
    """Return a file of another package, without importing that package."""
    spec = find_spec(package)
    assert spec is not None, f"{package} is a dependency"
    assert spec.origin is not None
    return Path(spec.origin).parent / name


def policy_for(page: bytes | memoryview) -> str:
    """Return the policy of a page with scripts in it, named by their digests (CSP 3, 2.3.1).

    Swagger UI sets styles on its elements; only `unsafe-inline` allows that.
    """
    digests = [hashlib.sha256(script).digest() for script in _INLINE_SCRIPT.findall(bytes(page))]
    scripts = "".join(f" 'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)
    return f"{_SOURCES}; script-src 'self'{scripts}; style-src 'self' 'unsafe-inline'"


def with_page_headers(send: Send) -> Send:
    """Return an ASGI `send` that adds the headers to an answer that lacks them."""

    async def sending(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for name, value in _HEADERS.items():
                headers.setdefault(name, value)
        await send(message)

    return sending


def with_nosniff(send: Send) -> Send:
    """Return an ASGI `send` that forbids browsers to guess the type of an answer.

    Our own server adds this header to every answer; those of others need it from us.
    """

    async def sending(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            MutableHeaders(scope=message).setdefault("x-content-type-options", "nosniff")
        await send(message)

    return sending
