"""A model with two named inputs and two named outputs, one of them in bfloat16."""

import torch

from inferpool.models.base import Model
from inferpool.models.item import Features
from inferpool.models.spec import TensorSpec


class PairModel(Model):
    inputs = (
        TensorSpec(name="a", dtype="float32", shape=(-1, 3)),
        TensorSpec(name="b", dtype="float32", shape=(-1, 3)),
    )
    outputs = (
        TensorSpec(name="sum", dtype="float32", shape=(-1, 3)),
        TensorSpec(name="half", dtype="bfloat16", shape=(-1, 3)),
    )

    def forward(self, batch: Features) -> Features:
        return {"sum": batch["a"] + batch["b"], "half": (batch["a"] / 2).to(torch.bfloat16)}
