import torch
from torch import nn

from inferpool.models.speed.folding import fold_batch_norms
from inferpool.models.vision.efficientnet import Network


def trained(network):
    """With statistics that matter."""
    generator = torch.Generator().manual_seed(0)
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.copy_(torch.randn(module.num_features, generator=generator))
            module.running_var.copy_(torch.rand(module.num_features, generator=generator) + 0.5)
    return network.eval().requires_grad_(False)


class Branched(nn.Module):
    """Uses one convolution twice, and a norm that follows none."""

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


def test_what_does_not_follow_one_convolution_alone_is_left():
    assert folded(trained(Branched()), torch.randn(2, 3, 8, 8)) == 1
