import random
from bisect import bisect_left

import pytest

from inferpool.service.telemetry.distribution import Distribution
from inferpool.service.telemetry.metrics import (
    BATCH_SIZE_EDGES,
    DURATION_EDGES_S,
    DURATION_PARTS,
    Metrics,
)
from tests.counted_steps import StepCounter


@pytest.mark.parametrize("parts", [1, DURATION_PARTS])
@pytest.mark.parametrize("edges", [DURATION_EDGES_S, BATCH_SIZE_EDGES])
def test_a_distribution_counts_like_a_plain_loop(edges, parts):
    rng = random.Random(0)
    values = [rng.choice([*edges, 0.0, 1e9, rng.expovariate(1.0)]) for _ in range(10_000)]
    distribution = Distribution(edges, parts)
    for value in values:
        distribution.observe(value)
    assert distribution.count == len(values)
    counts = [0] * (len(edges) + 1)
    for value in values:
        counts[bisect_left(edges, value)] += 1
    cumulative = [sum(counts[: place + 1]) for place in range(len(counts))]
    assert [count for _, count in distribution.buckets()] == cumulative
    assert distribution.sum == pytest.approx(sum(values))
    assert distribution.count == len(values)


@pytest.mark.parametrize("parts", [1, 3])
def test_a_value_on_an_edge_belongs_below_it(parts):
    distribution = Distribution((1.0, 2.0), parts)
    distribution.observe(1)
    distribution.observe(2.0)
    distribution.observe(2.1)
    assert distribution.buckets() == [("1.0", 1), ("2.0", 2), ("+Inf", 3)]


def test_the_memory_of_a_distribution_is_bounded():
    distribution = Distribution(DURATION_EDGES_S)
    for _ in range(100_000):
        distribution.observe(0.01)
        assert len(distribution.pending) < 4096
    assert distribution.count == 100_000


def test_percentiles_of_durations_are_right_to_a_few_percent():
    rng = random.Random(1)
    values = sorted(rng.lognormvariate(-4.0, 0.6) for _ in range(20_000))
    distribution = Distribution(DURATION_EDGES_S, DURATION_PARTS)
    for value in values:
        distribution.observe(value)
    none = Distribution(DURATION_EDGES_S, DURATION_PARTS)
    found = (distribution - none).percentiles(50, 95, 99)
    right = [values[round(len(values) * share)] for share in (0.5, 0.95, 0.99)]
    assert found == pytest.approx(right, rel=0.03)


def test_percentiles_cover_only_what_was_counted_since():
    distribution = Distribution((1.0, 2.0, 4.0))
    distribution.observe(0.5)
    before = distribution + Distribution((1.0, 2.0, 4.0))
    assert (distribution - before).percentiles(50) is None
    for value in (1.5, 3.0, 3.0, 9.0):
        distribution.observe(value)
    recent = distribution - before
    assert recent.percentiles(25, 50, 75, 100) == [2.0, 3.0, 4.0, 4.0]
    assert recent.by_edge() == {"2": 1, "4": 2, "+Inf": 1}


def test_two_distributions_add_up():
    one, other = Distribution((1.0, 2.0), 2), Distribution((1.0, 2.0), 2)
    one.observe(0.5)
    other.add(*one.take())
    other.observe(1.7)
    one.observe(3.0)
    assert (one + other).buckets() == [("1.0", 1), ("2.0", 2), ("+Inf", 3)]
    assert (one + other).sum == pytest.approx(5.2)


def test_a_sample_of_a_model_takes_few_steps_since_all_have_the_same_edges():
    metrics = Metrics(["m"], {})
    metrics.total("m")
    with StepCounter() as steps:
        metrics.total("m")
    assert 10 < steps.longest < 1000
