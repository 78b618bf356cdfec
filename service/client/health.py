"""Models and workers of a service, read from its /health."""

from typing import Any

import msgspec

_NO_WORKER = "failed"
_LOST = "lost"


class Rank(msgspec.Struct):
    """One process of a worker with a split model."""

    rank: int
    pid: int


class DecoderState(msgspec.Struct):
    """A process that decodes for a worker."""

    number: int
    pid: int
    num_decoded: int = 0


class WorkerState(msgspec.Struct):
    """One worker."""

    name: str
    state: str
    incarnation: int = 0
    pid: int | None = None
    placement: str = "replicate"
    ranks: list[Rank] = []
    """Its processes, if its model is split over several."""
    decoders: list[DecoderState] = []
    reason: str = ""
    speed: str | None = None
    decode: str | None = None
    device: str = ""
    num_batches: int = 0
    rss_bytes: int | None = None
    restarts: int = 0
    host: str = ""
    """The host that it runs on, of several."""

    @property
    def pids(self) -> dict[int | None, int]:
        """Its processes by rank; None is the rank of a worker that is not split."""
        if self.ranks:
            return {each.rank: each.pid for each in self.ranks}
        return {None: self.pid} if self.pid else {}


class SpeedSearchState(msgspec.Struct):
    """State of the search for a faster speed preset."""

    state: str = "off"
    text: str = ""


class LoadedVersion(msgspec.Struct):
    """One version of a model."""

    number: int
    state: str
    reason: str = ""


class ModelState(msgspec.Struct):
    """One model and its workers."""

    name: str
    workers: list[WorkerState] = []
    """Workers of the version that serves."""
    other_workers: list[WorkerState] = []
    """Workers of versions that are loaded and do not serve."""
    version: int | None = None
    """The version that serves."""
    change: str = ""
    """The change in progress."""
    versions: list[LoadedVersion] = []
    """Versions, the newest first."""
    inputs: list[dict[str, Any]] = []
    """Name, dtype and shape of each input."""
    example: object = None
    interface: dict[str, Any] = {}
    """How clients speak to it, where that is not as usual: `models.spec.Interface`."""
    reads_own_form: bool = False
    """True if it reads another form than that of `inputs`."""
    ready: bool = False
    reason: str = ""
    speed_search: SpeedSearchState = msgspec.field(default_factory=SpeedSearchState)


class FrontState(msgspec.Struct):
    """A process that answers calls."""

    name: str
    state: str


class DeviceState(msgspec.Struct):
    """A GPU."""

    index: int
    up: bool
    memory_bytes: int = 0
    memory_used_bytes: int | None = None
    utilization: float | None = None
    temperature_c: float | None = None
    last_xid: int = 0


class ForkserverState(msgspec.Struct):
    """The process that forks workers."""

    state: str
    pid: int
    incarnation: int


class KnownHost(msgspec.Struct):
    """A host with an agent that is connected, or was."""

    name: str
    state: str = ""
    epoch: int = 0
    """Number of the connection: a new one after each loss."""
    address: str = ""
    devices: list[str] = []
    version: str = ""
    torch: str = ""
    python: str = ""
    workers: int = 0
    workers_ready: int = 0
    last_beat_age_s: float = 0.0
    round_trip_s: float | None = None
    clock_offset_s: float | None = None
    gpus: list[DeviceState] = []

    @property
    def is_connected(self) -> bool:
        """Return whether the host may get work."""
        return self.state != _LOST


class LostHost(msgspec.Struct):
    """A host that was lost a short time ago."""

    name: str
    state: str = ""
    reason: str = ""
    age_s: float = 0.0


class ServiceHealth(msgspec.Struct):
    """The whole service."""

    models: list[ModelState]
    status: str = ""
    fronts: list[FrontState] = []
    """The processes that answer calls, if there are several."""
    gpus: list[DeviceState] = []
    forkserver: ForkserverState | None = None
    version: str = ""
    torch: str = ""
    python: str = ""
    cluster_address: str | None = None
    """Address at which agents join; None if all workers run on the service's own host."""
    standby: str = ""
    """Why none may join now; empty if they may."""
    hosts: list[KnownHost] = []
    """The hosts, if there are several."""
    lost_hosts: list[LostHost] = []

    @property
    def workers(self) -> list[WorkerState]:
        """Workers of all models."""
        return [worker for model in self.models for worker in model.workers]

    @property
    def is_full(self) -> bool:
        """Return whether every worker is ready."""
        return all(worker.state == "ready" for worker in self.workers)

    def is_host_full(self, host: KnownHost) -> bool:
        """Return whether a host is connected, has workers, and all of them are ready."""
        states = {worker.state for worker in self.workers if worker.host == host.name}
        return host.is_connected and states == {"ready"}

    @property
    def are_decoders_warm(self) -> bool:
        """Return whether every decoder has decoded something."""
        return all(each.num_decoded for worker in self.workers for each in worker.decoders)

    @property
    def failure(self) -> str:
        """Reason why a worker was given up; empty if none was."""
        failed = [worker for worker in self.workers if worker.state == _NO_WORKER]
        return f"{failed[0].name}: {failed[0].reason}" if failed else ""
