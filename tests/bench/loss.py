"""`loss`: what the service costs above a bare sketch of its design, step by step."""

import argparse
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict

from tests.bench import peers, rounds
from tests.bench.load import Cell, require_wrk
from tests.bench.processes import Contender, inferpool
from tests.bench.report import paired, save, spread, table
from tests.bench.workloads import WORKLOADS

HELP = "what the service loses against a bare sketch of its design, step by step"
STEPS = {
    "asgi": [],
    "asgi+queue": ["--queue"],
    "fastapi+queue": ["--queue", "--fastapi"],
}
"""Plain ASGI on uvicorn; the same through a queue to one worker and back; that inside FastAPI."""

_WORKLOADS = [name for name, workload in WORKLOADS.items() if not workload.network]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--workload", default="echo-1k", choices=_WORKLOADS, help="default: %(default)s"
    )
    parser.add_argument(
        "--serve-args",
        default="--replicas 1",
        help="further arguments of inferpool; default: one worker, as the sketch (%(default)s)",
    )


def run(args: argparse.Namespace, plan: rounds.Plan) -> int:
    """Measure, print and save; returns the exit status."""
    require_wrk()
    workload = WORKLOADS[args.workload]
    server = [sys.executable, "-m", "tests.bench.servers.ladder_server", "{port}"]
    ladder = [Contender(name=name, argv=[*server, *flags]) for name, flags in STEPS.items()]
    ours = inferpool(args.inferpool, *workload.serve(), *shlex.split(args.serve_args))
    match = rounds.Match(
        workload=args.workload, bodies=workload.bodies(), contenders=[*ladder, ours]
    )
    results = rounds.run([match], plan)
    if results.cells:
        rounds.print_cells("The ladder, closed loop", results.cells)
        _print_steps(results.cells, [each.name for each in match.contenders])
        save("loss", args.out, {"plan": asdict(plan), "results": asdict(results)})
    return peers.conclude(results)


def _print_steps(cells: Sequence[Cell], ladder: Sequence[str]) -> None:
    """Each step with what it adds to the one above it."""
    rows = []
    workload = cells[0].workload
    for connections in dict.fromkeys(cell.connections for cell in cells):
        above = ""
        for name in ladder:
            place = (cells, workload, connections)
            speed = rounds.over_rounds(*place, name, lambda cell: cell.requests_per_s)
            if not speed:
                continue
            front = rounds.over_rounds(*place, name, lambda cell: cell.front_cpu_s_per_1000)
            whole = rounds.over_rounds(*place, name, lambda cell: cell.cpu_s_per_1000)
            p50 = rounds.over_rounds(*place, name, lambda cell: cell.p50_ms)
            before = rounds.over_rounds(*place, above, lambda cell: cell.requests_per_s)
            before_us = rounds.over_rounds(*place, above, lambda cell: cell.cpu_s_per_1000)
            ratio = paired(speed, before)
            added = [1000 * (whole[key] - before_us[key]) for key in whole if key in before_us]
            rows.append((
                name,
                str(connections),
                spread(speed.values()).text(),
                ratio.text(2) if ratio else "-",
                spread(p50.values()).text(3),
                # Seconds for a thousand are milliseconds for one.
                f"{1000 * spread(front.values()).median:.1f}",
                f"{1000 * spread(whole.values()).median:.1f}",
                spread(added).text(1) if added else "-",
            ))  # fmt: skip
            above = name
    columns = (
        "step", "conns", "requests/s (range)", "x the step above", "p50 ms (range)",
        "front us/req", "all us/req", "us/req added",
    )  # fmt: skip
    caption = (
        "us/req: CPU of the process that listens, and of all the server's processes, for one "
        "request. Ratios and additions are paired by round."
    )
    table("Step by step", columns, rows, caption)
