"""GET /health, /health/live and /health/ready: for people, orchestrators and balancers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from fastapi import APIRouter, Request, Response

from inferpool.service.api.auth import Guard
from inferpool.service.api.codecs.body import joined
from inferpool.service.api.errors import problem_response
from inferpool.service.errors import UnavailableError

HostStatus = Literal["starting", "ready", "degraded", "unavailable", "draining"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LastEnding:
    """How the life of a worker before this one ended."""

    cause: str
    """`asked`, `canary`, `device`, `exit`, `files`, `hang`, `memory`, `signal` or `start`."""
    reason: str
    age_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RankHealth:
    """One process of a worker whose model is split."""

    rank: int
    """0 leads: it is given the batches."""
    pid: int
    device: str
    device_name: str
    """What the device is."""
    rss_bytes: int
    part_bytes: int
    """Of the parameters and buffers that it holds."""
    part: str
    """Which part of the model that is."""
    last_beat_age_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitHealth:
    """How the model of a worker was split."""

    cuts: Sequence[str]
    """Of a pipeline: the submodules that its stages begin with, but for the first."""
    note: str
    """Why it was split like this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerHealth:
    """One worker: a process, or one for each device of a replica that is split."""

    name: str
    state: str
    """`starting`, `ready`, `backoff`, `failed` or `stopped`: the supervisor's word; or `stalled`,
    which is ready but for showing no sign of life while it has no work."""
    device: str
    incarnation: int
    """Counts the lives of the worker, from 0."""
    pid: int | None
    """Of its lead, if it is split."""
    num_batches: int
    last_beat_age_s: float | None
    """Since its loop last showed that it turns."""
    last_answer_age_s: float | None
    """Since it last proved itself by an answer, to a request or to a canary."""
    rss_bytes: int | None
    """Memory that it holds, as the operating system counts it; with all its ranks."""
    restarts: int
    placement: Literal["replicate", "pipeline", "tensor"] = "replicate"
    """Whether a process has the whole model, or how it is split over several."""
    threads: int = 1
    """Threads that each of its processes computes with."""
    ranks: Sequence[RankHealth] = ()
    """The processes that it is split over; none if it is not, or while it is not there."""
    split: SplitHealth | None = None
    """How it was split, if it is."""
    speed: str | None = None
    """The speed preset that it serves with; null while it is not there."""
    speed_gain: float | None = None
    """How many times as fast as `exact` that preset was when it was measured."""
    speed_deviation: float | None = None
    """How far it was from `exact` on the sample inputs, at most."""
    decode: str | None = None
    """How it decodes inputs: `exact` or `fast`."""
    reason: str = ""
    """What it is doing while it loads, or why it is not there."""
    last_ending: LastEnding | None = None
    """None in its first life."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InputDescription:
    """One tensor that a model takes."""

    name: str
    dtype: str
    shape: Sequence[int]
    """With the batch dimension first; -1 where any length will do. Empty: any shape will do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedSearchHealth:
    """The search for a faster speed preset, while workers serve."""

    state: str
    """`off`, `waiting` (for the workers), `searching`, `changing` (the workers, one by one), `done`
    or `failed`."""
    text: str = ""
    """What it is doing, or what it came to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartHealth:
    """The last restart that an operator asked for."""

    state: str
    """`none`, `running`, `done` or `failed`."""
    text: str = ""
    """What is being done, or why it failed and what serves on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelHealth:
    """One model and its workers."""

    name: str
    ready: bool
    reason: str = ""
    """Why it is not ready."""
    queue_depth: int = 0
    """Instances that wait for a worker."""
    inputs: Sequence[InputDescription] = ()
    """What it takes, once a worker has been ready; empty if it does not say."""
    example: object = None
    """An instance that it takes, as JSON; null if it has none to show."""
    reads_own_form: bool = False
    """It reads something else than `inputs` say, by a `preprocess` of its own."""
    speed_search: SpeedSearchHealth = SpeedSearchHealth(state="off")
    restart: RestartHealth = RestartHealth(state="none")
    workers: Sequence[WorkerHealth] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontHealth:
    """One process that takes connections."""

    name: str
    state: str
    """`starting`, `up`, `backoff` or `stopped`."""
    pid: int | None
    num_connections: int
    restarts: int = 0
    reason: str = ""
    """Why it is not up, or was not before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkserverHealth:
    """The process that forks workers. Those outlive it."""

    state: str
    """`starting`, while it imports torch, or `ready`."""
    pid: int
    incarnation: int
    """Counts its lives, from 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuHealth:
    """One GPU that workers may use, or one slice of it. What the driver does not say is null."""

    index: int
    uuid: str
    name: str
    up: bool
    """The driver answers for it."""
    memory_bytes: int
    memory_used_bytes: int | None
    """By all processes, this service's and others'."""
    utilization: float | None
    """The share of the time in which something ran on it, from 0 to 1."""
    temperature_c: float | None
    power_w: float | None
    xid_errors: int
    """Critical errors that the driver has told of since the service started."""
    last_xid: int
    """Which the last of them was, as NVIDIA lists them; 0 for none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthReport:
    """The whole service."""

    status: HostStatus
    ready: bool
    """Whether this host should be sent requests."""
    draining: bool
    models: Sequence[ModelHealth]
    fronts: Sequence[FrontHealth] = ()
    gpus: Sequence[GpuHealth] = ()
    """None on a host without, and for a moment after the start."""
    forkserver: ForkserverHealth | None = None
    """Null where workers are started without, and for a moment after the start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """The answer of a check that is passed."""

    status: str


class HealthSource(Protocol):
    """Who knows."""

    def report(self) -> HealthReport:
        """The state of things now; called in the event loop, so it must not block."""


def health_router(source: HealthSource, guard: Guard | None = None) -> APIRouter:
    """The routes, answering from a source.

    Args:
        source: Who knows.
        guard: Who may see reasons: they quote errors, and probes ask without a key.
    """
    router = APIRouter(tags=["health"])

    @router.get("/health", summary="Models and workers, one by one")
    async def health() -> HealthReport:
        """Of each worker its state, device, memory, last answer, and why it is not there."""
        return source.report()

    @router.get("/health/live", summary="200 while the event loop turns")
    async def live() -> Health:
        """For the liveness probe: a process that does not answer is to be restarted."""
        return Health(status="live")

    @router.get(
        "/health/ready",
        summary="200 while this host should be sent requests",
        response_model=Health,
        responses={503: {"description": "Not now; says which models are not ready, and why."}},
    )
    async def ready(request: Request) -> Health | Response:
        """For the readiness probe and balancers: 503 while it starts, drains or has no worker."""
        report = source.report()
        if report.ready:
            return Health(status=report.status)
        if guard is not None and not guard.allows("metrics", joined(request.headers.raw)):
            message = "draining" if report.draining else "not ready; /health says why"
            return problem_response(request, UnavailableError(message, retry_after_s=1))
        reasons = [
            f"{model.name}: {model.reason or 'not ready'}"
            for model in report.models
            if not model.ready
        ]
        if report.draining:
            reasons.insert(0, "draining")
        message = "; ".join(reasons) or report.status
        return problem_response(request, UnavailableError(message, retry_after_s=1))

    return router
