"""`soak`: millions of requests, some bad, late or abandoned, and whether the service grows."""

import argparse
import asyncio
import math
import random
import shlex
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np
import uvloop

from inferpool.service.tools.chaos.questions import EchoQuestion
from inferpool.service.tools.chaos.resources import (
    Holdings,
    LedgerReading,
    holdings_of,
    read_ledger,
)
from inferpool.service.tools.trial.connection import TrialError, connect, post_request
from inferpool.service.tools.trial.load import LoadExchange, LoadGenerator, LoadPlan
from inferpool.service.tools.trial.processes import pss_of
from inferpool.service.tools.trial.report import line_chart
from inferpool.service.tools.trial.screen import Screen
from inferpool.service.tools.trial.tally import LoadTally
from tests.bench.frame import Benchmark
from tests.bench.server import HOST, BenchError, BenchServer, Probe, inferpool

HELP = "millions of requests, some bad, late or abandoned: whether memory grows"
OPTIONS = {
    "serve-args": "",
    "requests": (2_000_000, "how many"),
    "minutes": (0.0, "for so long instead"),
    "clients": (16, "that ask at once"),
    "hang-ups": (3, "percent"),
    "bad": (3, "percent"),
    "late": (3, "percent"),
    "every": (1.0, "seconds per sample"),
    "warm-share": (0.25, "of the time, not in the slopes"),
    "max-slope": (1.0, "MiB/h that are tolerated"),
    "seed": (1, "of the order of requests"),
}
_PATH = "/predict/echo"
_MIB = 2**20
_TIMEOUT_S = 35.0
_SETTLE_S = 5.0
_WARM_S = 2.0
_BAD: Sequence[tuple[bytes, int]] = tuple(
    (post_request(path, body, content_type), status)
    for path, content_type, body, status in (
        (_PATH, "application/json", b'{"instances":[', 400),
        (_PATH, "application/json", b'{"instances":[]}', 422),
        (_PATH, "text/plain", b"hello", 415),
        ("/predict/nobody", "application/json", b'{"instances":[1]}', 404),
        (_PATH, "application/x-npy", b"\x93NUMPY no array", 400),
    )
)
"""Bad requests, and the status that each must have."""
_LATE_STATUSES = (200, 429, 504)
_MAX_BINS, _MIN_BINS = 40, 8
_T_95 = {6: 2.45, 8: 2.31, 10: 2.23, 15: 2.13, 20: 2.09, 30: 2.04}
"""Student's t for 95 % on both sides, by degrees of freedom (any table of it)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trend:
    """A slope per hour, and the interval that holds the true one with 95 % confidence."""

    slope: float
    low: float
    high: float


class Soak:
    """The load and the samples of one run. Lives in the event loop."""

    def __init__(self, server: BenchServer, args: argparse.Namespace) -> None:
        self.series: dict[int, list[tuple[float, float, float]]] = {}
        """By process: seconds since the load began, PSS, and PSS without files, in MiB."""
        self.seconds = 0.0
        """Length of the load."""
        self.counts: Counter[str] = Counter()
        """Requests by what became of them: right, bad, late 504, abandoned..."""
        self.unexpected: Counter[str] = Counter()
        """Answers that should not be, by what was wrong."""
        self._server = server
        self._args = args
        self._address = (HOST, server.port)
        self._question = EchoQuestion(_PATH, args.seed)
        self._kinds = kinds(args.seed, bad=args.bad, hang_up=args.hang_ups, late=args.late)
        self._abandoning: set[asyncio.Task[None]] = set()

    async def run(self) -> tuple[Holdings, Holdings, LedgerReading]:
        """Load and sample; return what the service held before and after, and its counters."""
        await self._generator(_WARM_S).run()
        await asyncio.gather(*self._abandoning)
        before = await self._settled(None)
        self.counts.clear()
        minutes, requests = self._args.minutes, self._args.requests
        load = self._generator(60 * minutes or None, None if minutes else requests)
        began = time.monotonic()
        sampling = asyncio.create_task(self._sample())
        try:
            tally = await load.run()
        finally:
            sampling.cancel()
            await asyncio.gather(*self._abandoning)
        self.seconds = time.monotonic() - began
        self.unexpected.update(tally.errors)
        after = await self._settled(before)
        connection = await connect(self._address)
        try:
            return before, after, await read_ledger(connection)
        finally:
            connection.close()

    def _generator(
        self, duration_s: float | None, num_requests: int | None = None
    ) -> LoadGenerator:
        plan = LoadPlan(
            address=self._address,
            requests=self._request,
            connections=self._args.clients,
            timeout_s=_TIMEOUT_S,
            judge=self._judge,
            duration_s=duration_s,
            num_requests=num_requests,
        )
        return LoadGenerator(plan)

    def _request(self, number: int) -> bytes:
        request = self._question.request(number)
        match self._kinds[number % len(self._kinds)]:
            case "bad":
                return _BAD[number % len(_BAD)][0]
            case "late":
                return request.replace(b"X-Request-ID", b"X-Timeout-Ms: 1\r\nX-Request-ID", 1)
            case "hang_up":
                task = asyncio.create_task(self._hang_up(number, request))
                self._abandoning.add(task)
                task.add_done_callback(self._abandoning.discard)
        return request

    def _judge(self, exchange: LoadExchange, _: LoadTally) -> str:
        """Name what is wrong with an answer; count the right ones by kind."""
        number, answer = exchange.number, exchange.answer
        kind = self._kinds[number % len(self._kinds)]
        self.counts["sent"] += 1
        if answer is None:
            return exchange.failure
        if kind == "bad":
            expected = _BAD[number % len(_BAD)][1]
            if answer.status != expected:
                return f"status {answer.status} instead of {expected}"
        elif kind == "late":
            if answer.status not in _LATE_STATUSES:
                return f"status {answer.status} to a late one"
            kind = f"late {answer.status}"
        elif answer.status != 200:
            return f"status {answer.status}"
        elif self._question.complaint(number, answer.body):
            return "a wrong answer"
        self.counts["right" if kind == "hang_up" else kind] += 1
        return ""

    async def _hang_up(self, number: int, request: bytes) -> None:
        """Send it on another connection and leave: at once, while it waits, or is computed."""
        connection = await connect(self._address)
        connection.send(request)
        if number % 3:
            await asyncio.sleep(0.001 * (number % 5))
        connection.close()
        self.counts["abandoned"] += 1

    async def _sample(self) -> None:
        self.series.clear()
        began = time.monotonic()
        with Screen(sys.stderr) as screen:
            screen.begin("soaking")
            while True:
                now = time.monotonic() - began
                sizes = await asyncio.to_thread(
                    lambda: {each.pid: pss_of(each.pid) for each in self._server.processes()}
                )
                for pid, pss in sizes.items():
                    sample = (now, pss.total / _MIB, pss.own / _MIB)
                    self.series.setdefault(pid, []).append(sample)
                num_sent = self.counts["sent"]
                minutes = self._args.minutes
                share = now / 60 / minutes if minutes else num_sent / self._args.requests
                *_, own_mib = self.series[self._server.pid][-1]
                screen.show(share, f"{num_sent:,} sent; front end {own_mib:.1f} MiB")
                await asyncio.sleep(self._args.every)

    async def _settled(self, before: Holdings | None) -> Holdings:
        """Return what the service holds once it has seen that our connections are closed."""
        until = time.monotonic() + _SETTLE_S
        last = -1
        while True:
            now = holdings_of(self._server.pid, self._server.processes())
            is_back = before is None or now.descriptors <= before.descriptors
            if (is_back and now.descriptors == last) or time.monotonic() > until:
                return now
            last = now.descriptors
            await asyncio.sleep(0.3)


def run(bench: Benchmark) -> None:
    """Soak the service, and look for growth."""
    args = bench.args
    command = inferpool(args.inferpool, "echo", *shlex.split(args.serve_args))
    probe = Probe(path=_PATH, body=b'{"instances":[1]}', content_type="application/json")
    try:
        with BenchServer(command, args.port) as server:
            server.wait_ready(probe)
            soak = Soak(server, args)
            before, after, ledger = uvloop.run(soak.run())
            front_end = server.pid
    except (TrialError, OSError) as error:
        raise BenchError(f"the soak came to nothing: {error!r}") from error
    trends: dict[str, Trend | None] = {}
    rows = []
    lines = {}
    for pid, samples in soak.series.items():
        process = "front end" if pid == front_end else f"process {pid}"
        seconds, everything, own = zip(*samples, strict=True)
        lines[process] = list(zip(seconds, own, strict=True))
        for what, values in (("all", everything), ("own", own)):
            name = f"{process}, {what}"
            trend = trends[name] = _trend(seconds, values, soak.seconds, args)
            slope = "-"
            if trend is not None:
                slope = f"{trend.slope:+.2f} ({trend.low:+.2f} to {trend.high:+.2f})"
            rows.append((name, f"{values[0]:.1f}", f"{values[-1]:.1f}", slope))
    bench.content |= {
        "seconds": soak.seconds,
        "counts": soak.counts,
        "unexpected": soak.unexpected,
        "trends_mib_per_h": {name: trend and asdict(trend) for name, trend in trends.items()},
        "before": asdict(before),
        "after": asdict(after),
        "ledger": asdict(ledger),
        "series": soak.series,
    }
    bench.failures += failures_of(
        soak.unexpected, trends, before, after, ledger, max_slope=args.max_slope
    )
    rate = soak.counts["sent"] / soak.seconds
    bench.add_note(f"{rate:,.0f} requests per second: {dict(soak.counts)}")
    caption = (
        "Slopes after the warm-up, of processes that lived throughout. own: without the pages of "
        "files, which count for less while others map the same libraries."
    )
    columns = ("process", "PSS MiB, first", "last", "slope MiB/h (95 %)")
    bench.add_table("Memory", columns, rows, caption)
    held = [
        (name.replace("_", " "), f"{was:,}", f"{asdict(after)[name]:,}")
        for name, was in asdict(before).items()
    ]
    bench.add_table("Holdings", ("", "before", "after"), held, "Without connections.")
    bench.parts.append(line_chart("PSS without files", "seconds", "MiB", lines))


def failures_of(
    unexpected: Mapping[str, int],
    trends: Mapping[str, Trend | None],
    before: Holdings,
    after: Holdings,
    ledger: LedgerReading,
    *,
    max_slope: float,
) -> list[str]:
    """Return what is not as it should be."""
    found = [f"{count} times {what}" for what, count in unexpected.items()]
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


def kinds(seed: int, *, bad: int, hang_up: int, late: int) -> list[str]:
    """Return a hundred kinds of requests in a random order, by their percentages."""
    found = ["bad"] * bad + ["hang_up"] * hang_up + ["late"] * late
    found += ["right"] * (100 - len(found))
    random.Random(seed).shuffle(found)
    return found


def trend_of(seconds: Sequence[float], values: Sequence[float]) -> Trend | None:
    """Fit a straight line through samples; return None if there are too few.

    Neighbouring samples of memory are alike, so they count for fewer than they are. They are
    averaged in up to 40 bins, and what correlation r is left between neighbouring bins widens the
    interval as if there were (1 - r) / (1 + r) times as many.
    """
    num_bins = min(_MAX_BINS, len(values) // 2)
    if num_bins < _MIN_BINS:
        return None
    hours = np.array([part.mean() for part in np.array_split(np.array(seconds), num_bins)]) / 3600
    means = np.array([part.mean() for part in np.array_split(np.array(values, float), num_bins)])
    slope, start = np.polyfit(hours, means, 1)
    rest = means - (slope * hours + start)
    square = float((rest**2).sum())
    error = math.sqrt(square / (num_bins - 2) / float(((hours - hours.mean()) ** 2).sum()))
    alike = float((rest[1:] * rest[:-1]).sum()) / square if square else 0.0
    alike = min(max(alike, 0.0), 0.95)
    t_95 = _T_95[max(each for each in _T_95 if each <= num_bins - 2)]
    margin = t_95 * error * math.sqrt((1 + alike) / (1 - alike))
    return Trend(slope=slope, low=slope - margin, high=slope + margin)


def _trend(
    seconds: Sequence[float], values: Sequence[float], total_s: float, args: argparse.Namespace
) -> Trend | None:
    """Return the slope after the warm-up; None if the process was not there all the time."""
    warm_s = total_s * args.warm_share
    if seconds[0] > warm_s or seconds[-1] < total_s - 3 * args.every - 1:
        return None
    start = sum(second < warm_s for second in seconds)
    return trend_of(seconds[start:], values[start:])
