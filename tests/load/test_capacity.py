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


@pytest.mark.parametrize(("capacity", "found"), [(1e9, 100.0), (0.0, 0.0)])
def test_the_search_ends_at_the_highest_rate_or_when_no_rate_holds(capacity, found):
    assert _found(CapacitySearch(start=20.0, max_rate=100.0), capacity)[0] == found
