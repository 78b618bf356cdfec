"""Interfaces between the service and the engines that run workers."""

from asyncio import Future
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from inferpool.workers.shared.config import WorkerConfig
from inferpool.workers.shared.messages import BatchDone, ItemRef, Ready, StreamPart

OnParts = Callable[[Sequence[StreamPart]], None]
"""Called with parts of the streams of one batch, as they come; never after the batch's answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerId:
    """Identity of one incarnation of a worker."""

    model: str
    slot: int
    """Number of the worker among those of its model, from 0; restarts keep it."""
    incarnation: int = 0
    version: int = 1
    """The version of the model that it serves."""
    host: str = ""
    """Name of the host that runs it; empty for the host of the front end."""

    @property
    def number(self) -> str:
        """Name of the worker among those of its model: slot, or version/slot after the first."""
        return str(self.slot) if self.version == 1 else f"{self.version}/{self.slot}"

    @property
    def worker(self) -> str:
        """Name of the worker over all its incarnations: model/number."""
        return f"{self.model}/{self.number}"

    @property
    def log_fields(self) -> dict[str, str]:
        """Fields of log lines about it, besides its name."""
        return {"host": self.host} if self.host else {}

    def next_life(self) -> "WorkerId":
        """Return the identity of the next incarnation."""
        return replace(self, incarnation=self.incarnation + 1)

    def __str__(self) -> str:
        """Return the form that logs use: model/number#incarnation."""
        return f"{self.worker}#{self.incarnation}"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPeriods:
    """How often a host looks at its workers, and how long it waits for them."""

    look_s: float = 2.0
    """Seconds between two looks at each process, which cost some 0.1 ms each."""
    canary_every_s: float = 5.0
    """Seconds without a good answer after which a worker gets a canary."""
    patience_s: float = 5.0
    """Seconds that a worker may take to begin a batch, or to answer a quick canary."""
    retire_s: float = 5.0
    """Seconds that a worker may take to leave once it has finished its batches."""
    follow_out_s: float = 1.0
    """Seconds that the other ranks may take to leave after one has left as asked."""
    give_up_s: float = 5.0
    """Seconds to wait for a start that was given up; after that it ends itself later."""
    exit_s: float = 5.0
    """Seconds that a process may take to exit after SIGKILL."""
    stacks_step_s: float = 0.01
    """Seconds between two looks at the stacks that a process is asked to write: see `Stacks`."""
    max_decoder_pause_s: float = 2.0
    """Longest pause before the next start of a decoder. It is less than the time that a worker
    waits for a decoder that its inputs have killed."""
    decoder_rest_s: float = 300.0
    """Pause of decoders that die before they do anything."""


USUAL_PERIODS = WorkerPeriods()


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkserverHealth:
    """The process that forks workers. They outlive it."""

    state: str
    """`starting`, while it imports torch, or `ready`."""
    pid: int
    incarnation: int
    """Counts its lives, from 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuHealth:
    """One GPU that workers may use, or one slice of it; null where the driver tells nothing."""

    index: int
    uuid: str
    name: str
    up: bool
    """The driver answers for it."""
    memory_bytes: int
    memory_used_bytes: int | None
    """Memory of all processes, also of other programs."""
    utilization: float | None
    """The share of the time in which something ran on it, from 0 to 1."""
    temperature_c: float | None
    power_w: float | None
    xid_errors: int | None
    """Critical errors that the driver has reported since the service started."""
    last_xid: int
    """NVIDIA's number of the last of them; 0 for none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankHealth:
    """One process of a worker whose model is split."""

    rank: int
    """0 leads: it is given the batches."""
    pid: int
    device: str
    device_name: str
    """The device's model."""
    rss_bytes: int
    part_bytes: int
    """Bytes of the parameters and buffers that it holds."""
    part: str
    """The part of the model that it holds."""
    last_beat_age_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderHealth:
    """One process that decodes and resizes for a worker."""

    number: int
    pid: int
    rss_bytes: int
    num_decoded: int
    """Instances that it has prepared."""
    restarts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Vitals:
    """State of a worker, as seen from outside."""

    pid: int
    """Process number; that of the lead if the replica is split."""
    rss_bytes: int
    """Memory of all its processes."""
    last_beat_age_s: float
    num_batches: int
    last_answer_age_s: float
    """Seconds since its last good answer, to a batch or to a canary."""
    failure: str = ""
    """Error of its last canary; empty if it gave a good answer to that, or to a batch since."""
    batch_age_s: float = 0.0
    """Seconds that it has computed its present batch; 0 if it has none."""
    ranks: Sequence[RankHealth] = ()
    """Processes of a split replica; empty for others."""
    decoders: Sequence[DecoderHealth] = ()
    """Processes that prepare instances for it."""


Cause = Literal[
    "asked", "canary", "device", "exit", "files", "hang", "host", "memory", "signal", "start"
]
"""Kind of end: asked to leave, failed canaries, lost the device's context, exited, model files
changed on disk, hung, lost with its host, killed for memory, killed by another signal, never
started."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How an incarnation ended."""

    cause: Cause
    reason: str
    """Explanation for people."""
    was_at_work: bool = False
    """True if it had begun a batch, which may have caused the end."""


class Incarnation(Protocol):
    """A running process that is ready: one incarnation of a worker, or of a front process."""

    @property
    def id(self) -> WorkerId:
        """Identity of the incarnation."""

    @property
    def has_worked(self) -> bool:
        """True once it has done real work: a worker has answered a batch."""

    async def wait(self) -> Ending:
        """Wait for its exit and return how it ended; a process that hangs is killed."""

    async def stop(self, grace_s: float) -> None:
        """Ask it to finish, then terminate it, then kill it; return after its exit."""


class WorkerHandle(Incarnation, Protocol):
    """A ready incarnation of a worker."""

    @property
    def credit(self) -> int:
        """Number of batches that it may hold at once."""

    @property
    def ready(self) -> Ready:
        """Message that announced the worker as ready."""

    @property
    def is_stalled(self) -> bool:
        """True if it computes nothing and gives no sign of life: it would not begin a batch now."""

    def run(self, items: Sequence[ItemRef], on_parts: OnParts | None = None) -> Future[BatchDone]:
        """Send a batch. Its slots in the arena may be reused once the future is done.

        Where the model answers in parts, `on_parts` gets them.

        The future raises `WorkerLostError` once the exit of the worker is confirmed.
        """

    def drop(self, batch: Future[BatchDone], indices: Sequence[int]) -> None:
        """End some streams of a batch that it holds: nobody waits for them any more."""

    def vitals(self) -> Vitals:
        """Return the present state."""


class Engine(Protocol):
    """Starter of workers."""

    async def start(
        self, id: WorkerId, config: WorkerConfig, on_progress: Callable[[str], None]
    ) -> WorkerHandle:
        """Start an incarnation and return once it is ready.

        Raises:
            WorkerStartError: It did not become ready.
        """
