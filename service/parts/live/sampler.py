"""Samples what each model did in each of the last seconds, and sends it to those who ask `/events`.

The format of a stream is that of the HTML standard (9.2). One sampler serves all listeners, in the
main process's event loop. It reads the counters of `/metrics` once a second. The rest is built only
for listeners.
"""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from typing import TYPE_CHECKING

import msgspec
from fastapi import APIRouter, Request, Response

from inferpool.service.api.auth import Guard
from inferpool.service.api.codecs.body import joined
from inferpool.service.api.errors import WAS_HEAD
from inferpool.service.api.event_stream import EventStream, client_of
from inferpool.service.api.routes.health import HealthReport
from inferpool.service.parts.live.events import (
    ChangeEvent,
    EndingEvent,
    HostState,
    LiveSample,
    Moment,
    Outcomes,
    Percentiles,
    Sample,
    State,
    StoredJobs,
)
from inferpool.service.queue.pool import Pool
from inferpool.service.queue.shares import Shares
from inferpool.service.settings.settings import Settings
from inferpool.service.telemetry.distribution import Recent
from inferpool.service.telemetry.metrics import Metrics, ModelMetrics
from inferpool.service.telemetry.versions import version_of
from inferpool.workers.host.error_guard import ErrorGuard

if TYPE_CHECKING:
    from inferpool.service.parts.jobs.jobs import Jobs

MAX_STREAMS = 64
"""Streams at once. Each costs a connection, and some 50 us of every second."""
_EVERY_S = 1.0
_NUM_KEPT = 300
"""Samples kept: five minutes."""
_OUTCOMES = ("accepted", "succeeded", "failed", "expired", "cancelled")


class LiveFeed:
    """Stores the last samples and builds events."""

    def __init__(
        self,
        settings: Settings,
        pools: Mapping[str, Pool],
        metrics: Metrics,
        *,
        report: Callable[[], HealthReport],
        host: Callable[[], HostState],
        changes: Collection[ChangeEvent] = (),
        jobs: "Jobs | None" = None,
    ) -> None:
        self._settings = settings
        self._pools = pools
        self._report = report
        self._host = host
        self._changes = changes
        self._jobs = jobs
        self._num_answered = 0
        self._answered_per_s = 0.0
        """Instances of jobs in the last interval."""
        self._metrics = metrics
        self._before: dict[ModelMetrics, ModelMetrics] = {}
        """The counters of each model as they were at the last sample."""
        self._past: deque[Moment] = deque(maxlen=_NUM_KEPT)
        self._began = self._last = time.monotonic()
        self._interval_s = 0.0
        self._newest: bytes | None = None
        """The newest event, once a listener has asked for it."""
        self._ticked = asyncio.Event()
        """Set when the next event can be made, and then replaced."""
        self._task: asyncio.Task[None] | None = None
        self.is_ending = False
        """No event comes any more."""

    def start(self) -> None:
        """Begin to sample."""
        self._task = asyncio.create_task(self._run(), name="sample")

    def end(self) -> None:
        """Send all listeners a last event."""
        if not self.is_ending:
            self.is_ending = True
            self._tick()

    async def stop(self) -> None:
        """Stop sampling."""
        self.end()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def first(self) -> bytes:
        """Return the current `State` as JSON, with the history."""
        return msgspec.json.encode(self._state(list(self._past)))

    async def next(self) -> bytes:
        """Return the next `State` as JSON, once there is one."""
        await self._ticked.wait()
        if self._newest is None:
            self._newest = msgspec.json.encode(self._state())
        return self._newest

    async def _run(self) -> None:
        due = self._last
        error_guard = ErrorGuard("the live feed")
        while True:
            due = max(due + _EVERY_S, time.monotonic())
            await asyncio.sleep(due - time.monotonic())
            with error_guard:
                self._sample()
                self._tick()

    def _sample(self) -> None:
        now = time.monotonic()
        self._interval_s, self._last = now - self._last, now
        before = self._before
        counters = {name: self._metrics.model(name) for name in self._pools}
        self._before = {each: self._metrics.total(name) for name, each in counters.items()}
        models = {
            name: _sample(
                before.get(each) or ModelMetrics(name),
                self._before[each],
                self._pools[name].dispatcher.num_queued,
                self._interval_s,
            )
            for name, each in counters.items()
        }
        if self._jobs is not None:
            num = self._jobs.num_answered
            self._answered_per_s = round((num - self._num_answered) / self._interval_s, 2)
            self._num_answered = num
        self._past.append(Moment(time=round(time.time(), 3), models=models))

    def _tick(self) -> None:
        self._newest = None
        self._ticked.set()
        self._ticked = asyncio.Event()

    def _state(self, history: list[Moment] | None = None) -> State:
        newest = self._past[-1].models if self._past else {}
        return State(
            time=round(time.time(), 3),
            interval_s=round(self._interval_s, 3),
            uptime_s=round(time.monotonic() - self._began, 1),
            version=version_of(),
            default_model=self._settings.default_model,
            health=self._report(),
            host=self._host(),
            models={
                name: self._live(name, sample)
                for name, sample in newest.items()
                if name in self._pools
            },
            jobs=self._stored_jobs(),
            changes=list(self._changes),
            history=history or (),
        )

    def _stored_jobs(self) -> StoredJobs | None:
        if self._jobs is None:
            return None
        counts = self._jobs.counts
        return StoredJobs(
            open=self._jobs.is_open,
            by_state={state: num for state, num in counts.jobs.items() if num},
            instances_waiting=counts.num_waiting,
            instances_per_s=self._answered_per_s,
            store_bytes=counts.num_bytes,
        )

    def _live(self, name: str, sample: Sample) -> LiveSample:
        pool = self._pools[name]
        return LiveSample(
            **{field: getattr(sample, field) for field in Sample.__slots__},
            source=pool.source,
            queue_limit=pool.dispatcher.max_queue_length,
            max_batch_size=pool.dispatcher.max_batch_size,
            quarantined=pool.dispatcher.num_quarantined,
            endings=[
                EndingEvent(
                    worker=ending.id.worker,
                    incarnation=ending.id.incarnation,
                    time=round(ending.time, 3),
                    cause=ending.cause,
                    reason=ending.reason,
                )
                for ending in reversed(pool.endings)
            ],
        )


