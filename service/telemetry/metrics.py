"""Every number that `/metrics` shows: cheap to record, and put into Prometheus' form on demand.

Recording and rendering both happen in the front end's event loop, so there are no locks. Counters
are plain attributes, and the numbers of one batch are recorded by one call.
"""

import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from inferpool.service.telemetry.distribution import MAX_PENDING, Bucket, Distribution, Exemplars
from inferpool.workers.host.engine import Cause, GpuHealth

logger = logging.getLogger(__name__)

RejectReason = Literal[
    "queue_full",
    "arena_full",
    "key_share",
    "deadline",
    "objective",
    "draining",
    "unavailable",
    "quarantined",
]

DURATION_EDGES_S = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
)
"""Bucket edges from the fastest answer of a model that does nothing to the longest usual
timeout."""
DURATION_PARTS = 8
"""Parts that each bucket is counted in, for percentiles. A bucket spans a factor of 2.5 at most,
and a part 12 %."""
BATCH_SIZE_EDGES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0)

NO_MODEL = "-"
"""The label of calls that name no model served here. No model can have this name."""


class ModelMetrics:
    """The counters of one model or version. The attributes are written where things happen.

    Every instance that is `accepted` ends in exactly one of `succeeded`, `failed`, `expired` and
    `cancelled`. `in_flight` is counted separately, so that this can be checked: at every instant
    accepted = succeeded + failed + expired + cancelled + in flight.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.requests: dict[int, int] = defaultdict(int)
        """HTTP calls by status: `requests[200] += 1`."""
        self.answer_duration = Distribution(DURATION_EDGES_S, DURATION_PARTS)
        """Seconds from the head of an HTTP call to its answer, for calls answered with 200."""
        self.error_duration = Distribution(DURATION_EDGES_S, DURATION_PARTS)
        """The same for all other calls. Many are refusals, which take no time."""
        self.exemplars = Exemplars(DURATION_EDGES_S)
        """Exemplars of both together."""
        self.queue_wait = Distribution(DURATION_EDGES_S, DURATION_PARTS)
        """Seconds from an instance's arrival until work on its batch began."""
        self.prepare_duration = Distribution(DURATION_EDGES_S, DURATION_PARTS)
        """Seconds of decoding and collating, per batch."""
        self.inference_duration = Distribution(DURATION_EDGES_S, DURATION_PARTS)
        """Seconds of the forward pass and rendering, per batch."""
        self.batch_size = Distribution(BATCH_SIZE_EDGES)
        """Instances per batch."""
        self.stream_first_part = Distribution(DURATION_EDGES_S, DURATION_PARTS)
        """Seconds from the arrival of a stream's instance to its first part."""
        self.stream_part_gap = Distribution(DURATION_EDGES_S, DURATION_PARTS)
        """Seconds between two parts of a stream."""
        self.stream_parts = 0
        """Parts of streams."""
        self.accepted = 0
        self.succeeded = 0
        self.failed = 0
        self.expired = 0
        self.cancelled = 0
        self.in_flight = 0
        self.faults = 0
        """Instances among `failed` that the model failed on, or that ended workers."""
        self.unfit = 0
        """Instances among `failed` with JSON that made the model's `preprocess` raise."""
        self.retried = 0
        """Instances sent again after the worker that held them was lost."""
        self.rejected: dict[RejectReason, int] = dict.fromkeys(get_args(RejectReason), 0)
        """Instances that were not admitted, by reason: `rejected["queue_full"] += 1`."""
        self.restarts: dict[Cause, int] = dict.fromkeys(get_args(Cause), 0)
        """Incarnations that ended or did not start, by cause."""

    def __add__(self, other: "ModelMetrics") -> "ModelMetrics":
        """Return the sum of two; the exemplars are those of the first."""
        both = ModelMetrics(self.name)
        for name, value in vars(self).items():
            more = getattr(other, name)
            if isinstance(value, int | Distribution):
                setattr(both, name, value + more)
            elif isinstance(value, dict):
                getattr(both, name).update(
                    {key: value.get(key, 0) + more.get(key, 0) for key in value | more}
                )
        both.exemplars = self.exemplars
        return both

    def observe_batch(
        self, size: int, prepare_s: float, compute_s: float, waits_s: Sequence[float]
    ) -> None:
        """Count a batch that has come back, and the seconds that its instances waited."""
        self.batch_size.pending.append(size)
        self.prepare_duration.pending.append(prepare_s)
        self.inference_duration.pending.append(compute_s)
        self.queue_wait.pending += waits_s
        if max(len(self.batch_size.pending), len(self.queue_wait.pending)) >= MAX_PENDING:
            for each in (self.batch_size, self.prepare_duration, self.inference_duration):
                each.fold()
            self.queue_wait.fold()

    def forget(self) -> None:
        """Start again from zero, with what is in flight."""
        fresh, in_flight = ModelMetrics(self.name), self.in_flight
        for name, value in vars(fresh).items():
            if isinstance(value, Distribution):
                getattr(self, name).take()
            elif isinstance(value, dict):  # others hold it
                getattr(self, name).update(value)
            elif isinstance(value, int):
                setattr(self, name, value)
        self.accepted = self.in_flight = in_flight

    @property
    def request_duration(self) -> Distribution:
        """Seconds from the head of an HTTP call to its answer, for all calls."""
        return self.answer_duration + self.error_duration


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """A value that is read when the metrics are rendered."""

    name: str
    """A key of `GAUGES` or `COUNTERS`."""
    value: float
    labels: tuple[str, ...] = ()
    """Values for its labels, in the order given there; the last ones may be missing."""


