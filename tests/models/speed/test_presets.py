"""Networks that presets change: folded norms, corrected biases."""

import pytest
import torch
from torch import nn

from inferpool.models.speed.presets import correct_biases, fold_batch_norms
from inferpool.models.vision.efficientnet import Network


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


@pytest.mark.slow
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
