"""What a run has shown: as tables and plots, on the terminal and as a page, and as JSON."""

import json
import os
import platform
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table as RichTable

from tests.load.capacity import Ramp
from tests.load.charts import Chart, Line
from tests.load.drift import Drift, Slope
from tests.load.page import Note, Part, Table
from tests.load.plan import Plan
from tests.load.tally import Tally
from tests.load.team import Outcome
from tests.load.thresholds import Thresholds

_BUSY_CORE = 0.9
_LATE_MS = 5.0
_PERCENT_TICKS = (0.0, 50.0, 90.0, 99.0, 99.9, 99.99)
_HIDDEN = {"authorization", "x-api-key", "cookie", "proxy-authorization"}


def describe(kind: str, plan: Plan) -> str:
    """What was done, in a line."""
    if kind == "ramp":
        load = f"steps of {plan.duration_s:g} s"
    elif plan.rate is None:
        load = f"closed loop, {plan.connections} connections"
    else:
        load = f"open loop, {plan.rate:g} requests/s (Poisson)"
    if kind != "ramp":
        length = (
            f"{plan.num_requests:,} requests" if plan.num_requests else f"{plan.duration_s:g} s"
        )
        load += f", {length} after {plan.warmup_s:g} s of warm-up"
    processes = f", {plan.processes} generator processes" if plan.processes > 1 else ""
    return f"POST {plan.url}: {load}{processes}"


def outcome_parts(outcome: Outcome) -> list[Part]:
    """The tables and plots of one phase."""
    tally = outcome.tally
    parts: list[Part] = [_figures(outcome), _latencies(tally)]
    if tally.num_errors or tally.num_unfinished:
        parts.append(_errors(tally))
    if timings := tally.timings_ms():
        rows = [(name, f"{value:,.3f}") for name, value in timings.items()]
        parts.append(Table(title="Server-Timing", columns=("", "mean ms"), rows=rows))
    return parts


def warnings(outcome: Outcome) -> list[str]:
    """What makes the figures doubtful."""
    found = []
    if outcome.busiest_core > _BUSY_CORE:
        found.append(
            f"the generator is the limit: one of its processes took {outcome.busiest_core:.2f} of "
            f"a core. Give it more (--processes {2 * outcome.plan.processes}) if there are cores."
        )
    late_ms = outcome.tally.lateness.percentile_s(99) * 1e3
    if outcome.plan.rate is not None and late_ms > _LATE_MS:
        found.append(
            f"requests left late (p99 {late_ms:,.1f} ms): all connections were busy, or the "
            "generator was; the latencies above count from when they should have left."
        )
    return found


def _figures(outcome: Outcome) -> Table:
    tally = outcome.tally
    rows = [
        ("requests", f"{tally.num_requests:,}"),
        ("good answers/s", f"{outcome.rate:,.1f}"),
        ("errors", f"{tally.num_errors:,}"),
        *((f"status {status}", f"{num:,}") for status, num in sorted(tally.statuses.items())),
        ("sent, MiB/s", f"{tally.sent_bytes / outcome.wall_s / 2**20:,.2f}"),
        ("received, MiB/s", f"{tally.received_bytes / outcome.wall_s / 2**20:,.2f}"),
    ]
    if tally.num_retry_after:
        mean_s = tally.retry_after_s / tally.num_retry_after
        rows.append(("Retry-After", f"{tally.num_retry_after:,} (mean {mean_s:.1f} s)"))
    rows.append(
        ("generator, cores", f"{outcome.generator_cores:.2f} (busiest {outcome.busiest_core:.2f})")
    )
    return Table(title="Figures", columns=("", ""), rows=rows)


def _latencies(tally: Tally) -> Table:
    named = [("good answers", tally.latency), ("refusals", tally.refusal)]
    columns = ("latency, ms", "p50", "p90", "p99", "p99.9", "max", "mean", "number")
    rows = [
        (
            name,
            *(f"{value:,.2f}" for value in histogram.summary_ms().values()),
            f"{histogram.num:,}",
        )
        for name, histogram in named
        if histogram.num
    ]
    return Table(title="Latency", columns=columns, rows=rows)


