"""`/predict` under any ASGI server, as a wire of `Exchange`."""

import asyncio

from starlette.types import Receive, Scope, Send

from inferpool.service.api.codecs.body import BodyTimer
from inferpool.service.api.exchange import Exchange
from inferpool.service.api.predict import Predict
from inferpool.service.api.replies import Reply, send_reply

_CLIENT_GONE = 499


class _Answered(asyncio.Future[Reply | None]):
    """The wire of an exchange under ASGI: done with its answer, or with None if nobody waits."""

    def send_continue(self) -> None:
        """Leave it to the server, which sends this when it is asked for the body."""

    def send_answer(self, exchange: Exchange, reply: Reply) -> int | None:
        """Have the answer sent."""
        if self.done():  # it was cancelled this moment
            return _CLIENT_GONE
        self.set_result(reply)
        return None


async def answer(predict: Predict, path: str, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer one ASGI call to `/predict`; its path is without what the server is mounted under."""
    answered = _Answered()
    method, query = scope["method"], scope["query_string"]
    headers = [(name, value.strip(b" \t")) for name, value in scope["headers"]]  # RFC 9112, 5.1
    exchange = Exchange.open(answered, predict, method, path, query, headers)
    exchange.start()
    try:
        async with asyncio.TaskGroup() as group:
            listener = group.create_task(_listen(exchange, answered, receive), name="listen")
            reply = await answered
            listener.cancel()
    finally:
        exchange.abandon()  # unless it has its answer
    if reply is None:
        return
    status = reply[0]
    try:
        await send_reply(send, reply)
    except OSError:  # what ASGI 2.4 has `send` raise when the client has gone
        status = _CLIENT_GONE
    exchange.close(status)


async def _listen(exchange: Exchange, answered: _Answered, receive: Receive) -> None:
    """Hand on the body as it comes, and then wait for the client to hang up."""
    timer = BodyTimer(exchange.predict.limits, lambda: exchange.num_bytes, exchange.fail)
    try:
        while (message := await receive())["type"] != "http.disconnect":
            if exchange.is_complete or exchange.response_complete:
                continue
            exchange.feed(message.get("body", b""))
            if not message.get("more_body", False):
                timer.stop()
                exchange.complete()
            else:  # only who has sent a part of a body is timed: the others hold no memory
                exchange.count()
                timer.start(exchange.call.deadline)
    finally:
        timer.stop()
    exchange.abandon()
    if not answered.done():
        answered.set_result(None)
