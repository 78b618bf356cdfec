import pytest

from tests.load.capacity import CapacitySearch


def _found(search, capacity):
    tried = []
    while (rate := search.next_rate()) is not None:
        tried.append(rate)
        search.tell(rate, holds=rate <= capacity)
        assert len(tried) < 60
    return search.low, tried


@pytest.mark.parametrize("capacity", [3.0, 19.0, 777.0, 60_000.0])
def test_the_capacity_is_found_to_the_precision(capacity):
    found, tried = _found(CapacitySearch(start=20.0, precision=0.05), capacity)
    assert capacity / 1.05 <= found <= capacity
    assert len(tried) < 20


def test_a_highest_rate_is_not_passed():
    found, tried = _found(CapacitySearch(start=20.0, max_rate=100.0), 1e9)
    assert found == max(tried) == 100.0


def test_the_search_ends_if_no_rate_holds():
    assert _found(CapacitySearch(start=20.0), 0.0)[0] == 0.0
