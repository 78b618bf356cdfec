"""Made-up states of a service, and a way to show them to a browser's page."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from inferpool.service.api.routes.health import (
    FrontHealth,
    GpuHealth,
    HealthReport,
    HostHealth,
    InputDescription,
    LostHostHealth,
    ModelHealth,
    RankHealth,
    SwapFigures,
    VersionInfo,
    WorkerHealth,
)
from inferpool.service.parts.jobs.http.documents import JobError, JobInfo
from inferpool.service.parts.live.events import (
    ChangeEvent,
    EndingEvent,
    HostState,
    LiveSample,
    Moment,
    Outcomes,
    Percentiles,
    Sample,
    State,
    StoredJobs,
)

NUMBERS = (InputDescription(name="x", dtype="float32", shape=(-1, 3)),)
IMAGE = (InputDescription(name="image", dtype="uint8", shape=(-1, -1, -1, 3)),)
MODEL = "efficientnet_lite0"
NUM_SECONDS = 300
QUESTION = "How do I get from the station to the harbour?"

STUB = """
const scenario = %s;
const askFor = window.fetch;
window.fetch = (url, options) => {
  if (scenario.jobs.length && url.startsWith("jobs?")) {
    return Promise.resolve(Response.json({ jobs: scenario.jobs, next: null }));
  }
  if (url !== "events") return askFor(url, options);
  if (scenario.status) {
    return Promise.resolve(new Response("", { status: scenario.status }));
  }
  const events = scenario.events.map((data) => `event: state\\ndata: ${data}\\n\\n`);
  const body = new ReadableStream({
    start(controller) {
      controller.enqueue(new TextEncoder().encode(events.join("")));
      scenario.status = scenario.next;
      if (scenario.next) controller.close();
    },
  });
  return Promise.resolve(new Response(body, { status: 200 }));
};
"""


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """Events that a page gets in place of the real ones."""

    events: Sequence[State]
    next: int | None = None
    """Status of later answers, once the first stream has ended; None: it stays open."""
    jobs: Sequence[JobInfo] = ()
    """The latest jobs."""

    def script(self) -> str:
        """Return the script that a browser runs before the page's own."""
        events = [msgspec.json.encode(event).decode() for event in self.events]
        told = {"events": events, "next": self.next, "jobs": self.jobs}
        return STUB % msgspec.json.encode(told).decode()


def worker(number: int = 0, *, model: str = MODEL, **changes: Any) -> WorkerHealth:
    usual = WorkerHealth(
        name=f"{model}/{number}",
        state="ready",
        device=f"cuda:{number}",
        incarnation=0,
        pid=4711 + number,
        num_batches=18_204 + 37 * number,
        last_beat_age_s=0.02,
        last_answer_age_s=0.1,
        rss_bytes=(812 + 3 * number) << 20,
        restarts=0,
        speed="compiled_bf16",
        speed_gain=1.74,
        speed_deviation=0.0004,
        decode="fast",
    )
    return replace(usual, **changes)


def gpu(number: int) -> GpuHealth:
    return GpuHealth(
        index=number,
        uuid=f"GPU-{number}",
        name="NVIDIA H100",
        up=True,
        memory_bytes=80 << 30,
        memory_used_bytes=(11 + number) << 30,
        utilization=0.7 + number / 20,
        temperature_c=52.0 + number,
        power_w=310.0,
        xid_errors=0,
        last_xid=0,
    )


def ranks() -> Sequence[RankHealth]:
    return [
        RankHealth(
            rank=rank,
            pid=4800 + rank,
            device=f"cuda:{rank}",
            device_name="NVIDIA H100",
            rss_bytes=(1900 + rank) << 20,
            part_bytes=1 << 30,
            part=f"blocks {12 * rank}-{12 * rank + 11}",
            last_beat_age_s=0.1,
        )
        for rank in range(2)
    ]


def ending(cause: str, reason: str, *, number: int = 0, life: int = 0, ago_s: float) -> EndingEvent:
    return EndingEvent(
        worker=f"{MODEL}/{number}",
        incarnation=life,
        time=time.time() - ago_s,
        cause=cause,  # type: ignore[arg-type]  # one of them
        reason=reason,
    )


