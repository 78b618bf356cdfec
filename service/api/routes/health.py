"""GET /health, /health/live and /health/ready: for people, orchestrators and balancers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from fastapi import APIRouter, Request, Response

from inferpool.service.api.auth import Guard
from inferpool.service.api.codecs.body import joined
from inferpool.service.api.route_errors import problem_response
from inferpool.service.errors import UnavailableError
from inferpool.service.queue.replacer import RestartHealth
from inferpool.workers.host.engine import DecoderHealth, ForkserverHealth, GpuHealth, RankHealth

HostStatus = Literal["starting", "ready", "degraded", "unavailable", "draining"]
VersionState = Literal[
    "loading", "comparing", "serving", "kept", "leaving", "gone", "refused", "rolled_back"
]


@dataclass(frozen=True, slots=True, kw_only=True)
class LastEnding:
    """How the last life of a worker ended."""

    cause: str
    """`asked`, `canary`, `device`, `exit`, `files`, `hang`, `host`, `memory`, `signal` or
    `start`."""
    reason: str
    age_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitHealth:
    """How the model of a worker was split."""

    cuts: Sequence[str]
    """For a pipeline: the submodules that its stages begin with, except the first."""
    note: str
    """Why it was split like this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TriedSpeedHealth:
    """The result of one speed preset when they were measured."""

    preset: str
    gain: float | None
    """How many times as fast as `exact` it was; null if it was not timed."""
    deviation: float | None
    """Its largest deviation from `exact` on the sample inputs; null if it was not compared."""
    lost: str
    """Why it does not serve; empty for the one that was chosen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerHealth:
    """One worker: a process, or one for each device of a replica that is split."""

    name: str
    state: str
    """`starting`, `ready`, `backoff`, `failed` or `stopped`, as the supervisor says; or `stalled`:
    ready, but without a sign of life while it has no work; or `degraded`: ready, but it raised or
    gave nothing finite on its own example, when it was last asked."""
    device: str
    incarnation: int
    """Counts the lives of the worker, from 0."""
    pid: int | None
    """The lead's, if the model is split."""
    num_batches: int
    last_beat_age_s: float | None
    """Seconds since its loop last showed that it runs."""
    last_answer_age_s: float | None
    """Seconds since it last answered a request or a canary."""
    rss_bytes: int | None
    """Memory of all its ranks and decoders, as the operating system counts it."""
    restarts: int
    placement: Literal["replicate", "pipeline", "tensor"] = "replicate"
    """One process with the whole model, or the way it is split over several."""
    threads: int = 1
    """Threads with which each of its processes computes."""
    ranks: Sequence[RankHealth] = ()
    """The processes that it is split over; none if it is not split, or not there."""
    decoders: Sequence[DecoderHealth] = ()
    """The processes that decode for it, if it has some."""
    split: SplitHealth | None = None
    """How it was split."""
    speed: str | None = None
    """Its speed preset; null while it is not there."""
    speed_gain: float | None = None
    """How many times as fast as `exact` that preset was when it was measured."""
    speed_deviation: float | None = None
    """The largest deviation from `exact` on the sample inputs."""
    speed_tried: Sequence[TriedSpeedHealth] = ()
    """All presets that `auto` had to choose from, in the order in which they were tried."""
    decode: str | None = None
    """How it decodes inputs: `exact`, `fast`, or `device`."""
    reason: str = ""
    """Its progress while it loads, or why it is not there."""
    last_ending: LastEnding | None = None
    """None in its first life."""
    host: str = ""
    """The host that runs it; empty for the one that answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InputDescription:
    """One tensor that a model takes."""

    name: str
    dtype: str
    shape: Sequence[int]
    """The batch dimension first; -1 for any length. Empty: any shape."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckHealth:
    """The check of a version on its own example, before its workers were ready."""

    state: str
    """`none` (not yet done, or refused: the workers say why), `off`, `passed` or `warned`."""
    warnings: Sequence[str] = ()
    not_checked: Sequence[str] = ()
    """Parts that were left out, and why."""
    declared: Sequence[str] = ()
    """Parts that the model's class has turned off, such as `repeatable = False`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedSearchHealth:
    """The search for a faster speed preset while workers serve."""

    state: str
    """`off`, `waiting` (for the workers), `searching`, `changing` (the workers, one by one), `done`
    or `failed`."""
    text: str = ""
    """Its progress or its result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapFigures:
    """A comparison of a version with the one that serves."""

    num_inputs: int = 0
    """Inputs that both have computed."""
    num_live: int = 0
    """Inputs among them that clients had sent."""
    agreement: float | None = None
    """The share of inputs with the same best label, or the same text."""
    deviation: float | None = None
    """The largest difference of any number with a fraction, as a part of the largest such number
    of its output."""
    latency_ms: float | None = None
    """The median time of one input."""
    latency_ratio: float | None = None
    """The median of that time divided by that of the version that serves."""
    latency_ratio_least: float | None = None
    """The least that this median can be by chance; it is held against `max_latency_ratio`."""
    memory_bytes: int | None = None
    """Memory of its workers."""
    memory_ratio: float | None = None
    """The same divided by that of the version that serves."""
    num_faults: int = 0
    """Inputs that it fails on, and the version that serves does not."""
    first_fault: str = ""
    """The error of the first of these."""
    num_validated: int = 0
    """Inputs of `validation` that both have computed."""
    accuracy: float | None = None
    """The share of `validation` that it labels right."""
    accuracy_before: float | None = None
    """The same for the version that serves."""
    num_answered: int = 0
    """Inputs of clients that it has answered or failed on, as a canary or since it serves."""
    fault_share: float | None = None
    """The share of these that it fails on, by its own fault."""
    fault_share_before: float | None = None
    """The same for the version that served before."""
    live_latency_ratio: float | None = None
    """The time that it takes for one of these, divided by that of the version before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionInfo:
    """One version of a model."""

    number: int
    state: VersionState
    source: str
    weights: str
    since: float
    """When it came into this state, in seconds of the Unix epoch."""
    reason: str = ""
    """Why it was refused or rolled back, or its progress while it loads."""
    figures: SwapFigures | None = None
    """How it compared with the version that served then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InterfaceHealth:
    """How clients speak to a model: as its class says, or as its settings do."""

    media_types: Sequence[str] = ()
    """Types of the content that its answers may be."""
    accepts: str = ""
    """`image` or `bytes`: a JSON string in the place of an instance is base64 of that."""
    form: str = "instances"
    """`instance`: a form is one, as an object of its fields."""
    envelope: bool = True
    """If false, a JSON body is one instance as it stands, and so is the answer."""
    path: str = ""
    """Its own path, besides `/predict/NAME`."""
    streams: bool = False
    """Its answers come in parts."""
    joins: bool = False
    """Streams may begin while others are under way."""
    alone: bool = False
    """Parts are those of one instance, whatever `max_batch_size` is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelHealth:
    """One model, its versions and its workers."""

    name: str
    ready: bool
    reason: str = ""
    """Why it is not ready."""
    version: int | None = None
    """The version that serves; null while the model loads for the first time."""
    change: str = ""
    """The change that goes on, for a person; empty if there is none."""
    versions: Sequence[VersionInfo] = ()
    """The newest first; those that are gone too, as far as they are remembered."""
    queue_depth: int = 0
    """Instances that wait for a worker."""
    inputs: Sequence[InputDescription] = ()
    """The tensors it takes, once a worker has been ready; empty if it does not say."""
    example: object = None
    """An instance that it takes, as JSON; null if it shows none."""
    reads_own_form: bool = False
    """Its own `preprocess` reads something else than `inputs` say."""
    interface: InterfaceHealth = InterfaceHealth()  # it is frozen
    check: CheckHealth = CheckHealth(state="none")
    speed_search: SpeedSearchHealth = SpeedSearchHealth(state="off")
    restart: RestartHealth = RestartHealth(state="none")  # noqa: RUF009  # it is frozen
    workers: Sequence[WorkerHealth] = ()
    """Those of the version that serves."""
    other_workers: Sequence[WorkerHealth] = ()
    """Those of versions that are loaded and do not serve; they do not count for `status`."""


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
class HostHealth:
    """One host of the cluster, whose agent is connected."""

    name: str
    address: str
    """Address from which its agent dials."""
    state: str
    """`connected`, or `silent`: without a sign of life for longer than usual."""
    devices: Sequence[str]
    """In words, one by one."""
    epoch: int
    """Counts the connections to this front end, from 1."""
    workers: int
    """Those of all models that are to run there."""
    workers_ready: int
    version: str
    """Version of inferpool."""
    torch: str
    python: str
    pid: int
    """The agent's."""
    connected_s: float
    """How long this connection has lasted."""
    last_beat_age_s: float
    """Seconds since the last sign of life."""
    round_trip_s: float | None = None
    """A beat to the agent and back, on average; null until the first one is back."""
    clock_offset_s: float | None = None
    """How far its clock is ahead of this host's."""
    arena_bytes: int = 0
    """Shared memory reserved for payloads there."""
    arena_used_bytes: int = 0
    forkserver: ForkserverHealth | None = None
    gpus: Sequence[GpuHealth] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LostHostHealth:
    """A host that was lost in the last ten minutes, and is not connected again."""

    name: str
    address: str
    state: str
    """`lost`, or `left`: its agent was told to stop, or another front end has taken over."""
    epoch: int
    reason: str
    age_s: float
    """Seconds since then."""


