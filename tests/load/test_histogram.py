import random

import pytest

from tests.load.histogram import Histogram


def _of(values):
    histogram = Histogram()
    for value in values:
        histogram.record(value)
    return histogram


def test_percentiles_are_exact_to_one_percent():
    values = sorted(random.Random(1).lognormvariate(-5, 1.5) for _ in range(20_000))
    histogram = _of(values)
    for percent in (1, 50, 90, 99, 99.9):
        exact = values[int(percent / 100 * len(values)) - 1]
        assert histogram.percentile_s(percent) == pytest.approx(exact, rel=0.01)
    assert histogram.percentile_s(100) == values[-1]
    assert histogram.mean_s == pytest.approx(sum(values) / len(values))


def test_histograms_add_up_to_that_of_all_values():
    values = [0.001 * each for each in range(1, 1000)]
    whole, parts = _of(values), _of(values[:400])
    parts.add(_of(values[400:]))
    assert parts.counts == whole.counts
    assert parts.summary_ms() == whole.summary_ms()


def test_any_latency_finds_a_bucket_and_there_are_few():
    histogram = _of(
        [0.0, 1e-9, 1e-6, 1.0, 5000.0, *(1.0002**each * 1e-6 for each in range(99_999))]
    )
    assert histogram.percentile_s(100) == 5000.0
    assert len(histogram.counts) < 2500


def test_the_number_above_a_limit_is_told():
    assert _of([0.01] * 90 + [0.2] * 10).num_above(0.05) == 10


def test_nothing_recorded_is_nothing():
    assert set(Histogram().summary_ms().values()) == {0.0}