GaugeSource = Callable[[], Iterable[Reading]]

_WORKER = ("model", "worker")
_GPU = ("gpu", "uuid", "host")
_HOST = ("host",)
GAUGES: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "queue_depth": ("Instances that wait for a worker.", ("model",)),
    "background_depth": ("Instances of jobs that wait until a worker is idle.", ("model",)),
    "open_streams": ("Streams that workers compute.", ("model",)),
    "max_queue_length": ("Instances that may wait; more are refused.", ("model",)),
    "queue_bytes": ("Payload bytes of the instances that wait.", ("model",)),
    "max_batch_size": ("Instances that a batch may have now.", ("model",)),
    "quarantined_inputs": ("Inputs refused because workers died of them.", ("model",)),
    "jobs": ("Jobs that are not over, by state.", ("state",)),
    "job_instances_waiting": ("Instances of these jobs that have no answer yet.", ()),
    "job_store_open": ("Whether the store of jobs is open, so that jobs are served.", ()),
    "job_store_bytes": ("Bytes of payloads and results in the store of jobs.", ()),
    "job_store_free_bytes": ("Bytes that are free on the disk with the folder of jobs.", ()),
    "arena_used_bytes": ("Shared memory taken by payloads, rounding included.", ()),
    "arena_bytes": ("Shared memory reserved for payloads.", ()),
    "workers": ("Workers by state.", ("model", "state")),
    "worker_up": ("Whether this worker takes batches.", ("model", "worker", "device", "host")),
    "worker_stalled": (
        "Whether it is ready, but neither busy nor showing a sign of life.",
        _WORKER,
    ),
    "worker_incarnation": ("Lives of the worker before this one.", _WORKER),
    "worker_resident_memory_bytes": ("Memory of its process, or of all its ranks.", _WORKER),
    "worker_rank_resident_memory_bytes": (
        "Memory of one process of a worker whose model is split.",
        ("model", "worker", "rank"),
    ),
    "worker_rank_parameter_bytes": (
        "Parameters and buffers of the part of the model that this rank holds.",
        ("model", "worker", "rank"),
    ),
    "worker_beat_age_seconds": ("Seconds since the worker's loop last turned.", _WORKER),
    "worker_answer_age_seconds": (
        "Seconds since the worker last answered a batch or a check.",
        _WORKER,
    ),
    "worker_batch_age_seconds": ("Seconds it has spent on its batch; 0 without one.", _WORKER),
    "worker_speed_gain": (
        "How many times as fast as exact the worker's speed preset was when it was measured.",
        ("model", "worker", "preset"),
    ),
    "worker_speed_deviation": (
        "How far that preset was from exact on the sample inputs, at most.",
        ("model", "worker", "preset"),
    ),
    "model_version": ("The version of the model that serves.", ("model",)),
    "model_ready": ("Whether the model has a worker that takes batches.", ("model",)),
    "ready": ("Whether this host should be sent requests.", ()),
    "draining": ("Whether this host is being drained.", ()),
    "connections": ("Open HTTP connections.", ()),
    "unfinished_bytes": ("Bytes of requests that are on their way.", ()),
    "max_unfinished_bytes": ("Bytes that those may take; beyond it the slowest are refused.", ()),
    "unread_bytes": ("Bytes of answers that clients have not read.", ()),
    "max_unread_bytes": ("Bytes that those may take; beyond it the slowest readers go.", ()),
    "gpu_up": ("Whether the driver answers for this GPU.", _GPU),
    "gpu_memory_bytes": ("Memory of the GPU.", _GPU),
    "gpu_memory_used_bytes": ("Memory of the GPU in use by any process.", _GPU),
    "gpu_utilization_ratio": ("Share of time in which the GPU was busy.", _GPU),
    "gpu_temperature_celsius": ("Temperature of the GPU.", _GPU),
    "gpu_power_watts": ("Power that the GPU draws.", _GPU),
    "gpu_last_xid": ("The last critical error that the driver reported.", _GPU),
    "standby": ("Whether another front end serves, and this one would take over.", ()),
    "hosts": ("Hosts whose agents are connected.", ()),
    "host_up": ("Whether the agent of this host is connected; 0 for ten minutes after.", _HOST),
    "host_workers_ready": ("Workers of this host that take batches.", _HOST),
    "host_round_trip_seconds": ("Seconds of a beat to the host and back, on average.", _HOST),
    "host_beat_age_seconds": ("Seconds since the host's last sign of life.", _HOST),
    "host_clock_offset_seconds": ("How far the host's clock is ahead of the front end's.", _HOST),
    "host_arena_bytes": ("Shared memory reserved for payloads on the host.", _HOST),
    "host_arena_used_bytes": ("Shared memory taken by payloads on the host.", _HOST),
    "front_up": ("Whether this front takes connections.", ("front",)),
    "front_connections": ("Open HTTP connections of this front.", ("front",)),
}
"""Gauges that a source may report: help text and label names. Names get the prefix `inferpool_`."""
COUNTERS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "jobs_ended": ("Jobs that ended, by state.", ("state",)),
    "job_instances": ("Instances of jobs whose answer was kept.", ("model", "outcome")),
    "webhook_calls": (
        "Calls that tell of the end of a job: told, failed and tried again later, or given up.",
        ("outcome",),
    ),
    "gpu_xid_errors": ("Critical errors that the driver reported.", _GPU),
    "hosts_lost": ("Connections of hosts that ended: the agent left, or was lost.", ("reason",)),
    "unfinished_refused": ("Requests refused because too many were on their way.", ()),
    "readers_cut": ("Connections closed because too many answers were not read.", ()),
    "front_restarts": ("Fronts that ended and were started again.", ("front",)),
    "traces_exported": ("Traced calls that the collector has taken.", ()),
    "traces_dropped": ("Traced calls that no collector will see: it was down, or too slow.", ()),
    "log_lines_dropped": ("Log lines lost because nobody read them in time.", ()),
}
"""Counters that a source may report. Names also get the suffix `_total`."""


