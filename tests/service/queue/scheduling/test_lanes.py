import random
from types import SimpleNamespace

import pytest

from inferpool.service.queue.scheduling.lanes import BatchCosts, CostCurve, Lane, Lanes


def attach(lanes: Lanes, slot: int) -> Lane:
    lanes.attach(SimpleNamespace(id=SimpleNamespace(slot=slot), credit=2))
    return lanes.open[-1]


def answer(lanes: Lanes, lane: Lane, elapsed_s: float) -> None:
    """Have a worker answer a batch of one."""
    batch = [None]
    lanes.give(lane, batch, 0.0)
    lanes.answered(lane, batch, elapsed_s, was_computed=True)


def test_an_unknown_worker_makes_no_other_lag():
    lanes = Lanes()
    fast = attach(lanes, 0)
    for _ in range(100):
        answer(lanes, fast, 0.02)
    slow = attach(lanes, 1)
    assert lanes.leading == [fast, slow]
    answer(lanes, slow, 0.2)
    assert (lanes.leading, lanes.lagging) == ([fast], [slow])


def busy_until(lane: Lane, ends_at: float) -> None:
    lane.batches = [[None]]
    lane.ends_at = ends_at


def test_an_idle_worker_counts_as_soon_as_it_comes():
    lanes = Lanes()
    busy_until(attach(lanes, 0), 10.0)
    assert lanes.free_in(2.0) == 8.0
    second = attach(lanes, 1)
    assert lanes.free_in(2.0) == 0.0
    busy_until(second, 4.0)
    lanes.detach(SimpleNamespace())
    assert lanes.free_in(2.0) == 0.0
    lanes.give(second, [], 2.0)
    assert lanes.free_in(2.0) == 5.0
    lanes.detach(second.worker)
    assert lanes.free_in(2.0) == 8.0


def test_a_lagging_worker_delays_nothing():
    lanes = Lanes()
    fast, slow = attach(lanes, 0), attach(lanes, 1)
    answer(lanes, fast, 0.02)
    answer(lanes, slow, 0.2)
    busy_until(slow, 9.0)
    busy_until(fast, 3.0)
    assert lanes.free_in(1.0) == 2.0


def taught(curve: CostCurve, sizes: list[int], fixed_s: float, item_s: float, noise: float = 0.1):
    chance = random.Random(0)
    for size in sizes:
        curve.learn(size, (fixed_s + item_s * size) * (1 + chance.uniform(-noise, noise)))
    return curve


def test_a_worker_without_answers_has_no_estimate():
    assert CostCurve().time_s(8) == 0
    assert CostCurve().size_within(0.001, 64) == 64


def test_unused_sizes_are_estimated_from_used_ones():
    curve = taught(CostCurve(), [1, 2, 4, 8] * 20, fixed_s=0.010, item_s=0.005)
    for size in (1, 3, 5, 6, 8, 12, 16):
        assert curve.time_s(size) == pytest.approx(0.010 + 0.005 * size, rel=0.1)
    assert curve.size_within(0.041, 64) == 6
    assert curve.size_within(0.001, 64) == 0


def test_larger_batches_never_take_less_whatever_the_noise():
    chance = random.Random(1)
    curve = CostCurve()
    for _ in range(300):
        size = chance.randint(1, 64)
        curve.learn(size, (0.02 + 0.0001 * size) * chance.uniform(0.3, 3))
    times = [curve.time_s(size) for size in range(1, 130)]
    assert times == sorted(times)


def test_a_curve_need_not_be_a_straight_line():
    curve = CostCurve()
    for size in [1, 2, 4, 6, 8, 12, 16] * 20:
        curve.learn(size, 0.010 if size <= 8 else 0.030)
    assert curve.time_s(7) == pytest.approx(0.010, rel=0.01)
    assert curve.time_s(12) == pytest.approx(0.030, rel=0.01)


def test_a_batch_slowed_by_a_pause_says_little_about_the_next():
    curve = taught(CostCurve(), [4, 8] * 20, fixed_s=0.010, item_s=0.005)
    curve.learn(8, 10.0)
    assert curve.time_s(8) < 0.050 * 1.5
    taught(curve, [4, 8] * 10, fixed_s=0.010, item_s=0.005)
    assert curve.time_s(8) == pytest.approx(0.050, rel=0.1)


def test_first_batch_of_a_size_that_is_slow_by_chance_is_soon_forgotten():
    curve = taught(CostCurve(), [1] * 20, fixed_s=0.010, item_s=0.005)
    curve.learn(8, 5.0)
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
        curve.learn(8, 0.100)
    taught(curve, [1, 2, 4] * 700, fixed_s=0.010, item_s=0.005)
    assert curve.time_s(8) == pytest.approx(0.050, rel=0.1)


def test_idle_and_busy_workers_have_separate_curves():
    costs = BatchCosts()
    costs.learn(4, 0.030, was_idle=True)
    assert costs.curve(is_idle=False).time_s(4) == pytest.approx(0.030)
    for _ in range(5):
        costs.learn(4, 0.020, was_idle=False)
    assert costs.curve(is_idle=False).time_s(4) == pytest.approx(0.020)
    assert costs.curve(is_idle=True).time_s(4) == pytest.approx(0.030)