def _errors(tally: Tally) -> Table:
    rows = [(kind, f"{num:,}") for kind, num in tally.errors.most_common()]
    if tally.num_unfinished:
        rows.append(("under way when it was stopped (not counted)", f"{tally.num_unfinished:,}"))
    return Table(title="Errors", columns=("kind", "number"), rows=rows)


def outcome_charts(outcome: Outcome, thresholds: Thresholds) -> list[Chart]:
    """Latency and rate over time, and latency by percentile."""
    series = outcome.series
    times = [(number + 0.5) * series.width_s for number in range(len(series.bins))]
    over_time = [
        Line(
            name=f"p{percent}",
            points=[
                (at, each.latency.percentile_s(percent) * 1e3)
                for at, each in zip(times, series.bins, strict=True)
                if each.num_good
            ],
        )
        for percent in (50, 99)
    ]
    rates = [
        Line(
            name=name,
            points=[(at, num / series.width_s) for at, num in zip(times, nums, strict=True)],
        )
        for name, nums in (
            ("good answers", [each.num_good for each in series.bins]),
            ("errors", [each.num_errors for each in series.bins]),
        )
    ]
    limit_ms = thresholds.p99_ms
    limit = (limit_ms, f"p99 {limit_ms:g} ms") if limit_ms else None
    x_label = "seconds from the start of measuring"
    charts = [
        Chart(title="Latency over time", x_label=x_label, y_label="ms", lines=over_time,
              log_y=True, limit=limit),
        Chart(title="Answers over time", x_label=x_label, y_label="per second", lines=rates),
    ]  # fmt: skip
    if outcome.tally.num_good:
        charts.append(_by_percentile(outcome.tally))
    return charts


def _by_percentile(tally: Tally) -> Chart:
    """The tail drawn out: x is how many requests there are to one that is slower."""
    num = tally.num_good
    points = [
        (1 / max(1 - percent / 100, 1 / num), latency_s * 1e3)
        for percent, latency_s in tally.latency.curve()
    ]
    ticks = [
        (1 / (1 - percent / 100), f"p{percent:g}")
        for percent in _PERCENT_TICKS
        if 1 / (1 - percent / 100) <= num
    ]
    return Chart(
        title="Latency by percentile",
        x_label="share of the requests that took no longer",
        y_label="ms",
        lines=[Line(name="latency", points=points)],
        log_x=True,
        log_y=True,
        x_ticks=ticks,
    )


def ramp_parts(ramp: Ramp) -> list[Part]:
    """The steps as a table."""
    rows = []
    for step in sorted(ramp.steps, key=lambda step: step.rate):
        tally = step.outcome.tally
        figures = tally.latency.summary_ms()
        verdict = "holds" if step.holds else "; ".join(step.missed)
        if not step.holds and step.is_generators:
            verdict += " (the generator is the limit)"
        rows.append((
            f"{step.rate:,.1f}", f"{step.outcome.rate:,.1f}", f"{figures['p50']:,.2f}",
            f"{figures['p99']:,.2f}", f"{figures['max']:,.1f}", f"{tally.num_errors:,}",
            f"{step.outcome.busiest_core:.2f}", verdict,
        ))  # fmt: skip
    columns = (
        "requests/s",
        "answered/s",
        "p50 ms",
        "p99 ms",
        "max ms",
        "errors",
        "cores",
        "verdict",
    )
    caption = "cores: of the busiest generator process."
    return [Table(title="Steps", columns=columns, rows=rows, caption=caption)]


def ramp_charts(ramp: Ramp) -> list[Chart]:
    """Latency against rate."""
    steps = sorted(ramp.steps, key=lambda step: step.rate)
    lines = [
        Line(
            name=f"p{percent}",
            points=[
                (step.rate, step.outcome.tally.latency.percentile_s(percent) * 1e3)
                for step in steps
                if step.outcome.tally.num_good
            ],
            marks=True,
        )
        for percent in (50, 99)
    ]
    limit_ms = ramp.thresholds.p99_ms
    return [
        Chart(
            title="Latency against rate",
            x_label="requests per second",
            y_label="ms",
            lines=lines,
            log_y=True,
            limit=(limit_ms, f"p99 {limit_ms:g} ms") if limit_ms else None,
        )
    ]