def sample(
    load: float = 0.0, *, refused: float = 0.0, depth: int = 0, failed: float = 0.0
) -> Sample:
    """Return one second with a load in instances per second."""
    p50 = 9.0 + load / 200 + depth / 20
    slow = Percentiles(p50=p50, p95=p50 * 1.7, p99=p50 * 2.4)
    return Sample(
        requests_per_s=load + refused,
        instances_per_s=Outcomes(
            accepted=load, succeeded=load - failed, failed=failed, expired=0.0, cancelled=0.0
        ),
        rejected_per_s={"queue_full": refused} if refused else {},
        latency_ms=slow if load else None,
        queue_ms=slow if load else None,
        inference_ms=slow if load else None,
        batch_sizes={"2": int(load / 90), "4": int(load / 30), "8": int(load / 12)} if load else {},
        num_batched=int(load),
        queue_depth=depth,
        in_flight=depth + int(load / 60),
    )


def busy(second: int, *, peak: float = 900.0, refused: float = 0.0, depth: int = 6) -> Sample:
    """Return one second of a busy service."""
    wave = 0.75 + 0.2 * math.sin(second / 23) + 0.05 * math.sin(second * 2.7)
    return sample(peak * wave, refused=refused, depth=int(depth * (1 + math.sin(second / 7) ** 2)))


def state(
    workers: Sequence[WorkerHealth] | None = None,
    *,
    status: str = "ready",
    samples: Sequence[Sample] = (),
    endings: Sequence[EndingEvent] = (),
    inputs: Sequence[InputDescription] = IMAGE,
    example: object = None,
    reads_own_form: bool = False,
    others: Sequence[ModelHealth] = (),
    quarantined: int = 0,
) -> State:
    """Return the first event of a stream; its last sample is the newest."""
    now = time.time()
    past = samples or [sample() for _ in range(20)]
    model = ModelHealth(
        name=MODEL,
        ready=status in ("ready", "degraded"),
        inputs=inputs,
        example=example,
        reads_own_form=reads_own_form,
        workers=[worker(0), worker(1)] if workers is None else workers,
    )
    names = [MODEL, *(other.name for other in others)]
    newest = {name: getattr(past[-1], name) for name in Sample.__slots__}
    live = LiveSample(
        **newest,
        source="efficientnet_lite0",
        queue_limit=1024,
        max_batch_size=8,
        quarantined=quarantined,
        endings=endings,
    )
    return State(
        time=now,
        interval_s=1.0,
        uptime_s=3 * 3600.0 + 720,
        version="0.1.0",
        default_model=MODEL,
        health=HealthReport(
            status=status,  # type: ignore[arg-type]  # one of them
            ready=status in ("ready", "degraded"),
            draining=status == "draining",
            models=[model, *others],
            fronts=[FrontHealth(name="front/0", state="up", pid=4700, num_connections=12)],
            gpus=[gpu(0), gpu(1)],
        ),
        host=HostState(connections=12, arena_bytes=256 << 20, arena_used_bytes=9 << 20),
        models={
            name: live if name == MODEL else replace(live, endings=(), quarantined=0)
            for name in names
        },
        history=[
            Moment(time=now - len(past) + place + 1, models=dict.fromkeys(names, each))
            for place, each in enumerate(past)
        ],
    )


def several(samples: Sequence[Sample] = ()) -> State:
    """Return a service of four models, of which two are not well."""
    restarted = ending("hang", "its batch ran for more than 10 s", ago_s=12)
    gone = {"pid": None, "rss_bytes": None, "speed": None, "last_answer_age_s": None}
    backoff = worker(1, model="faulty", state="backoff", restarts=4, reason="exit code 3", **gone)
    lost = worker(model="far", state="failed", reason="far.pth: there is no such file", **gone)
    others = [
        ModelHealth(name="faulty", ready=True, workers=[worker(model="faulty"), backoff]),
        ModelHealth(name="far", ready=False, reason="no worker is ready", workers=[lost]),
        ModelHealth(name="minilm_l6", ready=True, workers=[worker(model="minilm_l6")]),
    ]
    own = ending("signal", "SIGKILL from outside, or by the kernel for memory", ago_s=94)
    before = state(status="degraded", samples=samples, endings=[own], others=others)
    theirs = replace(restarted, worker="faulty/1")
    faulty = replace(before.models["faulty"], endings=[theirs])
    return replace(before, models={**before.models, "faulty": faulty})


