"""`jobs`: what a full queue of jobs costs interactive calls, and how much of the rest it takes."""

import http.client
import io
import json
import shlex
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from inferpool.service.tools.trial.connection import post_request
from inferpool.service.tools.trial.generators import LoadRun, run_load
from inferpool.service.tools.trial.load import LoadPlan
from inferpool.service.tools.trial.tally import LoadTally
from tests.bench.frame import Benchmark, Cell, Column
from tests.bench.server import (
    HOST,
    OUT,
    BenchError,
    BenchServer,
    Probe,
    ServerCommand,
    ask,
    inferpool,
)
from tests.bench.workloads import photos

HELP = "interactive calls beside a full queue of jobs: p99, and the share of idle time they take"
OPTIONS = {
    "rounds": 5,
    "secs": 15,
    "serve-args": "",
    "source": ("efficientnet_lite0", "sleep: a model that only waits"),
    "batch-ms": (5.0, "that sleep takes for each batch"),
    "item-ms": (20.0, "and for each instance of it"),
    "load": (0.4, "of the capacity, of interactive calls"),
    "job-share": (0.0, "of the workers' time that jobs get in any case"),
    "job-store": ("", "a URL of PostgreSQL; default: a folder"),
}
_SETTLE_S = 1.0
"""Begin of each phase, which is not counted."""
_NUM_CLIENTS = 32
"""Clients of a closed loop; more than fill two batches of each worker find nothing more."""
_TRICKLE_PER_S = 1.0
_MOST_JOB = 20_000
_JSON = "application/json"
_COLUMNS = (
    Column("capacity", "capacity/s", 0, "range"),
    Column("jobs_alone", "jobs alone/s", 0, "range"),
    Column("batch_ms", "their batch ms", 1, "range"),
    Column("asked", "asked/s", 0),
    Column("p50_ms", "p50 ms", 1),
    Column("p99_ms", "p99 ms", 1, "range"),
    Column("beside_p50_ms", "beside jobs p50 ms", 1),
    Column("beside_p99_ms", "p99 ms", 1, "range"),
    Column("of_allowed", "p99 / (1.2 x without + batch)", 2, "range"),
    Column("jobs_per_s", "jobs/s", 1, "range"),
    Column("of_idle", "jobs / idle", 2, "range"),
    Column("late_ms", "sent late p99 ms", 1),
    Column("failed", "failed", 0, "sum"),
)


def run(bench: Benchmark) -> None:
    """Measure in each round with and without jobs, in turn."""
    bench.take_turns({"jobs": partial(_measure, bench)})


def report(bench: Benchmark) -> None:
    """Print the figures of all rounds."""
    title = f"Interactive calls at {bench.args.load:g} of the capacity, beside a full queue of jobs"
    bench.add_cells(title, "", _COLUMNS, "Idle is the capacity less what is asked for.")


def _measure(bench: Benchmark, round_: int) -> Iterator[Cell]:
    args = bench.args
    with tempfile.TemporaryDirectory(prefix="jobs-", dir=OUT) as folder:
        store = args.job_store or str(Path(folder) / "store")
        with BenchServer(_command(bench, store), args.port) as server:
            server.wait_ready(_probe(args.source))
            capacity = _load(bench, None).num_in_time / args.secs
            rate = args.load * capacity
            body = _job_body(args.source, int(min(_MOST_JOB, 2 * capacity * args.secs)), folder)
            submit = partial(_submit, server.port, body)
            phases: dict[str, Callable[[], dict[str, float]]] = {
                "alone": lambda: _figures(_load(bench, rate), ""),
                "beside": lambda: _beside(bench, server, submit, rate),
                "jobs": lambda: _jobs_alone(bench, server, submit),
            }
            figures = {"capacity": capacity, "asked": rate}
            figures["noise"] = 0.0
            for phase in sorted(phases, reverse=bool(round_ % 2)):
                before, began = server.cpu(), time.monotonic()
                figures |= phases[phase]()
                cores = server.cpu().cores(before, time.monotonic() - began)
                figures["noise"] = max(figures["noise"], cores["noise"])
    allowed_ms = 1.2 * figures["p99_ms"] + figures["batch_ms"]
    figures["of_allowed"] = figures["beside_p99_ms"] / allowed_ms
    figures["of_idle"] = figures["jobs_per_s"] / (capacity - rate)
    figures["failed"] += figures.pop("beside_failed")
    yield Cell(workload=args.source, contender="jobs", round=round_, figures=figures)


def _command(bench: Benchmark, store: str) -> ServerCommand:
    args = bench.args
    lines = [f'job_store = "{store}"', f"job_share = {args.job_share}"]
    lines += ["speed_search = false", "[models.m]"]  # it would take what is idle, too
    if args.source == "sleep":
        times = f"batch_s = {args.batch_ms / 1e3}, item_s = {args.item_ms / 1e3}"
        lines += ['source = "tests.bench.stand_in:Sleeper"', f"options = {{ {times} }}"]
    else:
        lines.append(f'source = "{args.source}"')
    config = OUT / "jobs.toml"
    config.parent.mkdir(parents=True, exist_ok=True)
    config.write_text("\n".join(lines) + "\n")
    arguments = ["--config", str(config), *shlex.split(args.serve_args)]
    return inferpool(args.inferpool, *arguments, name="jobs", env={"PYTHONPATH": "."})


