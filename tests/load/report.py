"""The report of a run of load: tables, charts, and JSON."""

import argparse
from collections.abc import Mapping
from typing import Any

from inferpool.service.tools.trial.report import Chart, Part, ReportTable, line_chart
from inferpool.service.tools.trial.tally import LoadTally
from tests.load.capacity import Ramp, RampStep
from tests.load.generators import LoadRun
from tests.load.judging import Thresholds, retry_after, timings_ms

_BUSY_CORE = 0.9
_LATE_MS = 5.0
_PERCENT_TICKS = (0.0, 50.0, 90.0, 99.0, 99.9, 99.99)


def describe(args: argparse.Namespace) -> str:
    """Say in a line what was done."""
    if args.kind == "ramp":
        load = f"steps of {args.duration:g} s"
    else:
        load = f"closed loop, {args.connections} connections"
        if args.rate is not None:
            load = f"open loop, {args.rate:g} requests/s (Poisson)"
        length = f"{args.requests:,} requests" if args.requests else f"{args.duration:g} s"
        load += f", {length} after {args.warmup:g} s of warm-up"
    processes = f", {args.processes} generator processes" if args.processes > 1 else ""
    return f"POST {args.url}: {load}{processes}"


def run_json(run: LoadRun) -> dict[str, Any]:
    """Return all figures of one phase."""
    tally, bins = run.tally, run.series.bins
    num_retries, retry_s = retry_after(tally)
    return {
        "is_complete": run.is_complete,
        "measured_s": run.wall_s,
        "good_per_s": run.rate,
        "requests": tally.num_requests,
        "good": tally.num_good,
        "errors": tally.errors,
        "unfinished": tally.num_unfinished,
        "statuses": tally.statuses,
        "latency_ms": tally.latency.summary_ms(),
        "refusal_ms": tally.refusal.summary_ms(),
        "lateness_ms": tally.lateness.summary_ms(),
        "server_timing_ms": timings_ms(tally),
        "retry_after": {"answers": num_retries, "sum_s": retry_s},
        "sent_bytes": tally.sent_bytes,
        "received_bytes": tally.received_bytes,
        "generator_cores": run.generator_cores,
        "busiest_generator_core": run.busiest_core,
        "series": {
            "width_s": run.series.width_s,
            "good": [each.num_good for each in bins],
            "errors": [each.num_errors for each in bins],
            **{f"p{percent}_ms": [_ms(each, percent) if each.num_good else None for each in bins]
               for percent in (50, 99)},
        },
    }  # fmt: skip


def run_parts(figures: Mapping[str, Any]) -> list[Part]:
    """Return the figures of one phase as tables."""
    counts = [(name, f"{each:,.3f}" if isinstance(each, float) else f"{each:,}")
              for name, each in figures.items() if type(each) in (int, float)]  # fmt: skip
    latencies = [
        (name.removesuffix("_ms"), *(f"{each:,.2f}" for each in figures[name].values()))
        for name in ("latency_ms", "refusal_ms", "lateness_ms")
        if any(figures[name].values())
    ]
    columns = ("", *figures["latency_ms"])
    parts: list[Part] = [ReportTable(title="Figures", columns=("", ""), rows=counts)]
    parts.append(ReportTable(title="Latencies, ms", columns=columns, rows=latencies))
    for name in ("errors", "statuses", "server_timing_ms", "retry_after"):
        rows = [(kind, f"{num:,.3f}".removesuffix(".000")) for kind, num in figures[name].items()]
        if any(figures[name].values()):
            parts.append(ReportTable(title=name, columns=("", ""), rows=rows))
    return parts


def warnings(run: LoadRun, num_processes: int) -> list[str]:
    """Say what makes the figures doubtful."""
    found = []
    if run.busiest_core > _BUSY_CORE:
        found.append(
            f"the generator is the limit: one of its processes took {run.busiest_core:.2f} of "
            f"a core. Give it more (--processes {2 * num_processes}) if there are cores."
        )
    late_ms = run.tally.lateness.percentile_s(99) * 1e3
    if run.plan.rate is not None and late_ms > _LATE_MS:
        found.append(
            f"requests left late (p99 {late_ms:,.1f} ms): all connections were busy, or the "
            "generator was; the latencies above count from when they should have left."
        )
    return found


