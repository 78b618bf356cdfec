"""The report of a run of load: tables, charts, and JSON."""

from inferpool.service.tools.trial.generators import LoadRun
from inferpool.service.tools.trial.report import Chart, Part, ReportTable, line_chart
from inferpool.service.tools.trial.tally import LoadTally
from tests.load.capacity import BUSY_CORE, Ramp
from tests.load.drift import Drift, Slope
from tests.load.options import Options
from tests.load.plan import retry_after, timings_ms
from tests.load.thresholds import Thresholds

_LATE_MS = 5.0
_PERCENT_TICKS = (0.0, 50.0, 90.0, 99.0, 99.9, 99.99)


def describe(options: Options) -> str:
    """Say in a line what was done."""
    if options.kind == "ramp":
        load = f"steps of {options.duration_s:g} s"
    else:
        load = f"closed loop, {options.connections} connections"
        if options.rate is not None:
            load = f"open loop, {options.rate:g} requests/s (Poisson)"
        num = options.num_requests
        length = f"{num:,} requests" if num else f"{options.duration_s:g} s"
        load += f", {length} after {options.warmup_s:g} s of warm-up"
    processes = f", {options.processes} generator processes" if options.processes > 1 else ""
    return f"POST {options.url}: {load}{processes}"


def run_parts(run: LoadRun) -> list[Part]:
    """Return the tables of one phase."""
    tally = run.tally
    parts: list[Part] = [_figures(run), _latencies(tally)]
    if tally.num_errors or tally.num_unfinished:
        rows = [(kind, f"{num:,}") for kind, num in tally.errors.most_common()]
        if tally.num_unfinished:
            rows.append(("under way at the stop (not counted)", f"{tally.num_unfinished:,}"))
        parts.append(ReportTable(title="Errors", columns=("kind", "number"), rows=rows))
    if timings := timings_ms(tally):
        rows = [(name, f"{value:,.3f}") for name, value in timings.items()]
        parts.append(ReportTable(title="Server-Timing", columns=("", "mean ms"), rows=rows))
    return parts


def warnings(run: LoadRun, num_processes: int) -> list[str]:
    """Say what makes the figures doubtful."""
    found = []
    if run.busiest_core > BUSY_CORE:
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


def _figures(run: LoadRun) -> ReportTable:
    tally = run.tally
    rows = [
        ("requests", f"{tally.num_requests:,}"),
        ("good answers/s", f"{run.rate:,.1f}"),
        ("errors", f"{tally.num_errors:,}"),
        *((f"status {status}", f"{num:,}") for status, num in sorted(tally.statuses.items())),
        ("sent, MiB/s", f"{tally.sent_bytes / run.wall_s / 2**20:,.2f}"),
        ("received, MiB/s", f"{tally.received_bytes / run.wall_s / 2**20:,.2f}"),
    ]
    num_retries, retry_s = retry_after(tally)
    if num_retries:
        rows.append(("Retry-After", f"{num_retries:,} (mean {retry_s / num_retries:.1f} s)"))
    rows.append(("generator, cores", f"{run.generator_cores:.2f} (busiest {run.busiest_core:.2f})"))
    return ReportTable(title="Figures", columns=("", ""), rows=rows)


def _latencies(tally: LoadTally) -> ReportTable:
    columns = ("latency, ms", "p50", "p90", "p99", "p99.9", "max", "mean", "number")
    rows = [
        (name, *(f"{each:,.2f}" for each in histogram.summary_ms().values()), f"{histogram.num:,}")
        for name, histogram in (("good answers", tally.latency), ("refusals", tally.refusal))
        if histogram.num
    ]
    return ReportTable(title="Latency", columns=columns, rows=rows)


def run_charts(run: LoadRun, thresholds: Thresholds) -> list[Chart]:
    """Draw latency and rate over time, and latency by percentile."""
    series = run.series
    bins = [((number + 0.5) * series.width_s, each) for number, each in enumerate(series.bins)]
    x_label = "seconds from the start of measuring"
    latencies = {
        f"p{percent}": [
            (at, each.latency.percentile_s(percent) * 1e3) for at, each in bins if each.num_good
        ]
        for percent in (50, 99)
    }
    rates = {
        "good answers": [(at, each.num_good / series.width_s) for at, each in bins],
        "errors": [(at, each.num_errors / series.width_s) for at, each in bins],
    }
    limit = _limit(thresholds)
    charts = [
        line_chart("Latency over time", x_label, "ms", latencies, log_y=True, limit=limit),
        line_chart("Answers over time", x_label, "per second", rates),
    ]
    if run.tally.num_good:
        charts.append(_by_percentile(run.tally))
    return charts