def version(number: int, state: str, **changes: Any) -> VersionInfo:
    usual = VersionInfo(
        number=number,
        state=state,  # type: ignore[arg-type]  # one of them
        source=MODEL,
        weights=f"weights-{number}.pth",
        since=time.time() - 60,
    )
    return replace(usual, **changes)


def changing() -> State:
    """Return a service of which one model is being swapped, after a version was refused."""
    worse = SwapFigures(
        num_inputs=64, num_live=48, agreement=0.71, deviation=0.4, latency_ms=9.5,
        latency_ratio=1.04, memory_bytes=900 << 20, memory_ratio=1.1,
    )  # fmt: skip
    refused = "its answer agrees for 71.00% of 64 inputs, min_agreement is 99.00%"
    before = state()
    model, *others = before.health.models
    loading = worker(0, state="starting", reason="loading weights", pid=None, rss_bytes=None)
    changed = replace(
        model,
        version=1,
        change="swap: version 3 starting: loading weights",
        versions=[
            version(3, "loading", reason="starting: loading weights"),
            version(2, "refused", reason=refused, figures=worse),
            version(1, "serving"),
        ],
        other_workers=[replace(loading, name=f"{MODEL}/3/0", speed=None)],
    )
    comes = ModelHealth(
        name="new", ready=False, reason="add", change="add", versions=[version(1, "loading")]
    )
    steps = [(3, "loading", ""), (2, "refused", refused), (2, "comparing", ""), (2, "loading", "")]
    return replace(
        before,
        health=replace(before.health, models=[changed, *others, comes]),
        changes=[
            ChangeEvent(
                time=time.time() - ago, model=MODEL, version=number, state=each, reason=reason
            )  # type: ignore[arg-type]  # one of them
            for ago, (number, each, reason) in enumerate(steps)
        ],
    )


def job(id: str, state: str, num_done: int, **changes: Any) -> JobInfo:
    now = time.time()
    usual = JobInfo(
        id=id,
        state=state,  # type: ignore[arg-type]  # one of them
        model=MODEL,
        versions=[1] if num_done else [],
        num_instances=12_000,
        num_done=num_done,
        num_failed=0,
        num_bytes=48 << 20,
        priority=5,
        created_at=now - 190,
        started_at=now - 180 if num_done else None,
        ended_at=now - 20 if state == "succeeded" else None,
        expires_at=None,
        error=None,
        webhook=None,
        request_id="a1",
    )
    return replace(usual, **changes)


def with_jobs(before: State) -> tuple[State, Sequence[JobInfo]]:
    """Return a state with jobs, and the latest of these."""
    stored = StoredJobs(
        open=True,
        by_state={"queued": 1, "running": 1, "succeeded": 3, "failed": 1, "cancelled": 1},
        instances_waiting=16_688,
        instances_per_s=412.0,
        store_bytes=311 << 20,
    )
    latest = [
        job("2f9c0e7a51d84c1b", "queued", 0),
        job("nightly-2031-05-02", "running", 7_312, num_failed=12),
        job("nightly-2031-05-01", "succeeded", 12_000, num_failed=3),
        job("91ab7c3e5f02d6a8", "failed", 40, num_instances=40, num_failed=40),
        job(
            "5d3b0a9c7e1f2648",
            "cancelled",
            900,
            error=JobError(code="cancelled", message="the job was cancelled"),
        ),
    ]
    return replace(before, jobs=stored), latest


