import random
from collections.abc import Callable
from itertools import pairwise
from math import inf

import pytest

from inferpool.service.queue.batch_sizing import SPARE, SizeLimit, fitting
from inferpool.service.queue.batcher import Batcher
from inferpool.service.queue.scheduling.lanes import CostCurve
from tests.service.queue.test_batcher import Queued

NOW = 100.0


def curve() -> CostCurve:
    """10 ms, and 10 ms more for each member, as far as estimates go."""
    curve = CostCurve()
    for size in [1, 2, 4, 8] * 10:
        curve.learn(size, (0.010 + 0.010 * size) / 1.2)  # so that with the spare it comes out even
    return curve


def queue(*lefts_s: float, **changes: bool) -> Batcher[Queued]:
    queue: Batcher[Queued] = Batcher()
    for left_s in lefts_s:
        queue.push(Queued("x", arrived=NOW, deadline=NOW + left_s, **changes), NOW)
    return queue


def size(waiting: Batcher[Queued], begin: float = NOW, most: int = 8) -> int:
    return fitting(waiting, min(most, len(waiting)), begin, curve())


@pytest.mark.parametrize(
    ("lefts_s", "begin_s", "expected"),
    [
        pytest.param([30.0] * 12, 0, 8, id="far deadlines"),
        pytest.param([0.055] * 12, 0, 4, id="near deadlines"),
        pytest.param([0.055, *[30.0] * 12], 0, 4, id="tightest"),
        pytest.param([0.055, *[30.0] * 12], 0.020, 2, id="the worker begins later"),
        pytest.param([0.015, *[30.0] * 12], 0, 8, id="late even alone"),
        pytest.param([0.015, 0.055, *[30.0] * 12], 0, 4, id="tightest beside a late one"),
    ],
)
def test_deadlines_that_can_be_met_bound_the_batch(lefts_s, begin_s, expected):
    assert size(queue(*lefts_s), NOW + begin_s) == expected


def test_rounding_makes_no_empty_batch():
    took_s, begin = 0.8607808228554693, 414184.2971055744
    costs = CostCurve()
    costs.learn(1, took_s)
    waiting: Batcher[Queued] = Batcher()
    waiting.push(Queued("x", arrived=begin, deadline=begin + took_s * SPARE), begin)
    assert fitting(waiting, 1, begin, costs) == 1


def test_an_instance_that_no_longer_fits_begins_the_next_batch():
    waiting = queue(0.095, 0.092, 0.035, 0.099)
    assert size(waiting) == 2
    waiting.next_batch(2)
    assert size(waiting) == 2


def test_unknown_costs_bound_nothing():
    assert fitting(queue(*[0.001] * 8), 8, NOW, CostCurve()) == 8


@pytest.mark.parametrize("left_s", [0.05, 0.5, 5.0, 50.0])
def test_the_soonest_deadline_is_a_lower_bound(left_s: float):
    waiting = queue(left_s, left_s * 1.5)
    assert NOW <= waiting.soonest() <= NOW + left_s
    assert queue().soonest() == inf


def fed(limit: SizeLimit, item_s: float, num_batches: int = 100) -> int:
    for _ in range(num_batches):
        limit.learn(limit.now, item_s * limit.now, 0.0, 0)
    return limit.now


@pytest.mark.parametrize(
    ("set_size", "item_s", "expected"),
    [(None, 0.00001, 64), (None, 0.00005, 32), (None, 0.001, 8), (8, 0.00001, 8)],
)
def test_only_auto_grows_and_while_full_batches_take_little_time(set_size, item_s, expected):
    limit = SizeLimit(set_size)
    assert limit.now == 8
    assert fed(limit, item_s) == expected
    assert fed(limit, item_s=0.001) == 8


def test_batch_that_is_not_full_or_was_interrupted_changes_nothing():
    limit = SizeLimit(None)
    for _ in range(50):
        limit.learn(limit.now - 1, 0.00001, 0.0, 0)
    assert limit.now == 8
    fed(limit, item_s=0.00001, num_batches=30)
    grown = limit.now
    limit.learn(grown, 5.0, 0.0, 0)
    assert fed(limit, item_s=0.00001) == 64


