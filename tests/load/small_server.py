"""A small HTTP server whose behaviour is known, in a thread of the tests."""

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import uvicorn
from starlette.types import Receive, Scope, Send

_START_TIMEOUT_S = 60.0


class SmallServer:
    """Answers by path; `headers` are those of all requests."""

    def __init__(self) -> None:
        self.url = ""
        self.num_requests = 0
        self.headers: list[dict[str, str]] = []
        self.began = time.monotonic()
        self.lane = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http"
        self.num_requests += 1
        self.headers.append({k.decode(): v.decode() for k, v in scope["headers"]})
        status, headers, answer = await self._answer(scope["path"])
        head = [(name.encode(), value.encode()) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": status, "headers": head})
        await send({"type": "http.response.body", "body": answer})

    async def _answer(self, path: str) -> tuple[int, dict[str, str], bytes]:
        match path:
            case "/missing":
                return 404, {"content-type": "text/plain"}, b"no such model"
            case "/busy" if self.num_requests % 2:
                headers = {"content-type": "application/problem+json", "retry-after": "3"}
                return 429, headers, b'{"code":"overloaded"}'
            case "/stall" if self.num_requests == 100:
                time.sleep(0.8)  # noqa: ASYNC251  # the whole server stands still
            case "/lane":  # 50 requests per second, one after the other
                async with self.lane:
                    await asyncio.sleep(0.02)
            case "/ageing":
                await asyncio.sleep(0.01 + 0.1 * (time.monotonic() - self.began))
            case "/silent":
                await asyncio.sleep(3600)
        headers = {"server-timing": "queue;dur=1.5, inference;dur=2.5", "content-length": "18"}
        return 200, headers, b'{"predictions":[]}'


@contextlib.contextmanager
def small_server(*, cert: Path | None = None, key: Path | None = None) -> Iterator[SmallServer]:
    """Run one on a free port, with TLS if there is a certificate."""
    small = SmallServer()
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(
        small, log_level="error", lifespan="off", ssl_certfile=cert, ssl_keyfile=key,
        timeout_graceful_shutdown=1,
    )  # fmt: skip
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()
    until = time.monotonic() + _START_TIMEOUT_S
    while not server.started:
        assert time.monotonic() < until
        time.sleep(0.01)
    small.url = f"{'https' if cert else 'http'}://127.0.0.1:{listener.getsockname()[1]}"
    try:
        yield small
    finally:
        server.should_exit = True
        server.force_exit = True
        thread.join(10)
        listener.close()
