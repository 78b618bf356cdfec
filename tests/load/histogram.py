"""Latencies in logarithmic buckets: exact to 1 %, in memory that does not grow with the run."""

import math
from collections import Counter

_LOWEST_S = 1e-6
_GROWTH = 1.01
_PER_FACTOR_E = 1 / math.log(_GROWTH)


class Histogram:
    """How often each latency was seen, in buckets 1 % wide; some 2,000 from 1 us to 1,000 s."""

    __slots__ = ("counts", "max_s", "min_s", "num", "sum_s")

    def __init__(self) -> None:
        self.counts: Counter[int] = Counter()
        self.num = 0
        self.sum_s = 0.0
        self.min_s = math.inf
        self.max_s = 0.0

    def record(self, latency_s: float) -> None:
        """Count one."""
        bucket = int(math.log(latency_s / _LOWEST_S) * _PER_FACTOR_E) if latency_s > 1e-6 else 0
        self.counts[bucket] += 1
        self.num += 1
        self.sum_s += latency_s
        self.min_s = min(self.min_s, latency_s)
        self.max_s = max(self.max_s, latency_s)

    def add(self, other: "Histogram") -> None:
        """Count all that another one has."""
        self.counts.update(other.counts)
        self.num += other.num
        self.sum_s += other.sum_s
        self.min_s = min(self.min_s, other.min_s)
        self.max_s = max(self.max_s, other.max_s)

    @property
    def mean_s(self) -> float:
        """The mean; 0 where there is none."""
        return self.sum_s / self.num if self.num else 0.0

    def percentile_s(self, percent: float) -> float:
        """The latency that so many percent did not exceed (nearest rank); 0 where there is none."""
        if not self.num:
            return 0.0
        rank = max(1, math.ceil(percent / 100 * self.num))
        if rank >= self.num:
            return self.max_s
        num_seen = 0
        for bucket in sorted(self.counts):
            num_seen += self.counts[bucket]
            if num_seen >= rank:
                return min(max(_middle_s(bucket), self.min_s), self.max_s)
        return self.max_s

    def num_above(self, latency_s: float) -> int:
        """How many took longer, as near as the buckets tell."""
        return sum(count for bucket, count in self.counts.items() if _middle_s(bucket) > latency_s)

    def curve(self) -> list[tuple[float, float]]:
        """Each bucket as a share of all that took as long at most, in percent, and its latency."""
        points = []
        num_seen = 0
        for bucket in sorted(self.counts):
            num_seen += self.counts[bucket]
            latency_s = min(max(_middle_s(bucket), self.min_s), self.max_s)
            points.append((100 * num_seen / self.num, latency_s))
        return points

    def summary_ms(self) -> dict[str, float]:
        """The figures that people ask for, in milliseconds."""
        percentiles = {
            f"p{percent:g}": round(self.percentile_s(percent) * 1e3, 3)
            for percent in (50, 90, 99, 99.9)
        }
        return {
            **percentiles,
            "max": round(self.max_s * 1e3, 3),
            "mean": round(self.mean_s * 1e3, 3),
        }


def _middle_s(bucket: int) -> float:
    return float(_LOWEST_S * _GROWTH ** (bucket + 0.5))
