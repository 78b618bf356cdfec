"""Networks that presets change: folded norms, corrected biases, CUDA graphs."""

import pytest
import torch
from torch import nn

from inferpool.models.errors import ModelError
from inferpool.models.speed.choose import choose
from inferpool.models.speed.graphs import Graphed
from inferpool.models.speed.presets import correct_biases, fold_batch_norms
from inferpool.models.vision.efficientnet import Network
from tests.models.speed.test_choose import options, quietly, small


def trained(network):
    """Give its norms statistics that matter."""
    generator = torch.Generator().manual_seed(0)
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.copy_(torch.randn(module.num_features, generator=generator))
            module.running_var.copy_(torch.rand(module.num_features, generator=generator) + 0.5)
    return network.eval().requires_grad_(False)


class Branched(nn.Module):
    """A network with a convolution used twice, and a norm that follows none."""

    def __init__(self):
        super().__init__()
        self.first = nn.BatchNorm2d(3)
        self.shared = nn.Conv2d(3, 3, 3, padding=1)
        self.norm = nn.BatchNorm2d(3)
        self.last = nn.Conv2d(3, 4, 1)
        self.last_norm = nn.BatchNorm2d(4)

    def forward(self, x):
        x = self.shared(self.first(x))
        return self.last_norm(self.last(self.norm(self.shared(x))))


def folded(network, x):
    want = network(x)
    num_folded = fold_batch_norms(network, lambda: network(x))
    torch.testing.assert_close(network(x), want, rtol=1e-4, atol=1e-4)
    return num_folded


def test_every_norm_of_an_efficientnet_is_folded_though_its_code_cannot_be_traced():
    network = trained(Network(num_classes=10))
    num_norms = sum(isinstance(module, nn.BatchNorm2d) for module in network.modules())
    assert folded(network, torch.randn(1, 3, 64, 64)) == num_norms
    assert not any(isinstance(module, nn.BatchNorm2d) for module in network.modules())


def test_norms_that_do_not_follow_one_convolution_are_left():
    assert folded(trained(Branched()), torch.randn(2, 3, 8, 8)) == 1


class AllLayers(nn.Module):
    """A layer of each kind, with and without a bias, in groups and without."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(
            nn.Conv2d(8, 16, 3, bias=False), nn.ReLU(),
            nn.Conv2d(16, 16, 3, groups=16), nn.ReLU(),
            nn.Conv2d(16, 12, 1, groups=4), nn.ReLU(),
        )  # fmt: skip
        self.last = nn.Linear(12, 5)

    def forward(self, x):
        return self.last(self.layers(x).mean((2, 3)))


def test_rounded_weights_with_corrected_biases_keep_the_mean_of_the_outputs():
    x = torch.randn(16, 8, 12, 12, generator=torch.Generator().manual_seed(1)) + 3
    exact = AllLayers().eval().requires_grad_(False)

    def deviation(*, is_corrected: bool) -> torch.Tensor:
        net = AllLayers().eval().requires_grad_(False)
        if is_corrected:
            with torch.inference_mode():
                correct_biases(net, torch.bfloat16, lambda: net(x))
        for module in net.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                module.weight.copy_(module.weight.bfloat16())
        return (net(x) - exact(x)).mean(0).abs().max()

    assert deviation(is_corrected=True) < deviation(is_corrected=False) / 10


class Captures:
    """Fake capture: replays compute into the same memory, and are counted."""

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
    with pytest.raises(ModelError, match="is for GPUs"):
        choose(small(), options("graphed"), quietly)


def test_a_network_whose_outputs_are_no_batch_is_refused():
    class Mean(nn.Module):
        def forward(self, x):
            return {"mean": x.mean()}

    with pytest.raises(ValueError, match="does not have the batch first"):
        Graphed(Mean(), Captures())(torch.randn(2, 3))
