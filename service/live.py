"""Samples what each model did in each of the last seconds, for the feed at `/events`.

One sampler serves all listeners, in the main process's event loop. It reads the counters of
`/metrics` once a second, which takes 0.1 ms per model. The rest is made only if somebody listens.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping

import msgspec

from inferpool.service.api.routes.events import (
    EndingEvent,
    HostState,
    LiveSample,
    Moment,
    Outcomes,
    Percentiles,
    Sample,
    State,
)
from inferpool.service.api.routes.health import HealthReport
from inferpool.service.queue.pool import Pool
from inferpool.service.settings.settings import Settings
from inferpool.service.telemetry.distribution import Distribution, Recent
from inferpool.service.telemetry.metrics import Metrics, ModelMetrics
from inferpool.service.telemetry.versions import version_of
from inferpool.workers.host.error_guard import ErrorGuard

_NUM_KEPT = 300
"""Samples kept: five minutes, which take 0.5 MB per model."""
_OUTCOMES = ("accepted", "succeeded", "failed", "expired", "cancelled")


class LiveFeed:
    """Keeps the last samples and makes events; see `service.api.routes.events.Feed`."""

    def __init__(
        self,
        settings: Settings,
        pools: Mapping[str, Pool],
        metrics: Metrics,
        *,
        report: Callable[[], HealthReport],
        host: Callable[[], HostState],
        every_s: float = 1.0,
    ) -> None:
        self._settings = settings
        self._pools = pools
        self._report = report
        self._host = host
        self._every_s = every_s
        self._samplers = {name: _Sampler(metrics.model(name)) for name in settings.models}
        self._past: deque[Moment] = deque(maxlen=_NUM_KEPT)
        self._began = self._last = time.monotonic()
        self._interval_s = 0.0
        self._newest: bytes | None = None
        """The newest event, once somebody has asked for it."""
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
        """See `Feed`."""
        return msgspec.json.encode(self._state(list(self._past)))

    async def next(self) -> bytes:
        """See `Feed`."""
        await self._ticked.wait()
        if self._newest is None:
            self._newest = msgspec.json.encode(self._state())
        return self._newest

    async def _run(self) -> None:
        due = self._last
        error_guard = ErrorGuard("the live feed")
        while True:
            due = max(due + self._every_s, time.monotonic())
            await asyncio.sleep(due - time.monotonic())
            with error_guard:
                self._sample()
                self._tick()

    def _sample(self) -> None:
        now = time.monotonic()
        self._interval_s, self._last = now - self._last, now
        models = {
            name: self._samplers[name].sample(pool.dispatcher.num_queued, self._interval_s)
            for name, pool in self._pools.items()
        }
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
            models={name: self._live(name, sample) for name, sample in newest.items()},
            history=history or (),
        )

    def _live(self, name: str, sample: Sample) -> LiveSample:
        pool = self._pools[name]
        return LiveSample(
            **{field: getattr(sample, field) for field in Sample.__slots__},
            source=self._settings.models[name].source,
            queue_limit=self._settings.max_queue_length,
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


class _Sampler:
    """Samples what one model has counted since the last sample."""

    def __init__(self, metrics: ModelMetrics) -> None:
        self._metrics = metrics
        self._outcomes = self._count_outcomes()
        self._num_requests = 0
        self._rejected = dict(metrics.rejected)
        self._latency = _SinceLastSample(metrics.answer_duration)
        self._queue = _SinceLastSample(metrics.queue_wait)
        self._inference = _SinceLastSample(metrics.inference_duration)
        self._batch_sizes = _SinceLastSample(metrics.batch_size)
        self._num_batched = 0

    def sample(self, queue_depth: int, interval_s: float) -> Sample:
        """Return what was counted in an interval that ends now."""
        metrics = self._metrics
        outcomes, before = self._count_outcomes(), self._outcomes
        num_requests, num_before = sum(metrics.requests.values()), self._num_requests
        rejected: dict[str, float] = {
            reason: round((num - self._rejected[reason]) / interval_s, 2)
            for reason, num in metrics.rejected.items()
            if num > self._rejected[reason]
        }
        num_batched, num_batched_before = int(metrics.batch_size.sum), self._num_batched
        self._outcomes, self._num_requests = outcomes, num_requests
        self._num_batched = num_batched
        self._rejected = dict(metrics.rejected)
        rates = {name: round((outcomes[name] - before[name]) / interval_s, 2) for name in _OUTCOMES}
        return Sample(
            requests_per_s=round((num_requests - num_before) / interval_s, 2),
            instances_per_s=Outcomes(**rates),
            rejected_per_s=rejected,
            latency_ms=_percentiles(self._latency.take()),
            queue_ms=_percentiles(self._queue.take()),
            inference_ms=_percentiles(self._inference.take()),
            batch_sizes=self._batch_sizes.take().by_edge(),
            num_batched=num_batched - num_batched_before,
            queue_depth=queue_depth,
            in_flight=metrics.in_flight,
        )

    def _count_outcomes(self) -> dict[str, int]:
        return {name: getattr(self._metrics, name) for name in _OUTCOMES}


class _SinceLastSample:
    """The counts of a distribution at the last sample."""

    def __init__(self, distribution: Distribution) -> None:
        self._distribution = distribution
        self._counts = distribution.counts()

    def take(self) -> Recent:
        """Return what was counted since the last call."""
        recent = self._distribution.since(self._counts)
        self._counts = self._distribution.counts()
        return recent


def _percentiles(recent: Recent) -> Percentiles | None:
    found = recent.percentiles(50, 95, 99)
    if found is None:
        return None
    p50, p95, p99 = (round(seconds * 1000, 3) for seconds in found)
    return Percentiles(p50=p50, p95=p95, p99=p99)