JobStoreState = Literal["opening", "open", "failing", "gone", "closed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobStoreHealth:
    """The store of jobs."""

    state: JobStoreState
    """`opening` at the start; `open`; `failing`: it does not answer, is locked by another program,
    or cannot be opened; `gone`: its folder or disk is not there, and it is opened when it is again;
    `closed` at the end."""
    place: str
    """The folder, or the URL without user and password."""
    reason: str = ""
    """Why it cannot be used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthReport:
    """The whole service."""

    status: HostStatus
    ready: bool
    """This host should be sent requests."""
    draining: bool
    models: Sequence[ModelHealth]
    fronts: Sequence[FrontHealth] = ()
    gpus: Sequence[GpuHealth] = ()
    """Empty on a host without GPUs, and for a moment after the start."""
    forkserver: ForkserverHealth | None = None
    """Null if workers are started without one, and for a moment after the start."""
    job_store: JobStoreHealth | None = None
    """Null if no jobs are kept here. Predictions do not need it."""
    version: str = ""
    """Version of inferpool."""
    torch: str = ""
    python: str = ""
    cluster_address: str | None = None
    """Address at which agents join; null if all workers run on this host."""
    standby: str = ""
    """Why no agent may join now: another front end serves. Empty if they may."""
    hosts: Sequence[HostHealth] = ()
    """The hosts of the cluster, by name."""
    lost_hosts: Sequence[LostHostHealth] = ()
    """Hosts that were lost in the last ten minutes, the latest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """The answer to a probe that passes."""

    status: str


def health_router(report: Callable[[], HealthReport], guard: Guard | None = None) -> APIRouter:
    """Return the routes; the guard decides which calls may see reasons.

    Reasons quote errors, and probes ask without a key.

    Args:
        report: Returns the state of the service now.
        guard: Knows the keys.
    """
    router = APIRouter(tags=["health"])

    @router.get("/health", summary="Models and workers, one by one")
    async def health() -> HealthReport:
        """The state, device, memory and last answer of each worker, and why it is not there."""
        return report()

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
        found = report()
        if found.ready:
            return Health(status=found.status)
        if guard is not None and not guard.allows("metrics", joined(request.headers.raw)):
            message = "draining" if found.draining else "not ready; /health says why"
            return problem_response(request, UnavailableError(message, retry_after_s=1))
        reasons = [
            f"{model.name}: {model.reason or 'not ready'}"
            for model in found.models
            if not model.ready
        ]
        if found.draining:
            reasons.insert(0, "draining")
        message = "; ".join(reasons) or "no model is served"
        return problem_response(request, UnavailableError(message, retry_after_s=1))

    return router
