"""Counts and latencies of requests under load, in memory that a long run cannot fill."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, fields

_LOWEST_S = 1e-6
_GROWTH = 1.01
_PER_FACTOR_E = 1 / math.log(_GROWTH)
_MAX_KINDS = 40
"""Kinds of errors that are counted apart; all further ones count as "other"."""


class LatencyHistogram:
    """Counts of latencies, in buckets 1 % wide: some 2,000 from 1 us to 1,000 s."""

    __slots__ = ("counts", "max_s", "min_s", "num", "sum_s")

    def __init__(self) -> None:
        self.counts: Counter[int] = Counter()
        self.num = 0
        self.sum_s = 0.0
        self.min_s = math.inf
        self.max_s = 0.0

    def record(self, latency_s: float, num: int = 1) -> None:
        """Count a latency `num` times."""
        bucket = int(math.log(latency_s / _LOWEST_S) * _PER_FACTOR_E) if latency_s > 1e-6 else 0
        self.counts[bucket] += num
        self.num += num
        self.sum_s += latency_s * num
        if latency_s < self.min_s:
            self.min_s = latency_s
        if latency_s > self.max_s:
            self.max_s = latency_s

    def add(self, other: "LatencyHistogram") -> None:
        """Add the counts of another one."""
        self.counts.update(other.counts)
        self.num += other.num
        self.sum_s += other.sum_s
        self.min_s = min(self.min_s, other.min_s)
        self.max_s = max(self.max_s, other.max_s)

    @property
    def mean_s(self) -> float:
        """The mean; 0 without a latency."""
        return self.sum_s / self.num if self.num else 0.0

    def percentile_s(self, percent: float) -> float:
        """Return the latency that `percent` do not exceed (nearest rank); 0 without one."""
        rank = max(1, math.ceil(percent / 100 * self.num))
        if rank >= self.num:
            return self.max_s
        return next(latency_s for num, latency_s in self._ranks() if num >= rank)

    def num_above(self, latency_s: float) -> int:
        """Return the number above a latency, as exactly as the buckets allow."""
        return sum(num for bucket, num in self.counts.items() if _middle_s(bucket) > latency_s)

    def curve(self) -> list[tuple[float, float]]:
        """Return each bucket's latency in s, after the percent that took at most this long."""
        return [(100 * num / self.num, latency_s) for num, latency_s in self._ranks()]

    def summary_ms(self) -> dict[str, float]:
        """Return the usual figures in milliseconds: p50, p90, p99, p99.9, max and mean."""
        percentiles = {f"p{each:g}": self.percentile_s(each) for each in (50, 90, 99, 99.9)}
        figures = {**percentiles, "max": self.max_s, "mean": self.mean_s}
        return {name: round(each * 1e3, 3) for name, each in figures.items()}

    def _ranks(self) -> Iterator[tuple[int, float]]:
        num = 0
        for bucket in sorted(self.counts):
            num += self.counts[bucket]
            yield num, min(max(_middle_s(bucket), self.min_s), self.max_s)


def _middle_s(bucket: int) -> float:
    return float(_LOWEST_S * _GROWTH ** (bucket + 0.5))


@dataclass(slots=True, kw_only=True)
class LoadTally:
    """Counts of the results of requests. Tallies of several processes or moments add up."""

    latency: LatencyHistogram = field(default_factory=LatencyHistogram)
    """Latencies of good answers, from the moment their request was due."""
    refusal: LatencyHistogram = field(default_factory=LatencyHistogram)
    given_up: LatencyHistogram = field(default_factory=LatencyHistogram)
    """How long requests without an answer had waited."""
    lateness: LatencyHistogram = field(default_factory=LatencyHistogram)
    """Open loop: how long requests that were due waited until they were sent."""
    statuses: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    """Everything else than good answers, by kind."""
    sent_bytes: int = 0
    """Bytes of requests, with their heads."""
    received_bytes: int = 0
    num_in_time: int = 0
    """Good answers that came in the measured time, also to requests due before it."""
    num_unfinished: int = 0
    """Requests under way when the run was stopped early: neither good nor bad."""
    sums: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))

    @property
    def num_good(self) -> int:
        """Requests that were answered well."""
        return self.latency.num

    @property
    def num_errors(self) -> int:
        """All other requests that have come to an end."""
        return self.errors.total()

    @property
    def num_requests(self) -> int:
        """Requests that have come to an end."""
        return self.num_good + self.num_errors

    def fail(self, kind: str, num: int = 1) -> None:
        """Count requests without a good answer."""
        if kind not in self.errors and len(self.errors) >= _MAX_KINDS:
            kind = "other"
        self.errors[kind] += num

    def add(self, other: "LoadTally") -> None:
        """Add the counts of another one."""
        for each in fields(self):
            mine, theirs = getattr(self, each.name), getattr(other, each.name)
            if each.name == "errors":
                for kind, num in other.errors.items():
                    self.fail(kind, num)
            elif isinstance(mine, LatencyHistogram):
                mine.add(theirs)
            elif isinstance(mine, Counter):
                mine.update(theirs)
            elif isinstance(mine, defaultdict):
                for name, value in theirs.items():
                    mine[name] += value
            else:
                setattr(self, each.name, mine + theirs)