def _probe(source: str) -> Probe:
    if source == "sleep":
        return Probe(path="/predict", body=b'{"instances":[{"n":1}]}', content_type=_JSON)
    return photos().probe()


def _load(bench: Benchmark, rate: float | None) -> LoadTally:
    """Load the service at a rate, or in a closed loop (None), from another process."""
    args = bench.args
    if args.source == "sleep":
        requests = [post_request("/predict", b'{"instances":[{"n":1}]}', _JSON)]
    else:
        bodies = photos()
        requests = [
            post_request("/predict", file.read_bytes(), bodies.content_type)
            for file in bodies.files
        ]
    plan = LoadPlan(
        address=(HOST, args.port),
        requests=requests,
        connections=_NUM_CLIENTS if rate is None else 10_000,
        rate=rate,
        warmup_s=_SETTLE_S,
        duration_s=args.secs,
    )
    return run_load(LoadRun(plan=plan)).tally


def _figures(tally: LoadTally, prefix: str) -> dict[str, float]:
    return {
        f"{prefix}p50_ms": 1e3 * tally.latency.percentile_s(50),
        f"{prefix}p99_ms": 1e3 * tally.latency.percentile_s(99),
        f"{prefix}failed": tally.num_errors,
        **({} if prefix else {"late_ms": 1e3 * tally.lateness.percentile_s(99)}),
    }


def _beside(
    bench: Benchmark, server: BenchServer, submit: Callable[[], str], rate: float
) -> dict[str, float]:
    """Measure interactive calls while there is a job that does not end, and what it gets."""
    job = submit()
    _await_jobs(server)
    before, began = _read(server), time.monotonic()
    tally = _load(bench, rate)
    took_s, after = time.monotonic() - began, _read(server)
    _end(server, job)
    return _figures(tally, "beside_") | {"jobs_per_s": (after["jobs"] - before["jobs"]) / took_s}


def _jobs_alone(
    bench: Benchmark, server: BenchServer, submit: Callable[[], str]
) -> dict[str, float]:
    """Measure what a job gets nearly alone, and how long its batches take then.

    A call now and then keeps them as small as they are beside other calls.
    """
    job = submit()
    _await_jobs(server)
    before, began = _read(server), time.monotonic()
    _load(bench, _TRICKLE_PER_S)
    took_s, after = time.monotonic() - began, _read(server)
    _end(server, job)
    num_batches = max(1.0, after["batches"] - before["batches"])
    return {
        "jobs_alone": (after["jobs"] - before["jobs"]) / took_s,
        "batch_ms": 1e3 * (after["seconds"] - before["seconds"]) / num_batches,
    }


def _read(server: BenchServer) -> dict[str, float]:
    """Return the instances of jobs that have an answer, all batches and their seconds, so far."""
    _, body = ask(server.port, Probe(path="/metrics"))
    found = {"jobs": 0.0, "batches": 0.0, "seconds": 0.0}
    names = {
        "inferpool_job_instances_total": "jobs",
        "inferpool_inference_duration_seconds_count": "batches",
        "inferpool_inference_duration_seconds_sum": "seconds",
        "inferpool_prepare_duration_seconds_sum": "seconds",
    }
    for line in body.decode().splitlines():
        if line.partition("{")[0] in names:
            found[names[line.partition("{")[0]]] += float(line.split()[-1])
    return found


def _job_body(source: str, num: int, folder: str) -> tuple[Path, str]:
    """Write a job of so many instances; return the file and its type."""
    if source == "sleep":
        file = Path(folder) / "job.jsonl"
        file.write_text('{"n":1}\n' * num)
        return file, "application/jsonl"
    file = Path(folder) / "job.tar"
    contents = [each.read_bytes() for each in photos().files]
    with tarfile.open(file, "w") as archive:
        for number in range(num):
            content = contents[number % len(contents)]
            entry = tarfile.TarInfo(f"{number}.jpg")
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return file, "application/x-tar"


def _submit(port: int, job: tuple[Path, str]) -> str:
    file, content_type = job
    connection = http.client.HTTPConnection(HOST, port, timeout=120)
    try:
        with file.open("rb") as body:
            headers = {"Content-Type": content_type, "Content-Length": str(file.stat().st_size)}
            connection.request("POST", "/jobs", body, headers)
            answer = connection.getresponse()
            document = json.loads(answer.read())
    finally:
        connection.close()
    if answer.status != 202:
        raise BenchError(f"the job was refused: {answer.status} {document}")
    return str(document["id"])


def _await_jobs(server: BenchServer) -> None:
    """Wait until instances of a job are computed."""
    first, until = _read(server)["jobs"], time.monotonic() + 30
    while _read(server)["jobs"] == first:
        if time.monotonic() > until:
            raise BenchError("the job does not begin")
        time.sleep(0.05)


def _end(server: BenchServer, job: str) -> None:
    """Cancel a job, and delete it, since it has all instances of the next one."""
    connection = http.client.HTTPConnection(HOST, server.port, timeout=60)
    states = []
    for _ in range(2):
        connection.request("DELETE", f"/jobs/{job}")
        answer = connection.getresponse()
        body = answer.read()
        if answer.status == 200:
            states.append(json.loads(body)["state"])
    connection.close()
    if states != ["cancelled"]:
        raise BenchError("the job came to an end while it was measured; it was too short")
