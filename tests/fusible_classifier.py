"""A classifier that compiling makes several times as fast: many small steps, which become one."""

import torch
from torch import Tensor, nn

from inferpool.models.vision.classifier import Classifier, ImageTransform


class Steps(nn.Module):
    """Each of them reads and writes all of its input."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.last = nn.Linear(3, 10)

    def forward(self, x: Tensor) -> Tensor:
        for step in range(40):
            x = (x * 1.01 + 0.01 * step).clamp(-3, 3)
        return self.last(x.mean((2, 3)))


class FusibleClassifier(Classifier):
    def __init__(self):
        transform = ImageTransform(resize=144, crop=128)
        super().__init__(transform=transform, labels=[f"label {i}" for i in range(10)])

    def build_network(self):
        return Steps()
