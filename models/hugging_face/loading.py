"""Loads a network and its picture processor from a folder. Runs in worker processes only."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from PIL import Image
from torch import Tensor, nn

from inferpool.models.accelerator.failures import lacks_resources
from inferpool.models.errors import InputError, SourceError
from inferpool.models.files.checkpoint import first_line
from inferpool.models.files.hugging_face import Task, architectures_of, task_of, why_no_task
from inferpool.models.files.networks import FolderOptions, NetworkFolder, some_names
from inferpool.models.vision.images import check_size
from inferpool.models.vision.pictures import check_stretch

logger = logging.getLogger(__name__)

_AUTO_CLASSES: Mapping[Task, str] = {
    "classification": "AutoModelForImageClassification",
    "detection": "AutoModelForObjectDetection",
    "segmentation": "AutoModelForSemanticSegmentation",
}
_PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
_MOST_USUAL = 16
"""Proportions of pictures that each processor should know how to prepare."""


class TransformersNetwork(nn.Module):
    """A network of transformers that returns tensors alone: logits, and boxes if it has them."""

    def __init__(self, inner: nn.Module, *, has_boxes: bool) -> None:
        super().__init__()
        self.inner = inner
        self._has_boxes = has_boxes

    def forward(self, pixels: Tensor, mask: Tensor | None = None) -> Any:
        """Compute a batch of processed pictures, with masks of the pixels that count."""
        given = {} if mask is None else {"pixel_mask": mask}
        found = self.inner(pixel_values=pixels, **given)
        return (found.logits, found.pred_boxes) if self._has_boxes else found.logits


class PictureFolder(NetworkFolder):
    """A folder with `config.json`, a picture processor, and weights.

    Args:
        path: The folder.
        options: What is allowed.

    Raises:
        SourceError: There is no network in it that can be served.
    """

    def __init__(self, path: Path, options: FolderOptions) -> None:
        super().__init__(path, options)
        architecture = next((each for each in architectures_of(path) if task_of(each)), None)
        task = architecture and task_of(architecture)
        if not architecture or not task:
            raise SourceError(why_no_task(path))
        self.architecture = architecture
        self.task: Task = task
        self.processor: Any = None

    def open(self) -> Mapping[int, str]:
        """Read the processor; return the names of the classes by number.

        Raises:
            ModelError: transformers is not installed.
            SourceError: A file is missing, or cannot be read.
        """
        transformers = self.library
        if not any((self.path / name).is_file() for name in _PROCESSOR_FILES):
            raise SourceError(
                f"{self.path} has no {_PROCESSOR_FILES[0]}, which says how pictures are prepared: "
                f'write it with `processor.save_pretrained("{self.path}")`'
            )
        self.processor = self.read(transformers.AutoImageProcessor.from_pretrained)
        config = self.config
        if getattr(config, "use_pretrained_backbone", False):
            # The folder's weights have the backbone too. transformers 5.0 would fetch it first.
            config.use_pretrained_backbone = False
        return cast("Mapping[int, str]", config.id2label)

    def build_network(self) -> TransformersNetwork:
        """Build the network; see `build`."""
        inner = self.build(_AUTO_CLASSES[self.task])
        return TransformersNetwork(inner, has_boxes=self.task == "detection")

    def check_size(self, size: tuple[int, int]) -> None:
        """Refuse a picture that the processor would make much too large.

        Raises:
            InputError: It is refused.
        """
        edge = _edge(self.processor, "shortest_edge")
        if edge and not _edge(self.processor, "longest_edge"):
            if self.task != "classification":
                check_stretch(size)
            short, long = sorted(size)
            check_size(edge, edge * long // short)

    def prepared(self, picture: Image.Image) -> dict[str, Tensor]:
        """Prepare a client's picture; see `features_of`.

        Raises:
            InputError: The processor cannot prepare it, since an edge would have no pixels.
        """
        try:
            return self.features_of(picture)
        except (ValueError, RuntimeError, ZeroDivisionError) as error:
            if lacks_resources(error) or max(picture.size) <= _MOST_USUAL * min(picture.size):
                raise
            raise InputError(
                f"the image of {picture.width} x {picture.height} pixels cannot be prepared for "
                f"this network: {first_line(error)}"
            ) from error

    def features_of(self, picture: Image.Image) -> dict[str, Tensor]:
        """Prepare a picture: `pixels` [C, h, w], its own `size`, and a `mask` of pixels if any."""
        found = self.processor(images=picture, return_tensors="pt")
        size = torch.tensor([picture.height, picture.width])
        features = {"pixels": found["pixel_values"][0], "size": size}
        if "pixel_mask" in found:
            features["mask"] = found["pixel_mask"][0]
        return features

    @property
    def is_multi_label(self) -> bool:
        """True if a picture may have several classes, each with a probability of its own."""
        return getattr(self.config, "problem_type", "") == "multi_label_classification"

    def report(self) -> None:
        """Log what was found in the folder."""
        labels = self.config.id2label
        names = [labels[number] for number in sorted(labels)]
        weights = self.options.weights
        logger.info(
            "%s: %s of transformers %s, with %s; %d classes: %s",
            self.path,
            self.architecture,
            self.library.__version__,
            "the folder's weights" if weights == "DEFAULT" else weights or "random weights",
            len(names),
            some_names(names),
        )


def _edge(processor: Any, name: str) -> int | None:
    """Return a length that a processor resizes to; None if it has none of this name."""
    size = getattr(processor, "size", None)
    found = size.get(name) if isinstance(size, Mapping) else getattr(size, name, None)
    return found if isinstance(found, int) and getattr(processor, "do_resize", True) else None
