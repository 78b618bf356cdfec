"""`soak`: millions of requests, some bad, late or abandoned, and whether the service grows."""

import asyncio
import math
import random
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import uvloop

from inferpool.service.tools.chaos.questions import EchoQuestion
from inferpool.service.tools.chaos.resources import (
    Holdings,
    LedgerReading,
    holdings_of,
    read_ledger,
)
from inferpool.service.tools.trial.connection import connect, connected, post_request
from inferpool.service.tools.trial.load import LoadExchange, LoadGenerator
from inferpool.service.tools.trial.processes import pss_of
from inferpool.service.tools.trial.report import line_chart
from inferpool.service.tools.trial.screen import Screen
from inferpool.service.tools.trial.tally import LoadTally
from tests.bench.frame import Benchmark, benchmark
from tests.bench.server import HOST, BenchServer, inferpool, plan_for

_PATH = "/predict/echo"
_JSON = "application/json"
_MIB = 2**20
_TIMEOUT_S = 35.0
_SETTLE_S = 5.0
_WARM_S = 2.0
_SEED = 1
_EVERY_S = 1.0
"""Between samples."""
_BAD = (
    (post_request(_PATH, b'{"instances":[', _JSON), 400),
    (post_request(_PATH, b'{"instances":[]}', _JSON), 422),
    (post_request(_PATH, b"hello", "text/plain"), 415),
    (post_request("/predict/nobody", b'{"instances":[1]}', _JSON), 404),
    (post_request(_PATH, b"\x93NUMPY no array", "application/x-npy"), 400),
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

    def __init__(self, server: BenchServer, args: Any) -> None:
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
        self._question = EchoQuestion(_PATH, _SEED)
        self._kinds = kinds(_SEED, bad=args.bad, hang_up=args.hang_ups, late=args.late)
        self._abandoning: set[asyncio.Task[None]] = set()

    async def run(self) -> tuple[Holdings, Holdings, LedgerReading]:
        """Load and sample; return what the service held before and after, and its counters."""
        await self._generator(duration_s=_WARM_S).run()
        await asyncio.gather(*self._abandoning)
        before = await self._settled(None)
        self.counts.clear()
        minutes = self._args.minutes
        length = {"duration_s": 60 * minutes} if minutes else {"num_requests": self._args.requests}
        load, began = self._generator(**length), time.monotonic()
        sampling = asyncio.create_task(self._sample(began))
        try:
            self.unexpected.update((await load.run()).errors)
        finally:
            sampling.cancel()
            await asyncio.gather(*self._abandoning)
        self.seconds = time.monotonic() - began
        after = await self._settled(before)
        async with connected((HOST, self._server.port)) as connection:
            return before, after, await read_ledger(connection)

    def _generator(self, **length: float) -> LoadGenerator:
        plan = plan_for(
            self._server.port, self._request, None, connections=self._args.clients,
            timeout_s=_TIMEOUT_S, judge=self._judge, **length,
        )  # fmt: skip
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
        self.counts["sent"] += 1
        if answer is None:
            return exchange.failure
        kind = self._kinds[number % len(self._kinds)]
        wanted = {"bad": (_BAD[number % len(_BAD)][1],), "late": _LATE_STATUSES}.get(kind, (200,))
        if answer.status not in wanted:
            return f"status {answer.status} instead of {wanted}"
        if kind in ("right", "hang_up") and self._question.complaint(number, answer.body):
            return "a wrong answer"
        name = {"hang_up": "right", "late": f"late {answer.status}"}.get(kind, kind)
        self.counts[name] += 1
        return ""

    async def _hang_up(self, number: int, request: bytes) -> None:
        """Send it on another connection and leave: at once, while it waits, or is computed."""
        connection = await connect((HOST, self._server.port))
        connection.send(request)
        if number % 3:
            await asyncio.sleep(0.001 * (number % 5))
        connection.close()
        self.counts["abandoned"] += 1

    async def _sample(self, began: float) -> None:
        minutes = self._args.minutes
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
                share = now / 60 / minutes if minutes else num_sent / self._args.requests
                screen.show(share, f"{num_sent:,} sent")
                await asyncio.sleep(_EVERY_S)

    async def _settled(self, before: Holdings | None) -> Holdings:
        """Return what the service holds once it has seen that our connections are closed."""
        until, last = time.monotonic() + _SETTLE_S, -1
        while True:
            now = holdings_of(self._server.pid, self._server.processes())
            is_back = before is None or now.descriptors <= before.descriptors
            if (is_back and now.descriptors == last) or time.monotonic() > until:
                return now
            last = now.descriptors
            await asyncio.sleep(0.3)


@benchmark(
    "millions of requests, some bad, late or abandoned: whether memory grows",
    serve_args="",
    requests=(2_000_000, "how many"),
    minutes=(0.0, "for so long instead"),
    clients=(16, "that ask at once"),
    hang_ups=(3, "percent"),
    bad=(3, "percent"),
    late=(3, "percent"),
    warm_share=(0.25, "of the time, not in the slopes"),
    max_slope=(1.0, "MiB/h that are tolerated"),
)
def soak(bench: Benchmark) -> None:
    """Soak the service, and look for growth."""
    args = bench.args
    with BenchServer(inferpool(args, "echo"), args.port) as server:
        server.wait_ready()
        found = Soak(server, args)
        before, after, ledger = uvloop.run(found.run())
        front_end = server.pid
    trends: dict[str, Trend | None] = {}
    rows = []
    lines = {}
    for pid, samples in found.series.items():
        process = "front end" if pid == front_end else f"process {pid}"
        lines[process] = [(at, own) for at, _, own in samples]
        for column, what in ((1, "all"), (2, "own")):
            points = [(sample[0], sample[column]) for sample in samples]
            trend = _trend(points, found.seconds, args.warm_share)
            trends[name := f"{process}, {what}"] = trend
            slope = f"{trend.slope:+.2f} ({trend.low:+.2f} to {trend.high:+.2f})" if trend else "-"
            rows.append((name, f"{points[0][1]:.1f}", f"{points[-1][1]:.1f}", slope))
    bench.content |= {
        "seconds": found.seconds,
        "counts": found.counts,
        "unexpected": found.unexpected,
        "before": asdict(before),
        "after": asdict(after),
        "ledger": asdict(ledger),
        "series": found.series,
    }
    bench.failures += failures_of(
        found.unexpected, trends, before, after, ledger, max_slope=args.max_slope
    )
    caption = (
        f"{found.counts['sent'] / found.seconds:,.0f} requests per second: {dict(found.counts)}. "
        "Slopes after the warm-up, of processes that lived throughout. own: without the pages of "
        "files, which count for less while others map the same libraries."
    )
    columns = ("process", "PSS MiB, first", "last", "slope MiB/h (95 %)")
    bench.add_table("Memory", columns, rows, caption)
    held = [
        (name.replace("_", " "), f"{was:,}", f"{getattr(after, name):,}")
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


def trend_of(points: Sequence[tuple[float, float]]) -> Trend | None:
    """Fit a straight line through samples; return None if there are too few.

    Neighbouring samples of memory are alike, so they count for fewer than they are. They are
    averaged in up to 40 bins, and what correlation r is left between neighbouring bins widens the
    interval as if there were (1 - r) / (1 + r) times as many.
    """
    num_bins = min(_MAX_BINS, len(points) // 2)
    if num_bins < _MIN_BINS:
        return None
    bins = [part.mean(0) for part in np.array_split(np.array(points, float), num_bins)]
    hours, means = np.array(bins).T / [[3600], [1]]
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
    points: Sequence[tuple[float, float]], total_s: float, warm_share: float
) -> Trend | None:
    """Return the slope after the warm-up; None if the process was not there all the time."""
    warm_s = total_s * warm_share
    if points[0][0] > warm_s or points[-1][0] < total_s - 3 * _EVERY_S - 1:
        return None
    return trend_of([point for point in points if point[0] >= warm_s])
