import pytest
import torch

from tests.models.speed.pace import Pace


@pytest.fixture(autouse=True)
def single_threaded():
    """Use one thread, as a worker with one core does: more than free cores wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def pace():
    """Return a fake clock, by which all presets are as fast as the exact network."""
    return Pace()


@pytest.fixture
def favoured(pace):
    """Let every preset gain by the fake clock, the later the more."""
    pace.favour_presets()
