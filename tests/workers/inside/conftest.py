from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def eight_openmp_threads() -> Iterator[None]:
    """Give this thread eight OpenMP threads, whatever the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(8)
    yield
    torch.set_num_threads(before)
