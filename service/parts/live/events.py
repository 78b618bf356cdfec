"""The events of `/events`: what the service does, second by second."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from inferpool.service.api.routes.health import HealthReport, VersionState
from inferpool.workers.host.engine import Cause


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcomes:
    """Instances per second: how many came in, and how the others ended."""

    accepted: float
    succeeded: float
    failed: float
    expired: float
    cancelled: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Percentiles:
    """Percentiles of durations in milliseconds, each to within a few percent."""

    p50: float
    p95: float
    p99: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A model's work in one interval, and its state at the end."""

    requests_per_s: float
    """HTTP calls answered, with any status."""
    instances_per_s: Outcomes
    rejected_per_s: Mapping[str, float]
    """Refused instances by reason; only reasons that occurred."""
    latency_ms: Percentiles | None
    """HTTP calls answered with 200, from their head to their answer; null if there were none."""
    queue_ms: Percentiles | None
    """The waiting time of instances, here and in their workers."""
    inference_ms: Percentiles | None
    """The forward pass and rendering of batches."""
    batch_sizes: Mapping[str, int]
    """Batches by the upper edge of their size: 1, 2, 4, ... 256, `+Inf`; only sizes that
    occurred."""
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
class ChangeEvent:
    """A step of a change: a version came into another state, or a model was removed."""

    time: float
    """Seconds of the Unix epoch."""
    model: str
    version: int | None
    """Null for the whole model."""
    state: VersionState
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveSample(Sample):
    """The newest sample of a model, with values that are not kept for the history."""

    source: str
    """The model's source in the settings."""
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
    """Values that all models share."""

    connections: int
    """Open HTTP connections."""
    arena_bytes: int
    """Shared memory reserved for payloads."""
    arena_used_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredJobs:
    """Jobs in the store, of all keys, about a second ago."""

    open: bool
    """False while the store cannot be used; then no job is served, and all counts may be zero."""
    by_state: Mapping[str, int]
    """Jobs by state; only states that occur."""
    instances_waiting: int
    """Instances of jobs that are not over and have no answer yet."""
    instances_per_s: float
    """Instances that got their answers from this service."""
    store_bytes: int
    """Payloads and results in the store."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """A second that has passed."""

    time: float
    """The second's end, in seconds of the Unix epoch."""
    models: Mapping[str, Sample]


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """The data of an event `state`."""

    time: float
    """Seconds of the Unix epoch."""
    interval_s: float
    """The period of the rates and percentiles."""
    uptime_s: float
    version: str
    """The version of inferpool."""
    default_model: str
    """The model that `/predict` asks."""
    health: HealthReport
    """The same as in `/health`."""
    host: HostState
    models: Mapping[str, LiveSample]
    jobs: StoredJobs | None = None
    """Null if no jobs are kept here."""
    changes: Sequence[ChangeEvent] = ()
    """The latest steps of changes of models, the newest first."""
    history: Sequence[Moment] = ()
    """The last minutes, the oldest first: in the first event of a stream only."""
