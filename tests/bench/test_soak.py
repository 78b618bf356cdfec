import json
from collections import Counter
from dataclasses import fields, replace

import numpy as np
import pytest

from inferpool.service.tools.chaos.resources import Holdings, LedgerReading
from tests.bench.__main__ import main
from tests.bench.soak import Trend, failures_of, kinds, trend_of
from tests.ports import free_port

pytestmark = [pytest.mark.measures, pytest.mark.slow]

_HOLDINGS = Holdings(**{each.name: 5 for each in fields(Holdings)})
_LEDGER = replace(
    LedgerReading(**{each.name: 0 for each in fields(LedgerReading)}),
    accepted=3,
    succeeded=1,
    expired=1,
    cancelled=1,
)
_GROWTH = Trend(slope=3.0, low=2.0, high=4.0)
_SECONDS = list(range(600))


def test_kinds_of_requests_are_mixed_by_their_percentages():
    found = kinds(1, bad=3, hang_up=4, late=5)
    assert Counter(found) == {"bad": 3, "hang_up": 4, "late": 5, "right": 88}
    assert found == kinds(1, bad=3, hang_up=4, late=5) != sorted(found)


@pytest.mark.parametrize(
    ("change", "failure"),
    [
        ({}, None),
        ({"unexpected": {"a wrong answer": 2}}, "2 times a wrong answer"),
        ({"trends": {"front end, own": _GROWTH}}, "front end, own grows by 3.00 MiB/h"),
        ({"trends": {"front end, all": _GROWTH, "process 7, own": None}}, None),
        ({"after": replace(_HOLDINGS, threads=6)}, "threads: 5 before, 6 after"),
        ({"ledger": replace(_LEDGER, expired=0)}, "1 instances in flight"),
        ({"ledger": replace(_LEDGER, arena_used_bytes=64)}, "64 bytes of the arena"),
    ],
)
def test_failures_are_named(change, failure):
    whole = {
        "unexpected": {},
        "trends": {},
        "before": _HOLDINGS,
        "after": _HOLDINGS,
        "ledger": _LEDGER,
        "max_slope": 1.0,
    }
    found = failures_of(**{**whole, **change})
    assert len(found) == (failure is not None)
    assert failure is None or failure in found[0]


@pytest.mark.alone
def test_every_kind_of_request_of_a_short_soak_is_answered_right(tmp_path):
    file = tmp_path / "soak.json"
    arguments = ["--requests", "400", "--port", str(free_port()), "--out", str(file)]
    assert main(["soak", *arguments, "--serve-args", "--replicas 1"]) == 0
    saved = json.loads(file.read_text())
    counts = saved["counts"]
    assert saved["unexpected"] == {}
    assert (counts["sent"], counts["right"], counts["bad"]) == (400, 400 - 24, 12)
    assert counts["abandoned"] == 12
    assert sum(num for kind, num in counts.items() if kind.startswith("late")) == 12
    assert saved["before"]["descriptors"] >= saved["after"]["descriptors"]
    assert file.with_suffix(".html").exists()


def samples(per_hour: float, seed: int, *, step: float = 0.0) -> list[float]:
    """Noise around a line; with `step`, a walk that goes nowhere in particular."""
    rng = np.random.default_rng(seed)
    noise = rng.normal(0, 1, len(_SECONDS))
    walk = np.zeros(len(_SECONDS))
    for i in range(1, len(_SECONDS)):
        walk[i] = 0.95 * walk[i - 1] + step * rng.normal()
    return list(100 + per_hour * np.array(_SECONDS) / 3600 + noise + walk)


def test_growth_is_found_with_its_interval():
    trend = trend_of(_SECONDS, samples(30.0, 1))
    assert trend is not None
    assert 0 < trend.low < 30 < trend.high < trend.low + 10


def test_noise_alone_is_rarely_called_growth_even_where_neighbours_are_alike():
    trends = [trend_of(_SECONDS, samples(0.0, seed, step=0.3)) for seed in range(100)]
    assert sum(trend is not None and trend.low <= 0 <= trend.high for trend in trends) >= 85


def test_values_that_never_change_have_no_slope_and_a_few_say_nothing():
    trend = trend_of(_SECONDS, [7.0] * len(_SECONDS))
    assert trend is not None
    assert abs(trend.slope) < 1e-6
    assert trend_of([1, 2, 3], [1.0, 2.0, 3.0]) is None