def with_hosts(before: State, *, is_alone: bool = False) -> State:
    """Return a state of a cluster: of two hosts and a lost one, or of the lost one alone."""
    hosts = [
        HostHealth(
            name=f"gpu-{number}",
            address=f"10.0.0.{number}:41234",
            state="silent" if number else "connected",
            devices=["NVIDIA H100", "32 CPU cores"],
            epoch=1 + number,
            workers=1,
            workers_ready=1 - number,
            version="0.1.0",
            torch="2.9.0",
            python="3.12.4",
            pid=300,
            connected_s=4000.0,
            last_beat_age_s=0.2 + 2 * number,
            round_trip_s=0.0004,
            clock_offset_s=0.001 - 3 * number,
            arena_bytes=256 << 20,
            arena_used_bytes=31 << 20,
            gpus=[gpu(0)],
        )
        for number in range(0 if is_alone else 2)
    ]
    lost = LostHostHealth(
        name="gpu-9", address="10.0.0.9:41234", state="lost", epoch=7,
        reason="no sign of life for 3 s", age_s=42.0,
    )  # fmt: skip
    model, *others = before.health.models
    workers = [
        replace(each, host=host.name) for each, host in zip(model.workers, hosts, strict=False)
    ]
    health = replace(
        before.health,
        models=[replace(model, workers=workers, ready=not is_alone), *others],
        gpus=[],
        cluster_address="0.0.0.0:7000",
        hosts=hosts,
        lost_hosts=[lost],
    )
    return replace(before, health=health)


def without_models(before: State) -> State:
    """Return the next event of a service whose models were removed."""
    health = replace(before.health, status="unavailable", ready=False, models=[])
    return replace(before, health=health, models={}, history=(), time=before.time + 1)


def scenarios() -> dict[str, Scenario]:
    """Return all states that the page is designed for, by name."""
    load = [busy(second) for second in range(NUM_SECONDS)]
    killed = ending("signal", "SIGKILL from outside, or by the kernel for memory", ago_s=94)
    hung = ending("hang", "its batch ran for more than 10 s", number=1, life=2, ago_s=3601)
    full = [busy(second, refused=140 + second % 40, depth=400) for second in range(120)]
    split = worker(
        device="cuda:0+cuda:1", placement="pipeline", ranks=ranks(), speed="exact", speed_gain=1.0
    )
    other = ModelHealth(name="minilm_l6", ready=True, workers=[worker(model="minilm_l6")])
    starting = worker(
        1, state="starting", reason="compiling compiled_bf16, 40 s so far",
        pid=None, rss_bytes=None, speed=None, num_batches=0, last_answer_age_s=None,
    )  # fmt: skip
    stored, latest = with_jobs(state(samples=load))
    gone = {"pid": None, "rss_bytes": None, "speed": None, "last_answer_age_s": None}
    lost = [
        worker(number, state="failed", reason="weights.pth: there is no such file", **gone)
        for number in range(2)
    ]
    again = worker(
        1, state="backoff", restarts=4, incarnation=4, reason="CUDA error: out of memory", **gone
    )
    down = [worker(0, state="backoff", restarts=3, reason="exit code 3", **gone), again]
    return {
        "busy": Scenario(events=[state(samples=load, endings=[killed, hung], others=[other])]),
        "several": Scenario(events=[several(load)]),
        "split": Scenario(events=[state([split], samples=load, inputs=(), example=QUESTION)]),
        "empty": Scenario(events=[state()]),
        "slow": Scenario(
            events=[state(samples=[busy(second, depth=4800) for second in range(NUM_SECONDS)])]
        ),
        "own form": Scenario(events=[state(inputs=NUMBERS, reads_own_form=True)]),
        "shown": Scenario(
            events=[state(inputs=NUMBERS, example={"words": ["a"]}, reads_own_form=True)]
        ),
        "starting": Scenario(
            events=[state([replace(starting, name=f"{MODEL}/0"), starting], status="starting")]
        ),
        "degraded": Scenario(
            events=[state([worker(), again], status="degraded", samples=load, endings=[killed])]
        ),
        "unavailable": Scenario(
            events=[state(down, status="unavailable", samples=load[:200], endings=[killed])]
        ),
        "failed": Scenario(events=[state(lost, status="unavailable")]),
        "overloaded": Scenario(events=[state(samples=load[:180] + full)]),
        "draining": Scenario(events=[state(status="draining", samples=load)]),
        "disconnected": Scenario(events=[state(samples=load, endings=[killed])], next=502),
        "quarantine": Scenario(events=[state(samples=load, quarantined=3, endings=[killed])]),
        "changing": Scenario(events=[changing()]),
        "jobs": Scenario(events=[stored], jobs=latest),
        "hosts": Scenario(events=[with_hosts(state(samples=load))]),
        "no hosts": Scenario(events=[with_hosts(state(status="unavailable"), is_alone=True)]),
        "nothing": Scenario(events=[without_models(state())]),
    }
