"""The page at `/`: files of `service/parts/live/files` and the chart library, each read once.

They are static and need no key: the page asks for its data like any client. Runs in the event loop;
files are read and compressed in a thread.
"""

import asyncio
import base64
import gzip
import hashlib
import re
from collections.abc import Mapping, MutableMapping
from html import escape
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Send

from inferpool.service.api.addresses import prefix_for
from inferpool.service.api.errors import NotFoundError

PAGE_PATH = "/page"
_FOLDER = Path(__file__).resolve().parent / "files"
_SAMPLE = _FOLDER.parents[3] / "models/vision/photos/chelsea.jpg"
"""A picture that the page sends by one click, as `sample.jpg`."""
_CHARTS = ("plotly", "package_data/plotly.min.js")
"""A package and its file: plotly.js comes with it, so the page asks no other host for it."""
_TYPES: Mapping[str, str] = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".jpg": "image/jpeg",
}
_LINK_TO_DOCS = re.compile(rb'<a [^>]*href="docs"[^>]*>.*?</a>', re.DOTALL)


POLICY_HEADER = "content-security-policy"
_SOURCES = (
    "default-src 'none'; connect-src 'self'; img-src 'self' data:; font-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
POLICY = f"{_SOURCES}; script-src 'self'; style-src 'self'"
"""Everything comes from files of this host, and nothing may frame it."""
_BASE = ("base-uri 'none'", "base-uri 'self'")
_INLINE_SCRIPT = re.compile(rb"<script>(.*?)</script>", re.DOTALL)

_HEADERS = {
    POLICY_HEADER: POLICY,
    "referrer-policy": "no-referrer",
    "x-frame-options": "DENY",  # for browsers that do not know frame-ancestors
    "cross-origin-opener-policy": "same-origin",
}
"""Security headers of pages; the server adds `X-Content-Type-Options` to every answer."""


class PageFile(NamedTuple):
    """A file in memory."""

    zipped: bytes
    etag: str
    content_type: str


class Page:
    """Answers for the page's files; a browser asks for each again, and mostly gets 304."""

    def __init__(self, *, docs: bool) -> None:
        """Find the files, and read none yet; `docs` says whether there is a /docs to link to."""
        self._docs = docs
        self._paths = {path.name: path for path in _FOLDER.iterdir() if path.suffix in _TYPES}
        charts = file_in_package(*_CHARTS)
        self._paths[charts.name] = charts
        self._paths["sample.jpg"] = _SAMPLE
        self._files: dict[str, asyncio.Task[PageFile]] = {}
        self._plain: dict[str, asyncio.Task[bytes]] = {}
        """Unzipped files, for clients that take no gzip; all browsers do."""

    def install(self, app: Starlette) -> None:
        """Give an application the routes."""
        app.add_route("/", self._answer_root, include_in_schema=False)
        app.add_route(PAGE_PATH + "/{name}", self._answer_file, include_in_schema=False)

    async def _answer_root(self, request: Request) -> Response:
        prefix = prefix_for(request.scope)
        if prefix is None:
            return await self._answer(request, "index.html")
        # At `/models` the page's relative addresses would miss a path: only `/models/` has a slash.
        base = f'<head>\n  <base href="{escape(prefix)}/">'.encode()
        body = (await self._unzipped("index.html")).replace(b"<head>", base, 1)
        headers = {"cache-control": "no-cache", "content-type": _TYPES[".html"]}
        return Response(body, headers={**headers, POLICY_HEADER: POLICY.replace(*_BASE)})

    async def _answer_file(self, request: Request) -> Response:
        return await self._answer(request, request.path_params["name"])

    async def _file(self, name: str) -> PageFile:
        if name not in self._files:
            reading = asyncio.to_thread(self._read, name)
            self._files[name] = asyncio.create_task(reading, name=f"read {name}")
        return await asyncio.shield(self._files[name])  # others may wait for it too

    async def _unzipped(self, name: str) -> bytes:
        if name not in self._plain:
            unzipping = asyncio.to_thread(gzip.decompress, (await self._file(name)).zipped)
            self._plain[name] = asyncio.create_task(unzipping, name=f"unzip {name}")
        return await asyncio.shield(self._plain[name])

    async def _answer(self, request: Request, name: str) -> Response:
        if name not in self._paths:
            raise NotFoundError(f"there is nothing at {PAGE_PATH}/{name[:200]}")
        file = await self._file(name)
        headers = {"etag": file.etag, "cache-control": "no-cache", "vary": "accept-encoding"}
        if file.etag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        body = file.zipped
        if "gzip" in request.headers.get("accept-encoding", ""):
            headers["content-encoding"] = "gzip"
        else:
            body = await self._unzipped(name)
        return Response(body, headers={**headers, "content-type": file.content_type})

    def _read(self, name: str) -> PageFile:
        path = self._paths[name]
        body = path.read_bytes()
        if not self._docs:
            body = _LINK_TO_DOCS.sub(b"", body) if path.suffix == ".html" else body
        return PageFile(
            zipped=gzip.compress(body, 6, mtime=0),
            etag=f'W/"{hashlib.sha256(body).hexdigest()[:24]}"',
            content_type=_TYPES[path.suffix],
        )


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
