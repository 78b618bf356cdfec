"""`soak`: millions of requests, some bad, late or abandoned, and what the service comes to hold."""

import argparse
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict

import uvloop

from inferpool.service.tools.chaos.resources import Holdings, LedgerReading
from inferpool.service.tools.trial.connection import NoAnswerError
from tests.bench import plots, rounds
from tests.bench.peers import conclude
from tests.bench.processes import OUT, BenchError, Probe, Server, inferpool
from tests.bench.report import console, save, table
from tests.bench.soak_load import PATH, Counts, Soak, asdict_of
from tests.bench.trend import Trend, trend_of
from tests.load.charts import Chart, Line

HELP = "millions of requests, some bad, late or abandoned: whether memory grows"
_PROBE = Probe(path=PATH, body=b'{"instances":[1]}', content_type="application/json")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--requests", type=int, default=2_000_000, help="default: %(default)s")
    parser.add_argument("--minutes", type=float, default=0, help="for so long instead")
    parser.add_argument("--clients", type=int, default=16, help="default: %(default)s")
    parser.add_argument("--hang-ups", type=int, default=3, help="percent (%(default)s)")
    parser.add_argument("--bad", type=int, default=3, help="percent (%(default)s)")
    parser.add_argument("--late", type=int, default=3, help="percent (%(default)s)")
    parser.add_argument("--every", type=float, default=1.0, help="seconds per sample (%(default)s)")
    parser.add_argument(
        "--warm-share", type=float, default=0.25, help="not in the slopes (%(default)s)"
    )
    parser.add_argument(
        "--max-slope", type=float, default=1.0, help="MiB/h that are borne (%(default)s)"
    )
    parser.add_argument("--seed", type=int, default=1, help="default: %(default)s")
    parser.add_argument("--serve-args", default="", help="further arguments of inferpool")


def run(args: argparse.Namespace, plan: rounds.Plan) -> int:
    """Soak, print and save; returns the exit status."""
    contender = inferpool(args.inferpool, "echo", *shlex.split(args.serve_args))
    results = rounds.Results()
    try:
        with Server(contender, plan.port, OUT / "logs" / "soak.log") as server:
            server.wait_ready(_PROBE, 180)
            soak = Soak(server, args)
            before, after, ledger = uvloop.run(soak.run())
            front_end = server.pid
    except (BenchError, NoAnswerError, ExceptionGroup) as error:
        results.failures.append(f"the soak came to nothing: {error!r}")
        return conclude(results)
    names = {pid: "front end" if pid == front_end else f"process {pid}" for pid in soak.series}
    trends: dict[str, Trend | None] = {}
    for pid, each in soak.series.items():
        trends[f"{names[pid]}, all"] = _trend(each.seconds, each.pss_mib, soak.seconds, args)
        trends[f"{names[pid]}, own"] = _trend(each.seconds, each.own_mib, soak.seconds, args)
    _print(soak, names, trends, before, after)
    results.failures += failures_of(
        soak.counts, trends, before, after, ledger, max_slope=args.max_slope
    )
    saved = save(
        "soak",
        args.out,
        {
            "seconds": soak.seconds,
            "counts": asdict_of(soak.counts),
            "trends_mib_per_h": {name: t and asdict(t) for name, t in trends.items()},
            "before": asdict(before),
            "after": asdict(after),
            "ledger": asdict(ledger),
            "series": {names[pid]: asdict(each) for pid, each in soak.series.items()},
            "failures": results.failures,
        },
    )
    lines = [
        Line(name=names[pid], points=list(zip(each.seconds, each.own_mib, strict=True)))
        for pid, each in soak.series.items()
        if len(each.seconds) > 1
    ]
    chart = Chart(title="PSS without files", x_label="seconds", y_label="MiB", lines=lines)
    plots.write(saved, "soak", [chart], f"{soak.counts.num_sent:,} requests to echo")
    return conclude(results)


def failures_of(
    counts: Counts,
    trends: Mapping[str, Trend | None],
    before: Holdings,
    after: Holdings,
    ledger: LedgerReading,
    *,
    max_slope: float,
) -> list[str]:
    """What is not as it should be."""
    found = [f"{count} times {what}" for what, count in counts.unexpected.items()]
    for name, trend in trends.items():
        if name.endswith("own") and trend is not None and trend.low > max_slope:
            found.append(f"{name} grows by {trend.slope:.2f} MiB/h")
    for name in ("descriptors", "threads", "processes", "shared_bytes", "shared_files"):
        was, now = getattr(before, name), getattr(after, name)
        if now > was:
            found.append(f"{name}: {was} before, {now} after")
    if ledger.in_flight or ledger.arena_used_bytes:
        found.append(
            f"{ledger.in_flight} instances in flight and {ledger.arena_used_bytes} bytes of the "
            "arena in use, with nobody asking"
        )
    return found


def _trend(
    seconds: Sequence[float], values: Sequence[float], total_s: float, args: argparse.Namespace
) -> Trend | None:
    """The slope after the warm-up; None of a process that was not there all the time."""
    warm_s = total_s * args.warm_share
    if seconds[0] > warm_s or seconds[-1] < total_s - 3 * args.every - 1:
        return None
    start = sum(second < warm_s for second in seconds)
    return trend_of(seconds[start:], values[start:])


def _print(
    soak: Soak,
    names: Mapping[int, str],
    trends: Mapping[str, Trend | None],
    before: Holdings,
    after: Holdings,
) -> None:
    rate = soak.counts.num_sent / soak.seconds
    console.print(
        f"{soak.counts.num_sent:,} requests in {soak.seconds:,.1f} s ({rate:,.0f} a second): "
        + json.dumps(asdict_of(soak.counts)),
        markup=False,
        highlight=False,
    )
    rows = []
    for pid, series in soak.series.items():
        for what, values in (("all", series.pss_mib), ("own", series.own_mib)):
            trend = trends[f"{names[pid]}, {what}"]
            slope = "-"
            if trend is not None:
                slope = f"{trend.slope:+.2f} ({trend.low:+.2f} to {trend.high:+.2f})"
            verdict = "-" if trend is None else "flat" if trend.is_flat else "not flat"
            first, last = f"{values[0]:.1f}", f"{values[-1]:.1f}"
            rows.append((f"{names[pid]}, {what}", first, last, slope, verdict))
    columns = ("process", "PSS MiB, first", "last", "slope MiB/h (95 %)", "trend")
    caption = (
        "Slopes after the warm-up, of processes that lived throughout. Own: without the pages of "
        "files, which count for less while others map the same libraries."
    )
    table("Memory", columns, rows, caption)
    held = [
        (name.replace("_", " "), f"{was:,}", f"{asdict(after)[name]:,}")
        for name, was in asdict(before).items()
    ]
    table("Holdings", ("", "before", "after"), held, "Without connections.")
