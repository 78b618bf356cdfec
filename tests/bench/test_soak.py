from dataclasses import fields, replace

import numpy as np
import pytest

from inferpool.service.tools.chaos.resources import Holdings, LedgerReading
from tests.bench.soak import Trend, failures_of, trend_of

pytestmark = pytest.mark.slow

_HOLDINGS = Holdings(**{each.name: 5 for each in fields(Holdings)})
_LEDGER = LedgerReading(**{each.name: 0 for each in fields(LedgerReading)})
_GROWTH = Trend(slope=3.0, low=2.0, high=4.0)


@pytest.mark.parametrize(
    ("change", "failure"),
    [
        ({}, ""),
        ({"unexpected": {"a wrong answer": 2}}, "2 times a wrong answer"),
        ({"trends": {"front end, own": _GROWTH}}, "front end, own grows by 3.00 MiB/h"),
        ({"trends": {"front end, all": _GROWTH, "process 7, own": None}}, ""),
        ({"after": replace(_HOLDINGS, threads=6)}, "threads: 5 before, 6 after"),
        ({"ledger": replace(_LEDGER, accepted=1)}, "1 instances in flight"),
        ({"ledger": replace(_LEDGER, arena_used_bytes=64)}, "64 bytes of the arena"),
    ],
)
def test_failures_are_named(change, failure):
    whole = {"unexpected": {}, "trends": {}, "before": _HOLDINGS, "after": _HOLDINGS}
    found = failures_of(**{**whole, "ledger": _LEDGER, "max_slope": 1.0, **change})
    assert len(found) == bool(failure)
    assert failure in "".join(found)


def _trend(per_hour: float, seed: int, step: float = 0.0) -> Trend:
    """Noise around a line; with `step`, a walk that goes nowhere in particular."""
    rng = np.random.default_rng(seed)
    seconds, walk = np.arange(600), np.zeros(600)
    for i in range(1, 600):
        walk[i] = 0.95 * walk[i - 1] + step * rng.normal()
    values = 100 + per_hour * seconds / 3600 + rng.normal(0, 1, 600) + walk
    trend = trend_of(list(zip(seconds, values, strict=True)))
    assert trend is not None
    return trend


def test_growth_is_found_and_noise_alone_is_rarely_called_growth():
    growth = _trend(30.0, 1)
    assert 0 < growth.low < 30 < growth.high < growth.low + 10
    trends = [_trend(0.0, seed, step=0.3) for seed in range(100)]
    assert sum(trend.low <= 0 <= trend.high for trend in trends) >= 85
    assert trend_of([(1, 1.0), (2, 2.0)]) is None
