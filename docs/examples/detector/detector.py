"""An object detector from torchvision: pictures in, boxes with labels and scores out."""

from collections.abc import Mapping, Sequence
from io import BytesIO

import torch
from PIL import Image
from torch import Tensor
from torchvision.models.detection import (
    SSDLite320_MobileNet_V3_Large_Weights,
    ssdlite320_mobilenet_v3_large,
)
from torchvision.transforms.functional import to_tensor

from inferpool import Features, InputError, Item, Model, Placement
from inferpool.models.vision.images import decode_image


def _gray() -> bytes:
    file = BytesIO()
    Image.new("RGB", (320, 320), "gray").save(file, "JPEG")
    return file.getvalue()


GRAY = _gray()
"""A picture to warm up with, and to show people what to send."""


class Detector(Model):
    """SSDLite with MobileNetV3 (torchvision), trained on COCO.

    Args:
        weights: The name of torchvision's weights, "COCO_V1", which it fetches; None for random
            ones.
    """

    accepts = "image"
    example = (GRAY, "image/jpeg")
    alone_as_in_batch = False  # a rounding may decide for or against a box

    def __init__(self, weights: str | None = None) -> None:
        self._weights = weights
        self._names: Sequence[str] = SSDLite320_MobileNet_V3_Large_Weights.DEFAULT.meta[
            "categories"
        ]

    def load(self, placement: Placement) -> None:
        """Build the detector on the replica's device."""
        self.device = torch.device(placement.devices[0])
        detector = ssdlite320_mobilenet_v3_large(weights=self._weights, weights_backbone=None)
        self.detector = detector.eval().to(self.device)

    def preprocess(self, item: Item) -> Features:
        """Decode a picture to float32 [3, height, width] between 0 and 1."""
        if item.kind != "image":
            raise InputError("send one picture: JPEG, PNG, WebP, GIF, BMP or TIFF")
        return {"image": to_tensor(decode_image(item.payload, max_pixels=self.max_image_pixels))}

    def forward(self, batch: Features) -> list[dict[str, Tensor]]:
        """Find objects in pictures [B, 3, height, width]: a dict for each, with any number."""
        found: list[dict[str, Tensor]] = self.detector(list(batch["image"].to(self.device)))
        return found

    def render(self, outputs: Features, parameters: Mapping[str, object]) -> object:
        """Answer with the boxes that score at least `min_score` (0.5), in pixels."""
        least = parameters.get("min_score", 0.5)
        if not isinstance(least, int | float):
            raise InputError("parameters.min_score: must be a number")
        rows = outputs["scores"] >= least
        return {
            "boxes": outputs["boxes"][rows].tolist(),
            "labels": [self._names[label] for label in outputs["labels"][rows].tolist()],
            "scores": outputs["scores"][rows].tolist(),
        }
