import msgspec
import pytest
import torch

from inferpool.workers.training import fitting, rank
from inferpool.workers.training.course import TrainingError
from inferpool.workers.training.fitting import most_images
from inferpool.workers.training.group import RankGroup, RankPlace
from tests.models.training.test_learner import RECIPE
from tests.training_network import TinyNet

CPU = torch.device("cpu")


def group():
    return RankGroup(RankPlace(rank=0, num_ranks=1, local_rank=0, num_local=1), CPU)


def with_memory(monkeypatch, num_bytes):
    memory = type("Memory", (), {"available": num_bytes})
    monkeypatch.setattr(fitting.psutil, "virtual_memory", lambda: memory)


def test_twice_the_pixels_take_twice_the_memory(monkeypatch):
    with_memory(monkeypatch, 1 << 28)
    network = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8))
    small, large = (most_images(network, edge, CPU, 1) for edge in (64, 128))
    assert small / large == pytest.approx(4, rel=0.1)
    assert most_images(network, 64, CPU, 2) == pytest.approx(small / 2, rel=0.1)


def test_a_look_at_the_memory_changes_nothing():
    torch.manual_seed(0)
    network = TinyNet(3)
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    random = torch.get_rng_state()
    most_images(network, 32, CPU, 1)
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(before[k], tensor) for k, tensor in network.state_dict().items())


def test_a_batch_that_does_not_fit_takes_several_passes(monkeypatch):
    recipe = msgspec.structs.replace(RECIPE, batch_size=64)
    network = TinyNet(3)
    monkeypatch.setattr(rank, "most_images", lambda *_: 20)
    accumulate, note = rank._accumulated(recipe, network, group(), CPU)
    assert accumulate == 4
    assert "room for 20 images at once: each step takes 4 passes of 16 images" in note
    monkeypatch.setattr(rank, "most_images", lambda *_: 64)
    assert rank._accumulated(recipe, network, group(), CPU) == (1, "")
    monkeypatch.setattr(rank, "most_images", lambda *_: 1)
    with pytest.raises(TrainingError, match="room for 1 images of 32 x 32"):
        rank._accumulated(recipe, network, group(), CPU)
