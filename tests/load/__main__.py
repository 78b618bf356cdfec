"""The command `python -m tests.load`: loads a running service. See README.md."""

import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict
from types import FrameType

import httpx
from rich.console import Console

from tests.load import report
from tests.load.capacity import Ramp, Search, climb
from tests.load.charts import Chart
from tests.load.drift import find_drift
from tests.load.errors import LoadError
from tests.load.generator import tls_of
from tests.load.live import Live
from tests.load.options import Options, read_options
from tests.load.page import Note, Part, write_page
from tests.load.plan import Plan
from tests.load.team import Outcome, Team

_KEPT, _MISSED, _UNUSABLE, _INTERRUPTED = 0, 1, 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Load, report; returns the exit status."""
    try:
        options = read_options(argv)
        if options.is_checked:
            _check(options.plan)
        return _ramp(options) if options.kind == "ramp" else _steady(options)
    except LoadError as error:
        sys.stderr.write(f"{error}\n")
        return _UNUSABLE
    except KeyboardInterrupt:
        return _INTERRUPTED


def _check(plan: Plan) -> None:
    """Send one request: a mistake in the command should not be measured.

    Raises:
        LoadError: It was not answered well; says what came instead.
    """
    body = plan.source.bodies()[0]
    headers = {"Content-Type": body.content_type, **plan.headers}
    try:
        answer = httpx.post(
            plan.url, content=body.content, headers=headers, verify=tls_of(plan.verify),
            timeout=plan.timeout_s,
        )  # fmt: skip
    except (httpx.HTTPError, OSError, ValueError) as error:
        raise LoadError(f"{plan.url}: {error or type(error).__name__}") from error
    if not answer.is_success and answer.status_code != 429:
        raise LoadError(
            f"{plan.url}: the first request was answered with {answer.status_code}: "
            f"{answer.text[:500]}\n(--no-check goes on all the same)"
        )


def _steady(options: Options) -> int:
    """`closed`, `open` and `soak`: one phase."""
    is_interrupted = False
    outcome = Outcome(plan=options.plan)
    with Live() as live, Team(options.plan.processes) as team:
        show = live.begin(options.plan, options.kind)
        try:
            team.run(outcome, lambda: show(outcome) is None)
        except KeyboardInterrupt:
            is_interrupted = True
    missed = options.thresholds.misses(outcome) if options.thresholds else []
    parts = report.outcome_parts(outcome)
    content = report.outcome_json(outcome)
    if options.kind == "soak":
        drift = find_drift(outcome)
        if drift is None:
            parts.append(Note(text="Too short to say anything of drift."))
        else:
            parts += report.drift_parts(drift)
            content["drift"] = asdict(drift)
            limit = options.thresholds.max_drift
            if limit is not None and drift.p99_growth_percent > limit:
                missed.append(f"p99 grew by {drift.p99_growth_percent:.1f} %, above {limit:g} %")
    parts += [Note(text=f"Note: {text}", tone="bad") for text in report.warnings(outcome)]
    charts = report.outcome_charts(outcome, options.thresholds)
    return _conclude(options, parts, charts, content, missed, is_interrupted=is_interrupted)


def _ramp(options: Options) -> int:
    """Many phases, to find a rate."""
    plan, thresholds = options.plan, options.thresholds
    assert plan.rate is not None
    search = Search(start=plan.rate, max_rate=options.max_rate, precision=options.precision)
    ramp = Ramp(thresholds=thresholds)
    with Live() as live, Team(plan.processes) as team:
        try:
            climb(plan, search, ramp, team, live.begin)
        except KeyboardInterrupt:
            live.say("interrupted")
    parts = report.ramp_parts(ramp)
    missed = []
    best = ramp.capacity
    if best is None:
        missed.append("no rate that was tried keeps the thresholds")
    else:
        text = f"Capacity: {best.rate:,.1f} requests/s"
        if not ramp.is_complete:
            text += ", at least"
        parts.append(Note(text=text, tone="good"))
        if thresholds.min_rate is not None and best.rate < thresholds.min_rate:
            missed.append(f"{best.rate:,.1f} requests/s are fewer than {thresholds.min_rate:g}")
    content: dict[str, object] = {
        "capacity_per_s": best.rate if best else None,
        "steps": [
            {"rate": step.rate, "holds": step.holds, "missed": step.missed,
             **report.outcome_json(step.outcome)}
            for step in ramp.steps
        ],
    }  # fmt: skip
    charts = report.ramp_charts(ramp) if ramp.steps else []
    if best:
        charts += report.outcome_charts(best.outcome, thresholds)
    return _conclude(options, parts, charts, content, missed, is_interrupted=not ramp.is_complete)


def _conclude(
    options: Options,
    parts: list[Part],
    charts: Sequence[Chart],
    content: dict[str, object],
    missed: Sequence[str],
    *,
    is_interrupted: bool,
) -> int:
    """Print and write everything; returns the exit status."""
    parts += [Note(text=f"Missed: {text}", tone="bad") for text in missed]
    if options.kind != "ramp" and options.thresholds and not missed and not is_interrupted:
        parts.append(Note(text="All thresholds were kept.", tone="good"))
    if is_interrupted:
        parts.append(Note(text="Interrupted: these are the figures until then.", tone="bad"))
    console = Console(width=None if sys.stdout.isatty() else 130)
    title = report.describe(options.kind, options.plan)
    console.print(title, markup=False, highlight=False)
    report.show(parts, console)
    if options.html:
        write_page(options.html, f"Load: {options.kind}", title, [*parts, *charts])
        console.print(f"Written to {options.html}", markup=False, highlight=False)
    if options.out:
        report.write_json(options.out, options.kind, options.plan, content | {"missed": missed})
        console.print(f"Written to {options.out}", markup=False, highlight=False)
    if is_interrupted:
        return _INTERRUPTED
    return _MISSED if missed else _KEPT


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    # As Ctrl-C does: what was measured is reported.
    raise KeyboardInterrupt


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _interrupt)
    sys.exit(main())
