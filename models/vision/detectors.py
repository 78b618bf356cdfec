"""Detectors of torchvision: from a picture to boxes, masks and keypoints. Worker processes only.

Axes: B batch, H height, W width, C = 3 colours, N detections, M edge of a mask, P keypoints.
"""

import logging
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torchvision.models.detection.transform import (  # type: ignore[import-untyped]  # it has none
    GeneralizedRCNNTransform,
)

from inferpool.models.base import Model
from inferpool.models.errors import InputError, ModelError
from inferpool.models.item import Features, Item
from inferpool.models.ragged import outputs_of
from inferpool.models.spec import Placement, TensorSpec
from inferpool.models.vision.masks import runs_in_box
from inferpool.models.vision.photos import sample_jpegs
from inferpool.models.vision.pictures import MIN_SCORE, picture_of, share_of
from inferpool.models.vision.published import DETECTORS, PublishedNetwork, check_number, labels_of

logger = logging.getLogger(__name__)

_BACKGROUND = "__background__"
_NO_CLASS = "N/A"
"""COCO numbers its 80 classes with gaps up to 90, and torchvision fills these with this name."""


class TorchvisionDetector(Model):
    """Serves a detector of torchvision: of boxes, and of masks or keypoints within them.

    An instance is an encoded picture, or its pixels: uint8 [H, W, 3], [3, H, W] or gray [H, W] as a
    tensor, or [H, W, 3] as JSON. The parameter `min_score` leaves out what the network is less sure
    of; tensors have all that it found.

    Args:
        name: A name in torchvision.models.detection.
        weights: "DEFAULT", a named weight, a checkpoint's path, or None for random weights.
        labels: Names of the classes, without the background, or a file with one a line; by default
            those of the published weights.
        min_score: Least score of what is answered, from 0 to 1.
        options: Keyword arguments of torchvision's builder, such as `num_classes`, which counts the
            background, or `box_detections_per_img`.
    """

    accepts = "image"
    inputs = (TensorSpec(name="image", dtype="uint8", shape=(-1, -1, -1, 3)),)
    preprocessed = ()
    prepares_apart = True
    alone_as_in_batch = False  # smaller pictures are padded; and a rounding may decide for a box
    network: Callable[..., list[dict[str, Tensor]]]

    def __init__(
        self,
        name: str,
        *,
        weights: str | None = "DEFAULT",
        labels: Sequence[str] | str | None = None,
        min_score: float = MIN_SCORE,
        **options: Any,
    ) -> None:
        self._network = PublishedNetwork(DETECTORS, name, weights, options)
        self.checkpoint = self._network.checkpoint
        meta = self._network.meta
        self.labels = labels_of(labels, options.get("num_classes"), meta["categories"])
        if labels is not None:
            if self.labels[:1] != [_BACKGROUND]:
                self.labels.insert(0, _BACKGROUND)
            check_number(self.labels, options.get("num_classes"))
            self._network.options.setdefault("num_classes", len(self.labels))
        self._keypoints: Sequence[str] = _keypoint_names(meta, options.get("num_keypoints"))
        self._min_score = share_of({}, "min_score", min_score)
        self._is_padded = True
        self._most_stretched: float = math.inf
        self.outputs = _outputs(name, len(self._keypoints))
        self.device = torch.device("cpu")

    @property
    def download(self) -> str:
        """URL that `load` will download; empty if there is nothing to download."""
        return self._network.download

    def load(self, placement: Placement) -> None:
        """Load the network.

        Raises:
            ModelError: It cannot be loaded.
        """
        network = self.load_network(self._build, self.checkpoint, placement)
        self.network = cast("Callable[..., list[dict[str, Tensor]]]", network)
        self.device = torch.device(placement.devices[0])
        logger.info(
            "%s is a detector of torchvision, with %s, for %s",
            self._network.name,
            self._network.weights_text,
            classes_text([each for each in self.labels[1:] if each != _NO_CLASS]),
        )

    def preprocess(self, item: Item) -> Features:
        """Decode a picture to uint8 [H, W, C], upright."""
        self._wanted(item.parameters)
        picture = picture_of(item, max_pixels=self.max_image_pixels)
        return {"image": torch.from_numpy(np.array(picture))}

    def bucket(self, features: Features) -> Hashable:
        """Group pictures of about the same proportions, which are padded to the largest one."""
        height, width = features["image"].shape[:2]
        return round(2 * math.log2(width / height)) if self._is_padded else None

    def collate(self, instances: Sequence[Features]) -> Features:
        """Lay pictures of any sizes in a row: their bytes, and the height and width of each."""
        pixels = [each["image"].reshape(-1) for each in instances]
        sizes = [each["image"].shape[:2] for each in instances]
        return {
            "pixels": pixels[0] if len(pixels) == 1 else torch.cat(pixels),
            "size": torch.tensor(sizes, dtype=torch.int64),
        }

    def forward(self, batch: Features) -> Features:
        """Find what is in each picture; each output is a list with a tensor for each picture."""
        sizes = [(height, width) for height, width in batch["size"].tolist()]
        for height, width in sizes:
            self._check_stretch(height, width)
        pixels = batch["pixels"].to(self.device, non_blocking=True)
        parts = pixels.split([height * width * 3 for height, width in sizes])
        found = self.network(
            [
                part.view(*size, 3).permute(2, 0, 1).to(torch.float32).div_(255)
                for part, size in zip(parts, sizes, strict=True)
            ]
        )
        for each, size in zip(found, batch["size"], strict=True):
            each["size"] = size
        return outputs_of(found)

    def render(self, outputs: Features, parameters: Mapping[str, object]) -> object:
        """Render what has at least `min_score`, in pixels of the picture."""
        (rows,) = (outputs["scores"] >= self._wanted(parameters)).nonzero(as_tuple=True)
        boxes = outputs["boxes"][rows].tolist()
        answer: dict[str, object] = {
            "boxes": boxes,
            "labels": [self.labels[label] for label in outputs["labels"][rows].tolist()],
            "scores": outputs["scores"][rows].tolist(),
        }
        if "masks" in outputs:
            height, width = outputs["size"].tolist()
            answer["masks"] = [
                runs_in_box(outputs["masks"][row], box, (height, width))
                for row, box in zip(rows.tolist(), boxes, strict=True)
            ]
        if "keypoints" in outputs:
            places = outputs["keypoints"][rows, :, :2].tolist()
            scores = outputs["keypoints_scores"][rows].tolist()
            answer["keypoints"] = [
                {
                    name: [*place, score]
                    for name, place, score in zip(self._keypoints, *each, strict=True)
                }
                for each in zip(places, scores, strict=True)
            ]
        return answer

    def warmup(self) -> Sequence[Item]:
        """Return a photograph."""
        return [Item(kind="image", payload=memoryview(sample_jpegs()[0]))]

    def samples(self) -> Sequence[Item]:
        """Return none: presets are not tried, since a rounding may decide for or against a box."""
        return ()

    def _wanted(self, parameters: Mapping[str, object]) -> float:
        for name in parameters:
            if name != "min_score":
                raise InputError(f"parameter {name!r} is unknown: this model knows 'min_score'")
        return share_of(parameters, "min_score", self._min_score)

    def _check_stretch(self, height: int, width: int) -> None:
        """Refuse a picture whose shorter edge the network would make less than a pixel long.

        Raises:
            InputError: It is refused.
        """
        short, long = sorted((height, width))
        if long >= self._most_stretched * short:
            raise InputError(
                f"the image has {width} x {height} pixels; its longer edge must be less than "
                f"{self._most_stretched:g} times the shorter one"
            )

    def _build(self) -> nn.Module:
        network = self._network.build({"weights_backbone": None})
        resized = getattr(network, "transform", None)
        if not isinstance(resized, GeneralizedRCNNTransform):
            raise ModelError(f"{self._network.name} has no `transform` as torchvision's detectors")
        self._is_padded = resized.fixed_size is None
        if self._is_padded:
            self._most_stretched = resized.max_size
        if "masks" in {spec.name for spec in self.outputs}:
            network.transform = SmallMasks(
                resized.min_size,
                resized.max_size,
                resized.image_mean,
                resized.image_std,
                size_divisible=resized.size_divisible,
                fixed_size=resized.fixed_size,
            )
        return network


