"""A classifier whose device is played by a wait: it takes time for each picture, and no core."""

import time

import torch

from inferpool.models.item import Features
from inferpool.models.spec import Placement
from inferpool.models.vision.classifier import Classifier
from inferpool.models.vision.transforms import ImageTransform
from tests.fault_model import FaultModel


class StandIn(Classifier):
    """Answers any picture with the same labels."""

    prepares_apart = True

    def __init__(self, *, image_s: float = 0.0001) -> None:
        """Store the seconds that the device takes for each picture."""
        labels = [f"label {i}" for i in range(10)]
        super().__init__(transform=ImageTransform(resize=256, crop=224), labels=labels)
        self._image_s = image_s

    def load(self, placement: Placement) -> None:
        """Load nothing."""

    def forward(self, batch: Features) -> Features:
        """Wait as long as the device would compute."""
        num = len(batch["image"])
        time.sleep(num * self._image_s)
        return {"logits": torch.zeros(num, 10)}


class Sleeper(FaultModel):
    """Takes the inputs of `FaultModel`, and a time that grows with the batch, but no core."""

    def __init__(self, *, batch_s: float = 0.0, item_s: float = 0.0) -> None:
        """Store the seconds of each batch, and of each of its instances."""
        super().__init__()
        self._batch_s, self._item_s = batch_s, item_s

    def forward(self, batch: Features) -> Features:
        """Wait as long as the device would compute."""
        time.sleep(self._batch_s + len(batch["x"]) * self._item_s)
        return super().forward(batch)
