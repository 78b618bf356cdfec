import torch
from torch import nn

from inferpool.models.speed.correction import correct_biases


class Net(nn.Module):
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
    exact = Net().eval().requires_grad_(False)

    def deviation(*, is_corrected: bool) -> torch.Tensor:
        net = Net().eval().requires_grad_(False)
        if is_corrected:
            with torch.inference_mode():
                correct_biases(net, torch.bfloat16, lambda: net(x))
        for module in net.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                module.weight.copy_(module.weight.bfloat16())
        return (net(x) - exact(x)).mean(0).abs().max()

    assert deviation(is_corrected=True) < deviation(is_corrected=False) / 10