def _sample(before: ModelMetrics, now: ModelMetrics, queue_depth: int, interval_s: float) -> Sample:
    """Return what a model has counted in an interval, and what it has in hand."""
    rates = {
        name: round((getattr(now, name) - getattr(before, name)) / interval_s, 2)
        for name in _OUTCOMES
    }
    num_requests = sum(now.requests.values()) - sum(before.requests.values())
    rejected: dict[str, float] = {
        reason: round((num - before.rejected[reason]) / interval_s, 2)
        for reason, num in now.rejected.items()
        if num > before.rejected[reason]
    }
    return Sample(
        requests_per_s=round(num_requests / interval_s, 2),
        instances_per_s=Outcomes(**rates),
        rejected_per_s=rejected,
        latency_ms=_percentiles(now.answer_duration - before.answer_duration),
        queue_ms=_percentiles(now.queue_wait - before.queue_wait),
        inference_ms=_percentiles(now.inference_duration - before.inference_duration),
        batch_sizes=(now.batch_size - before.batch_size).by_edge(),
        num_batched=int(now.batch_size.sum - before.batch_size.sum),
        queue_depth=queue_depth,
        in_flight=now.in_flight,
    )


def _percentiles(recent: Recent) -> Percentiles | None:
    found = recent.percentiles(50, 95, 99)
    if found is None:
        return None
    p50, p95, p99 = (round(seconds * 1000, 3) for seconds in found)
    return Percentiles(p50=p50, p95=p95, p99=p99)


async def _events_of(feed: LiveFeed, *, is_head: bool) -> AsyncIterator[bytes]:
    if is_head:
        return
    number, state = 0, feed.first()
    while True:
        yield b"event: state\nid: %d\ndata: %b\n\n" % (number, state)
        if feed.is_ending:
            return
        number, state = number + 1, await feed.next()


def events_router(feed: LiveFeed, guard: Guard) -> APIRouter:
    """Return the route, answering from a feed; the guard finds the owner of each stream."""
    router = APIRouter(tags=["health"])
    streams = Shares(MAX_STREAMS, guard.share, "streams of events")

    @router.get(
        "/events",
        summary="What the service does, second by second (server-sent events)",
        status_code=200,  # FastAPI does not take it from the class
        response_class=EventStream,
        responses={
            200: {"model": State},
            429: {"description": "The key or the address has its share of streams."},
        },
    )
    async def events(request: Request) -> Response:
        """Send one event `state` per second, without an end; its data is one JSON object.

        `id` counts up, and `Last-Event-ID` makes no difference: the first event of each stream
        brings the last minutes along. The stream ends when the service shuts down, after an event
        that says so.

        `curl -N http://127.0.0.1:8000/events`
        """
        owner = guard.owner_of("metrics", joined(request.headers.raw), client_of(request))
        is_head = WAS_HEAD in request.scope
        return EventStream(_events_of(feed, is_head=is_head), streams, owner, is_head=is_head)

    return router
