"""The seam between the service and whatever runs workers: processes here, actors elsewhere."""

from asyncio import Future
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from inferpool.models.split.report import RankPart
from inferpool.workers.config import WorkerConfig
from inferpool.workers.messages import BatchDone, ItemRef, Ready


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerId:
    """Which worker of which model, and which of its lives."""

    model: str
    slot: int
    """Stable over restarts, from 0."""
    incarnation: int = 0

    @property
    def worker(self) -> str:
        """The worker over all its lives, for people: model/slot."""
        return f"{self.model}/{self.slot}"

    def next_life(self) -> "WorkerId":
        """The incarnation after this one."""
        return WorkerId(model=self.model, slot=self.slot, incarnation=self.incarnation + 1)

    def __str__(self) -> str:
        """As it is written in logs: model/slot#incarnation."""
        return f"{self.worker}#{self.incarnation}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkserverVitals:
    """What can be seen of the forkserver from outside, now."""

    pid: int
    is_ready: bool
    """It has imported torch, and forks at once."""
    incarnation: int
    """Counts its lives, from 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankVitals:
    """What can be seen of one process of a split replica from outside, now."""

    rank: int
    pid: int
    device: str
    """As a person would name it on this host: "cuda:GPU-5f...", "cpu"."""
    device_name: str
    """What it is: "NVIDIA H100 80GB HBM3", "cpu"; empty while it loads."""
    rss_bytes: int
    last_beat_age_s: float
    part: RankPart | None
    """What it holds of the model; None while it loads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Vitals:
    """What can be seen of a worker from outside, now."""

    pid: int
    """Of its lead, if it is split."""
    rss_bytes: int
    """Of all its processes."""
    last_beat_age_s: float
    num_batches: int
    last_answer_age_s: float
    """Since it last proved itself by a good answer, to a batch or to a canary."""
    batch_age_s: float = 0.0
    """For how long it has been at the batch that it is at work on; 0 while it has none."""
    ranks: Sequence[RankVitals] = ()
    """Each process of a split replica; none of another."""


Cause = Literal["asked", "canary", "device", "exit", "files", "hang", "memory", "signal", "start"]
"""What ended an incarnation: it was asked to leave, it failed on its own sample, it lost its
device's context, it left, it may not serve as its files have changed on disk, it hung, it was
killed for memory, or by another signal, or it never started."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How an incarnation ended."""

    cause: Cause
    reason: str
    """For a person."""
    was_at_work: bool = False
    """It held a batch that it had begun, which may be what ended it."""


class Incarnation(Protocol):
    """One life of a worker, or of a front, that is ready."""

    @property
    def id(self) -> WorkerId:
        """Which process, and which of its lives."""

    @property
    def has_worked(self) -> bool:
        """It has been of use: a worker has answered a batch."""

    async def wait(self) -> Ending:
        """Wait until it is gone, and say how it ended; one that hangs is killed and so gone."""

    async def stop(self, grace_s: float) -> None:
        """Let it finish and leave, then terminate, then kill; wait for the exit."""


class WorkerHandle(Incarnation, Protocol):
    """One ready incarnation of a worker."""

    @property
    def credit(self) -> int:
        """How many batches it may hold at once."""

    @property
    def ready(self) -> Ready:
        """What it said of itself when it was ready."""

    @property
    def is_stalled(self) -> bool:
        """It is not at work, and shows no sign of life: no work would be taken up now."""

    def run(self, items: Sequence[ItemRef]) -> Future[BatchDone]:
        """Give it a batch. The arena's slots may be used again once the future is done.

        The future raises `WorkerLostError` after the exit of the incarnation is confirmed.
        """

    def vitals(self) -> Vitals:
        """How it is doing."""


class Engine(Protocol):
    """What starts workers."""

    async def start(
        self, id: WorkerId, config: WorkerConfig, on_progress: Callable[[str], None]
    ) -> WorkerHandle:
        """Start an incarnation and wait until it is ready.

        Raises:
            WorkerStartError: It did not become ready.
        """
