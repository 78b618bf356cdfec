"""The command `python -m tests.load`: loads a running service. See README.md."""

import argparse
import asyncio
import signal
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from math import inf
from types import FrameType

from inferpool.service.client.cli.access import tls_context
from inferpool.service.tools.trial.connection import NoAnswerError, TrialError, connect
from inferpool.service.tools.trial.load import LoadPlan
from inferpool.service.tools.trial.report import (
    Chart,
    Note,
    Part,
    console_for,
    show,
    write_json,
    write_page,
)
from inferpool.service.tools.trial.screen import Screen
from tests.load import report
from tests.load.capacity import Ramp, rates
from tests.load.generators import LoadRun, run_load
from tests.load.judging import find_drift
from tests.load.options import plan_for, read_options

_KEPT, _MISSED, _UNUSABLE, _INTERRUPTED = 0, 1, 2, 130


@dataclass(slots=True)
class Outcome:
    """The report of a run, and its exit status."""

    parts: list[Part] = field(default_factory=list)
    charts: list[Chart] = field(default_factory=list)
    content: dict[str, object] = field(default_factory=dict)
    """For the JSON file."""
    missed: list[str] = field(default_factory=list)
    """Thresholds that were missed."""
    is_complete: bool = True

    def note(self, text: str, tone: str = "bad") -> None:
        """Report a line."""
        self.parts.append(Note(text=text, tone=tone))


def main(argv: list[str] | None = None) -> int:
    """Load and report; returns the exit status."""
    args = read_options(argv)
    try:
        plan = plan_for(args)
        if not args.no_check:
            asyncio.run(_check(args.url, plan))
        with Screen(sys.stderr) as screen:
            outcome = (_ramp if args.kind == "ramp" else _steady)(args, plan, screen)
    except TrialError as error:
        sys.stderr.write(f"{error}\n")
        return _UNUSABLE
    except KeyboardInterrupt:
        return _INTERRUPTED
    return _conclude(args, outcome)


async def _check(url: str, plan: LoadPlan) -> None:
    """Send one request: a mistake in the command should not be measured."""
    assert not callable(plan.requests)
    try:
        async with asyncio.timeout(plan.timeout_s):
            tls = None if plan.tls is None else tls_context(plan.tls)
            connection = await connect(plan.address, tls=tls)
            try:
                answer = await connection.ask(plan.requests[0], plan.timeout_s)
            finally:
                connection.give_up("one answer was enough")
    except (NoAnswerError, OSError) as error:
        raise TrialError(f"{url}: {error or type(error).__name__}") from error
    if not 200 <= answer.status < 300 and answer.status != 429:
        raise TrialError(
            f"{url}: the first request was answered with {answer.status}: "
            f"{answer.body[:500].decode(errors='replace')}\n(--no-check goes on all the same)"
        )


def _shower(screen: Screen, run: LoadRun, title: str) -> Callable[[], None]:
    """Announce a run, and return what shows how far it has come."""
    plan = run.plan
    total_s = plan.warmup_s + (plan.duration_s or 0.0)
    screen.begin(title, line_every_s=min(60.0, max(1.0, total_s / 20)))

    def show_figures() -> None:
        share = (run.at_s + plan.warmup_s) / total_s if total_s else 0.0
        if plan.num_requests:
            share = run.tally.num_requests / plan.num_requests
        tally = run.tally
        p50_ms, p99_ms = (tally.latency.percentile_s(percent) * 1e3 for percent in (50, 99))
        screen.show(
            share,
            f"{run.rate:,.0f}/s  p50 {p50_ms:.2f}  p99 {p99_ms:.2f} ms  errors "
            f"{tally.num_errors:,}  in flight {run.num_in_flight} + {run.num_waiting} waiting",
        )

    return show_figures


def _steady(args: argparse.Namespace, plan: LoadPlan, screen: Screen) -> Outcome:
    """Run `closed`, `open` or `soak`: one phase."""
    run, outcome = LoadRun(plan), Outcome()
    show_figures = _shower(screen, run, args.kind)
    try:
        run_load(run, args.processes, lambda: show_figures() is None)
    except KeyboardInterrupt:
        outcome.is_complete = False
    outcome.missed = args.thresholds.misses(run) if any(asdict(args.thresholds).values()) else []
    outcome.content = report.run_json(run)
    outcome.parts = report.run_parts(outcome.content)
    outcome.charts = report.run_charts(run, args.thresholds)
    if args.kind == "soak":
        if drift := find_drift(run):
            outcome.parts.append(report.drift_table(drift))
            outcome.content["drift"] = drift
            growth, limit = drift["p99_growth_percent"], args.max_drift or inf
            if growth > limit:
                outcome.missed.append(f"p99 grew by {growth:.1f} %, above {limit:g} %")
        else:
            outcome.note("Too short to say anything of drift.", "")
    for text in report.warnings(run, args.processes):
        outcome.note(f"Note: {text}")
    return outcome


def _ramp(args: argparse.Namespace, plan: LoadPlan, screen: Screen) -> Outcome:
    """Run many phases to find a rate."""
    ramp, outcome = Ramp(args.thresholds), Outcome()
    search = rates(args.rate, (args.precision or 5.0) / 100, args.max_rate or inf)
    try:
        ramp.climb(plan, search, args.processes, lambda *step: _shower(screen, *step))
    except KeyboardInterrupt:
        screen.begin("interrupted")
    outcome.is_complete, best = ramp.is_complete, ramp.capacity
    table, chart = report.ramp_parts(ramp)
    outcome.parts, outcome.charts = [table], [chart]
    outcome.content = {
        "capacity_per_s": best.rate if best else None,
        "steps": [
            {"rate": step.rate, "holds": not step.missed, "missed": step.missed}
            | report.run_json(step.run)
            for step in ramp.steps
        ],
    }
    if best is None:
        outcome.missed.append("no rate that was tried keeps the thresholds")
        return outcome
    outcome.charts += report.run_charts(best.run, args.thresholds)
    at_least = "" if ramp.is_complete else ", at least"
    outcome.note(f"Capacity: {best.rate:,.1f} requests/s{at_least}", "good")
    if best.rate < (args.min_rate or 0.0):
        outcome.missed.append(f"{best.rate:,.1f} requests/s are fewer than {args.min_rate:g}")
    return outcome


def _conclude(args: argparse.Namespace, outcome: Outcome) -> int:
    """Print and write everything; returns the exit status."""
    for text in outcome.missed:
        outcome.note(f"Missed: {text}")
    if not outcome.is_complete:
        outcome.note("Interrupted: these are the figures until then.")
    elif not outcome.missed and any(asdict(args.thresholds).values()):
        outcome.note("All thresholds were kept.", "good")
    title = report.describe(args)
    plan = {name: value for name, value in vars(args).items() if name != "header"}  # has secrets
    if args.html:
        write_page(args.html, f"Load: {args.kind}", title, [*outcome.parts, *outcome.charts])
        outcome.note(f"Written to {args.html}", "")
    if args.out:
        found = {"kind": args.kind, "plan": plan, "missed": outcome.missed}
        write_json(args.out, outcome.content | found)
        outcome.note(f"Written to {args.out}", "")
    show([Note(text=title), *outcome.parts], console_for(sys.stdout))
    if not outcome.is_complete:
        return _INTERRUPTED
    return _MISSED if outcome.missed else _KEPT


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    # As Ctrl-C does: what was measured is reported.
    raise KeyboardInterrupt


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _interrupt)
    sys.exit(main())
