"""Models that campaigns are run against, besides `echo` and the default model."""

import torch
from torch import nn

from inferpool.models.base import Model
from inferpool.models.item import Features
from inferpool.models.spec import TensorSpec
from inferpool.models.vision.classifier import Classifier
from inferpool.models.vision.transforms import ImageTransform


class TwoInputs(Model):
    """A model of two named inputs of different dtypes and ranks."""

    inputs = (
        TensorSpec(name="x", dtype="float32", shape=(-1, 3)),
        TensorSpec(name="ids", dtype="int64", shape=(-1, -1)),
    )
    outputs = (
        TensorSpec(name="sum", dtype="float32", shape=(-1,)),
        TensorSpec(name="twice", dtype="float32", shape=(-1, 3)),
    )

    def forward(self, batch: Features) -> Features:
        total = batch["x"].sum(-1) + batch["ids"].float().sum(-1)
        # Sums of large finite numbers stay finite.
        return {
            "sum": total.nan_to_num().clamp(-1e30, 1e30),
            "twice": (batch["x"] * 2).nan_to_num().clamp(-1e30, 1e30),
        }


class Grid(Model):
    """A model of one input of three dimensions, as nested lists or as an array."""

    inputs = (TensorSpec(name="image", dtype="float32", shape=(-1, 2, 3, 4)),)
    outputs = (TensorSpec(name="mean", dtype="float32", shape=(-1,)),)

    def forward(self, batch: Features) -> Features:
        return {"mean": batch["image"].clamp(-1e6, 1e6).mean((1, 2, 3)).nan_to_num()}


class Decoder(Classifier):
    """An image classifier whose network costs nothing, to test the decoding before it."""

    def __init__(self) -> None:
        transform = ImageTransform(resize=40, crop=32)
        super().__init__(transform=transform, labels=["dark", "bright", "gray"])

    def build_network(self) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 3))
