"""A classifier that loads and computes in no time, for services in tests."""

import torch
from torch import nn

from inferpool.models.vision.classifier import Classifier
from inferpool.models.vision.transforms import ImageTransform


class SmallClassifier(Classifier):
    def __init__(self):
        transform = ImageTransform(resize=36, crop=32)
        super().__init__(transform=transform, labels=[f"label {i}" for i in range(10)])

    def build_network(self):
        torch.manual_seed(0)
        layers = (nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 10, 30))
        return nn.Sequential(*layers, nn.Flatten())
