"""State of the processes that a supervisor keeps running, in the main process's event loop."""

import asyncio
from asyncio import Task
from dataclasses import dataclass, field
from typing import Generic, Literal, Protocol, TypeVar

from inferpool.workers.host.engine import Cause, Ending, Incarnation, WorkerHandle, WorkerId
from inferpool.workers.host.replica_files import ModelFiles
from inferpool.workers.shared.config import WorkerConfig

State = Literal["starting", "ready", "backoff", "failed", "stopped"]


C = TypeVar("C")
"""Configuration of a process: a `WorkerConfig`, or that of a front process."""
L = TypeVar("L", bound=Incarnation)


@dataclass(slots=True, kw_only=True, eq=False)
class Slot(Generic[C, L]):
    """State of one process over all its incarnations. Only its own task writes to it."""

    config: C
    id: WorkerId
    state: State = "starting"
    stage: str = "waiting to start"
    """Description of the present step of the start, for people."""
    reason: str = ""
    """Why the last incarnation ended or did not start, for people."""
    cause: Cause = "start"
    ended_at: float | None = None
    """Time at which it ended, on the event loop's clock; None before the first end."""
    num_restarts: int = 0
    task: Task[None] | None = None
    """Keeps the process running; None before the first start."""
    handle: L | None = None
    files: ModelFiles | None = None
    """Files that the incarnation has loaded; None if they are unknown."""
    num_failures: int = 0
    """Incarnations in a row that did not start, or ended before they had done any work."""
    num_deaths_at_work: int = 0
    """Incarnations in a row that died while they computed and had not answered anything."""
    was_ever_ready: bool = False
    due: float = 0.0
    """Time of the next start, on the event loop's clock."""
    is_asked_to_leave: bool = False
    """True while a healthy incarnation is being replaced."""
    is_paused: bool = False
    """No incarnation is started until `Supervisor.resume`."""
    may_renew: bool = False
    """The next incarnation may load other files than the other workers."""
    is_asked_to_start: asyncio.Event = field(default_factory=asyncio.Event)
    """Set to end the pause before the next start."""
    raised: str = ""
    """Traceback of the last start without its numbers, if the model raised an error."""
    told_with: str = ""
    """Incarnation under which that traceback was logged; it may be another worker's."""
    settled: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once the newest incarnation is ready or has failed to start."""

    @property
    def num_in_row(self) -> int:
        """Failures in a row, after which the next start pauses longer."""
        # The first two deaths at work may be one bad input and its retry: they cause no pause.
        return max(self.num_failures, self.num_deaths_at_work - 1)

    def count(self, ending: Ending, *, was_well: bool) -> None:
        """Count the end of an incarnation; one that was well until then ends the row."""
        if was_well:
            self.num_failures = self.num_deaths_at_work = 0
        elif ending.cause == "host":  # which says nothing of the worker
            pass
        elif ending.was_at_work:  # blame the batch: a request that kills twice is quarantined
            self.num_deaths_at_work += 1
        else:
            self.num_failures += 1


class Watcher(Protocol[C, L]):
    """Listener to a supervisor."""

    def on_progress(self, slot: Slot[C, L]) -> None:
        """Handle a new step of a start, `slot.stage`."""

    def on_ready(self, slot: Slot[C, L]) -> None:
        """Handle a process that became ready: `slot.handle` accepts work."""

    def on_gone(self, handle: L) -> None:
        """Handle an incarnation that accepts no more work."""

    def on_down(self, slot: Slot[C, L]) -> None:
        """Handle an end or a failed start; `slot.state` and `slot.reason` say what follows."""


WorkerSlot = Slot[WorkerConfig, WorkerHandle]
