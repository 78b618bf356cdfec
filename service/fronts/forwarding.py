"""Forwards all calls but predictions to the main process, over a Unix socket. Runs in a front.

`service.fronts.forwarded` is the other end. Only jobs and changes of models have bodies that
anybody reads. They are forwarded as they come, if the key is right. Other bodies are not forwarded:
a client that sends half of one holds up nobody.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator
from typing import Any

import httpx
from starlette.types import Receive, Scope, Send

from inferpool.service.api.auth import Guard
from inferpool.service.api.call import Call, begin_call
from inferpool.service.api.predict import is_job
from inferpool.service.api.replies import refusal_of, send_reply
from inferpool.service.errors import BadRequestError, ServiceError, UnavailableError
from inferpool.service.fronts.forwarded import CLIENT, IDLE_S, SCHEME

logger = logging.getLogger(__name__)

_CONNECTION_HEADERS = frozenset(
    b"connection keep-alive proxy-connection te trailer transfer-encoding upgrade expect".split()
)
"""Headers of one connection, which are not forwarded (RFC 9110, 7.6.1)."""
_WITH_BODY = "/admin/models"
"""Calls to these paths may have a body."""
_NOT_FORWARDED = _CONNECTION_HEADERS | {b"content-length", CLIENT, SCHEME}


class Forwarder:
    """Has the main process answer every call that is not a prediction."""

    def __init__(self, path: str, guard: Guard) -> None:
        """Forward to the main process's Unix socket; the guard knows who may send a body."""
        self._guard = guard
        limits = httpx.Limits(
            max_connections=None, max_keepalive_connections=8, keepalive_expiry=IDLE_S
        )
        self._transport = httpx.AsyncHTTPTransport(uds=path, limits=limits, retries=1)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one ASGI call."""
        call = begin_call(scope["method"], scope["path"], scope["query_string"], scope["headers"])
        try:
            body = _body(receive) if self._may_send_body(call) else None
            answer = await self._transport.handle_async_request(_request(scope, body))
        except _HungUpError:
            return
        except (httpx.LocalProtocolError, httpx.InvalidURL) as error:
            await _refuse(call, send, BadRequestError(f"this cannot be passed on: {error}"))
            return
        except httpx.TransportError as error:
            logger.warning("the main process does not answer: %r", error)
            gone = UnavailableError("the main process does not answer", retry_after_s=1)
            await _refuse(call, send, gone)
            return
        task = asyncio.current_task()
        assert task is not None
        watch = asyncio.create_task(_cancel_when_gone(receive, task), name="forwarding hangup")
        try:
            try:
                await _pass_back(answer, send)
            finally:
                watch.cancel()
                await answer.aclose()
        except asyncio.CancelledError:
            if not watch.done() or watch.cancelled():
                raise

    def _may_send_body(self, call: Call) -> bool:
        if call.method not in ("POST", "PUT"):
            return False
        if not call.path.startswith(_WITH_BODY) and not is_job(call.path, call.headers.items()):
            return False
        try:
            self._guard.check_path(call.path, call.headers)
        except ServiceError:
            return False  # the main process refuses the call, and logs it
        return True

    async def close(self) -> None:
        """Close the connections to the main process."""
        await self._transport.aclose()


class _HungUpError(Exception):
    """The client is gone before its body was complete."""


async def _body(receive: Receive) -> AsyncGenerator[bytes, None]:
    is_more = True
    while is_more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise _HungUpError
        yield message.get("body", b"")
        is_more = message.get("more_body", False)


def _request(scope: Scope, body: AsyncGenerator[bytes, None] | None) -> httpx.Request:
    headers = [each for each in scope["headers"] if each[0] not in _NOT_FORWARDED]
    if scope.get("client"):
        host, port = scope["client"]
        headers.append((CLIENT, f"{host} {port}".encode()))
    headers.append((SCHEME, scope["scheme"].encode()))
    target = scope["raw_path"] + (b"?" + scope["query_string"] if scope["query_string"] else b"")
    return httpx.Request(
        scope["method"],
        "http://main/",
        headers=headers,
        content=body,
        extensions={"target": target},
    )


async def _pass_back(answer: httpx.Response, send: Send) -> None:
    headers = [each for each in answer.headers.raw if each[0].lower() not in _CONNECTION_HEADERS]
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
    """Cancel a forwarded call when its client is gone."""
    while (await receive())["type"] != "http.disconnect":
        pass
    task.cancel()


async def _refuse(call: Call, send: Send, error: ServiceError) -> None:
    with contextlib.suppress(OSError):
        await send_reply(send, refusal_of(call, error))
