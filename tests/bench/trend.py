"""Whether a figure that was sampled over time grows, and how sure that is."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_MAX_BINS = 40
_MIN_BINS = 8
_T_95 = {6: 2.45, 8: 2.31, 10: 2.23, 15: 2.13, 20: 2.09, 30: 2.04}
"""Student's t for 95 % on both sides, by degrees of freedom (any table of it)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trend:
    """A slope, and the interval that holds the true one with 95 % confidence. Per hour."""

    slope: float
    low: float
    high: float
    mean: float

    @property
    def is_flat(self) -> bool:
        """Whether it is not told from zero."""
        return self.low <= 0 <= self.high


def trend_of(seconds: Sequence[float], values: Sequence[float]) -> Trend | None:
    """The straight line through samples; None if there are too few.

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
    spread = float(((hours - hours.mean()) ** 2).sum())
    error = math.sqrt(float((rest**2).sum()) / (num_bins - 2) / spread)
    variance = float((rest**2).sum())
    alike = float((rest[1:] * rest[:-1]).sum()) / variance if variance else 0.0
    alike = min(max(alike, 0.0), 0.95)
    margin = _t_95(num_bins - 2) * error * math.sqrt((1 + alike) / (1 - alike))
    return Trend(slope=slope, low=slope - margin, high=slope + margin, mean=float(means.mean()))


def _t_95(freedom: int) -> float:
    return _T_95[max(each for each in _T_95 if each <= freedom)]
