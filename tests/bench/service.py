"""`start`, `shares` and `jobs`: what the service's users wait for in its various states.

`start` times the command until it is ready, `shares` two models on the same cores, and `jobs` calls
beside a full queue of jobs.
"""

import io
import tarfile
import tempfile
import time
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import cycle, islice
from math import inf
from pathlib import Path

import httpx

from inferpool.service.tools.trial.tally import LoadTally
from tests.bench.frame import Benchmark, Cell, benchmark
from tests.bench.models import SLEEPER
from tests.bench.server import (
    OUT,
    BenchError,
    BenchServer,
    CpuMeter,
    ServerCommand,
    inferpool,
    plan_for,
)
from tests.bench.together import load_together
from tests.bench.workloads import asked_of

_START_S = 180.0
_SETTLE_S = 1.0
"""Begin of each phase, which is not counted."""
_PATHS = ("/predict/first", "/predict/second")
_TRICKLE_PER_S = 1.0
"""Calls that keep the batches of a job as small as they are beside more of them."""
_MOST_JOB = 20_000
_SLACK_S = 30.0
"""Time that a generator may take to start, beside a job that must not end."""


@benchmark(
    "from the command to ready",
    rounds=5,
    serve_args="",
    model=("", "default: the service's own default model"),
)
def start(bench: Benchmark) -> None:
    """Start the service in each round."""
    command = inferpool(bench.args, *filter(None, [bench.args.model]), name="start")
    bench.take_turns({"inferpool serve": partial(_start, command, bench.args.port)})
    bench.report()


def _start(command: ServerCommand, port: int, _: int) -> Iterator[Cell]:
    began, listening_s = time.monotonic(), 0.0
    with BenchServer(command, port) as server:
        for __ in server.turns(began + _START_S, pause_s=0.01):
            try:
                status = server.http.get(command.ready).status_code
            except httpx.ConnectError:
                continue
            except httpx.TransportError:
                status = 0
            passed_s = time.monotonic() - began
            listening_s = listening_s or passed_s
            if status == 200:
                break
        else:
            server.fail(f"not ready in {_START_S:g} s")
        cpu_s = sum(sum(process.cpu_times()[:2]) for process in server.processes())
    times = {"listening": listening_s, "ready": passed_s, "CPU until ready": cpu_s}
    for name, seconds in times.items():
        yield Cell("start", name, 0, {"seconds": seconds})


@benchmark(
    "fair shares of two models: a flood beside a quiet one, and weights under full load",
    rounds=3,
    secs=10,
    serve_args="",
    source=("efficientnet_lite0", "of both models; sleep: one that only waits"),
    forward_ms=(100.0, "of a batch of sleep"),
    weight=(3.0, "share of the first model in the second part"),
    times=(10.0, "the capacity, at which one is flooded"),
    load=(0.2, "of the capacity, for the quiet one"),
)
def shares(bench: Benchmark) -> None:
    """Measure a quiet model beside a flooded one, and two by their weights, in each round."""
    args = bench.args
    bench.take_turns({"flood": partial(_flood, bench), "weights": partial(_weigh, bench)})
    caption = (
        f"First the quiet one has {args.load:g} of the capacity, and the other {args.times:g} "
        "times. of_allowed: p99 / (2 x alone + batch)."
    )
    bench.report(caption=caption)


def _two_models(bench: Benchmark, share: float) -> BenchServer:
    first = _model(bench, "first", bench.args.forward_ms, share=share)
    second = _model(bench, "second", bench.args.forward_ms, share=1.0)
    command = inferpool(bench.args, name="shares", settings={**first, **second})
    return BenchServer(command, bench.args.port)


def _flood(bench: Benchmark, _: int) -> Iterator[Cell]:
    args = bench.args
    with _two_models(bench, 1.0) as server:
        server.wait_ready(*(asked_of(args.source, path) for path in _PATHS))
        capacity = _load(bench, {"first": None})["first"].num_in_time / args.secs
        alone = _load(bench, {"first": args.load * capacity})["first"]
        before = _batches(server, "second")
        both = _load(bench, {"first": args.load * capacity, "second": args.times * capacity})
        batch_ms = _batch_ms(before, _batches(server, "second"))
    yield Cell(args.source, "shares 1:1", 0, {
        "capacity": capacity,
        **_beside(alone, both["first"], 2.0, batch_ms),
        "flood_per_s": both["second"].num_in_time / args.secs,
    })  # fmt: skip


