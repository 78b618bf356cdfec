"""Versions that are swapped in real services while clients ask."""

import pytest

from tests.e2e.swapping import Operator, serving, under_load

pytestmark = pytest.mark.measures


@pytest.mark.parametrize(
    ("num_fronts", "num_swaps"),
    [
        ("1", 20),
        ("2", 20),
        pytest.param("1", 100, marks=pytest.mark.slow),
        pytest.param("2", 100, marks=pytest.mark.slow),
    ],
)
async def test_each_call_is_answered_whole_by_one_version_while_versions_change(
    num_fronts: str, num_swaps: int
):
    with serving("--front-ends", num_fronts) as service:
        operator = Operator(service.address)
        async with under_load(service.address) as tally:
            for number in range(num_swaps):
                status, answer = await operator.swap(rollback_s=60 * (number % 2))
                assert status == 200, answer
                if number % 4 == 3:
                    status, answer = await operator.post("rollback")
                    assert status == 200, answer
            await tally.until(tally.right + 50)
        tally.check()
        assert len(tally.marks) > num_swaps / 2
