import pytest
import torch
from torch import nn

from inferpool.models.errors import ModelError
from inferpool.models.speed.choose import SpeedWish, choose
from inferpool.models.speed.graphs import Graphed
from tests.models.speed.test_choose import loaded


class Captures:
    """Computes anew into the same memory, as a replay does, and counts."""

    def __init__(self) -> None:
        self.num_captured = 0
        self.num_replayed = 0

    def __call__(self, call):
        self.num_captured += 1
        outputs = call()

        def replay() -> None:
            self.num_replayed += 1
            for held, new in zip(outputs.values(), call().values(), strict=True):
                held.copy_(new)

        return outputs, replay


class Two(nn.Module):
    def forward(self, x, y):
        return {"sum": x.flatten(1).sum(1) + y, "x": x * 2}


def test_batches_of_any_size_are_computed_by_a_graph_for_each_power_of_two():
    captures = Captures()
    graphed = Graphed(Two(), captures)
    kept = []
    for size in (3, 4, 1, 5, 8, 4, 3):
        x, y = torch.randn(size, 2, 3), torch.randn(size)
        found = graphed(x, y)
        assert torch.equal(found["sum"], x.flatten(1).sum(1) + y)
        assert torch.equal(found["x"], x * 2)
        kept.append((x, found["x"]))
    assert captures.num_captured == 3  # of 4, 1 and 8
    assert captures.num_replayed == 7
    for x, found in kept:  # none is written over by a later replay
        assert torch.equal(found, x * 2)


def test_other_shapes_get_graphs_of_their_own_up_to_a_bound():
    captures = Captures()
    graphed = Graphed(Two(), captures)
    for width in range(1, 41):
        x = torch.randn(2, width)
        assert torch.equal(graphed(x, torch.zeros(2))["x"], x * 2)
    assert captures.num_captured == 32


def test_layouts_are_told_apart_and_kept():
    seen = []

    class Look(nn.Module):
        def forward(self, x):
            seen.append(x.is_contiguous(memory_format=torch.channels_last))
            return {"y": x + 1}

    graphed = Graphed(Look(), Captures())
    x = torch.randn(3, 4, 5, 5)
    for each in (x, x.to(memory_format=torch.channels_last)):
        assert torch.equal(graphed(each)["y"], x + 1)
    assert set(seen[: len(seen) // 2]) == {False}
    assert set(seen[len(seen) // 2 :]) == {True}


def test_it_is_refused_where_there_is_no_gpu():
    wish = SpeedWish(speed="graphed", max_batch_size=8, cache_dir=None)
    with pytest.raises(ModelError, match="is for GPUs"):
        choose(loaded(), wish, lambda _: None)


def test_a_network_whose_outputs_are_no_batch_is_refused():
    class Mean(nn.Module):
        def forward(self, x):
            return {"mean": x.mean()}

    with pytest.raises(ValueError, match="has not the batch first"):
        Graphed(Mean(), Captures())(torch.randn(2, 3))
