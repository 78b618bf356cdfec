"""`/predict` under any ASGI server."""

import asyncio
from collections.abc import Callable
from typing import Any

from starlette.types import Receive, Scope, Send

from inferpool.models.attached import attached
from inferpool.service.api.codecs.body import BodyTimer
from inferpool.service.api.exchange import CLOSE_LINE, Call, Exchange, Predict, Reply, send_reply

_CLIENT_GONE = 499
_TO_NOBODY: Reply = _CLIENT_GONE, b"content-length: 0\r\n", b""


class _AsgiWire(asyncio.Future[Reply]):
    """The wire of an exchange under ASGI: a future of its answer, or of one to nobody."""

    is_by_exchange = False
    stream: Any = None
    """Sends the answer, if it is a streamed one."""

    def __init__(self, predict: Predict, client: str | None) -> None:
        """Expect the answer of a call from a client's address."""
        super().__init__()
        self._predict = predict
        self._client = client

    def owner_of(self, call: Call) -> str:
        """Return the owner of the memory that a call takes."""
        return self._predict.owner_of(call.headers, self._client)

    def send_continue(self) -> None:
        """Do nothing: the server sends this when it is asked for the body."""

    def send_answer(self, exchange: Exchange, reply: Reply) -> int | None:
        """Have the answer sent."""
        if self.done():  # it was cancelled just now
            return _CLIENT_GONE
        self.is_by_exchange = True
        self.set_result(reply)
        return None

    def open_stream(self, exchange: Exchange, lines: bytes, on_writable: Callable[[], None]) -> Any:
        """Have an answer sent that comes in pieces."""
        self.stream = attached("stream by ASGI")(exchange.call.status, lines, on_writable)
        if not self.done():
            self.set_result(_TO_NOBODY)
        return self.stream


async def answer(predict: Predict, path: str, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer one ASGI call to `/predict`; its path is relative to the server's mount."""
    wire = _AsgiWire(predict, (scope.get("client") or (None,))[0])
    method, query = scope["method"], scope["query_string"]
    headers = [(name, value.strip(b" \t")) for name, value in scope["headers"]]  # RFC 9112, 5.1
    exchange = Exchange.open(wire, predict, method, path, query, headers)
    exchange.start()
    status = _CLIENT_GONE
    try:
        async with asyncio.TaskGroup() as group:
            listener = group.create_task(_listen(exchange, wire, receive), name="listen")
            reply = await wire
            if wire.stream is not None:
                await wire.stream.run(send)
            listener.cancel()
        if wire.stream is not None:
            return
        if exchange.leaves_body:
            reply = reply[0], reply[1] + CLOSE_LINE, reply[2]
        await send_reply(send, reply)
        status = reply[0]
    except OSError:  # ASGI 2.4: `send` raises it when the client has gone
        pass
    finally:
        exchange.abandon()  # does nothing once it has its answer
        if wire.is_by_exchange:
            exchange.close(status)


async def _listen(exchange: Exchange, wire: _AsgiWire, receive: Receive) -> None:
    """Pass on the body as it comes, and then wait for the client to hang up."""
    timer = BodyTimer(exchange.predict.limits, lambda: exchange.num_bytes, exchange.fail)
    timer.start(exchange.call.ref.deadline)
    try:
        while (message := await receive())["type"] != "http.disconnect":
            if exchange.is_complete:
                return  # middleware repeats the body, and cannot tell us that the client is gone
            exchange.feed(message.get("body", b""))
            if exchange.response_complete:
                return  # the body is too large
            if message.get("more_body", False):
                exchange.count()
            else:
                timer.stop()
                exchange.complete()
    except Exception:
        if not exchange.is_complete:
            raise
        return  # middleware has no more to give; the call still gets its answer
    finally:
        timer.stop()
    if wire.stream is not None:
        exchange.abandon()
        wire.stream.leave()
    if not wire.done():
        wire.set_result(_TO_NOBODY)  # no server sends it, but Starlette's middleware needs one
