"""Reads the images of a training run, in an order and with changes that depend on the seed alone.

Axes: B batch, C = 3 colours, H height, W width.
"""

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset, DistributedSampler, Sampler

from inferpool.models.errors import InputError, ModelError
from inferpool.models.training.augment import TrainingTransform
from inferpool.models.vision.images import decode_image
from inferpool.models.vision.transforms import ImageTransform

Key = tuple[int, int]
"""An epoch, and the index of an image."""
_TURN = 1_000_003
"""A prime, which spreads the seeds of images."""
_SEEDS = 2**63


class ImageSource(ABC):
    """Images with their classes: files, or a dataset of the user's."""

    def __init__(self, targets: Sequence[int]) -> None:
        # Arrays, since each reader process gets a copy, and lists of a million texts are slow.
        self._targets = np.array(targets, dtype=np.int64)

    @property
    def targets(self) -> Sequence[int]:
        """Class of each image."""
        return [int(target) for target in self._targets]

    @abstractmethod
    def name_of(self, index: int) -> str:
        """Return what people call an image: its path."""

    @abstractmethod
    def read(self, index: int) -> Image.Image:
        """Return an image as RGB.

        Raises:
            InputError: It cannot be read.
        """


class ImageFiles(ImageSource):
    """Images in files."""

    def __init__(self, paths: Sequence[str], targets: Sequence[int]) -> None:
        super().__init__(targets)
        self._paths = np.array(paths, dtype=np.str_)

    def name_of(self, index: int) -> str:
        """Return the path of an image."""
        return str(self._paths[index])

    def read(self, index: int) -> Image.Image:
        """Return an image as RGB.

        Raises:
            InputError: It cannot be read.
        """
        return decode_image(self.bytes_of(index))

    def bytes_of(self, index: int) -> bytes:
        """Return an encoded image.

        Raises:
            InputError: The file cannot be read.
        """
        try:
            return Path(self.name_of(index)).read_bytes()
        except OSError as error:
            raise InputError(f"it cannot be read: {error.strerror or error}") from error


class UserImages(ImageSource):
    """A part of a dataset of the user's; its items are an image and the index of its class.

    An image is one of Pillow's, or a tensor uint8 [3, H, W].
    """

    def __init__(self, dataset: Dataset[object], indices: Sequence[int], targets: Sequence[int]):
        super().__init__(targets)
        self._dataset = dataset
        self._indices = np.array(indices, dtype=np.int64)

    def name_of(self, index: int) -> str:
        """Return the number of an item in the whole dataset."""
        return f"item {self._indices[index]}"

    def read(self, index: int) -> Image.Image:
        """Return an image as RGB.

        Raises:
            InputError: The dataset cannot read it.
            ModelError: The dataset returns something else.
        """
        try:
            item = self._dataset[int(self._indices[index])]
        except (OSError, InputError) as error:  # Pillow's errors about files are OSErrors
            raise InputError(str(error)) from error
        image = item[0] if isinstance(item, tuple | list) else item
        if isinstance(image, Image.Image):
            return image.convert("RGB")
        if isinstance(image, Tensor) and image.dtype == torch.uint8 and image.shape[0] == 3:
            return Image.fromarray(np.ascontiguousarray(image.permute(1, 2, 0).numpy()))
        raise ModelError(
            f"{type(self._dataset).__name__}[{self._indices[index]}] must be a pair of an image "
            f"(Pillow's, or a tensor uint8 [3, height, width]) and a class, not {type(item)}"
        )


@dataclass(slots=True)
class TrainingBatch:
    """Images to train on, or to be judged by."""

    pixels: Tensor
    """uint8 [B, C, H, W]."""
    targets: Tensor
    """int64 [B]."""
    indices: Sequence[int]
    """Numbers of the images that are shown."""
    faults: Mapping[int, str]
    """Numbers of images that cannot be read, with the reasons."""

    def pin_memory(self) -> "TrainingBatch":
        """Pin the tensors, as `DataLoader` asks for."""
        self.pixels, self.targets = self.pixels.pin_memory(), self.targets.pin_memory()
        return self


