"""What an event of the feed says, as far as it is shown. Fields that are not there are 0 or empty.

That way an older service, or a newer one, can be watched too.
"""

from typing import Any

import msgspec


class OutcomesSeen(msgspec.Struct):
    """Instances by the second: how many came in, and how the others ended."""

    accepted: float = 0.0
    succeeded: float = 0.0
    failed: float = 0.0
    expired: float = 0.0
    cancelled: float = 0.0


class PercentilesSeen(msgspec.Struct):
    """Of durations in milliseconds."""

    p50: float
    p95: float
    p99: float


class EndingSeen(msgspec.Struct):
    """The end of one life of a worker."""

    worker: str
    time: float
    cause: str
    reason: str
    incarnation: int = 0


class SampleSeen(msgspec.Struct):
    """What a model did in one interval, and where it stood at its end."""

    requests_per_s: float = 0.0
    instances_per_s: OutcomesSeen = msgspec.field(default_factory=OutcomesSeen)
    rejected_per_s: dict[str, float] = {}
    latency_ms: PercentilesSeen | None = None
    queue_ms: PercentilesSeen | None = None
    inference_ms: PercentilesSeen | None = None
    batch_sizes: dict[str, int] = {}
    """Batches by the upper edge of their size."""
    queue_depth: int = 0
    in_flight: int = 0
    source: str = ""
    queue_limit: int = 0
    max_batch_size: int = 0
    quarantined: int = 0
    endings: list[EndingSeen] = []
    """The newest first."""


class WorkerSeen(msgspec.Struct):
    """One worker, as /health has it."""

    name: str
    state: str
    device: str = ""
    incarnation: int = 0
    num_batches: int = 0
    rss_bytes: int | None = None
    restarts: int = 0
    speed: str | None = None
    reason: str = ""


class SpeedSearchSeen(msgspec.Struct):
    """The search for a faster speed preset."""

    state: str = "off"
    text: str = ""


class ModelSeen(msgspec.Struct):
    """One model and its workers, as /health has it."""

    name: str
    ready: bool
    reason: str = ""
    speed_search: SpeedSearchSeen = msgspec.field(default_factory=SpeedSearchSeen)
    workers: list[WorkerSeen] = []


class FrontSeen(msgspec.Struct):
    """One process that takes connections."""

    name: str
    state: str


class GpuSeen(msgspec.Struct):
    """One GPU."""

    index: int
    up: bool
    memory_bytes: int = 0
    memory_used_bytes: int | None = None
    utilization: float | None = None
    temperature_c: float | None = None
    last_xid: int = 0


class HealthSeen(msgspec.Struct):
    """The whole service, as /health has it."""

    status: str
    models: list[ModelSeen]
    fronts: list[FrontSeen] = []
    gpus: list[GpuSeen] = []


class HostSeen(msgspec.Struct):
    """What all models share."""

    connections: int = 0
    arena_bytes: int = 0
    arena_used_bytes: int = 0


class MomentSeen(msgspec.Struct):
    """A second that has passed."""

    time: float
    models: dict[str, SampleSeen] = {}


class StateSeen(msgspec.Struct):
    """One event."""

    time: float
    health: HealthSeen
    models: dict[str, SampleSeen]
    version: str = ""
    uptime_s: float = 0.0
    host: HostSeen = msgspec.field(default_factory=HostSeen)
    history: list[MomentSeen] = []
    """The last minutes, the oldest first: in the first event alone."""


_decode = msgspec.json.Decoder(StateSeen).decode


def read_state(data: bytes) -> StateSeen:
    """An event's data.

    Raises:
        ValueError: It is something else.
    """
    return _decode(data)


def as_json(data: bytes) -> str:
    """An event's data for machines: all that it says, but for the past."""
    event: dict[str, Any] = msgspec.json.decode(data)
    event.pop("history", None)
    return msgspec.json.format(msgspec.json.encode(event)).decode()
