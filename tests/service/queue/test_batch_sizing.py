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
        limit.learn(limit.now, 0.0, item_s * limit.now)
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
        limit.learn(limit.now - 1, 0.0, 0.00001)
    assert limit.now == 8
    fed(limit, item_s=0.00001, num_batches=30)
    grown = limit.now
    limit.learn(grown, 0.0, 5.0)
    assert fed(limit, item_s=0.00001) == 64


def test_the_size_of_a_compiled_network_stays():
    limit = SizeLimit(None)
    fed(limit, item_s=0.00001)
    limit.hold()
    assert fed(limit, item_s=0.00001) == 8


def accelerated(fixed_s: float, item_s: float, num_batches: int = 200, prepare_s: float = 0.0):
    """Return the sizes that a limit goes through on a device that takes so long for a batch."""
    limit, sizes = SizeLimit(None), []
    limit.accelerate()
    for number in range(num_batches):
        is_new = number == 0 or sizes[-1] != limit.now
        sizes.append(limit.now)
        cold_s = 1.0 if is_new else 0.0  # the first batch of a size
        limit.learn(limit.now, prepare_s * limit.now, cold_s + fixed_s + item_s * limit.now)
    return sizes


@pytest.mark.parametrize(
    ("fixed_s", "item_s", "expected"),
    [
        pytest.param(0.005, 0.0, 256, id="bound by launches"),
        pytest.param(0.005, 0.0002, 128, id="both"),
        pytest.param(0.0, 0.001, 8, id="in proportion"),
        pytest.param(0.15, 0.0, 8, id="long"),
    ],
)
def test_on_accelerators_batches_grow_while_the_time_per_instance_falls(fixed_s, item_s, expected):
    sizes = accelerated(fixed_s, item_s)
    assert sizes[-1] == expected
    assert max(sizes) <= 2 * expected
    assert len(set(sizes[100:])) == 1


def test_batches_do_not_grow_where_the_preparation_takes_longer_than_the_accelerator():
    assert accelerated(0.005, 0.0, prepare_s=0.001)[-1] == 8


def test_size_that_did_not_pay_is_tried_again_much_later():
    sizes = accelerated(0.0, 0.001, num_batches=2000)
    trials = [i for i in range(1, len(sizes)) if sizes[i] == 16 != sizes[i - 1]]
    assert 2 <= len(trials) <= 4
    assert all(later - earlier > 400 for earlier, later in pairwise(trials))


def test_a_size_in_the_settings_holds_for_accelerators_too():
    limit = SizeLimit(8)
    limit.accelerate()
    for _ in range(100):
        limit.learn(8, 0.0, 0.001)
    assert limit.now == 8