class Metrics(Collector):
    """The metrics of all models and of the service, in a registry of their own."""

    def __init__(self, models: Iterable[str], versions: Mapping[str, str]) -> None:
        """Start at zero.

        Args:
            models: Names of the models served. No other name becomes a label.
            versions: Labels of the build information: {"version": "0.1.0", "torch": ...}.
        """
        self.unknown_model = ModelMetrics(NO_MODEL)
        """Only its `requests` are shown."""
        self.removed = ModelMetrics(NO_MODEL)
        """Its `requests` are those of models that were removed; they are not shown alone."""
        self._models: dict[str, ModelMetrics] = {}
        """Counts of each model as a whole, and of its versions that are gone."""
        self._parts: dict[str, list[ModelMetrics]] = {}
        """Counts of each version of a model."""
        for name in models:
            self.add(name)
        self.job_durations: Distribution | None = None
        """Seconds from the arrival of a job to its end; None where no jobs are kept."""
        self._versions = dict(versions)
        self._sources: list[GaugeSource] = []
        self._refresh: Callable[[], Awaitable[None]] | None = None
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def add(self, name: str) -> None:
        """Show the metrics of one more model, from zero."""
        self._models[name], self._parts[name] = ModelMetrics(name), []

    def remove(self, name: str) -> None:
        """Show the metrics of a model no longer."""
        for status, count in self.total(name).requests.items():
            self.removed.requests[status] += count
        del self._models[name], self._parts[name]

    def model(self, name: str) -> ModelMetrics:
        """Return where a model's HTTP calls are counted; `unknown_model` if it is not served."""
        return self._models.get(name, self.unknown_model)

    def show(self, part: ModelMetrics) -> None:
        """Include the counters of a version in `total` from now on, when clients reach it.

        The counters start again: those before were of no client's call.
        """
        parts = self._parts[part.name]
        if not any(part is each for each in parts):
            part.forget()
            parts.append(part)

    def fold(self, part: ModelMetrics) -> None:
        """Add the counters of a version that is gone to those of its model."""
        if part in self._parts.get(part.name, ()):
            self._parts[part.name].remove(part)
            self._models[part.name] += part

    def total(self, name: str) -> ModelMetrics:
        """Return a copy of what a model and its versions have counted up to now."""
        return sum(self._parts[name], self._models[name] + ModelMetrics(name))

    def gauge_source(self, source: GaugeSource) -> None:
        """Call a source whenever the metrics are rendered, in the event loop: it must be quick."""
        self._sources.append(source)

    def refresh_by(self, refresh: Callable[[], Awaitable[None]]) -> None:
        """Call this before the metrics are rendered, since other processes count too."""
        self._refresh = refresh

    async def refresh(self) -> None:
        """Collect what other processes have counted."""
        if self._refresh is not None:
            await self._refresh()

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """Render the metrics in Prometheus' text format, or as OpenMetrics if that is accepted.

        Args:
            accept: The Accept header of the call.

        Returns:
            The body and its Content-Type.
        """
        kinds = {part.partition(";")[0].strip().lower() for part in accept.split(",")}
        # Clients may also name versions and escapings. They make no difference for our names, and
        # the library fails on some.
        wanted = "application/openmetrics-text"
        encode, content_type = choose_encoder(wanted if wanted in kinds else "text/plain")
        return encode(self._registry), content_type

    def collect(self) -> Iterator[Metric]:
        """Yield the families anew at each scrape."""
        models = [self.total(name) for name in self._models]
        build = InfoMetricFamily("inferpool_build", "What is running.")
        build.add_metric([], self._versions)
        yield build
        yield _requests([*models, self.unknown_model])
        yield from _counters(models)
        yield from _histograms(models)
        text = "Instances accepted that have not ended."
        in_flight = GaugeMetricFamily("inferpool_instances_in_flight", text, labels=("model",))
        for model in models:
            in_flight.add_metric((model.name,), model.in_flight)
        yield in_flight
        if self.job_durations is not None:
            job, text = self.job_durations, "Seconds from the arrival of a job to its end."
            name = "inferpool_job_duration_seconds"
            yield HistogramMetricFamily(name, text, buckets=job.buckets(), sum_value=job.sum)
        yield from self._gauges()

    def describe(self) -> Iterable[Metric]:
        """Describe nothing, so that registering does not collect."""
        return ()

    def _gauges(self) -> Iterator[Metric]:
        families: dict[str, GaugeMetricFamily | CounterMetricFamily] = {}
        for source in self._sources:
            try:
                readings = list(source())
            except Exception:  # one broken source must not break the whole page
                logger.exception("a source of gauges failed")
                continue
            for reading in readings:
                if reading.name not in families:
                    families[reading.name] = _family(reading.name)
                families[reading.name].add_metric(reading.labels, reading.value)
        yield from families.values()


