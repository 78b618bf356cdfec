import random

import pytest

from inferpool.service.queue.batch_costs import BatchCosts, CostCurve


def taught(curve: CostCurve, sizes: list[int], fixed_s: float, item_s: float, noise: float = 0.1):
    chance = random.Random(0)
    for size in sizes:
        curve.note(size, (fixed_s + item_s * size) * (1 + chance.uniform(-noise, noise)))
    return curve


def test_nothing_is_assumed_of_a_worker_that_has_answered_nothing():
    assert CostCurve().time_s(8) == 0
    assert CostCurve().size_within(0.001, 64) == 64


def test_sizes_that_were_never_used_are_told_from_those_that_were():
    curve = taught(CostCurve(), [1, 2, 4, 8] * 20, fixed_s=0.010, item_s=0.005)
    for size in (1, 3, 5, 6, 8, 12, 16):
        assert curve.time_s(size) == pytest.approx(0.010 + 0.005 * size, rel=0.1)
    assert curve.size_within(0.041, 64) == 6
    assert curve.size_within(0.001, 64) == 0


def test_more_never_takes_less_however_noisy_the_measurements_are():
    chance = random.Random(1)
    curve = CostCurve()
    for _ in range(300):
        size = chance.randint(1, 64)
        curve.note(size, (0.02 + 0.0001 * size) * chance.uniform(0.3, 3))
    times = [curve.time_s(size) for size in range(1, 130)]
    assert times == sorted(times)


def test_curve_that_is_no_straight_line_is_learned_as_it_is():
    curve = CostCurve()
    for size in [1, 2, 4, 6, 8, 12, 16] * 20:
        curve.note(size, 0.010 if size <= 8 else 0.030)
    assert curve.time_s(7) == pytest.approx(0.010, rel=0.01)
    assert curve.time_s(12) == pytest.approx(0.030, rel=0.01)


def test_batch_that_was_slowed_by_a_pause_says_little_of_the_next():
    curve = taught(CostCurve(), [4, 8] * 20, fixed_s=0.010, item_s=0.005)
    curve.note(8, 10.0)
    assert curve.time_s(8) < 0.050 * 1.5
    taught(curve, [4, 8] * 10, fixed_s=0.010, item_s=0.005)
    assert curve.time_s(8) == pytest.approx(0.050, rel=0.1)


def test_first_batch_of_a_size_that_is_slow_by_chance_is_soon_forgotten():
    curve = taught(CostCurve(), [1] * 20, fixed_s=0.010, item_s=0.005)
    curve.note(8, 5.0)
    taught(curve, [8] * 10, fixed_s=0.010, item_s=0.005)
    assert curve.time_s(8) == pytest.approx(0.050, rel=0.25)


@pytest.mark.parametrize("factor", [0.2, 8.0])
def test_worker_that_changes_its_pace_is_believed_at_every_size(factor: float):
    curve = taught(CostCurve(), [1, 2, 4, 8] * 50, fixed_s=0.010, item_s=0.005)
    taught(curve, [2] * 60, fixed_s=0.010 * factor, item_s=0.005 * factor)
    assert curve.time_s(2) == pytest.approx(0.020 * factor, rel=0.15)
    assert curve.time_s(8) > 0.025 * factor if factor > 1 else curve.time_s(8) < 0.050 * 0.7


def test_size_that_was_not_used_for_long_may_be_tried_again():
    curve = taught(CostCurve(), [1, 2, 4], fixed_s=0.010, item_s=0.005)
    for _ in range(5):
        curve.note(8, 0.100)
    taught(curve, [1, 2, 4] * 700, fixed_s=0.010, item_s=0.005)
    assert curve.time_s(8) == pytest.approx(0.050, rel=0.1)


def test_batches_that_were_prepared_ahead_are_told_apart_from_those_of_idle_workers():
    costs = BatchCosts()
    costs.note(4, 0.030, was_idle=True)
    assert costs.curve(is_idle=False).time_s(4) == pytest.approx(0.030)
    for _ in range(5):
        costs.note(4, 0.020, was_idle=False)
    assert costs.curve(is_idle=False).time_s(4) == pytest.approx(0.020)
    assert costs.curve(is_idle=True).time_s(4) == pytest.approx(0.030)