def test_the_size_of_a_compiled_network_stays():
    limit = SizeLimit(None)
    fed(limit, item_s=0.00001)
    limit.hold()
    assert fed(limit, item_s=0.00001) == 8


Curve = Callable[[int], float]
"""Seconds of a batch on an accelerator, by its size."""


def line(fixed_s: float, item_s: float) -> Curve:
    return lambda size: fixed_s + item_s * size


def by_rate(**gains: float) -> Curve:
    """Return a curve that serves 1,000/s in batches of 8, and larger ones by these gains."""
    rates = {int(size.removeprefix("of_")): 1000 * gain for size, gain in gains.items()}
    return lambda size: (
        size / max(rate for of, rate in {8: 1000.0, **rates}.items() if of in (8, size))
    )


def accelerated(
    curve: Curve, num_batches: int = 1000, noise: float = 0.0, seed: int = 0
) -> list[int]:
    """Return the sizes that a limit goes through under full load."""
    limit, sizes, chance = SizeLimit(None), [0], random.Random(seed)
    limit.accelerate()
    for _ in range(num_batches):
        cold_s = 1.0 if limit.now != sizes[-1] else 0.0  # the first batch of a size
        sizes.append(limit.now)
        took_s = curve(limit.now) * chance.uniform(1 - noise, 1 + noise) + cold_s
        limit.learn(limit.now, 0.0, took_s, 0)
    return sizes[1:]


@pytest.mark.parametrize(
    ("curve", "expected"),
    [
        pytest.param(line(0.005, 0.0), 256, id="bound by launches"),
        pytest.param(line(0.005, 0.0002), 256, id="both"),
        pytest.param(line(0.0, 0.001), 8, id="in proportion"),
        pytest.param(line(0.15, 0.0), 8, id="long"),
        pytest.param(line(0.030, 0.00155), 64, id="until they are long"),
        pytest.param(
            by_rate(of_16=1.8, of_32=3.0, of_64=4.0, of_128=4.16, of_256=4.18), 128, id="by 4 %"
        ),
        pytest.param(by_rate(of_16=1.5, of_32=1.2, of_64=3.0), 16, id="less again"),
    ],
)
def test_on_accelerators_batches_grow_while_more_are_computed_per_second(curve, expected):
    sizes = accelerated(curve)
    assert sizes[-1] == expected
    assert max(sizes) <= 2 * expected
    assert len(set(sizes[500:])) == 1


@pytest.mark.parametrize("seed", range(5))
def test_a_gain_of_4_percent_is_found_in_times_that_vary_by_10(seed: int):
    curve = by_rate(of_16=1.8, of_32=3.0, of_64=4.0, of_128=4.16, of_256=3.9)
    sizes = accelerated(curve, num_batches=15_000, noise=0.1, seed=seed)
    assert sizes[5000:].count(128) / len(sizes[5000:]) > 0.95
    assert sum(sizes) > 0.97 * 128 / curve(128) * sum(map(curve, sizes))


def test_a_clear_gain_needs_one_comparison():
    sizes = accelerated(line(0.005, 0.0))
    assert sizes.index(256) <= 100


def test_size_that_did_not_pay_is_tried_again_much_later():
    sizes = accelerated(line(0.0, 0.001), num_batches=10_000)
    changes = [number for number, (one, next) in enumerate(pairwise(sizes)) if one != next]
    rests = [later - earlier for earlier, later in pairwise(changes) if later - earlier > 20]
    assert len(rests) >= 3
    assert min(rests) > 2000
    assert sizes.count(16) < 0.05 * len(sizes)


def full_batches(limit: SizeLimit, curve: Curve, num: int = 1000) -> int:
    for _ in range(num):
        limit.learn(limit.now, 0.0, curve(limit.now), 0)
    return limit.own


