"""The flags of `inferpool tune`, and the plan that they make.

Imported whenever the command's line is read, so it imports little.
"""

import math
from argparse import ArgumentParser, Namespace
from dataclasses import dataclass
from pathlib import Path

from inferpool.service.tools.trial.flags import count, existing, positive

STDOUT = "-"


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """The goal: the most requests per second, with an optional limit of the latency."""

    connections: int = 64
    """Number of clients; each asks again when it has its answer."""
    p99_ms: float | None = None

    def is_met(self, p99_s: float, spare: float = 1.0) -> bool:
        """Return whether a latency is within the limit, with a factor to spare."""
        return self.p99_ms is None or p99_s * 1e3 * spare <= self.p99_ms


@dataclass(frozen=True, slots=True, kw_only=True)
class TunePlan:
    """The load, its time, and the files of the result."""

    goal: Goal
    secs: float
    """Least seconds for which a candidate is measured, in rounds that take turns with the best."""
    budget_s: float = math.inf
    """Seconds for a whole search; candidates that remain then are not tried."""
    warm_s: float = 0.5
    """Least seconds of load before a candidate is measured."""
    warm_pipeline_s: float = 5.0
    """The same for a pipeline, which tries into how many pieces batches go best, and computes the
    first of them twice: 16 clients of minilm_l6 got a fifth less in its first four seconds than in
    the four that followed."""
    inputs: Path | None = None
    """File of a request body, or folder of them; None takes photographs, or makes inputs up."""
    output: Path | None = None
    html: Path | None = None
    is_json: bool = False


def add_flags(parser: ArgumentParser) -> None:
    """The flags of the verb, beside those of the settings."""
    aim = parser.add_argument_group("objective")
    aim.add_argument(
        "--p99-ms",
        type=positive,
        metavar="MS",
        help="99 of 100 answers within this; where all connections at once are too many for it, "
        "as many as keep it (default: no limit)",
    )
    aim.add_argument(
        "--connections",
        type=count,
        default=64,
        metavar="N",
        help="clients at once, each of which asks when it has its answer (default: 64)",
    )
    course = parser.add_argument_group("measuring")
    course.add_argument(
        "--secs",
        type=positive,
        default=2.0,
        metavar="S",
        help="measure each candidate for at least so long (default: 2)",
    )
    course.add_argument(
        "--budget",
        type=positive,
        default=120.0,
        metavar="S",
        help="what all of it may take, if that suffices for one candidate (default: 120)",
    )
    course.add_argument(
        "--inputs",
        type=existing,
        metavar="PATH",
        help="ask with this file, or with those of this folder: images, .npy, .safetensors, .json, "
        ".bin (default: photographs, or what the model declares)",
    )
    result = parser.add_argument_group("result")
    result.add_argument(
        "--output",
        default="inferpool.toml",
        metavar="FILE",
        help="write the settings there; - is stdout (default: inferpool.toml)",
    )
    result.add_argument("--force", action="store_true", help="replace FILE if it is there")
    result.add_argument("--html", type=Path, metavar="FILE", help="a page with table and plot")
    result.add_argument(
        "--json", action="store_true", help="print all figures as JSON, and the table on stderr"
    )


def plan_of(args: Namespace) -> TunePlan:
    """Return the plan that the flags make."""
    return TunePlan(
        goal=Goal(connections=args.connections, p99_ms=args.p99_ms),
        secs=args.secs,
        budget_s=args.budget,
        inputs=args.inputs,
        output=None if args.output == STDOUT else Path(args.output),
        html=args.html,
        is_json=args.json,
    )


def problem_with(plan: TunePlan, *, may_replace: bool) -> str:
    """Return why a result could not be written, before minutes of measuring; empty if it can."""
    if plan.output is not None and plan.output.exists() and not may_replace:
        return f"{plan.output} is there already; --force replaces it, --output names another"
    if plan.output is None and plan.is_json:
        return "--json prints on stdout, where --output - would print the settings; name a file"
    for path in (plan.output, plan.html):
        if path is not None and not path.absolute().parent.is_dir():
            return f"{path} cannot be written: there is no folder {path.parent}"
        if path is not None and path.is_dir():
            return f"{path} cannot be written: it is a folder"
    return ""
