"""The page at `/`: files of `service/parts/live/files` and the chart library, each read once.

They are static and need no key: the page asks for its data like any client. Runs in the event loop;
files are read and compressed in a thread.
"""

import asyncio
import gzip
import hashlib
import re
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import NamedTuple

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from inferpool.service.api.addresses import prefix_for
from inferpool.service.api.errors import NotFoundError
from inferpool.service.api.page_headers import POLICY, POLICY_HEADER, file_in_package

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
_BASE = ("base-uri 'none'", "base-uri 'self'")
_LINK_TO_DOCS = re.compile(rb'<a [^>]*href="docs"[^>]*>.*?</a>', re.DOTALL)


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
        """Unzipped files, for clients that accept no gzip; all browsers do."""

    def router(self) -> APIRouter:
        """Return the routes."""
        router = APIRouter()
        router.add_route("/", self._answer_root, include_in_schema=False)
        router.add_route(PAGE_PATH + "/{name}", self._answer_file, include_in_schema=False)
        return router

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
