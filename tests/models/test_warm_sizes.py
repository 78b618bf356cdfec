import pytest

from inferpool.models.speed_names import MOST_GROWN
from inferpool.models.warm_sizes import largest_batch, sizes_to_warm, steps_to


@pytest.mark.parametrize(
    ("most", "sizes"),
    [(1, [1]), (2, [1, 2]), (8, [1, 2, 4, 8]), (9, [1, 2, 4, 8, 9])],
)
def test_steps_double_up_to_the_largest_batch(most, sizes):
    assert steps_to(most) == sizes


def test_accelerators_are_warmed_up_in_all_steps_and_cpus_at_both_ends():
    assert sizes_to_warm("cuda:0", 24) == [1, 2, 4, 8, 16, 24]
    assert sizes_to_warm("cpu", 24) == [1, 24]
    assert sizes_to_warm("cpu", 1) == [1]


def test_batches_may_grow_on_accelerators_alone_and_only_if_the_service_tries_them():
    assert largest_batch("cuda:0", 8, may_grow=True) == MOST_GROWN
    assert largest_batch("cuda:0", 8, may_grow=False) == 8
    assert largest_batch("cuda:0", 1000, may_grow=True) == 1000
    assert largest_batch("cpu", 8, may_grow=True) == 8
