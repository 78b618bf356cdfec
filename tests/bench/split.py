"""`split`: what each placement takes and gives: memory, throughput, restarts; a model too large."""

import argparse
from collections.abc import Callable, Mapping
from dataclasses import asdict

from tests.bench import rounds, split_memory, split_restart, split_speed
from tests.bench.load import require_wrk
from tests.bench.peers import conclude
from tests.bench.processes import BenchError
from tests.bench.report import save
from tests.bench.split_placements import WORKLOADS

HELP = "replicate, pipeline and tensor: memory, throughput and restarts of each"

_Part = Callable[[argparse.Namespace, rounds.Plan, rounds.Results], object]
_PARTS: Mapping[str, _Part] = {
    "memory": split_memory.measure_memory,
    "placements": split_speed.measure_placements,
    "stage": split_speed.measure_against_a_stage,
    "restart": split_restart.measure_restarts,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    names = ",".join(_PARTS)
    parser.add_argument("--parts", default=names, help="comma-separated (%(default)s)")
    parser.add_argument("--workloads", default=",".join(WORKLOADS), help="default: %(default)s")
    parser.add_argument(
        "--gib", type=float, default=3.0, help="of parameters of the large model (%(default)s)"
    )
    parser.add_argument(
        "--limit-share", type=float, default=0.7, help="of that, for each process (%(default)s)"
    )
    parser.add_argument(
        "--limit-by",
        choices=("auto", "cgroup", "rlimit"),
        default="auto",
        help="what bounds a process: a control group, or RLIMIT_DATA (%(default)s)",
    )
    parser.add_argument(
        "--blocks", type=int, default=4, help="of 128 MiB, of the MLP under load (%(default)s)"
    )
    parser.add_argument(
        "--kills", type=int, default=10, help="of a rank, for each placement (%(default)s)"
    )


def run(args: argparse.Namespace, plan: rounds.Plan) -> int:
    """Measure, print and save; returns the exit status."""
    require_wrk()
    parts = args.parts.split(",")
    if unknown := [*({*parts} - {*_PARTS}), *({*args.workloads.split(",")} - {*WORKLOADS})]:
        raise BenchError(f"there is no {', '.join(unknown)}")
    results = rounds.Results()
    content: dict[str, object] = {}
    for name in parts:
        try:
            content[name] = _PARTS[name](args, plan, results)
        except KeyboardInterrupt:
            results.is_complete = False
        except BenchError as error:
            results.failures.append(f"{name}: {error}")
        if not results.is_complete:
            break
    save("split", args.out, {"plan": asdict(plan), **content, "failures": results.failures})
    return conclude(results)