def recorder(metrics: Callable[[str], ModelMetrics]) -> Callable[[str, int, float], None]:
    """Return a function that counts each finished call in the metrics of its model."""

    def on_done(model: str, status: int, duration_s: float) -> None:
        record = metrics(model)
        record.requests[status] += 1
        durations = record.answer_duration if status == 200 else record.error_duration
        durations.pending.append(duration_s)  # as `observe` does, without another call for each
        if len(durations.pending) >= MAX_PENDING:
            durations.fold()

    return on_done


def gpu_gauges(gpus: Iterable[GpuHealth], *host: str) -> Iterator[Reading]:
    """Yield what is known of each GPU of this host, or of another one if that is named."""
    for gpu in gpus:
        labels = (str(gpu.index), gpu.uuid, *host)
        for name, value in (
            ("up", gpu.up),
            ("memory_bytes", gpu.memory_bytes),
            ("memory_used_bytes", gpu.memory_used_bytes),
            ("utilization_ratio", gpu.utilization),
            ("temperature_celsius", gpu.temperature_c),
            ("power_watts", gpu.power_w),
            ("last_xid", gpu.last_xid),
            ("xid_errors", gpu.xid_errors),
        ):
            if value is not None:
                yield Reading(name=f"gpu_{name}", value=value, labels=labels)


