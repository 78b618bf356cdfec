"""`sweep`: latency against the arrival rate, open loop, up to collapse and beyond."""

import argparse
import time
from collections.abc import Iterator, Sequence
from functools import partial

from inferpool.service.tools.trial.connection import post_request
from inferpool.service.tools.trial.generators import LoadRun, run_load
from inferpool.service.tools.trial.load import LoadPlan
from inferpool.service.tools.trial.tally import LatencyHistogram
from tests.bench import peers
from tests.bench.frame import Benchmark, Cell, Column
from tests.bench.server import HOST, BenchServer, Bodies, ServerCommand, load_closed, require_wrk

HELP = "latency against the arrival rate, open loop, up to collapse"
OPTIONS = {
    **peers.OPTIONS,
    "secs": 5,
    "connections": (64,),
    "rates": ((), "requests per second for all; default: shares of the closed loop's"),
    "max-connections": (512, "of the open loop"),
    "p99-ms": (0.0, "an objective, to be drawn"),
}
SHARES = (0.1, 0.25, 0.4, 0.55, 0.7, 0.8, 0.9, 1.0, 1.2, 1.5)
"""Rates, as shares of what the same server answers in a closed loop."""
TIMEOUT_S = 5.0
"""A request without an answer counts with this time: so nothing is left out of the latencies."""
_COLLAPSED = 0.8
"""Higher rates show nothing new where twice less than this share was answered in time."""
_GOOD = Column("good_per_s", "good/s (range)", 0, "range")
_P99 = Column("p99_ms", "p99 ms (range)", 1, "range")
_COLUMNS = (
    _GOOD,
    Column("p50_ms", "p50 ms", 2),
    _P99,
    Column("refused", "refused", 0, "sum"),
    Column("unanswered", "no answer", 0, "sum"),
    Column("late_p99_ms", "late ms", 1),
    Column("server_cores", "cores", 2),
    Column("generator_cores", "generator", 2),
)


def run(bench: Benchmark) -> None:
    """Ask each server at one rate after another."""
    require_wrk()
    rates: dict[tuple[str, str], Sequence[float]] = {}
    bench.take_turns({
        f"{name}, {command.name}": partial(_take_turn, bench, name, bodies, command, rates)
        for name, bodies, command in peers.contenders(bench)
    })  # fmt: skip
    bench.content["rates"] = {", ".join(key): found for key, found in rates.items()}


def report(bench: Benchmark) -> None:
    """Print the figures at each rate, and draw them."""
    caption = (
        f"Latency counts from when a request was due, {TIMEOUT_S:g} s where there was no answer. "
        "late: p99 of the delay before it was sent."
    )
    bench.add_cells("Arrival rates, open loop", "due/s", _COLUMNS, caption)
    bench.add_charts(_P99, "requests due per second", is_log=True, limit=bench.args.p99_ms)
    bench.add_charts(_GOOD, "requests due per second", is_log=True)


def _take_turn(
    bench: Benchmark,
    workload: str,
    bodies: Bodies,
    command: ServerCommand,
    rates: dict[tuple[str, str], Sequence[float]],
    round_: int,
) -> Iterator[Cell]:
    args = bench.args
    with bench.warm_server(workload, bodies, command) as (server, asked):
        # Settings of our server are all asked at the rates that suit the first of them.
        name = peers.OURS if command.name.startswith(peers.OURS) else command.name
        key = (workload, name)
        if args.rates:
            rates[key] = args.rates
        elif key not in rates:
            peak = load_closed(server, asked, max(args.connections), args.secs)["requests_per_s"]
            rates[key] = [round(share * peak, 1) for share in SHARES]
        num_collapsed = 0
        for rate in rates[key]:
            figures = load_open(server, asked, rate, args, seed=round_)
            yield Cell(
                workload=workload,
                contender=command.name,
                load=rate,
                round=round_,
                figures=figures,
            )
            num_collapsed += figures["good_per_s"] < _COLLAPSED * rate
            if num_collapsed == 2:
                return


def load_open(
    server: BenchServer, bodies: Bodies, rate: float, args: argparse.Namespace, seed: int
) -> dict[str, float]:
    """Ask a server at a rate, whatever becomes of the requests before."""
    plan = LoadPlan(
        address=(HOST, server.port),
        requests=[
            post_request(bodies.path, file.read_bytes(), bodies.content_type)
            for file in bodies.files
        ],
        connections=args.max_connections,
        rate=rate,
        duration_s=args.secs,
        warmup_s=min(1.0, args.warm),
        timeout_s=TIMEOUT_S,
        seed=seed,
    )
    before, began = server.cpu(), time.monotonic()
    done = run_load(LoadRun(plan))
    wall_s, span_s = time.monotonic() - began, plan.warmup_s + done.wall_s
    cores, tally = server.cpu().cores(before, wall_s), done.tally
    latency = LatencyHistogram()
    latency.add(tally.latency)
    latency.add(tally.given_up)
    return {
        "good_per_s": tally.num_in_time / args.secs,
        **{f"p{each}_ms": 1e3 * latency.percentile_s(each) for each in (50, 90, 99)},
        "max_ms": 1e3 * latency.max_s,
        "refused": tally.refusal.num,
        "unanswered": tally.given_up.num,
        "late_p99_ms": 1e3 * tally.lateness.percentile_s(99),
        "server_cores": cores["server_cores"] * wall_s / span_s,  # it was idle in between
        "generator_cores": done.generator_cores,
        "noise": cores["noise"],
    }
