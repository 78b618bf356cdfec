"""A model whose instances have outputs of different sizes, as detectors have."""

from collections.abc import Mapping
from typing import Any

import torch

from inferpool.models.base import Model
from inferpool.models.item import Features
from inferpool.models.spec import TensorSpec


class RaggedBoxes(Model):
    """Finds as many boxes as the first number of an instance says; the second says what it does.

    With 1 the boxes of the instance have the wrong shape, with 2 the labels the wrong dtype, with 3
    a box is not finite, and with 4 the batch lacks a list of boxes.
    """

    inputs = (TensorSpec(name="x", dtype="float32", shape=(-1, 2)),)
    outputs = (
        TensorSpec(name="boxes", dtype="float32", shape=(-1, -1, 4)),
        TensorSpec(name="labels", dtype="int64", shape=(-1, -1)),
    )
    example = (2.0, 0.0)

    def forward(self, batch: Features) -> Any:
        found = [self._found(int(num), int(what)) for num, what in batch["x"].tolist()]
        if bool((batch["x"][:, 1] == 4).any()):
            return {"boxes": [one["boxes"] for one in found][1:], "labels": torch.zeros(0)}
        return found

    def _found(self, num: int, what: int) -> Mapping[str, torch.Tensor]:
        boxes = torch.arange(num * 4, dtype=torch.float32).reshape(num, 4) + num
        labels = torch.arange(num)
        if what == 1:
            boxes = boxes[:, :3]
        if what == 2:
            labels = labels.float()
        if what == 3:
            boxes[0, 0] = float("nan")
        return {"boxes": boxes, "labels": labels}
