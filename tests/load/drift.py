"""Drift in `soak`: do latency and throughput change while the load stays the same?"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from inferpool.service.tools.trial.generators import LoadRun
from inferpool.service.tools.trial.tally import LatencyHistogram

_MIN_BINS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Slope:
    """How fast a figure changes, by a least-squares line through it."""

    mean: float
    per_hour: float
    error_per_hour: float
    """Two standard errors: a smaller slope may be chance."""

    @property
    def is_shown(self) -> bool:
        """The figure changes, and does not only scatter."""
        return abs(self.per_hour) > self.error_per_hour


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """Changes over a run."""

    p50_ms: Slope
    p99_ms: Slope
    rate: Slope
    first_p99_ms: float
    """p99 in the first quarter of the time."""
    last_p99_ms: float
    """p99 in the last quarter."""

    @property
    def p99_growth_percent(self) -> float:
        """Growth of p99 from the first to the last quarter."""
        return 100 * (self.last_p99_ms / self.first_p99_ms - 1) if self.first_p99_ms else 0.0


def find_drift(run: LoadRun) -> Drift | None:
    """Return the drift of a run; None if it was too short to say."""
    bins = run.series.bins[:-1]  # the last one is not full
    width_s = run.series.width_s
    if sum(each.num_good > 0 for each in bins) < _MIN_BINS:
        return None
    quarter = len(bins) // 4
    p99_ms = [each.latency.percentile_s(99) * 1e3 for each in bins]
    return Drift(
        p50_ms=_slope([each.latency.percentile_s(50) * 1e3 for each in bins], width_s),
        p99_ms=_slope(p99_ms, width_s),
        rate=_slope([each.num_good / width_s for each in bins], width_s),
        first_p99_ms=_p99_ms([each.latency for each in bins[:quarter]]),
        last_p99_ms=_p99_ms([each.latency for each in bins[-quarter:]]),
    )


def _slope(values: Sequence[float], width_s: float) -> Slope:
    hours = [number * width_s / 3600 for number in range(len(values))]
    (slope, _), covariance = np.polyfit(hours, values, 1, cov=True)
    error = math.sqrt(covariance[0, 0])
    return Slope(mean=statistics.fmean(values), per_hour=slope, error_per_hour=2 * error)


def _p99_ms(latencies: Sequence[LatencyHistogram]) -> float:
    whole = LatencyHistogram()
    for each in latencies:
        whole.add(each)
    return whole.percentile_s(99) * 1e3