def _family(name: str) -> GaugeMetricFamily | CounterMetricFamily:
    if name in COUNTERS:
        text, labels = COUNTERS[name]
        return CounterMetricFamily(f"inferpool_{name}", text, labels=labels)
    text, labels = GAUGES[name]
    return GaugeMetricFamily(f"inferpool_{name}", text, labels=labels)


def _requests(models: Sequence[ModelMetrics]) -> Metric:
    family = _counter("requests", "HTTP calls, by status.", "code")
    for model in models:
        for code, count in sorted(model.requests.items()):
            family.add_metric((model.name, str(code)), count)
    return family


def _counters(models: Sequence[ModelMetrics]) -> Iterator[Metric]:
    instances = _counter("instances", "Instances accepted, and how they ended.", "outcome")
    unfit = _counter("instances_unfit", "Instances of JSON that preprocess raised on: 422.")
    parts = _counter("stream_parts", "Parts of streams.")
    retried = _counter("instances_retried", "Instances sent again after a worker was lost.")
    rejected = _counter("rejected", "Instances that were not admitted, and why.", "reason")
    restarts = _counter("worker_restarts", "Workers that ended or did not start: why.", "reason")
    for model in models:
        for outcome in ("accepted", "succeeded", "failed", "expired", "cancelled"):
            instances.add_metric((model.name, outcome), getattr(model, outcome))
        unfit.add_metric((model.name,), model.unfit)
        parts.add_metric((model.name,), model.stream_parts)
        retried.add_metric((model.name,), model.retried)
        for family, counts in ((rejected, model.rejected), (restarts, model.restarts)):
            for reason, count in counts.items():
                family.add_metric((model.name, reason), count)
    yield from (instances, unfit, parts, retried, rejected, restarts)


def _counter(name: str, text: str, *labels: str) -> CounterMetricFamily:
    return CounterMetricFamily(f"inferpool_{name}", text, labels=("model", *labels))


def _histograms(models: Sequence[ModelMetrics]) -> Iterator[Metric]:
    for attribute, text in (
        ("request_duration", "Seconds from an HTTP call to its answer."),
        ("queue_wait", "Seconds that an instance waited, here and in its worker."),
        ("prepare_duration", "Seconds of decoding and collating a batch."),
        ("inference_duration", "Seconds of computing and rendering a batch."),
        (
            "stream_first_part",
            "Seconds from an arrival to the first part of a stream.",
        ),
        ("stream_part_gap", "Seconds between two parts of a stream."),
        ("batch_size", "Instances in a batch."),
    ):
        unit = "" if attribute == "batch_size" else "_seconds"
        family = HistogramMetricFamily(f"inferpool_{attribute}{unit}", text, labels=("model",))
        for model in models:
            values: Distribution = getattr(model, attribute)
            buckets: Sequence[Bucket] = values.buckets()
            if attribute == "request_duration":
                buckets = model.exemplars.put_on(values.buckets())
            family.add_metric((model.name,), buckets, values.sum)
        yield family
