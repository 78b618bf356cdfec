"""`shares`: two models on the same cores: what a flood leaves the other, and what weights give."""

import asyncio
import shlex
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from math import inf
from multiprocessing import get_context
from multiprocessing.synchronize import Barrier
from pathlib import Path

from inferpool.service.tools.trial.connection import post_request
from inferpool.service.tools.trial.generators import precise_loop
from inferpool.service.tools.trial.load import LoadGenerator, LoadPlan
from inferpool.service.tools.trial.tally import LoadTally
from tests.bench.frame import Benchmark, Cell, Column
from tests.bench.server import HOST, OUT, BenchServer, Probe, ask, inferpool
from tests.bench.workloads import photos

HELP = "fair shares of two models: a flood beside a quiet one, and weights under full load"
OPTIONS = {
    "rounds": 3,
    "secs": 10,
    "serve-args": "",
    "source": ("efficientnet_lite0", "of both models; sleep: one that only waits"),
    "forward-ms": (100.0, "of a batch of sleep"),
    "weight": (3.0, "share of the first model in the second part"),
    "times": (10.0, "the capacity, at which one is flooded"),
    "load": (0.2, "of the capacity, for the quiet one"),
    "replicas": (0, "of each model; 0: one for each core"),
}
_SETTLE_S = 1.0
"""Begin of each phase, which is not counted."""
_START_S = 60.0
"""Time for the processes of the generators to start."""
_NUM_CLIENTS = 32
"""Clients of a closed loop; more than fill two batches of each worker find nothing more."""
_FLOOD = (
    Column("capacity", "capacity/s", 0, "range"),
    Column("alone_p50_ms", "alone p50 ms", 1),
    Column("alone_p99_ms", "p99 ms", 1, "range"),
    Column("p50_ms", "beside a flood p50 ms", 1),
    Column("p99_ms", "p99 ms", 1, "range"),
    Column("batch_ms", "flood's batch ms", 1),
    Column("of_allowed", "p99 / (2 x alone + batch)", 2, "range"),
    Column("late_ms", "sent late p99 ms", 1),
    Column("failed", "failed", 0, "sum"),
    Column("flood_per_s", "flood answered/s", 0),
)
_WEIGHTS = (
    Column("first_per_s", "first/s", 1, "range"),
    Column("second_per_s", "second/s", 1, "range"),
    Column("ratio", "ratio", 2, "range"),
    Column("alone_per_s", "first alone/s", 1),
    Column("sum_of_alone", "both / alone", 2, "range"),
)


def run(bench: Benchmark) -> None:
    """Measure both parts in each round."""
    flood = partial(_flood, bench, _config(bench, "flood", 1.0))
    weights = partial(_weigh, bench, _config(bench, "weights", bench.args.weight))
    bench.take_turns({"flood": flood, "weights": weights})


def report(bench: Benchmark) -> None:
    """Print both parts."""
    args = bench.args
    title = f"A quiet model at {args.load:g} of the capacity, another at {args.times:g} times"
    bench.add_cells(title, "", _FLOOD)
    bench.add_cells(f"Weights {args.weight:g} to 1 under full load of both", "", _WEIGHTS)


def _config(bench: Benchmark, name: str, share: float) -> Path:
    args = bench.args
    lines = []
    for model, weight in (("first", share), ("second", 1.0)):
        source = "tests.fault_model:FaultModel" if args.source == "sleep" else args.source
        lines += [f"[models.{model}]", f'source = "{source}"', f"share = {weight}"]
        if args.replicas:
            lines.append(f"replicas = {args.replicas}")
        if args.source == "sleep":
            lines.append(f"options = {{ forward_s = {args.forward_ms / 1e3} }}")
    config = OUT / f"shares-{name}.toml"
    config.parent.mkdir(parents=True, exist_ok=True)
    config.write_text("\n".join(lines) + "\n")
    return config


def _server(bench: Benchmark, config: Path) -> BenchServer:
    args = bench.args
    arguments = ["--config", str(config), *shlex.split(args.serve_args)]
    command = inferpool(args.inferpool, *arguments, name=config.stem, env={"PYTHONPATH": "."})
    return BenchServer(command, args.port)


