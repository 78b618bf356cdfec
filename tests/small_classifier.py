"""Classifiers that load in no time, for services in tests."""

import torch
from torch import Tensor, nn

from inferpool.models.vision.classifier import Classifier
from inferpool.models.vision.transforms import ImageTransform

_LABELS = [f"label {i}" for i in range(10)]


class SmallClassifier(Classifier):
    """A classifier that computes in no time."""

    def __init__(self):
        super().__init__(transform=ImageTransform(resize=36, crop=32), labels=_LABELS)

    def build_network(self):
        torch.manual_seed(0)
        layers = (nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 10, 30))
        return nn.Sequential(*layers, nn.Flatten())


class FusibleClassifier(Classifier):
    """A classifier that compiling makes several times as fast."""

    def __init__(self):
        super().__init__(transform=ImageTransform(resize=144, crop=128), labels=_LABELS)

    def build_network(self):
        return _ManySteps()


class _ManySteps(nn.Module):
    """Small steps, each of which reads and writes all of its input; a compiler makes them one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.last = nn.Linear(3, 10)

    def forward(self, x: Tensor) -> Tensor:
        for step in range(40):
            x = (x * 1.01 + 0.01 * step).clamp(-3, 3)
        return self.last(x.mean((2, 3)))
