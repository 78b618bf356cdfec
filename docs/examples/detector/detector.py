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

from inferpool import Features, InputError, Item, Model, Placement, TensorSpec
from inferpool.models.vision.images import decode_image

EDGE = 320
"""Pixels. The network resizes to this anyway; equal sizes make batches."""
MOST_BOXES = 100


def _gray() -> bytes:
    file = BytesIO()
    Image.new("RGB", (EDGE, EDGE), "gray").save(file, "JPEG")
    return file.getvalue()


GRAY = _gray()
"""A picture to warm up with, and to show people what to send."""


class Detector(Model):
    """SSDLite with MobileNetV3 (torchvision), trained on COCO.

    Args:
        weights: The name of torchvision's weights, "COCO_V1", which it fetches; None for random
            ones.
    """

    example = (GRAY, "image/jpeg")
    preprocessed = (TensorSpec(name="image", dtype="float32", shape=(-1, 3, EDGE, EDGE)),)
    outputs = (
        TensorSpec(name="boxes", dtype="float32", shape=(-1, MOST_BOXES, 4)),
        TensorSpec(name="labels", dtype="int64", shape=(-1, MOST_BOXES)),
        TensorSpec(name="scores", dtype="float32", shape=(-1, MOST_BOXES)),
    )

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
        """Decode a picture and resize it to float32 [3, 320, 320] between 0 and 1."""
        if item.kind != "image":
            raise InputError("send one picture: JPEG, PNG, WebP, GIF, BMP or TIFF")
        image = decode_image(item.payload, max_pixels=self.max_image_pixels)
        return {"image": to_tensor(image.resize((EDGE, EDGE)))}

    def forward(self, batch: Features) -> Features:
        """Find objects in pictures [B, 3, 320, 320]; fill up to 100 boxes each with scores of 0."""
        found = self.detector(list(batch["image"].to(self.device)))
        return {
            name: torch.stack([_filled(each[name]) for each in found])
            for name in ("boxes", "labels", "scores")
        }

    def render(self, outputs: Features, parameters: Mapping[str, object]) -> object:
        """Answer with the boxes that score at least `min_score` (0.5), as parts of the edges."""
        least = parameters.get("min_score", 0.5)
        if not isinstance(least, int | float):
            raise InputError("parameters.min_score: must be a number")
        return [
            {"label": self._names[label], "score": score, "box": (box / EDGE).tolist()}
            for label, score, box in zip(
                outputs["labels"].tolist(),
                outputs["scores"].tolist(),
                outputs["boxes"],
                strict=True,
            )
            if score >= max(least, 1e-6)
        ]

    def warmup(self) -> Sequence[Item]:
        """Return what is computed before the worker counts as ready."""
        return [Item(kind="image", payload=memoryview(GRAY))]


def _filled(rows: Tensor) -> Tensor:
    """Cut or fill the first dimension to 100 rows."""
    filled = rows.new_zeros((MOST_BOXES, *rows.shape[1:]))
    filled[: len(rows)] = rows[:MOST_BOXES]
    return filled
