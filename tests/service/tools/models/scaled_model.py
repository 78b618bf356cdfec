"""A model whose versions differ by an option."""

from inferpool.models.base import Model
from inferpool.models.item import Features
from inferpool.models.spec import TensorSpec


class ScaledModel(Model):
    """Answers its input times `factor`; below 0, another number is the largest."""

    inputs = (TensorSpec(name="x", dtype="float32", shape=(-1, 3)),)
    outputs = (TensorSpec(name="y", dtype="float32", shape=(-1, 3)),)

    def __init__(self, factor: float = 1.0) -> None:
        self._factor = factor

    def forward(self, batch: Features) -> Features:
        return {"y": batch["x"] * self._factor}