def test_limit_falls_once_smaller_batches_pay():
    limit = SizeLimit(None)
    limit.accelerate()
    assert full_batches(limit, line(0.005, 0.0)) == 256
    assert full_batches(limit, by_rate(of_128=1.0, of_256=0.9), num=3000) == 128


def test_limit_is_sought_anew_for_a_worker_that_computes_in_another_way():
    limit = SizeLimit(None)
    limit.accelerate()
    assert full_batches(limit, line(0.0, 0.001)) == 8
    limit.accelerate()
    assert full_batches(limit, line(0.005, 0.0)) == 256


def on_trial() -> SizeLimit:
    """Return a limit that compares batches of 16 with batches of 8, which take 5 ms."""
    limit = SizeLimit(None)
    limit.accelerate()
    while limit.own == 8:
        limit.learn(8, 0.0, 0.005, 24)
    return limit


def test_trial_compares_no_times_of_workers_that_compute_in_another_way():
    limit = on_trial()
    limit.accelerate()
    assert full_batches(limit, line(0.0, 0.00025)) == 8


@pytest.mark.parametrize(
    ("size", "took_s", "expected"), [(12, 0.005, 16), (12, 0.009, 8), (16, 0.011, 8)]
)
def test_a_larger_limit_must_pay_as_its_batches_come_full_or_not(size, took_s, expected):
    limit = on_trial()
    sizes = set()
    for _ in range(3 + 2 + 8):
        limit.learn(size, 0.0, took_s, 0)
        sizes.add(limit.own)
    assert sizes == {16, expected}
    for _ in range(100):
        limit.learn(limit.own if expected == 8 else 12, 0.0, 0.005, 0)
    assert limit.own == expected


def test_nothing_grows_while_batches_are_not_full():
    limit = SizeLimit(None)
    limit.accelerate()
    for _ in range(1000):
        for size in (3, 8, 2):
            limit.learn(size, 0.0, 0.005, 0)
    assert limit.own == 8


def test_pause_of_the_load_during_a_trial_says_nothing_about_sizes():
    limit = on_trial()
    for _ in range(1000):
        limit.learn(2, 0.0, 0.005, 0)
    assert limit.own == 16
    assert full_batches(limit, line(0.005, 0.0)) == 256


def test_small_batches_of_a_quiet_time_leave_the_limit_as_it_is():
    limit = SizeLimit(None)
    limit.accelerate()
    curve = line(0.005, 0.00003)
    assert full_batches(limit, curve) == 256
    for _ in range(1000):
        limit.learn(1, 0.0, curve(1), 0)
    assert limit.own == 256


def test_batches_that_were_sent_before_the_limit_changed_say_nothing():
    limit = on_trial()
    for _ in range(3):  # these were held
        limit.learn(8, 0.0, 0.001, 0)
    for _ in range(2 + 8):
        assert limit.own == 16
        limit.learn(16, 0.0, 0.012, 0)
    assert limit.own == 8


def test_one_interrupted_batch_changes_no_choice():
    limit = on_trial()
    for number in range(3 + 2 + 8):
        assert limit.own == 16
        limit.learn(16, 0.0, 1.0 if number == 9 else 0.008, 0)
    for _ in range(3 + 2 + 8):
        limit.learn(limit.own, 0.0, 0.0005 * limit.own, 0)
    assert limit.own == 32  # it is the next to be tried


def test_sizes_that_an_objective_bounds_are_compared_as_they_are():
    limit = SizeLimit(None)
    limit.accelerate()
    for _ in range(1000):
        limit.bound(100)
        limit.learn(limit.now, 0.0, 0.005, 0)
    assert limit.own == 128
    limit.bound(100)
    assert limit.now == 100


def test_a_size_in_the_settings_holds_for_accelerators_too():
    limit = SizeLimit(8)
    limit.accelerate()
    for _ in range(100):
        limit.learn(8, 0.0, 0.001, 0)
    assert limit.now == 8
