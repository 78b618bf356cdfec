"""Streams of server-sent events, which a key or an address may have a share of.

The format is that of the HTML standard (9.2). Runs in the event loop.
"""

from collections.abc import AsyncIterator
from contextlib import nullcontext

from fastapi import Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from inferpool.service.api.route_errors import problem_response
from inferpool.service.errors import OverloadedError
from inferpool.service.queue.shares import Shares

_RETRY_AFTER_S = 5


class EventStream(StreamingResponse):
    """Sends events until they end or the client goes, if its owner has a place left for a stream.

    A slow client misses events: none is kept for it. The server cuts off one that reads nothing.
    """

    media_type = "text/event-stream"

    def __init__(
        self, events: AsyncIterator[bytes], shares: Shares, owner: str, *, is_head: bool
    ) -> None:
        """Answer with events; the answer to HEAD has none, and needs no place."""
        headers = {
            "cache-control": "no-store",
            "x-accel-buffering": "no",  # else nginx holds events back
        }
        super().__init__(events, headers=headers)
        self._place = nullcontext() if is_head else shares.place(owner, _RETRY_AFTER_S)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one ASGI call."""
        # From version 2.4 on, Starlette expects `send` to raise once the client is gone, and does
        # not ask `receive`. An event can be a second away, and not every server's `send` raises.
        streaming = {**scope, "asgi": {**scope.get("asgi", {}), "spec_version": "2.3"}}
        try:
            with self._place:
                await super().__call__(streaming, receive, send)
        except OverloadedError as error:
            await problem_response(Request(scope), error)(scope, receive, send)


def client_of(request: Request) -> str | None:
    """Return the address of a call's client, if it has one."""
    return None if request.client is None else request.client.host
