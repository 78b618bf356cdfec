import pytest

from inferpool.models.speed.sizes import sizes_to_warm, steps_to


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
