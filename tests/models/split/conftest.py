import pytest

from tests.models.split.rank_processes import RankProcesses


@pytest.fixture(scope="package")
def pair():
    """Two ranks."""
    pair = RankProcesses(2)
    yield pair
    pair.close()