def _by_percentile(tally: LoadTally) -> Chart:
    """Draw the tail out: x is how many requests there are to one that is slower."""
    num = tally.num_good
    points = [
        (1 / max(1 - percent / 100, 1 / num), latency_s * 1e3)
        for percent, latency_s in tally.latency.curve()
    ]
    ticks = [(1 / (1 - percent / 100), f"p{percent:g}") for percent in _PERCENT_TICKS]
    return line_chart(
        "Latency by percentile",
        "share of the requests that took no longer",
        "ms",
        {"latency": points},
        log_x=True,
        log_y=True,
        x_ticks=[(x, text) for x, text in ticks if x <= num],
    )


def _limit(thresholds: Thresholds) -> tuple[float, str] | None:
    limit_ms = thresholds.p99_ms
    return (limit_ms, f"p99 {limit_ms:g} ms") if limit_ms else None


def ramp_table(ramp: Ramp) -> ReportTable:
    """Return the steps as a table."""
    columns = (
        "requests/s", "answered/s", "p50 ms", "p99 ms", "max ms", "errors", "cores", "verdict",
    )  # fmt: skip
    rows = []
    for step in sorted(ramp.steps, key=lambda step: step.rate):
        tally = step.run.tally
        figures = tally.latency.summary_ms()
        verdict = "holds" if step.holds else "; ".join(step.missed)
        if not step.holds and step.run.busiest_core > BUSY_CORE:
            verdict += " (the generator is the limit)"
        rows.append((
            f"{step.rate:,.1f}", f"{step.run.rate:,.1f}", f"{figures['p50']:,.2f}",
            f"{figures['p99']:,.2f}", f"{figures['max']:,.1f}", f"{tally.num_errors:,}",
            f"{step.run.busiest_core:.2f}", verdict,
        ))  # fmt: skip
    caption = "cores: of the busiest generator process."
    return ReportTable(title="Steps", columns=columns, rows=rows, caption=caption, texts=(7,))


def ramp_chart(ramp: Ramp) -> Chart:
    """Draw latency against rate."""
    steps = sorted(ramp.steps, key=lambda step: step.rate)
    lines = {
        f"p{percent}": [
            (step.rate, step.run.tally.latency.percentile_s(percent) * 1e3)
            for step in steps
            if step.run.tally.num_good
        ]
        for percent in (50, 99)
    }
    return line_chart(
        "Latency against rate", "requests per second", "ms", lines,
        mode="lines+markers", log_y=True, limit=_limit(ramp.thresholds),
    )  # fmt: skip


def drift_table(drift: Drift) -> ReportTable:
    """Return slopes as a table."""

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
    return ReportTable(title="Drift", columns=columns, rows=rows, caption=caption)


def run_json(run: LoadRun) -> dict[str, object]:
    """Return all figures of one phase."""
    tally, bins = run.tally, run.series.bins
    num_retries, retry_s = retry_after(tally)
    return {
        "is_complete": run.is_complete,
        "measured_s": round(run.wall_s, 3),
        "good_per_s": round(run.rate, 3),
        "requests": tally.num_requests,
        "good": tally.num_good,
        "errors": dict(tally.errors),
        "unfinished": tally.num_unfinished,
        "statuses": dict(tally.statuses),
        "latency_ms": tally.latency.summary_ms(),
        "refusal_ms": tally.refusal.summary_ms(),
        "lateness_ms": tally.lateness.summary_ms(),
        "server_timing_ms": timings_ms(tally),
        "retry_after": {"answers": num_retries, "sum_s": retry_s},
        "sent_bytes": tally.sent_bytes,
        "received_bytes": tally.received_bytes,
        "generator_cores": round(run.generator_cores, 3),
        "busiest_generator_core": round(run.busiest_core, 3),
        "series": {
            "width_s": run.series.width_s,
            "good": [each.num_good for each in bins],
            "errors": [each.num_errors for each in bins],
            "p50_ms": [_ms(each, 50) for each in bins],
            "p99_ms": [_ms(each, 99) for each in bins],
        },
    }


def _ms(tally: LoadTally, percent: float) -> float | None:
    return round(tally.latency.percentile_s(percent) * 1e3, 3) if tally.num_good else None