def _flood(bench: Benchmark, config: Path, round_: int) -> Iterator[Cell]:
    args = bench.args
    with _server(bench, config) as server:
        _await_all(server, args.source)
        capacity = _per_s(_load(bench, {"first": None})["first"], args.secs)
        alone = _load(bench, {"first": args.load * capacity})["first"]
        before = _batches(server)
        both = _load(bench, {"first": args.load * capacity, "second": args.times * capacity})
        batch_ms = _batch_ms(before, _batches(server))
        quiet = both["first"]
    allowed_ms = 2e3 * alone.latency.percentile_s(99) + batch_ms
    yield Cell(
        workload=args.source,
        contender="shares 1:1",
        round=round_,
        figures={
            "capacity": capacity,
            "alone_p50_ms": 1e3 * alone.latency.percentile_s(50),
            "alone_p99_ms": 1e3 * alone.latency.percentile_s(99),
            "p50_ms": 1e3 * quiet.latency.percentile_s(50),
            "p99_ms": 1e3 * quiet.latency.percentile_s(99),
            "batch_ms": batch_ms,
            "of_allowed": 1e3 * quiet.latency.percentile_s(99) / allowed_ms,
            "late_ms": 1e3 * quiet.lateness.percentile_s(99),
            "failed": quiet.num_errors,
            "flood_per_s": _per_s(both["second"], args.secs),
        },
    )


def _weigh(bench: Benchmark, config: Path, round_: int) -> Iterator[Cell]:
    args = bench.args
    with _server(bench, config) as server:
        _await_all(server, args.source)
        alone = _per_s(_load(bench, {"first": None})["first"], args.secs)
        both = _load(bench, {"first": None, "second": None})
    first, second = (_per_s(both[name], args.secs) for name in ("first", "second"))
    yield Cell(
        workload=args.source,
        contender=f"shares {args.weight:g}:1",
        round=round_,
        figures={
            "first_per_s": first,
            "second_per_s": second,
            "ratio": first / second if second else inf,
            "alone_per_s": alone,
            "sum_of_alone": (first + second) / alone,
        },
    )


def _await_all(server: BenchServer, source: str) -> None:
    body, content_type = b'{"instances":[{"n":1}]}', "application/json"
    if source != "sleep":
        bodies = photos()
        body, content_type = bodies.files[0].read_bytes(), bodies.content_type
    for model in ("first", "second"):
        server.wait_ready(Probe(path=f"/predict/{model}", body=body, content_type=content_type))


def _load(bench: Benchmark, rates: dict[str, float | None]) -> dict[str, LoadTally]:
    """Load each model at a rate, or in a closed loop (None), at once.

    Each has a process of its own: a flood would keep the generator of the quiet one waiting.
    """
    args = bench.args
    plans = [
        LoadPlan(
            address=(HOST, args.port),
            requests=_requests(args.source, model),
            connections=_NUM_CLIENTS if rate is None else 10_000,
            rate=rate,
            warmup_s=_SETTLE_S,
            duration_s=args.secs,
            seed=number,
        )
        for number, (model, rate) in enumerate(rates.items())
    ]
    context = get_context("spawn")
    are_ready = context.Barrier(len(plans))
    with ProcessPoolExecutor(len(plans), context, _keep, (are_ready,)) as processes:
        return dict(zip(rates, processes.map(_generate, plans), strict=True))


def _keep(are_ready: Barrier) -> None:
    """Keep what all generators wait for, so that they begin together."""
    _generate.are_ready = are_ready  # type: ignore[attr-defined]  # a barrier cannot be an argument


def _generate(plan: LoadPlan) -> LoadTally:
    _generate.are_ready.wait(_START_S)  # type: ignore[attr-defined]  # as above
    with asyncio.Runner(loop_factory=precise_loop) as runner:
        return runner.run(LoadGenerator(plan).run())


def _requests(source: str, model: str) -> list[bytes]:
    path = f"/predict/{model}"
    if source == "sleep":
        return [post_request(path, b'{"instances":[{"n":1}]}', "application/json")]
    bodies = photos()
    return [post_request(path, file.read_bytes(), bodies.content_type) for file in bodies.files]


def _per_s(tally: LoadTally, secs: float) -> float:
    return tally.num_in_time / secs


def _batches(server: BenchServer) -> dict[str, float]:
    """Return how many batches the flooded model had, and their seconds in all."""
    _, body = ask(server.port, Probe(path="/metrics"))
    found = {"sum": 0.0, "count": 0.0}
    for line in body.decode().splitlines():
        for step in ("prepare", "inference"):
            for name in found:
                if line.startswith(f'inferpool_{step}_duration_seconds_{name}{{model="second"}}'):
                    found[name] += float(line.split()[1])
    return found


def _batch_ms(before: dict[str, float], after: dict[str, float]) -> float:
    num = (after["count"] - before["count"]) / 2  # each counts once for each step
    return 1e3 * (after["sum"] - before["sum"]) / num if num else 0.0
