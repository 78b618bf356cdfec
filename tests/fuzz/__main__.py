"""The command `python -m tests.fuzz`: a long campaign of hostile inputs against a real service.

It starts the service with five models and sends the inputs over many connections. The exit code is
1 if anything happened that must not: an answer of 5xx, an input without an answer, a lost worker,
memory that grows, a ledger out of balance, or an error in the log.
"""

import argparse
import re
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn
from rich.table import Table

from tests.fuzz.campaign import PROTOCOLS, Verdict, campaign, keep, read_input, replay, service

_REQUEST_ID = re.compile(r'"request_id":"[^"]*"')
_MAX_REASONS = 30
_REST_S = 10.0
"""Pause after each half: idle workers give memory back after 5 s."""
_OUT = Path(__file__).with_name("out")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a campaign, or send one input again; return the exit status."""
    args = _parser().parse_args(argv)
    console = Console() if sys.stdout.isatty() else Console(width=160)
    with service(args.replicas, args.front_ends, args.protocol) as target:
        if args.replay:
            for exchange in replay(target, read_input(args.replay)):
                console.print(exchange.error or "answered:", markup=False)
                for answer in exchange.answers:
                    console.print(answer.head.decode("latin-1"), answer.body[:2000], markup=False)
            return 0
        columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress("inputs", *columns, console=console) as progress:
            task = progress.add_task("", total=args.inputs)
            verdict = campaign(
                target,
                num_inputs=args.inputs,
                seed=args.seed,
                max_s=args.minutes * 60,
                num_connections=args.connections,
                rest_s=_REST_S,
                protocol=args.protocol,
                on_progress=lambda done: progress.update(task, completed=done),
            )
    _report(console, verdict)
    for path in keep(verdict, args.out):
        console.print(f"kept {path}", markup=False)
    return 1 if verdict.offences else 0


def _report(console: Console, verdict: Verdict) -> None:
    statuses = sorted(set().union(*verdict.statuses.values()))
    table = Table("kind", *statuses, "inputs", title="Answers")
    for kind, counts in sorted(verdict.statuses.items()):
        table.add_row(kind, *(str(counts[each] or "") for each in statuses), str(counts.total()))
    console.print(table)
    rate = verdict.num_inputs / max(verdict.seconds, 1e-9)
    before, middle, after = (pss / 2**20 for pss in verdict.pss_bytes)
    console.print(
        f"{verdict.num_inputs:,} inputs in {verdict.seconds:.0f} s: {rate:,.0f} per second. "
        f"{verdict.num_workers} workers. "
        f"Memory: {before:.0f} MiB before, {middle:.0f} in the middle, {after:.0f} after."
    )
    offences = sorted(verdict.offences, key=lambda each: each[1] is not None)
    reasons = Counter(_REQUEST_ID.sub("", reason) for reason, _ in offences)
    for reason, count in list(reasons.items())[:_MAX_REASONS]:
        console.print(f"{count} x {reason}", style="red", markup=False)
    console.print("nothing that must not happen" if not reasons else f"{len(reasons)} offences")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--inputs", type=int, default=200_000, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument("--protocol", choices=PROTOCOLS, default="predict", help="%(default)s")
    parser.add_argument("--minutes", type=float, default=60, help="stop after (%(default)s)")
    parser.add_argument("--connections", type=int, default=48, help="default: %(default)s")
    parser.add_argument("--replicas", type=int, default=2, help="of each model (%(default)s)")
    parser.add_argument("--front-ends", type=int, default=1, help="processes (%(default)s)")
    parser.add_argument("--out", type=Path, default=_OUT, help="for offending inputs (%(default)s)")
    parser.add_argument("--replay", type=Path, metavar="FILE", help="send one such input again")
    return parser


if __name__ == "__main__":
    sys.exit(main())
