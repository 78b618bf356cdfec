"""GET /events: what the service does, second by second, as server-sent events.

The format is that of the HTML standard (9.2). Runs in the event loop.
"""

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from fastapi import APIRouter, Response
from starlette.types import Receive, Scope, Send

from inferpool.service.api.routes.health import HealthReport
from inferpool.service.errors import UnavailableError
from inferpool.workers.host.engine import Cause

_MAX_LISTENERS = 64
"""Each costs a connection, and some 50 us of every second."""
_RETRY_AFTER_S = 5
WAS_HEAD = "inferpool.was_head"
"""A key of the scope of a call whose method was HEAD, which is answered as GET is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcomes:
    """Instances by the second: how many came in, and how the others ended."""

    accepted: float
    succeeded: float
    failed: float
    expired: float
    cancelled: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Percentiles:
    """Of durations in milliseconds, each to within a few percent."""

    p50: float
    p95: float
    p99: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """What a model did in one interval, and where it stood at its end."""

    requests_per_s: float
    """HTTP calls answered, however they were."""
    instances_per_s: Outcomes
    rejected_per_s: Mapping[str, float]
    """Instances refused, by reason; only the reasons that there were."""
    latency_ms: Percentiles | None
    """Of the HTTP calls answered with 200, from their head to their answer; null without any."""
    queue_ms: Percentiles | None
    """What instances waited, here and in their workers."""
    inference_ms: Percentiles | None
    """Of batches: the forward pass and rendering."""
    batch_sizes: Mapping[str, int]
    """Batches by the upper edge of their size: 1, 2, 4, ... 256, `+Inf`; only where there are."""
    num_batched: int
    """Instances in those batches."""
    queue_depth: int
    """Instances that wait for a worker."""
    in_flight: int
    """Instances accepted that have not ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndingEvent:
    """The end of one life of a worker."""

    worker: str
    incarnation: int
    time: float
    """Seconds of the Unix epoch."""
    cause: Cause
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveSample(Sample):
    """The newest sample of a model, and what is kept for now alone."""

    source: str
    """Where the model comes from, as the settings say."""
    queue_limit: int
    """Instances that may wait."""
    max_batch_size: int
    """Instances that a batch may have now."""
    quarantined: int
    """Inputs that are refused because workers died of them."""
    endings: Sequence[EndingEvent]
    """The latest ends of its workers' lives, the newest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostState:
    """What all models share."""

    connections: int
    """Open HTTP connections."""
    arena_bytes: int
    """Shared memory reserved for payloads."""
    arena_used_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """A second that has passed."""

    time: float
    """Of its end, in seconds of the Unix epoch."""
    models: Mapping[str, Sample]


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """The data of an event `state`."""

    time: float
    """Seconds of the Unix epoch."""
    interval_s: float
    """What the rates and percentiles are of."""
    uptime_s: float
    version: str
    """Of inferpool."""
    default_model: str
    """The one that `/predict` asks."""
    health: HealthReport
    """As `/health` has it."""
    host: HostState
    models: Mapping[str, LiveSample]
    history: Sequence[Moment] = ()
    """The last minutes, the oldest first: in the first event of a stream, and in no other."""


class Feed(Protocol):
    """Who makes the events: one for all listeners."""

    @property
    def is_ending(self) -> bool:
        """No event comes any more: the service shuts down."""

    def first(self) -> bytes:
        """A `State` of now as JSON, with the history."""

    async def next(self) -> bytes:
        """The next `State` as JSON, once it is there."""


class EventStream(Response):
    """Sends the events of a feed until that ends or the client goes.

    A client that reads slowly misses events: none is kept for it, and the server cuts off one that
    reads nothing.
    """

    media_type = "text/event-stream"

    def __init__(self, feed: Feed, listeners: "set[EventStream]") -> None:
        """Answer from a feed, as one of its listeners."""
        super().__init__()
        del self.headers["content-length"]
        self.headers["cache-control"] = "no-store"
        self.headers["x-accel-buffering"] = "no"  # nginx would hold events back
        self._feed = feed
        self._listeners = listeners

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one ASGI call."""
        if scope.get(WAS_HEAD):
            await self._send_start(send)
            await send({"type": "http.response.body", "body": b""})
            return
        self._listeners.add(self)
        sending = asyncio.create_task(self._send_events(send), name="send events")
        hangup = asyncio.create_task(_until_gone(receive), name="events hangup")
        try:
            await asyncio.wait((sending, hangup), return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._listeners.discard(self)
            hangup.cancel()
            sending.cancel()
            with contextlib.suppress(asyncio.CancelledError, OSError):
                await sending

    async def _send_events(self, send: Send) -> None:
        await self._send_start(send)
        number = 0
        state = self._feed.first()
        while True:
            event = b"event: state\nid: %d\ndata: %b\n\n" % (number, state)
            await send({"type": "http.response.body", "body": event, "more_body": True})
            if self._feed.is_ending:
                break
            state = await self._feed.next()
            number += 1
        await send({"type": "http.response.body", "body": b""})

    async def _send_start(self, send: Send) -> None:
        headers = self.raw_headers
        await send({"type": "http.response.start", "status": 200, "headers": headers})


def events_router(feed: Feed) -> APIRouter:
    """The route, answering from a feed."""
    router = APIRouter(tags=["health"])
    listeners: set[EventStream] = set()

    @router.get(
        "/events",
        summary="What the service does, second by second (server-sent events)",
        status_code=200,  # or FastAPI does not know that of the class
        response_class=EventStream,
        responses={200: {"model": State}},
    )
    async def events() -> Response:
        """One event `state` per second, without an end; its data is one JSON object.

        `id` counts up, and `Last-Event-ID` makes no difference: the first event of each stream
        brings the last minutes along. The stream ends when the service shuts down, after an event
        that says so.

        `curl -N http://127.0.0.1:8000/events`
        """
        if len(listeners) >= _MAX_LISTENERS:
            raise UnavailableError(
                f"{_MAX_LISTENERS} clients listen already", retry_after_s=_RETRY_AFTER_S
            )
        return EventStream(feed, listeners)

    return router


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
