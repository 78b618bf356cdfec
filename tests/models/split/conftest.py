import pytest

from tests.models.split.rank_processes import RankProcesses


@pytest.fixture(scope="package")
def pair():
    """Two ranks, which load one network after the other."""
    with RankProcesses(2) as pair:
        yield pair
