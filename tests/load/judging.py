"""Judges answers and runs: a good answer, thresholds, and drift in `soak`."""

import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import numpy as np

from inferpool.service.tools.chaos.questions import problem_code
from inferpool.service.tools.trial.load import LoadExchange
from inferpool.service.tools.trial.tally import LatencyHistogram, LoadTally
from tests.load.generators import LoadRun

_MAX_TIMINGS = 12
_DURATION = re.compile(r"([^;,\s]+)[^,]*?;\s*dur=(\d+(?:\.\d+)?)")
"""A metric of Server-Timing (W3C): `queue;dur=0.1, inference;dur=2`."""
_TIMING, _TIMED = "timing ", "timed "
"""How the names of sums of Server-Timing begin: the milliseconds, and how many answers had them."""
_RETRY_S, _RETRIES = "retry-after s", "retry-after"
_MAX_BEHIND = 0.05
"""Share of a step by which its last answer may come after its end."""
_SLACK = 1.1
_MIN_BINS = 8


def judge(expect: str | None, exchange: LoadExchange, tally: LoadTally) -> str:
    """Call a 2xx good if its JSON has the expected field; see `service.tools.trial.load.Judge`."""
    answer = exchange.answer
    if answer is None:
        return exchange.failure
    for name, value in _DURATION.findall(answer.header(b"server-timing").decode("latin-1")):
        if _TIMED + name in tally.sums or len(tally.sums) < 2 * _MAX_TIMINGS:
            tally.sums[_TIMING + name] += float(value)
            tally.sums[_TIMED + name] += 1
    if not 200 <= answer.status < 300:
        if retry_after := answer.header(b"retry-after"):
            tally.sums[_RETRIES] += 1
            tally.sums[_RETRY_S] += int(retry_after) if retry_after.isdigit() else 0  # else a date
        is_json = b"json" in answer.header(b"content-type")
        return f"{answer.status} {problem_code(answer.body) if is_json else ''}"[:60].strip()
    return f"no {expect!r} in the answer" if expect and not _has_field(answer.body, expect) else ""


def timings_ms(tally: LoadTally) -> dict[str, float]:
    """Return what Server-Timing said on average, by name, in the order the server names them."""
    sums = tally.sums
    names = [name.removeprefix(_TIMED) for name in sums if name.startswith(_TIMED)]
    return {name: sums[_TIMING + name] / sums[_TIMED + name] for name in names}


def retry_after(tally: LoadTally) -> tuple[int, float]:
    """Return how many answers had a Retry-After, and the sum of what they said in seconds."""
    return round(tally.sums.get(_RETRIES, 0)), tally.sums.get(_RETRY_S, 0)


def _has_field(body: bytes, name: str) -> bool:
    try:
        document = json.loads(body)
    except ValueError:
        return False
    return isinstance(document, dict) and name in document


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorLimit:
    """A number of errors, or a share of all requests."""

    num: int = 0
    share: float | None = None

    def allowed(self, num_requests: int) -> int:
        """Return how many errors there may be among some requests."""
        return self.num if self.share is None else int(self.share * num_requests)

    def __str__(self) -> str:
        return f"{self.num}" if self.share is None else f"{self.share:.4g} of all"


@dataclass(frozen=True, slots=True, kw_only=True)
class Thresholds:
    """Bounds of a run; None for no bound. Latencies are those of good answers."""

    p50_ms: float | None = None
    p90_ms: float | None = None
    p99_ms: float | None = None
    p999_ms: float | None = None
    errors: ErrorLimit | None = None
    min_rate: float | None = None
    """Good answers per second."""
    max_drift: float | None = None
    """How much p99 may grow from the first to the last quarter of a soak, in percent."""

    def percentiles(self) -> Iterator[tuple[float, float]]:
        """Yield the bounds of latencies: percentile and milliseconds."""
        limits = (self.p50_ms, self.p90_ms, self.p99_ms, self.p999_ms)
        for percent, limit_ms in zip((50.0, 90.0, 99.0, 99.9), limits, strict=True):
            if limit_ms is not None:
                yield percent, limit_ms

    def misses(self, run: LoadRun) -> list[str]:
        """Say in sentences which thresholds were missed."""
        tally = run.tally
        missed = []
        for percent, limit_ms in self.percentiles():
            found_ms = tally.latency.percentile_s(percent) * 1e3
            if found_ms > limit_ms:
                missed.append(f"p{percent:g} {found_ms:,.2f} ms is above {limit_ms:g} ms")
        if tally.num_good == 0:
            missed.append("no request was answered well")
        if self.has_too_many_errors(tally, tally.num_requests):
            missed.append(f"{tally.num_errors:,} errors are more than {self.errors}")
        if self.min_rate is not None and run.rate < self.min_rate:
            missed.append(f"{run.rate:,.1f} requests/s are fewer than {self.min_rate:g}")
        return missed

    def misses_in(self, planned_s: float, run: LoadRun) -> list[str]:
        """Say what a step of `ramp` missed; falling behind the rate counts, too."""
        missed = replace(self, min_rate=None).misses(run)
        behind_s = run.finished_s - planned_s - run.tally.latency.percentile_s(50)
        if run.is_complete and behind_s > _MAX_BEHIND * planned_s and not missed:
            missed.append(f"a queue grew: the last answer came {behind_s:,.1f} s late")
        return missed

    def are_lost(self, run: LoadRun, num_planned: float) -> bool:
        """Return whether a step cannot keep them any more, whatever comes."""
        return self.has_too_many_errors(run.tally, int(num_planned)) or any(
            run.tally.latency.num_above(limit_ms / 1e3)
            > max(1.0, (1 - percent / 100) * num_planned * _SLACK)
            for percent, limit_ms in self.percentiles()
        )

    def has_too_many_errors(self, tally: LoadTally, num_requests: int) -> bool:
        """Return whether there are more errors than may be among some requests."""
        return self.errors is not None and tally.num_errors > self.errors.allowed(num_requests)


def find_drift(run: LoadRun) -> dict[str, Any]:
    """Return the slopes of the figures of a run over its time, and how much p99 grew in it.

    It is empty if the run was too short to say. A slope that is smaller than its error, which is
    two standard errors, may be chance.
    """
    bins, width_s = run.series.bins[:-1], run.series.width_s  # the last one is not full
    if sum(each.num_good > 0 for each in bins) < _MIN_BINS:
        return {}

    def slope(values: Sequence[float]) -> dict[str, float]:
        hours = [number * width_s / 3600 for number in range(len(values))]
        (per_hour, _), covariance = np.polyfit(hours, values, 1, cov=True)
        error = 2 * math.sqrt(covariance[0, 0])
        return {"mean": fmean(values), "per_hour": per_hour, "error_per_hour": error}

    def p99_ms(some: Sequence[LoadTally]) -> float:
        whole = LatencyHistogram()
        for each in some:
            whole.add(each.latency)
        return whole.percentile_s(99) * 1e3

    quarter = len(bins) // 4
    first_ms, last_ms = p99_ms(bins[:quarter]), p99_ms(bins[-quarter:])
    return {
        "p50_ms": slope([each.latency.percentile_s(50) * 1e3 for each in bins]),
        "p99_ms": slope([each.latency.percentile_s(99) * 1e3 for each in bins]),
        "good_per_s": slope([each.num_good / width_s for each in bins]),
        "first_p99_ms": first_ms,
        "last_p99_ms": last_ms,
        "p99_growth_percent": 100 * (last_ms / first_ms - 1) if first_ms else 0.0,
    }