class SmallMasks(GeneralizedRCNNTransform):  # type: ignore[misc]  # torchvision has no types
    """The transform of torchvision's detectors, but masks stay as large as the network made them.

    torchvision makes a picture of float32 for each instance: 4.8 GB for 100 in a photograph of 12
    million pixels.
    """

    def postprocess(
        self,
        result: list[dict[str, Tensor]],
        image_shapes: list[tuple[int, int]],
        original_image_sizes: list[tuple[int, int]],
    ) -> list[dict[str, Tensor]]:
        """Turn boxes into pixels of the pictures; masks [N, 1, M, M] become [N, M, M]."""
        masks = [each.pop("masks")[:, 0] for each in result]
        result = super().postprocess(result, image_shapes, original_image_sizes)
        return [{**each, "masks": mask} for each, mask in zip(result, masks, strict=True)]


def classes_text(labels: Sequence[str]) -> str:
    """Return the number of classes and the first of them, for people."""
    shown = ", ".join(labels[:3])
    return f"{len(labels)} classes: {shown}{', …' if len(labels) > 3 else ''}"


def _keypoint_names(meta: Mapping[str, Any], number: object) -> list[str]:
    """Return the names of keypoints, or numbers where they are not those of the weights."""
    names = [str(name) for name in meta.get("keypoint_names", ())]
    if isinstance(number, int) and number != len(names):
        return [str(place) for place in range(number)]
    return names


def _outputs(name: str, num_keypoints: int) -> list[TensorSpec]:
    shapes: dict[str, tuple[str, tuple[int, ...]]] = {
        "boxes": ("float32", (-1, -1, 4)),
        "labels": ("int64", (-1, -1)),
        "scores": ("float32", (-1, -1)),
        "size": ("int64", (-1, 2)),
    }
    if name.startswith("maskrcnn"):
        shapes["masks"] = ("float32", (-1, -1, -1, -1))
    if num_keypoints:
        shapes["keypoints"] = ("float32", (-1, -1, num_keypoints, 3))
        shapes["keypoints_scores"] = ("float32", (-1, -1, num_keypoints))
    return [
        TensorSpec(name=each, dtype=dtype, shape=shape) for each, (dtype, shape) in shapes.items()
    ]
