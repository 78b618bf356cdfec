"""Processes that a part attaches to a worker, as the worker's view on the host knows them.

They start once the worker is loaded, are looked at with it, and end with it.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from typing import Protocol

from inferpool.workers.host.engine import DecoderHealth, WorkerPeriods
from inferpool.workers.host.observed import OomKills
from inferpool.workers.shared.memory import SharedMemory
from inferpool.workers.shared.messages import Ready


class Attachment(Protocol):
    """The attached processes of one part. Used in the event loop."""

    @property
    def worker_end(self) -> object:
        """Object that the worker's own process gets, pickled."""

    @property
    def is_gone(self) -> bool:
        """True once no process is left and none will be started, which `end` leads to."""

    def on_started(self) -> None:
        """Close what only the worker's own process needs, since that has it."""

    def begin(self, ready: Ready) -> int:
        """Start processes for the worker, which is loaded, and keep them running.

        Returns:
            Number of batches that the worker may hold more because of them.
        """

    def look(self) -> None:
        """Record what cannot be read after the end of a process."""

    def vitals(self) -> Sequence[DecoderHealth]:
        """Return the state of those that run."""

    def end(self) -> None:
        """Kill them all, and start no more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Starter:
    """Means to start the processes of a part."""

    arena: SharedMemory
    oom_kills: OomKills
    periods: WorkerPeriods
    until_ready: Callable[[], Awaitable[None]]
    """Returns once processes can be started; raises an error if they cannot for long."""
    start: Callable[..., Awaitable[BaseProcess]]
    """Starts a process: called with its target, its name and its arguments."""


AttachProcesses = Callable[..., Attachment]
"""Side of a part on the host: called with the id and the configuration of the worker, a `Starter`,
and a function to call once `Attachment.is_gone`."""
