"""What is known of the service, and what of it the person has chosen to see. No input or output."""

import copy
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from inferpool.service.tools.top.state import (
    ModelSeen,
    MomentSeen,
    SampleSeen,
    StateSeen,
    WorkerSeen,
)

_MAX_PAST = 300


@dataclass(slots=True, kw_only=True)
class Scene:
    """What the events have said until a moment."""

    state: StateSeen | None = None
    """The newest; None until there was one."""
    past: deque[MomentSeen] = field(default_factory=lambda: deque(maxlen=_MAX_PAST))
    batches_per_s: Mapping[str, float] = field(default_factory=dict)
    """Of each worker, by name."""

    @property
    def models(self) -> Sequence[ModelSeen]:
        """Those that are served."""
        return self.state.health.models if self.state else ()

    def take(self, state: StateSeen) -> None:
        """The next event."""
        if state.history:
            self.past.clear()
            self.past.extend(state.history)
        if not self.past or self.past[-1].time < state.time - 1e-3:
            self.past.append(MomentSeen(time=state.time, models=state.models))
        self.batches_per_s = _rates(self.state, state)
        self.state = state

    def samples(self, model: ModelSeen) -> list[SampleSeen]:
        """The past of a model, the oldest first."""
        none = SampleSeen()
        return [moment.models.get(model.name, none) for moment in self.past]

    def copy(self) -> "Scene":
        """This one, which later events do not change."""
        other = copy.copy(self)
        other.past = self.past.copy()
        return other


class View:
    """Changed by events and keys; the screen draws it."""

    def __init__(self, url: str) -> None:
        """Know nothing yet."""
        self.url = url
        self.trouble = ""
        """Why no events come; empty while they do."""
        self.is_help = False
        self.chosen = 0
        """Which model is shown."""
        self._now = Scene()
        self._then: Scene | None = None

    @property
    def is_paused(self) -> bool:
        """What is shown stands still."""
        return self._then is not None

    @property
    def scene(self) -> Scene:
        """What is shown."""
        return self._then or self._now

    def take(self, state: StateSeen) -> None:
        """The next event."""
        self._now.take(state)
        self.trouble = ""

    def pause(self) -> None:
        """Stand still, or go on."""
        self._then = None if self._then else self._now.copy()

    def choose(self, number: int) -> None:
        """Show another model, if there are so many."""
        if 0 <= number < len(self.scene.models):
            self.chosen = number

    def step(self, by: int) -> None:
        """Show the next model or the one before; the last is followed by the first."""
        self.chosen = (self.chosen + by) % max(1, len(self.scene.models))


def _rates(before: StateSeen | None, now: StateSeen) -> dict[str, float]:
    """Batches per second of each worker that was there before."""
    if before is None or now.time <= before.time:
        return {}
    elapsed_s = now.time - before.time
    lives = {(worker.name, worker.incarnation): worker.num_batches for worker in _workers(before)}
    return {
        worker.name: max(0.0, (worker.num_batches - then) / elapsed_s)
        for worker in _workers(now)
        if (then := lives.get((worker.name, worker.incarnation))) is not None
    }


def _workers(state: StateSeen) -> list[WorkerSeen]:
    return [worker for model in state.health.models for worker in model.workers]