def drift_parts(drift: Drift) -> list[Part]:
    """Slopes, as a table."""

    def row(name: str, slope: Slope, digits: int) -> tuple[str, ...]:
        change = f"{slope.per_hour:+,.{digits}f} ± {slope.error_per_hour:,.{digits}f}"
        return (name, f"{slope.mean:,.{digits}f}", change, "yes" if slope.is_shown else "no")

    rows = [
        row("p50, ms", drift.p50_ms, 3),
        row("p99, ms", drift.p99_ms, 3),
        row("good answers/s", drift.rate, 2),
    ]
    caption = (
        f"p99 of the first quarter {drift.first_p99_ms:,.2f} ms, of the last "
        f"{drift.last_p99_ms:,.2f} ms ({drift.p99_growth_percent:+.1f} %)."
    )
    columns = ("", "mean", "change per hour", "shown")
    return [Table(title="Drift", columns=columns, rows=rows, caption=caption)]


def show(parts: Sequence[Part], console: Console) -> None:
    """Print tables and notes."""
    for part in parts:
        if isinstance(part, Table):
            shown = RichTable(
                title=part.title, title_justify="left", caption=part.caption or None,
                caption_justify="left", show_header=any(part.columns),
            )  # fmt: skip
            for number, column in enumerate(part.columns):
                shown.add_column(column, justify="right" if number else "left")
            for cells in part.rows:
                shown.add_row(*cells)
            console.print(shown)
        elif isinstance(part, Note):
            style = {"bad": "red", "good": "green"}.get(part.tone)
            console.print(part.text, style=style, markup=False, highlight=False, soft_wrap=True)


def outcome_json(outcome: Outcome) -> dict[str, object]:
    """All figures of one phase."""
    tally = outcome.tally
    return {
        "is_complete": outcome.is_complete,
        "measured_s": round(outcome.wall_s, 3),
        "good_per_s": round(outcome.rate, 3),
        "requests": tally.num_requests,
        "good": tally.num_good,
        "errors": dict(tally.errors),
        "unfinished": tally.num_unfinished,
        "statuses": dict(tally.statuses),
        "latency_ms": tally.latency.summary_ms(),
        "refusal_ms": tally.refusal.summary_ms(),
        "lateness_ms": tally.lateness.summary_ms(),
        "server_timing_ms": tally.timings_ms(),
        "retry_after": {"answers": tally.num_retry_after, "sum_s": tally.retry_after_s},
        "sent_bytes": tally.sent_bytes,
        "received_bytes": tally.received_bytes,
        "generator_cores": round(outcome.generator_cores, 3),
        "busiest_generator_core": round(outcome.busiest_core, 3),
        "series": {
            "width_s": outcome.series.width_s,
            "good": [each.num_good for each in outcome.series.bins],
            "errors": [each.num_errors for each in outcome.series.bins],
            "p50_ms": [_ms(each, 50) for each in outcome.series.bins],
            "p99_ms": [_ms(each, 99) for each in outcome.series.bins],
        },
    }


def _ms(tally: Tally, percent: float) -> float | None:
    return round(tally.latency.percentile_s(percent) * 1e3, 3) if tally.num_good else None


def write_json(path: Path, kind: str, plan: Plan, content: dict[str, object]) -> None:
    """Write all figures, with what was done. Secrets of headers are left out."""
    headers = {
        name: "hidden" if name.lower() in _HIDDEN else value for name, value in plan.headers.items()
    }
    document = {
        "kind": kind,
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "machine": {
            "cores": os.cpu_count(),
            "system": platform.platform(),
            "python": sys.version.split()[0],
        },
        "plan": asdict(plan) | {"headers": headers},
        **content,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1, default=str) + "\n")
