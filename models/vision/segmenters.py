"""Segmenters of torchvision: from a picture to a class for each pixel. Worker processes only.

Axes: B batch, H height, W width, h and w those that the network sees, C = 3 colours, K classes.
"""

# ruff: noqa: N806 - tensors carry their axes in their names

import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from inferpool.models.base import Model
from inferpool.models.content import Content
from inferpool.models.errors import InputError, SourceError
from inferpool.models.item import Features, Item
from inferpool.models.ragged import outputs_of
from inferpool.models.spec import Placement, TensorSpec
from inferpool.models.vision.detectors import classes_text
from inferpool.models.vision.masks import labels_at, palette_png, runs_by_label
from inferpool.models.vision.photos import sample_jpegs
from inferpool.models.vision.pictures import check_stretch, picture_of
from inferpool.models.vision.published import SEGMENTERS, PublishedNetwork, check_number, labels_of

logger = logging.getLogger(__name__)

_BACKGROUND = "__background__"
_MOST_CLASSES = 256
"""Colours of a palette, and values of uint8."""


class TorchvisionSegmenter(Model):
    """Serves a segmenter of torchvision.

    An instance is an encoded picture, or its pixels: uint8 [H, W, 3], [3, H, W] or gray [H, W] as a
    tensor, or [H, W, 3] as JSON.

    Args:
        name: A name in torchvision.models.segmentation.
        weights: "DEFAULT", a named weight, a checkpoint's path, or None for random weights.
        labels: Names of the classes, the background among them, or a file with one a line; by
            default those of the published weights.
        resize: Length that the shorter edge of a picture gets before the network; by default that
            of the published weights.
        options: Keyword arguments of torchvision's builder, such as `num_classes`.
    """

    accepts = "image"
    media_types = ("image/png",)
    inputs = (TensorSpec(name="image", dtype="uint8", shape=(-1, -1, -1, 3)),)
    outputs = (TensorSpec(name="labels", dtype="uint8", shape=(-1, -1, -1)),)
    preprocessed = ()
    prepares_apart = True
    network: Callable[..., dict[str, Tensor]]

    def __init__(
        self,
        name: str,
        *,
        weights: str | None = "DEFAULT",
        labels: Sequence[str] | str | None = None,
        resize: int | None = None,
        **options: Any,
    ) -> None:
        self._network = PublishedNetwork(SEGMENTERS, name, weights, options)
        self.checkpoint = self._network.checkpoint
        published = self._network.meta["categories"]
        self.labels = labels_of(labels, options.get("num_classes"), published)
        if len(self.labels) > _MOST_CLASSES:
            raise SourceError(
                f"{len(self.labels)} classes are too many: a picture of classes has at most "
                f"{_MOST_CLASSES}"
            )
        if labels is not None:
            check_number(self.labels, options.get("num_classes"))
            self._network.options.setdefault("num_classes", len(self.labels))
        preset = self._network.preset
        self._resize: int = resize or preset.resize_size[0]
        self._interpolation = Image.Resampling[preset.interpolation.name]
        self._mean, self._std = torch.tensor(preset.mean), torch.tensor(preset.std)
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
        blank = torch.zeros(1, 3, 64, 64)
        network = self.load_network(self._build, self.checkpoint, placement, example=[blank])
        self.network = cast("Callable[..., dict[str, Tensor]]", network)
        self.device = torch.device(placement.devices[0])
        self._mean, self._std = self._mean.to(self.device), self._std.to(self.device)
        logger.info(
            "%s is a segmenter of torchvision, with %s, for %s",
            self._network.name,
            self._network.weights_text,
            classes_text([each for each in self.labels if each != _BACKGROUND]),
        )

    def preprocess(self, item: Item) -> Features:
        """Decode a picture, and resize it to uint8 [h, w, C]; keep its own size [2]."""
        self._check(item.parameters)
        picture = picture_of(item, max_pixels=self.max_image_pixels, check=check_stretch)
        size = torch.tensor([picture.height, picture.width])
        resized = picture.resize(self._resized(picture.size), self._interpolation)
        return {"image": torch.from_numpy(np.array(resized)), "size": size}

    def bucket(self, features: Features) -> Hashable:
        """Group pictures that the network sees in one size."""
        return tuple(features["image"].shape)

    def forward(self, batch: Features) -> Features:
        """Find the class of each pixel: a list with uint8 [H, W] for each picture."""
        x_BHWC = batch["image"].to(self.device, non_blocking=True)
        x_BCHW = x_BHWC.permute(0, 3, 1, 2).to(torch.float32, memory_format=torch.contiguous_format)
        x_BCHW.div_(255).sub_(self._mean.view(3, 1, 1)).div_(self._std.view(3, 1, 1))
        scores_BKHW = self.network(x_BCHW)["out"]
        sizes = [(height, width) for height, width in batch["size"].tolist()]
        labels = [labels_at(*each) for each in zip(scores_BKHW, sizes, strict=True)]
        return outputs_of({"labels": labels})

    def render(self, outputs: Features, parameters: Mapping[str, object]) -> object:
        """Render the pixels of each class but the background, by its name."""
        self._check(parameters)
        found = runs_by_label(outputs["labels"].numpy())
        named = {self.labels[label]: runs for label, runs in found.items()}
        named.pop(_BACKGROUND, None)
        return named

    def render_content(self, outputs: Features, parameters: Mapping[str, object]) -> object:
        """Render a PNG of the picture's size, whose pixels are the numbers of their classes."""
        self._check(parameters)
        return Content(palette_png(outputs["labels"].numpy()), "image/png")

    def warmup(self) -> Sequence[Item]:
        """Return a photograph."""
        return [Item(kind="image", payload=memoryview(sample_jpegs()[0]))]

    def samples(self) -> Sequence[Item]:
        """Return none: the classes of pixels say nothing about how far scores are off."""
        return ()

    def _check(self, parameters: Mapping[str, object]) -> None:
        for name in parameters:
            raise InputError(f"parameter {name!r} is unknown: this model knows none")

    def _resized(self, size: tuple[int, int]) -> tuple[int, int]:
        """Return the width and height that the network sees, as torchvision's `resize` does."""
        width, height = size
        short, long = sorted(size)
        other = int(self._resize * long / short)
        return (self._resize, other) if width <= height else (other, self._resize)

    def _build(self) -> nn.Module:
        network: Any = self._network.build({"weights_backbone": None})
        if hasattr(network, "aux_classifier"):  # it serves training alone
            network.aux_classifier = None
            network.unused_weights = ("aux_classifier.",)  # of `check_fit`
        assert isinstance(network, nn.Module)
        return network