def _beside(
    alone: LoadTally, beside: LoadTally, factor: float, batch_ms: float
) -> dict[str, float]:
    """Compare latencies with those alone, times a factor, plus one batch of what is beside."""
    found = {"batch_ms": batch_ms, "failed": alone.num_errors + beside.num_errors}
    for percent in (50, 99):
        found[f"alone_p{percent}_ms"] = 1e3 * alone.latency.percentile_s(percent)
        found[f"p{percent}_ms"] = 1e3 * beside.latency.percentile_s(percent)
    found["of_allowed"] = found["p99_ms"] / (factor * found["alone_p99_ms"] + batch_ms)
    return found | {"late_ms": 1e3 * beside.lateness.percentile_s(99)}


def _weigh(bench: Benchmark, _: int) -> Iterator[Cell]:
    args = bench.args
    with _two_models(bench, args.weight) as server:
        server.wait_ready(*(asked_of(args.source, path) for path in _PATHS))
        alone = _load(bench, {"first": None})["first"].num_in_time / args.secs
        both = _load(bench, {"first": None, "second": None})
    first, second = (each.num_in_time / args.secs for each in both.values())
    yield Cell(args.source, f"shares {args.weight:g}:1", 0, {
        "first_per_s": first,
        "second_per_s": second,
        "ratio": first / second if second else inf,
        "alone_per_s": alone,
        "sum_of_alone": (first + second) / alone,
    })  # fmt: skip


def _model(
    bench: Benchmark, name: str, batch_ms: float, item_ms: float = 0.0, **more: object
) -> dict[str, object]:
    """Return the settings of a model of `--source`; `sleep` is one that only waits."""
    is_sleep = bench.args.source == "sleep"
    table = {"source": SLEEPER if is_sleep else bench.args.source, **more}
    if is_sleep:
        table |= {"options.batch_s": batch_ms / 1e3, "options.item_s": item_ms / 1e3}
    return {f"models.{name}.{key}": value for key, value in table.items()}


def _load(bench: Benchmark, rates: Mapping[str, float | None]) -> dict[str, LoadTally]:
    """Load each model at a rate, or in a closed loop (None), at once.

    Each has a process of its own: a flood would keep the generator of the quiet one waiting.
    """
    plans = [
        plan_for(
            bench.args.port,
            asked_of(bench.args.source, f"/predict/{model}").requests(),
            rate,
            warmup_s=_SETTLE_S,
            duration_s=bench.args.secs,
            seed=number,
        )
        for number, (model, rate) in enumerate(rates.items())
    ]
    return dict(zip(rates, load_together(plans), strict=True))


def _batches(server: BenchServer, model: str) -> tuple[float, float]:
    """Return how many batches a model had, and their seconds in all, so far."""
    names = ("inference_duration_seconds_count", "inference_duration_seconds_sum",
             "prepare_duration_seconds_sum")  # fmt: skip
    num, *seconds = server.metrics(*(f'{name}{{model="{model}"' for name in names))
    return num, sum(seconds)


def _batch_ms(before: tuple[float, float], after: tuple[float, float]) -> float:
    return 1e3 * (after[1] - before[1]) / max(1.0, after[0] - before[0])


@benchmark(
    "interactive calls beside a full queue of jobs: p99, and the share of idle time they take",
    rounds=5,
    secs=15,
    serve_args="",
    source=("efficientnet_lite0", "sleep: a model that only waits"),
    batch_ms=(5.0, "that sleep takes for each batch"),
    item_ms=(20.0, "and for each instance of it"),
    load=(0.4, "of the capacity, of interactive calls"),
    job_share=(0.0, "of the workers' time that jobs get in any case"),
    job_store=("", "a URL of PostgreSQL; default: a folder"),
)
def jobs(bench: Benchmark) -> None:
    """Measure in each round with and without jobs, in turn."""
    bench.take_turns({"jobs": partial(_measure_jobs, bench)})
    caption = (
        f"Calls come at {bench.args.load:g} of the capacity. of_allowed: p99 / (1.2 x alone + "
        "batch of jobs). of_idle: jobs_per_s / (capacity - asked)."
    )
    bench.report(caption=caption)