def run_charts(run: LoadRun, thresholds: Thresholds) -> list[Chart]:
    """Draw latency and rate over time, and latency by percentile."""
    series, tally = run_json(run)["series"], run.tally
    at = [(number + 0.5) * series["width_s"] for number in range(len(series["good"]))]
    x_label = "seconds from the start of measuring"

    def line(name: str, factor: float = 1.0) -> list[tuple[float, float]]:
        pairs = zip(at, series[name], strict=True)
        return [(x, y * factor) for x, y in pairs if y is not None]

    latencies = {f"p{percent}": line(f"p{percent}_ms") for percent in (50, 99)}
    rates = {name: line(name, 1 / series["width_s"]) for name in ("good", "errors")}
    # The tail is drawn out: x is how many requests there are to one that is slower.
    num = max(1, tally.num_good)
    points = [
        (1 / max(1 - percent / 100, 1 / num), latency_s * 1e3)
        for percent, latency_s in tally.latency.curve()
    ]
    ticks = [(1 / (1 - percent / 100), f"p{percent:g}") for percent in _PERCENT_TICKS]
    return [
        line_chart(
            "Latency over time", x_label, "ms", latencies, log_y=True, limit=_limit(thresholds)
        ),
        line_chart("Answers over time", x_label, "per second", rates),
        line_chart(
            "Latency by percentile", "share of the requests that took no longer", "ms",
            {"latency": points}, log_x=True, log_y=True,
            x_ticks=[(x, text) for x, text in ticks if x <= num],
        ),
    ]  # fmt: skip


def ramp_parts(ramp: Ramp) -> tuple[ReportTable, Chart]:
    """Return the steps as a table, and latency against rate as a chart."""
    steps = sorted(ramp.steps, key=lambda step: step.rate)

    def row(step: RampStep) -> tuple[str, ...]:
        figures = step.run.tally.latency.summary_ms()
        verdict = "; ".join(step.missed) or "holds"
        if step.missed and step.run.busiest_core > _BUSY_CORE:
            verdict += " (the generator is the limit)"
        return (
            f"{step.rate:,.1f}", f"{step.run.rate:,.1f}", f"{figures['p50']:,.2f}",
            f"{figures['p99']:,.2f}", f"{figures['max']:,.1f}",
            f"{step.run.tally.num_errors:,}", f"{step.run.busiest_core:.2f}", verdict,
        )  # fmt: skip

    heads = ["requests/s", "answered/s", "p50 ms", "p99 ms", "max ms", "errors", "cores", "verdict"]
    table = ReportTable(
        title="Steps", columns=heads, rows=[row(step) for step in steps], texts=(7,),
        caption="cores: of the busiest generator process.",
    )  # fmt: skip
    lines = {
        f"p{percent}": [
            (step.rate, _ms(step.run.tally, percent)) for step in steps if step.run.tally.num_good
        ]
        for percent in (50, 99)
    }
    chart = line_chart(
        "Latency against rate", "requests per second", "ms", lines,
        mode="lines+markers", log_y=True, limit=_limit(ramp.thresholds),
    )  # fmt: skip
    return table, chart


def _limit(thresholds: Thresholds) -> tuple[float, str] | None:
    limit_ms = thresholds.p99_ms
    return (limit_ms, f"p99 {limit_ms:g} ms") if limit_ms else None


def drift_table(drift: Mapping[str, Any]) -> ReportTable:
    """Return slopes as a table."""
    rows = [
        (name, *(f"{each:,.3f}" for each in slope.values()),
         "yes" if abs(slope["per_hour"]) > slope["error_per_hour"] else "no")
        for name, slope in drift.items() if isinstance(slope, dict)
    ]  # fmt: skip
    caption = (
        f"p99 of the first quarter {drift['first_p99_ms']:,.2f} ms, of the last "
        f"{drift['last_p99_ms']:,.2f} ms ({drift['p99_growth_percent']:+.1f} %)."
    )
    columns = ("", "mean", "change per hour", "±", "shown")
    return ReportTable(title="Drift", columns=columns, rows=rows, caption=caption)


def _ms(tally: LoadTally, percent: float) -> float:
    return tally.latency.percentile_s(percent) * 1e3
