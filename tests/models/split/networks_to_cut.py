"""Networks to cut, which followers can import."""

import time

import torch
from torch import nn


def sequential():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 3)
    )


def resnet():
    import torchvision  # takes a second

    torch.manual_seed(0)
    return torchvision.models.resnet18(num_classes=10)


def vit():
    import torchvision

    torch.manual_seed(0)
    network = torchvision.models.VisionTransformer(32, 8, 4, 2, 64, 128, num_classes=10)
    nn.init.normal_(network.heads[0].weight)  # zeros as it is built
    return network


def encoder():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    return nn.TransformerEncoder(layer, 3, norm=nn.LayerNorm(32))


class Chain(nn.Sequential):
    """A class, so that a worker can serve it."""

    def __init__(self):
        super().__init__(*(nn.Linear(2, 2) for _ in range(3)))


class Refusing(nn.Module):
    """Branches on its input, so that it is one step; and fails on some."""

    def forward(self, x):
        if x.max() > 100:
            raise ValueError(f"{float(x.max()):g} is too much")
        if x.min() < -100:
            raise MemoryError
        return x


def refusing():
    return nn.Sequential(nn.Identity(), Refusing(), nn.Linear(2, 2))


class Tangled(nn.Module):
    """Several values of every kind cross its cuts, and its outputs have names."""

    split_points = ("second", "third")

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.third = (nn.Linear(4, 4) for _ in range(3))
        self.third.weight = self.first.weight
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.register_buffer("shift", torch.tensor(3.0), persistent=False)

    def forward(self, x, mask=None, *, other):
        size = x.shape[1]
        a = self.first(x) * self.scale
        b = self.second(a) + self.shift
        if mask is not None:
            b = b * mask
        c = self.third(b + x) * self.scale / size
        return {"c": c, "pair": torch.cat((a, other), 1)}


def _doubled(x):
    return x * 2 if torch.is_tensor(x) else x


class Asking(nn.Sequential):
    """Asks for types in a helper, where tracing does not see it."""

    def forward(self, x):
        return super().forward(_doubled(x))


def asking():
    return Asking(nn.Linear(4, 4), nn.Linear(4, 4))


class Slow(nn.Module):
    """Without weights."""

    def forward(self, x):
        if x.shape[0]:
            time.sleep(0.01)
        return x


def slow_at_first():
    return nn.Sequential(Slow(), nn.Linear(8, 8), Slow(), nn.Linear(8, 64), nn.Linear(64, 64))


class Centred(nn.Sequential):
    """Has each row see the others."""

    def forward(self, x):
        return super().forward(x - x.mean(0))


def centred():
    torch.manual_seed(0)
    return Centred(nn.Linear(4, 4), nn.Linear(4, 4))


class Choosing(Centred):
    """Answers with whole numbers."""

    def forward(self, x):
        return super().forward(x).argmax(1)


def choosing():
    torch.manual_seed(0)
    return Choosing(nn.Linear(4, 4), nn.Linear(4, 64))


class Crop(nn.Module):
    """To as many columns as some row has that is positive up to there."""

    def forward(self, x):
        return x[:, : (x > 0).long().cumprod(1).sum(1).max().clamp(1)]


def cropping():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), Crop())


class Overwriting(Centred):
    """Writes to its input."""

    def forward(self, x):
        return super().forward(x.mul_(3))


def overwriting():
    torch.manual_seed(0)
    return Overwriting(nn.Linear(4, 4), nn.Linear(4, 4))
