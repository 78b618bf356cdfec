"""The command `python -m tests.load`: loads a running service. See README.md."""

import asyncio
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from types import FrameType

from inferpool.service.tools.trial.connection import NoAnswerError, TrialError, connect
from inferpool.service.tools.trial.generators import LoadRun, run_load
from inferpool.service.tools.trial.load import LoadPlan, tls_context
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
from inferpool.service.tools.trial.tally import LoadTally
from tests.load import report
from tests.load.capacity import CapacitySearch, Ramp, climb
from tests.load.drift import find_drift
from tests.load.options import Options, read_options
from tests.load.plan import plan_for

_KEPT, _MISSED, _UNUSABLE, _INTERRUPTED = 0, 1, 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Load and report; returns the exit status."""
    try:
        options = read_options(argv)
        plan = plan_for(options)
        if options.is_checked:
            asyncio.run(_check(options.url, plan))
        with Screen(sys.stderr) as screen:
            return (_ramp if options.kind == "ramp" else _steady)(options, plan, screen)
    except TrialError as error:
        sys.stderr.write(f"{error}\n")
        return _UNUSABLE
    except KeyboardInterrupt:
        return _INTERRUPTED


async def _check(url: str, plan: LoadPlan) -> None:
    """Send one request: a mistake in the command should not be measured."""
    assert not callable(plan.requests)
    try:
        async with asyncio.timeout(plan.timeout_s):
            connection = await connect(
                plan.address, tls=None if plan.tls is None else tls_context(plan.tls)
            )
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
        if plan.num_requests:
            share = run.tally.num_requests / plan.num_requests
        else:
            share = (run.at_s + plan.warmup_s) / total_s
        screen.show(share, _figures(run))

    return show_figures


def _figures(run: LoadRun) -> str:
    """Say what the last moments were like."""
    if run.at_s < 0:
        return f"warming up  in flight {run.num_in_flight}"
    latest = LoadTally()
    bins = run.series.bins[-4:-1] or run.series.bins
    for tally in bins:
        latest.add(tally)
    rate = latest.num_good / (run.series.width_s * max(1, len(bins)))
    p50_ms, p99_ms = (latest.latency.percentile_s(percent) * 1e3 for percent in (50, 99))
    waiting = f" + {run.num_waiting} waiting" if run.num_waiting else ""
    return (
        f"{rate:,.0f}/s  p50 {p50_ms:.2f}  p99 {p99_ms:.2f} ms  "
        f"errors {run.tally.num_errors:,}  in flight {run.num_in_flight}{waiting}"
    )


def _steady(options: Options, plan: LoadPlan, screen: Screen) -> int:
    """Run `closed`, `open` or `soak`: one phase."""
    is_interrupted = False
    run = LoadRun(plan)
    show_figures = _shower(screen, run, options.kind)
    try:
        run_load(run, options.processes, lambda: show_figures() is None)
    except KeyboardInterrupt:
        is_interrupted = True
    missed = options.thresholds.misses(run) if options.thresholds else []
    parts = report.run_parts(run)
    content = report.run_json(run)
    if options.kind == "soak":
        drift = find_drift(run)
        if drift is None:
            parts.append(Note(text="Too short to say anything of drift."))
        else:
            parts.append(report.drift_table(drift))
            content["drift"] = asdict(drift)
            limit = options.thresholds.max_drift
            if limit is not None and drift.p99_growth_percent > limit:
                missed.append(f"p99 grew by {drift.p99_growth_percent:.1f} %, above {limit:g} %")
    warnings = report.warnings(run, options.processes)
    parts += [Note(text=f"Note: {text}", tone="bad") for text in warnings]
    charts = report.run_charts(run, options.thresholds)
    return _conclude(options, parts, charts, content, missed, is_interrupted=is_interrupted)


def _ramp(options: Options, plan: LoadPlan, screen: Screen) -> int:
    """Run many phases to find a rate."""
    thresholds = options.thresholds
    assert plan.rate is not None
    search = CapacitySearch(start=plan.rate, max_rate=options.max_rate, precision=options.precision)
    ramp = Ramp(thresholds=thresholds)
    try:
        climb(plan, search, ramp, options.processes, lambda *step: _shower(screen, *step))
    except KeyboardInterrupt:
        screen.begin("interrupted")
    parts: list[Part] = [report.ramp_table(ramp)]
    missed = []
    best = ramp.capacity
    if best is None:
        missed.append("no rate that was tried keeps the thresholds")
    else:
        at_least = "" if ramp.is_complete else ", at least"
        text = f"Capacity: {best.rate:,.1f} requests/s{at_least}"
        parts.append(Note(text=text, tone="good"))
        if thresholds.min_rate is not None and best.rate < thresholds.min_rate:
            missed.append(f"{best.rate:,.1f} requests/s are fewer than {thresholds.min_rate:g}")
    content: dict[str, object] = {
        "capacity_per_s": best.rate if best else None,
        "steps": [
            {"rate": step.rate, "holds": step.holds, "missed": step.missed,
             **report.run_json(step.run)}
            for step in ramp.steps
        ],
    }  # fmt: skip
    charts = [report.ramp_chart(ramp)] if ramp.steps else []
    if best:
        charts += report.run_charts(best.run, thresholds)
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
    title = report.describe(options)
    content |= {"kind": options.kind, "plan": options.as_dict(), "missed": missed}
    written = []
    if options.html:
        write_page(options.html, f"Load: {options.kind}", title, [*parts, *charts])
        written.append(Note(text=f"Written to {options.html}"))
    if options.out:
        write_json(options.out, content)
        written.append(Note(text=f"Written to {options.out}"))
    show([Note(text=title), *parts, *written], console_for(sys.stdout))
    if is_interrupted:
        return _INTERRUPTED
    return _MISSED if missed else _KEPT


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    # As Ctrl-C does: what was measured is reported.
    raise KeyboardInterrupt


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _interrupt)
    sys.exit(main())
