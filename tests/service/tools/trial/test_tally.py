import random
from collections.abc import Sequence

import pytest

from inferpool.service.tools.trial.tally import LatencyHistogram, LoadTally


def histogram_of(values: Sequence[float]) -> LatencyHistogram:
    histogram = LatencyHistogram()
    for value in values:
        histogram.record(value)
    return histogram


def test_percentiles_are_exact_to_one_percent_and_parts_add_up():
    shuffled = [random.Random(1).lognormvariate(-5, 1.5) for _ in range(20_000)]
    values = sorted(shuffled)
    histogram = histogram_of(shuffled[:4000])
    histogram.add(histogram_of(shuffled[4000:]))
    for percent in (1, 50, 90, 99, 99.9):
        exact = values[int(percent / 100 * len(values)) - 1]
        assert histogram.percentile_s(percent) == pytest.approx(exact, rel=0.01)
    assert histogram.percentile_s(100) == values[-1]
    assert histogram.mean_s == pytest.approx(sum(values) / len(values))
    assert [percent for percent, _ in histogram.curve()][-1] == 100
    assert set(LatencyHistogram().summary_ms().values()) == {0.0}


def test_any_latency_finds_a_bucket_and_there_are_few():
    histogram = histogram_of([0.0, 1e-9, 5000.0, *(1.002**each * 1e-6 for each in range(9_999))])
    assert histogram.percentile_s(100) == 5000.0
    assert len(histogram.counts) < 2500
    assert histogram_of([0.01] * 90 + [0.2] * 10).num_above(0.05) == 10


def test_tallies_add_up_and_their_kinds_of_errors_are_bounded():
    tally, other = LoadTally(sent_bytes=1), LoadTally(sent_bytes=2, num_unfinished=3)
    for number in range(100):
        tally.fail(f"error {number}")
        other.fail(f"another {number}")
    tally.sums["queue"] += 1.5
    other.sums["queue"] += 2.0
    other.latency.record(0.1)
    tally.add(other)
    assert (tally.num_errors, tally.num_good, tally.num_requests) == (200, 1, 201)
    assert len(tally.errors) <= 41
    assert (tally.sent_bytes, tally.num_unfinished, tally.sums["queue"]) == (3, 3, 3.5)
