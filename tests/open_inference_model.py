"""Models for clients of the Open Inference Protocol, whose right answers are known."""

from collections.abc import Mapping

import torch

from inferpool.models.base import Model
from inferpool.models.errors import InputError
from inferpool.models.item import Features, Item
from inferpool.models.spec import DTYPE_BYTES, TensorSpec

WIDTH = 100_000


class AllTypes(Model):
    """Returns one input of each dtype, `in_float32` as `out_float32` and so on."""

    inputs = tuple(
        TensorSpec(name=f"in_{dtype}", dtype=dtype, shape=(-1, -1)) for dtype in DTYPE_BYTES
    )
    outputs = tuple(
        TensorSpec(name=f"out_{dtype}", dtype=dtype, shape=(-1, -1)) for dtype in DTYPE_BYTES
    )

    def forward(self, batch: Features) -> Features:
        return {name.replace("in_", "out_"): tensor for name, tensor in batch.items()}


class RowSums(Model):
    """Returns the sum of each row, and the row's first number; as if it scored two classes."""

    inputs = (TensorSpec(name="x", dtype="float32", shape=(-1, WIDTH)),)
    outputs = (TensorSpec(name="y", dtype="float32", shape=(-1, 2)),)
    labels = ("all", "first")

    def forward(self, batch: Features) -> Features:
        x = batch["x"]
        return {"y": torch.stack([x.sum(1), x[:, 0]], 1)}


class TextLengths(Model):
    """Answers a text with its length in JSON; an object with the text "t" of it."""

    example = "text"

    def preprocess(self, item: Item) -> Features:
        value = item.json()
        text = value.get("t") if isinstance(value, dict) else value
        if not isinstance(text, str):
            raise InputError("an instance is a text")
        return {"length": torch.tensor(len(text))}

    def forward(self, batch: Features) -> Features:
        return batch

    def render(self, outputs: Features, parameters: Mapping[str, object]) -> object:
        length = int(outputs["length"])
        return "a" * length if parameters.get("as_text") else {"length": length}
