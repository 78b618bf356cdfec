"""What /health says of the models and workers of a service."""

import msgspec

from inferpool.models.spec import TensorSpec
from inferpool.service.tools.trial.connection import TrialConnection

_TIMEOUT_S = 10.0
_NO_WORKER = "failed"


class Rank(msgspec.Struct):
    """One process of a worker whose model is split."""

    rank: int
    pid: int


class WorkerState(msgspec.Struct):
    """One worker, as /health has it."""

    name: str
    state: str
    incarnation: int
    pid: int | None
    placement: str = "replicate"
    """How its model is split, if it is."""
    ranks: list[Rank] = []
    """Its processes, if its model is split."""
    reason: str = ""
    speed: str | None = None
    """The speed preset that it serves with."""
    decode: str | None = None
    """How it decodes inputs."""

    @property
    def pids(self) -> dict[int | None, int]:
        """Its processes by rank; one that is not split has none."""
        if self.ranks:
            return {each.rank: each.pid for each in self.ranks}
        return {None: self.pid} if self.pid else {}


class ModelState(msgspec.Struct):
    """One model and its workers."""

    name: str
    workers: list[WorkerState]
    inputs: list[TensorSpec] = []
    example: object = None
    """An instance that it takes."""
    reads_own_form: bool = False
    """It reads something else than `inputs` say."""


class ForkserverState(msgspec.Struct):
    """The process that forks workers."""

    state: str
    pid: int
    incarnation: int


class ServiceHealth(msgspec.Struct):
    """The whole service."""

    models: list[ModelState]
    fronts: list[object] = []
    """The processes that take calls, where they are several."""
    forkserver: ForkserverState | None = None

    @property
    def workers(self) -> list[WorkerState]:
        """Of all models."""
        return [worker for model in self.models for worker in model.workers]

    @property
    def is_full(self) -> bool:
        """Every worker is ready."""
        return all(worker.state == "ready" for worker in self.workers)

    @property
    def failure(self) -> str:
        """Why a worker will never come; empty if none is given up."""
        failed = [worker for worker in self.workers if worker.state == _NO_WORKER]
        return f"{failed[0].name}: {failed[0].reason}" if failed else ""


_decode = msgspec.json.Decoder(ServiceHealth).decode


async def read_health(connection: TrialConnection) -> ServiceHealth:
    """Ask for the state of all workers.

    Raises:
        NoAnswerError: There is no answer that tells.
    """
    return _decode(await connection.read("/health", _TIMEOUT_S))
