"""Opens the images of a run: files, or a dataset class of the user's."""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from inferpool.models.errors import DataError, InputError
from inferpool.models.sources.classes import find_class
from inferpool.models.sources.registry import construct
from inferpool.models.training.images import ImageFiles, ImageSource, UserImages
from inferpool.models.training.recipe import Recipe
from inferpool.models.training.samples import ImageFacts, LabelledImages, unfit_label

_ITEM = "item "
"""Text before the number of an item, in the place of a path."""
_MOST_SEEN = 200


def images_of(recipe: Recipe, samples: LabelledImages) -> ImageSource:
    """Return what reads the images of a list.

    Raises:
        SourceError: The user's dataset cannot be opened.
    """
    if not recipe.dataset:
        return ImageFiles(samples.paths, samples.targets)
    dataset = open_dataset(recipe.dataset, recipe.dataset_options)
    numbers = [int(path.removeprefix(_ITEM)) for path in samples.paths]
    return UserImages(dataset, numbers, samples.targets)


def open_dataset(source: str, options: Mapping[str, object]) -> Any:
    """Return an object of a user's dataset class.

    Raises:
        SourceError: There is no such class, or it cannot be constructed.
        DataError: It has no length or no items.
    """
    module, _, name = source.partition(":")
    dataset: Any = construct(find_class(module, name), options, source)
    for needed in ("__len__", "__getitem__"):
        if not hasattr(dataset, needed):
            raise DataError(f"{source} must define {needed}, as datasets of torch do")
    return dataset


def labelled(dataset: Any, source: str) -> LabelledImages:
    """List the items of a dataset.

    Its `classes` name the classes, and its `targets` are the class of each item, as in torchvision;
    without `targets`, each item is read for its class.

    Raises:
        DataError: It does not say which classes there are, or an item has none of them.
    """
    classes: Sequence[object] | None = getattr(dataset, "classes", None)
    if classes is None:
        raise DataError(f"{source} must have `classes`, a list of the names of its classes")
    labels = [str(label) for label in classes]
    if odd := [label for label in labels if unfit_label(label) or labels.count(label) > 1]:
        raise DataError(f"{source}: {odd[0]!r} cannot be a label: it is {_why(odd[0])}")
    if not len(dataset):
        raise DataError(f"{source} has no items")
    known = getattr(dataset, "targets", None)
    targets = [int(each) for each in (known if known is not None else _read_targets(dataset))]
    if len(targets) != len(dataset):
        raise DataError(f"{source} has {len(dataset)} items, but {len(targets)} targets")
    for index, target in enumerate(targets):
        if not 0 <= target < len(labels):
            raise DataError(f"{source}[{index}] has class {target}, but there are {len(labels)}")
    return LabelledImages([f"{_ITEM}{i}" for i in range(len(targets))], targets, labels)


def facts_of(dataset: Any) -> ImageFacts | None:
    """Return facts about some items of a dataset; None if none of them is an image."""
    num = min(_MOST_SEEN, len(dataset))
    images = []
    for index in range(num):
        try:
            item = dataset[index * len(dataset) // num]
        except (OSError, InputError):
            continue
        image = item[0] if isinstance(item, tuple | list) else item
        if isinstance(image, Tensor) and image.dtype == torch.uint8:
            image = Image.fromarray(np.ascontiguousarray(image.permute(1, 2, 0).numpy()))
        if isinstance(image, Image.Image):
            images.append(image)
    if not images:
        return None
    edges = [sorted(image.size) for image in images]
    return ImageFacts(
        num_sampled=num,
        num_unreadable=num - len(images),
        short_edge=int(median(short for short, _ in edges)),
        aspect=median(long / max(1, short) for short, long in edges),
        is_gray=all(_is_gray(image) for image in images),
    )


def _is_gray(image: Image.Image) -> bool:
    red, green, blue = np.moveaxis(np.asarray(image.convert("RGB")), 2, 0)
    return bool((red == green).all() and (green == blue).all())


def _why(label: str) -> str:
    return unfit_label(label).removeprefix("it is ") or "there twice"


def _read_targets(dataset: Any) -> list[int]:
    return [int(dataset[index][1]) for index in range(len(dataset))]
