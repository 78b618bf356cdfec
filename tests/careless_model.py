"""A model whose author has thought of good inputs only."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from inferpool.models.base import Model
from inferpool.models.item import Features, Item
from inferpool.models.spec import TensorSpec
from tests.small_classifier import SmallClassifier


class Careless(Model):
    """Returns the square root of what JSON has as "x", and NaN for "nan"."""

    example: object = {"x": 4}
    prepares_apart = True

    def preprocess(self, item: Item) -> Features:
        """Read the JSON as if it always had the right form."""
        value: Any = item.json()
        return {"x": torch.tensor(float(value["x"]))}

    def warmup(self) -> Sequence[Item]:
        return [Item(kind="json", payload=memoryview(b'{"x": 4}'))]

    def forward(self, batch: Features) -> Features:
        return {"y": batch["x"].abs().sqrt()}

    def render(self, outputs: Features, parameters: Mapping[str, object]) -> object:
        y = outputs["y"].item()
        return {"y": y, "logs": [None, math.log(y) if y else -math.inf]}


class Rooted(Model):
    """Returns the square roots of three numbers."""

    inputs = (TensorSpec(name="x", dtype="float32", shape=(-1, 3)),)

    def forward(self, batch: Features) -> Features:
        return {"y": batch["x"].sqrt()}


class SmallApart(SmallClassifier):
    """A classifier that computes in no time, of pictures from decoders."""

    prepares_apart = True
