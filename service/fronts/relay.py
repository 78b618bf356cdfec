"""What is no prediction: a front passes it on to the main process over a Unix socket, and back.

`Relay` is the ASGI application in a front, `Relayed` what stands before the main process's own.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from multiprocessing import util
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from service.api.call import Call, begin_call
from service.api.predict import Predict, is_predict, route_path
from service.api.replies import pairs_of, refusal_of
from service.errors import BadRequestError, ServiceError, UnavailableError

logger = logging.getLogger(__name__)

_OF_A_CONNECTION = frozenset(
    b"connection keep-alive proxy-connection te trailer transfer-encoding upgrade expect".split()
)
"""Headers that end where the connection ends (RFC 9110, 7.6.1)."""
_RELAYED_S = 2
"""How long an answer that is still being given may hold up the end."""
_IDLE_S = 5.0
"""How long a front keeps a connection to the main process that is not used."""
_CLIENT, _SCHEME = b"x-inferpool-client", b"x-inferpool-scheme"
"""What only the front knows of a call; taken off before the application sees it."""


class _HungUpError(Exception):
    """The client went in the middle of its body."""


class Relay:
    """Answers predictions here, and has everything else answered by the main process."""

    def __init__(self, predict: Predict, path: str) -> None:
        """Relay to a socket.

        Args:
            predict: For predictions that come by ASGI.
            path: Of the main process's Unix socket.
        """
        self._predict = predict
        limits = httpx.Limits(
            max_connections=None, max_keepalive_connections=8, keepalive_expiry=_IDLE_S
        )
        self._transport = httpx.AsyncHTTPTransport(uds=path, limits=limits, retries=1)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one ASGI call."""
        path = route_path(scope)
        if is_predict(path):
            await self._predict(scope, receive, send)
            return
        call = begin_call(scope["method"], path, scope["query_string"], scope["headers"])
        try:
            answer = await self._transport.handle_async_request(_request(scope, receive))
        except (httpx.LocalProtocolError, httpx.InvalidURL) as error:
            await _refuse(call, send, BadRequestError(f"this cannot be passed on: {error}"))
            return
        except _HungUpError:
            return
        except httpx.TransportError as error:
            logger.warning("the main process does not answer: %r", error)
            gone = UnavailableError("the main process does not answer", retry_after_s=1)
            await _refuse(call, send, gone)
            return
        task = asyncio.current_task()
        assert task is not None
        watch = asyncio.create_task(_cancel_when_gone(receive, task), name="relay hangup")
        try:
            try:
                await _pass_back(answer, send)
            finally:
                watch.cancel()
                await answer.aclose()
        except asyncio.CancelledError:
            if not watch.done() or watch.cancelled():
                raise

    async def close(self) -> None:
        """Close the connections to the main process."""
        await self._transport.aclose()


class Relayed:
    """Gives the application calls that a front has relayed, as if they had come to it."""

    def __init__(self, app: ASGIApp) -> None:
        """Stand before an application."""
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Hand on one ASGI call."""
        if scope["type"] == "http":
            told = {name: value for name, value in scope["headers"] if name in (_CLIENT, _SCHEME)}
            scope = dict(scope)
            scope["headers"] = [each for each in scope["headers"] if each[0] not in told]
            host, _, port = told.get(_CLIENT, b"").decode("latin-1").rpartition(" ")
            scope["client"] = (host, int(port)) if host else None
            scope["scheme"] = told.get(_SCHEME, b"http").decode("latin-1")
        await self._app(scope, receive, send)


def relay_path() -> str:
    """Where the main process's socket goes: a folder that nobody else may look into.

    It is that of `multiprocessing`, which removes it at the end.
    """
    return str(Path(util.get_temp_dir()) / "relay")


def relayed_config(app: ASGIApp, path: str) -> uvicorn.Config:
    """How the main process serves an application to its fronts."""
    return uvicorn.Config(
        Relayed(app),
        uds=path,
        loop="uvloop",
        http="httptools",
        ws="none",
        lifespan="on",
        log_config=None,
        log_level="warning",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        date_header=False,
        timeout_graceful_shutdown=_RELAYED_S,
        timeout_keep_alive=int(10 * _IDLE_S),  # or it may close one that a call is on its way by
    )


def _request(scope: Scope, receive: Receive) -> httpx.Request:
    headers = [each for each in scope["headers"] if _is_passed_on(each[0])]
    if scope.get("client"):
        host, port = scope["client"]
        headers.append((_CLIENT, f"{host} {port}".encode()))
    headers.append((_SCHEME, scope["scheme"].encode()))
    names = {name for name, _ in scope["headers"]}
    has_body = b"content-length" in names or b"transfer-encoding" in names
    target = scope["raw_path"] + (b"?" + scope["query_string"] if scope["query_string"] else b"")
    return httpx.Request(
        scope["method"],
        "http://main/",
        headers=headers,
        content=_body(receive) if has_body else None,
        extensions={"target": target},
    )


def _is_passed_on(name: bytes) -> bool:
    return name not in _OF_A_CONNECTION and name not in (_CLIENT, _SCHEME)


async def _body(receive: Receive) -> AsyncIterator[bytes]:
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise _HungUpError
        yield message.get("body", b"")
        if not message.get("more_body", False):
            return


async def _pass_back(answer: httpx.Response, send: Send) -> None:
    headers = [each for each in answer.headers.raw if each[0].lower() not in _OF_A_CONNECTION]
    start: dict[str, Any] = {"type": "http.response.start", "status": answer.status_code}
    await send({**start, "headers": headers})
    assert isinstance(answer.stream, httpx.AsyncByteStream)
    try:
        async for chunk in answer.stream:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
    except httpx.TransportError as error:
        logger.warning("the main process broke an answer off: %r", error)
        return  # the server closes a connection whose answer is not complete
    await send({"type": "http.response.body", "body": b""})


async def _cancel_when_gone(receive: Receive, task: "asyncio.Task[Any]") -> None:
    """Give a relayed answer up when nobody is left to read it."""
    while (await receive())["type"] != "http.disconnect":
        pass
    task.cancel()


async def _refuse(call: Call, send: Send, error: ServiceError) -> None:
    status, lines, body = refusal_of(call, error)
    headers = pairs_of(lines)
    with contextlib.suppress(OSError):
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})
