"""Forwards all calls but predictions to the main process, over a Unix socket. Runs in a front.

`forwarded.py` is the other end. Only jobs, changes of models, the repository and, with the setting
tei, calls to / and /tei/NAME have bodies that anybody reads. They are forwarded as they come, if
the key is right and the main process asks for them. Other bodies are not forwarded: a client that
sends half of one holds up nobody.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

from starlette.types import Receive, Scope, Send

from inferpool.service.api.auth import Guard
from inferpool.service.api.exchange import (
    PREFIX,
    Call,
    Predict,
    begin_call,
    is_job,
    refusal_of,
    send_reply,
)
from inferpool.service.errors import BadRequestError, ServiceError, UnavailableError
from inferpool.service.parts.fronts.forwarded import CLIENT, IDLE_S, SCHEME
from inferpool.service.parts.fronts.relay import Header, Relay, RelayBrokenError

logger = logging.getLogger(__name__)

_CONNECTION_HEADERS = frozenset(
    b"connection keep-alive proxy-connection te trailer transfer-encoding upgrade expect".split()
)
"""Headers of one connection, which are not forwarded (RFC 9110, 7.6.1)."""
_WITH_BODY = ("/admin/models", "/v2/repository/", "/models")
"""Calls to paths that begin so may have a body."""
_ANY_TASK = "/any_task"
"""The end of paths of the exchange that calls to / and /tei/NAME are for, with the setting tei."""
_NOT_FORWARDED = _CONNECTION_HEADERS | {b"content-length", CLIENT, SCHEME}
_MOST_UNUSED = 8
"""Connections to the main process that are kept for the next calls."""


class Forwarder:
    """Has the main process answer every call that is not a prediction."""

    def __init__(self, path: str, guard: Guard, predict: Predict) -> None:
        """Forward to the main process's Unix socket; the guard checks calls with a body."""
        self._guard = guard
        self._takes, self._own = predict.takes, predict.own
        self._relay = Relay(path, most_unused=_MOST_UNUSED, unused_s=IDLE_S)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one ASGI call."""
        call = begin_call(scope["method"], scope["path"], scope["query_string"], scope["headers"])
        body = _body(receive) if self._may_send_body(call) else None
        try:
            async with self._relay.connection() as main:
                headers = _headers_of(scope)
                start = await main.ask(scope["method"], _target_of(scope), headers, body)
                await _pass_back(*start, main.pieces(), receive, send)
        except _HungUpError:
            return
        except BadRequestError as error:
            await _refuse(call, send, error)
        except RelayBrokenError as error:
            logger.warning("the main process does not answer: %s", error)
            gone = UnavailableError("the main process does not answer", retry_after_s=1)
            await _refuse(call, send, gone)

    def _may_send_body(self, call: Call) -> bool:
        if call.method not in ("POST", "PUT"):
            return False
        path = "/tei/*" if call.path == "/" else call.path
        has_task = self._takes(path + _ANY_TASK)
        takes = has_task or self._takes(call.path)
        is_later = is_job(call.path, call.headers.items(), self._own)
        if not (has_task or is_later or call.path.startswith(_WITH_BODY)):
            return False
        try:
            self._guard.check_path(PREFIX if takes else call.path, call.headers)
        except ServiceError:
            return False  # the main process refuses the call, and logs it
        return True

    async def close(self) -> None:
        """Close the connections to the main process."""
        self._relay.close()


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


def _target_of(scope: Scope) -> bytes:
    path: bytes = scope["raw_path"]
    query: bytes = scope["query_string"]
    return path + b"?" + query if query else path


def _headers_of(scope: Scope) -> list[Header]:
    headers = [each for each in scope["headers"] if each[0] not in _NOT_FORWARDED]
    if scope.get("client"):
        host, port = scope["client"]
        headers.append((CLIENT, f"{host} {port}".encode()))
    headers.append((SCHEME, scope["scheme"].encode()))
    return headers


async def _pass_back(
    status: int, headers: list[Header], body: AsyncIterator[bytes], receive: Receive, send: Send
) -> None:
    """Pass an answer back; stop when the client is gone."""
    headers = [each for each in headers if each[0] not in _CONNECTION_HEADERS]
    # Before anything is received: that would ask the client for its body.
    await send({"type": "http.response.start", "status": status, "headers": headers})
    task = asyncio.current_task()
    assert task is not None
    watch = asyncio.create_task(_cancel_when_gone(receive, task), name="forwarding hangup")
    try:
        try:
            async for piece in body:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        except RelayBrokenError as error:
            # The server closes a connection if its answer is not complete.
            logger.warning("the main process broke an answer off: %s", error)
        finally:
            watch.cancel()
    except asyncio.CancelledError:
        if not watch.done() or watch.cancelled():
            raise


async def _cancel_when_gone(receive: Receive, task: "asyncio.Task[Any]") -> None:
    """Cancel a forwarded call when its client is gone."""
    while (await receive())["type"] != "http.disconnect":
        pass
    task.cancel()


async def _refuse(call: Call, send: Send, error: ServiceError) -> None:
    with contextlib.suppress(OSError):
        await send_reply(send, refusal_of(call, error))