class TrainingImages(Dataset[TrainingBatch]):
    """Images as the training sees them: changed by the seed, the epoch and the index alone.

    In the place of an image that cannot be read stands the next one of its class.
    """

    def __init__(self, source: ImageSource, transform: TrainingTransform, *, seed: int) -> None:
        self._source = source
        self._transform = transform
        self._seed = seed
        self._of_class: dict[int, list[int]] = defaultdict(list)
        self._targets = [*source.targets]
        for index, target in enumerate(self._targets):
            self._of_class[target].append(index)

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self._targets)

    def __getitem__(self, key: Key) -> TrainingBatch:
        """Return one image.

        Raises:
            ModelError: No image of its class can be read.
        """
        epoch, index = key
        target = self._targets[index]
        image, shown, faults = self._read(index, target)
        before = torch.default_generator.get_state()
        torch.default_generator.manual_seed(self._seed_of(epoch, index))
        try:
            pixels = self._transform(image)
        finally:  # the network's dropout draws from the same generator
            torch.default_generator.set_state(before)
        return TrainingBatch(pixels[None], torch.tensor([target]), [shown], faults)

    def _read(self, index: int, target: int) -> tuple[Image.Image, int, dict[int, str]]:
        alike = self._of_class[target]
        faults: dict[int, str] = {}
        first = bisect_left(alike, index)
        for turn in range(len(alike)):
            shown = alike[(first + turn) % len(alike)]
            try:
                return self._source.read(shown), shown, faults
            except InputError as error:
                faults[shown] = str(error)
        raise ModelError(
            f"no image of the class of {self._source.name_of(index)} can be read: {faults[index]}"
        )

    def _seed_of(self, epoch: int, index: int) -> int:
        return ((self._seed * _TURN + epoch) * _TURN + index) % _SEEDS


class HeldOutImages(Dataset[TrainingBatch]):
    """Images as the served network sees them. Those that cannot be read are left out."""

    def __init__(self, source: ImageSource, transform: ImageTransform) -> None:
        self._source = source
        self._transform = transform
        self._targets = [*source.targets]

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self._targets)

    def __getitem__(self, index: int) -> TrainingBatch:
        """Return one image, or none with the reason."""
        edge = self._transform.crop
        try:
            image = self._source.read(index)
            pixels = self._transform.pixels(image).permute(2, 0, 1)
        except InputError as error:
            nothing = torch.empty((0, 3, edge, edge), dtype=torch.uint8)
            return TrainingBatch(
                nothing, torch.empty(0, dtype=torch.int64), [], {index: str(error)}
            )
        return TrainingBatch(pixels[None], torch.tensor([self._targets[index]]), [index], {})


def collate(items: Sequence[TrainingBatch]) -> TrainingBatch:
    """Collate several images to one batch."""
    return TrainingBatch(
        torch.cat([item.pixels for item in items]),
        torch.cat([item.targets for item in items]),
        [index for item in items for index in item.indices],
        {index: reason for item in items for index, reason in item.faults.items()},
    )


class EpochBatches(Sampler[list[Key]]):
    """The batches of one rank in one epoch, from a step on.

    All ranks together see the images in the same order, for any number of ranks. Images that do not
    fill a step are left out; they are others in each epoch.

    Args:
        num_images: Images of the run.
        batch_size: Images of one step, over all ranks.
        accumulate: Forward passes of one step.
        rank: Number of this rank.
        num_ranks: All ranks, which divide the batch evenly.
        seed: Seed of the order.
    """

    def __init__(
        self,
        num_images: int,
        *,
        batch_size: int,
        accumulate: int,
        rank: int,
        num_ranks: int,
        seed: int,
    ) -> None:
        per_pass = num_ranks * accumulate
        assert batch_size % per_pass == 0, "the ranks and passes divide a batch evenly"
        self._size = batch_size // per_pass
        self._accumulate = accumulate
        self.num_steps = num_images // batch_size
        """Steps of an epoch."""
        sized = cast("Dataset[object]", range(num_images))  # it asks only for the length
        self._sampler: DistributedSampler[object] = DistributedSampler(
            sized, num_replicas=num_ranks, rank=rank, seed=seed
        )
        self._epoch = self._first_step = 0

    def begin(self, epoch: int, first_step: int = 0) -> None:
        """Choose the epoch, and the step in it to begin with."""
        self._epoch, self._first_step = epoch, first_step
        self._sampler.set_epoch(epoch)

    def __len__(self) -> int:
        """Return the number of batches that are left of the epoch."""
        return (self.num_steps - self._first_step) * self._accumulate

    def __iter__(self) -> Iterator[list[Key]]:
        """Yield the keys of each batch."""
        indices = [*self._sampler]
        size = self._size
        first = self._first_step * self._accumulate
        for number in range(first, self.num_steps * self._accumulate):
            chosen = indices[number * size : (number + 1) * size]
            yield [(self._epoch, index) for index in chosen]