def _measure_jobs(bench: Benchmark, round_: int) -> Iterator[Cell]:
    args = bench.args
    with tempfile.TemporaryDirectory(prefix="jobs-", dir=OUT) as folder:
        settings = {
            "job_store": args.job_store or str(Path(folder) / "store"),
            "job_share": args.job_share,
            "speed_search": False,  # it would take what is idle, too
            **_model(bench, "m", args.batch_ms, args.item_ms),
        }
        command = inferpool(args, name="jobs", settings=settings)
        with BenchServer(command, args.port) as server:
            server.wait_ready(asked_of(args.source))
            capacity = _load(bench, {"m": None})["m"].num_in_time / args.secs
            rate = args.load * capacity
            num = int(min(_MOST_JOB, 2 * capacity * (args.secs + _SLACK_S)))
            job = _JobBeside(bench, server, _job_file(args.source, num, Path(folder)))
            phases = {
                "alone": lambda: (_load(bench, {"m": rate})["m"], 0.0, 0.0),
                "beside": lambda: job.load(rate),
                "jobs": lambda: job.load(_TRICKLE_PER_S),
            }
            found, noise = {}, 0.0
            for phase in sorted(phases, reverse=bool(round_ % 2)):
                meter = CpuMeter(server)
                found[phase] = phases[phase]()
                noise = max(noise, meter.figures()["noise"])
    jobs_per_s = found["beside"][1]
    yield Cell(args.source, "jobs", 0, {
        "capacity": capacity,
        "asked": rate,
        **_beside(found["alone"][0], found["beside"][0], 1.2, found["jobs"][2]),
        "jobs_alone": found["jobs"][1],
        "jobs_per_s": jobs_per_s,
        "of_idle": jobs_per_s / (capacity - rate),
        "noise": noise,
    })  # fmt: skip


class _JobBeside:
    """Loads a service while there is a job that does not end."""

    def __init__(self, bench: Benchmark, server: BenchServer, file: Path) -> None:
        self._bench, self._server, self._file = bench, server, file

    def load(self, rate: float) -> tuple[LoadTally, float, float]:
        """Return what became of the calls, the job's instances a second, and ms of a batch."""
        with self._file.open("rb") as file:
            size = str(self._file.stat().st_size)
            kind = {".tar": "x-tar", ".jsonl": "jsonl"}[self._file.suffix]
            headers = {"Content-Type": f"application/{kind}", "Content-Length": size}
            answer = self._server.http.post("/jobs", content=file, headers=headers)
        if answer.status_code != 202:
            raise BenchError(f"the job was refused: {answer.text}")
        first = self._num_done()
        for _ in self._server.turns(time.monotonic() + _START_S):
            if self._num_done() > first:
                break
        else:
            self._server.fail("the job does not begin")
        before, num, began = _batches(self._server, "m"), self._num_done(), time.monotonic()
        tally = _load(self._bench, {"m": rate})["m"]
        per_s = (self._num_done() - num) / (time.monotonic() - began)
        batch_ms = _batch_ms(before, _batches(self._server, "m"))
        self._end(answer.json()["id"])
        return tally, per_s, batch_ms

    def _num_done(self) -> float:
        return self._server.metrics("job_instances_total")[0]

    def _end(self, job: str) -> None:
        """Cancel a job, and delete it, since it has all instances of the next one."""
        answers = [self._server.http.delete(f"/jobs/{job}") for _ in range(2)]
        states = [each.json()["state"] for each in answers if each.status_code == 200]
        if states != ["cancelled"]:
            raise BenchError("the job came to an end while it was measured; it was too short")


def _job_file(source: str, num: int, folder: Path) -> Path:
    """Write a job of as many instances."""
    if source == "sleep":
        file = folder / "job.jsonl"
        file.write_text('{"n":1}\n' * num)
        return file
    file = folder / "job.tar"
    contents = cycle([each.read_bytes() for each in asked_of(source).files])
    with tarfile.open(file, "w") as archive:
        for number, content in enumerate(islice(contents, num)):
            entry = tarfile.TarInfo(f"{number}.jpg")
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return file
