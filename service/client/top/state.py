"""The shown parts of a feed event, and the view: past events and the user's choices.

Missing fields of an event are 0 or empty, so `top` also watches services of other versions.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from ..health import ModelState, ServiceHealth

_MAX_PAST = 300


class OutcomesSeen(msgspec.Struct):
    """Instances per second: those that came in, and those that ended, by outcome."""

    succeeded: float = 0.0
    failed: float = 0.0
    expired: float = 0.0
    cancelled: float = 0.0


class PercentilesSeen(msgspec.Struct):
    """Percentiles of durations, in milliseconds."""

    p50: float
    p95: float
    p99: float


class EndingSeen(msgspec.Struct):
    """End of a worker process."""

    worker: str
    time: float
    cause: str
    reason: str
    incarnation: int = 0


class SampleSeen(msgspec.Struct):
    """Work of a model in one interval, and its state at the end of it."""

    instances_per_s: OutcomesSeen = msgspec.field(default_factory=OutcomesSeen)
    rejected_per_s: dict[str, float] = {}
    latency_ms: PercentilesSeen | None = None
    queue_ms: PercentilesSeen | None = None
    inference_ms: PercentilesSeen | None = None
    batch_sizes: dict[str, int] = {}
    """Number of batches by the upper bound of their size."""
    queue_depth: int = 0
    in_flight: int = 0
    source: str = ""
    queue_limit: int = 0
    max_batch_size: int = 0
    quarantined: int = 0
    endings: list[EndingSeen] = []
    """Ends of workers, the newest first."""


class HostSeen(msgspec.Struct):
    """Resources that all models share."""

    connections: int = 0
    arena_bytes: int = 0
    arena_used_bytes: int = 0


class JobsSeen(msgspec.Struct):
    """Jobs in the store."""

    open: bool = True
    by_state: dict[str, int] = {}
    instances_waiting: int = 0
    instances_per_s: float = 0.0


class MomentSeen(msgspec.Struct):
    """One past second."""

    time: float
    models: dict[str, SampleSeen] = {}


class StateSeen(msgspec.Struct):
    """One event of the feed."""

    time: float
    health: ServiceHealth
    models: dict[str, SampleSeen]
    version: str = ""
    uptime_s: float = 0.0
    host: HostSeen = msgspec.field(default_factory=HostSeen)
    jobs: JobsSeen | None = None
    history: list[MomentSeen] = []
    """The last minutes, the oldest first; only in the first event."""


_decode = msgspec.json.Decoder(StateSeen).decode


def read_state(data: bytes) -> StateSeen:
    """Read the data of an event."""
    return _decode(data)


def as_json(data: bytes) -> str:
    """Return the whole event as indented JSON, without its history."""
    event: dict[str, Any] = msgspec.json.decode(data)
    event.pop("history", None)
    return msgspec.json.format(msgspec.json.encode(event)).decode()


@dataclass(slots=True, kw_only=True)
class Scene:
    """Data of all events up to a moment."""

    state: StateSeen | None = None
    """Newest event; None before the first."""
    past: deque[MomentSeen] = field(default_factory=lambda: deque(maxlen=_MAX_PAST))
    batches_per_s: Mapping[str, float] = field(default_factory=dict)
    """By the name of a worker."""

    @property
    def models(self) -> Sequence[ModelState]:
        """Models of the service."""
        return self.state.health.models if self.state else ()

    def take(self, state: StateSeen) -> None:
        """Add the next event."""
        if state.history:
            self.past.clear()
            self.past.extend(state.history)
        if not self.past or self.past[-1].time < state.time - 1e-3:
            self.past.append(MomentSeen(time=state.time, models=state.models))
        self.batches_per_s = _rates(self.state, state)
        self.state = state

    def samples(self, model: ModelState) -> list[SampleSeen]:
        """Return the past samples of a model, the oldest first."""
        none = SampleSeen()
        return [moment.models.get(model.name, none) for moment in self.past]


class View:
    """State of the view. Events and keys change it; the screen draws it."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.trouble = ""
        """Reason why no events arrive; empty while they do."""
        self.is_help = False
        self.chosen = 0
        self._now = Scene()
        self._then: Scene | None = None

    @property
    def is_paused(self) -> bool:
        """True while the picture is frozen."""
        return self._then is not None

    @property
    def scene(self) -> Scene:
        """The data to draw."""
        return self._then or self._now

    def take(self, state: StateSeen) -> None:
        """Add the next event. The chosen model stays chosen while others come and go."""
        names = [model.name for model in self._now.models]
        self._now.take(state)
        self.trouble = ""
        if self._then is None and self.chosen < len(names):
            now = [model.name for model in self._now.models]
            name = names[self.chosen]
            self.chosen = now.index(name) if name in now else min(self.chosen, max(0, len(now) - 1))

    def pause(self) -> None:
        """Freeze the picture, or continue it."""
        self._then = None if self._then else replace(self._now, past=self._now.past.copy())

    def toggle_help(self) -> None:
        """Show or hide the help."""
        self.is_help = not self.is_help

    def choose(self, number: int) -> None:
        """Show the model with this index, if there is one."""
        if 0 <= number < len(self.scene.models):
            self.chosen = number

    def step(self, by: int) -> None:
        """Move the choice of the model by a number of places, around the end."""
        self.chosen = (self.chosen + by) % max(1, len(self.scene.models))


def _rates(before: StateSeen | None, now: StateSeen) -> dict[str, float]:
    """Return batches per second of each worker that both events have."""
    if before is None or now.time <= before.time:
        return {}
    elapsed_s = now.time - before.time
    lives = {
        (worker.name, worker.incarnation): worker.num_batches for worker in before.health.workers
    }
    return {
        worker.name: max(0.0, (worker.num_batches - then) / elapsed_s)
        for worker in now.health.workers
        if (then := lives.get((worker.name, worker.incarnation))) is not None
    }
