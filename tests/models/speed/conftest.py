import pytest
import torch

from inferpool.models.speed.trial import Trial


@pytest.fixture(autouse=True)
def single_threaded():
    """Use one thread, as a worker with one core does: more than free cores wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def always_faster(monkeypatch):
    """Fake timings that favour every preset, the later the more: a busy machine gives none."""
    gains = iter(range(2, 100))
    monkeypatch.setattr(Trial, "gain", lambda self, network: float(next(gains)))
