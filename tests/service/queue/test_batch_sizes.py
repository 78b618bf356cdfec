from math import inf

import pytest

from inferpool.service.queue.batch_costs import CostCurve
from inferpool.service.queue.batch_sizes import SPARE, SizeLimit, fitting
from inferpool.service.queue.batcher import Batcher
from tests.service.queue.test_batcher import Waiting

NOW = 100.0


def curve() -> CostCurve:
    """10 ms, and 10 ms more for each member, as far as estimates go."""
    curve = CostCurve()
    for size in [1, 2, 4, 8] * 10:
        curve.note(size, (0.010 + 0.010 * size) / 1.2)  # so that with the spare it comes out even
    return curve


def queue(*lefts_s: float, **changes: bool) -> Batcher[Waiting]:
    queue: Batcher[Waiting] = Batcher()
    for left_s in lefts_s:
        queue.push(Waiting("x", arrived=NOW, deadline=NOW + left_s, **changes), NOW)
    return queue


def size(waiting: Batcher[Waiting], begin: float = NOW, most: int = 8) -> int:
    return fitting(waiting, min(most, len(waiting)), begin, curve())


def test_far_deadlines_leave_the_batch_as_it_is():
    assert size(queue(*[30.0] * 12)) == 8


def test_tightest_deadline_of_a_member_bounds_the_batch():
    assert size(queue(*[0.055] * 12)) == 4
    assert size(queue(0.055, *[30.0] * 12)) == 4


def test_time_until_the_worker_begins_counts():
    assert size(queue(0.055, *[30.0] * 12), begin=NOW + 0.020) == 2


def test_one_that_cannot_be_in_time_even_alone_shrinks_no_batch():
    assert size(queue(0.015, *[30.0] * 12)) == 8
    assert size(queue(0.015, 0.055, *[30.0] * 12)) == 4


def test_there_is_no_empty_batch_however_the_last_bit_is_rounded():
    took_s, begin = 0.8607808228554693, 414184.2971055744
    costs = CostCurve()
    costs.note(1, took_s)
    waiting: Batcher[Waiting] = Batcher()
    waiting.push(Waiting("x", arrived=begin, deadline=begin + took_s * SPARE), begin)
    assert fitting(waiting, 1, begin, costs) == 1


def test_one_for_which_the_batch_is_too_large_already_begins_the_next():
    waiting = queue(0.095, 0.092, 0.035, 0.099)
    assert size(waiting) == 2
    waiting.next_batch(2)
    assert size(waiting) == 2


def test_costs_that_are_not_known_bound_nothing():
    assert fitting(queue(*[0.001] * 8), 8, NOW, CostCurve()) == 8


@pytest.mark.parametrize("left_s", [0.05, 0.5, 5.0, 50.0])
def test_no_deadline_is_sooner_than_the_queue_says(left_s: float):
    waiting = queue(left_s, left_s * 1.5)
    assert NOW <= waiting.soonest() <= NOW + left_s
    assert queue().soonest() == inf


def fed(limit: SizeLimit, item_s: float, num_batches: int = 100) -> int:
    for _ in range(num_batches):
        limit.note(limit.now, item_s * limit.now)
    return limit.now


def test_auto_grows_while_full_batches_are_next_to_nothing():
    assert SizeLimit(None).now == 8
    assert fed(SizeLimit(None), item_s=0.00001) == 64
    assert fed(SizeLimit(None), item_s=0.00005) == 32
    assert fed(SizeLimit(None), item_s=0.001) == 8


def test_auto_goes_back_when_large_batches_turn_out_slow():
    limit = SizeLimit(None)
    fed(limit, item_s=0.00001)
    assert fed(limit, item_s=0.001) == 8


def test_batch_that_is_not_full_or_was_interrupted_changes_nothing():
    limit = SizeLimit(None)
    for _ in range(50):
        limit.note(limit.now - 1, 0.00001)
    assert limit.now == 8
    fed(limit, item_s=0.00001, num_batches=30)
    grown = limit.now
    limit.note(grown, 5.0)
    assert fed(limit, item_s=0.00001) == 64


def test_size_that_is_set_stays_and_so_does_that_of_what_was_compiled_for_some():
    assert fed(SizeLimit(8), item_s=0.00001) == 8
    limit = SizeLimit(None)
    fed(limit, item_s=0.00001)
    limit.hold()
    assert fed(limit, item_s=0.00001) == 8
