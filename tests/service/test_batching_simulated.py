"""What batching comes to under load: see `tests.service.simulation`."""

import random

import pytest

from service import dispatcher
from tests.service.simulation import simulate


def slow(size: int) -> float:
    """A model on a CPU: 5 ms, and 10 ms for each instance."""
    return 0.005 + 0.010 * size


def some_are_urgent(chance: random.Random) -> float:
    return 0.060 if chance.random() < 0.3 else 30.0


@pytest.mark.parametrize("rate", [130, 160])
def test_deadlines_are_met_that_batches_of_fixed_size_miss(monkeypatch, rate: int):
    aware = simulate(slow, rate, monkeypatch=monkeypatch, timeouts_s=some_are_urgent)
    with monkeypatch.context() as patch:
        patch.setattr(dispatcher, "fitting", lambda queue, most, begin, curve: most)
        fixed = simulate(slow, rate, monkeypatch=monkeypatch, timeouts_s=some_are_urgent)
    assert fixed.num_missed >= 5
    assert aware.num_missed <= fixed.num_missed / 5
    assert aware.good_per_s >= fixed.good_per_s
    assert aware.num_refused <= fixed.num_refused


def test_without_near_deadlines_nothing_changes(monkeypatch):
    aware = simulate(slow, 160, monkeypatch=monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr(dispatcher, "fitting", lambda queue, most, begin, curve: most)
        fixed = simulate(slow, 160, monkeypatch=monkeypatch)
    assert aware.sizes == fixed.sizes
    assert aware.p99_ms == fixed.p99_ms
