"""Changes training images at random, so that a network learns what does not matter."""

from collections.abc import Callable, Mapping

from PIL import Image
from torch import Tensor
from torchvision.transforms import InterpolationMode, v2  # type: ignore[import-untyped]  # has none

from inferpool.models.files.run_folder import TransformCard
from inferpool.models.training.recipe import Augmentation

_LEAST_AREA = 0.35
"""Least share of a photograph that a random crop keeps. torchvision's recipe for ImageNet has 0.08,
which asks for many more epochs than a fine-tuning takes."""
_TURN_DEGREES, _SHIFT, _SCALE = 10, 0.1, (0.9, 1.1)
"""Bounds of "shift": what handwriting and scans vary by, and still say the same."""

TrainingTransform = Callable[[Image.Image], Tensor]
"""Turns an RGB image into uint8 [C, crop, crop]. It draws from torch's generator."""


def training_transform(
    card: TransformCard, augmentation: Augmentation, *, flip: bool
) -> TrainingTransform:
    """Return the transform of training images.

    Args:
        card: Size and interpolation, as served.
        augmentation: `none`: as served. `shift`: turned, moved and scaled a little. `crop`: a
            random part. The others add to `crop`: `trivial` one random change (arXiv:2103.10158),
            `randaugment` two (arXiv:1909.13719), `autoaugment` learnt pairs (arXiv:1805.09501).
        flip: Whether images are mirrored left to right, half of the time.
    """
    interpolation = InterpolationMode(card.interpolation)
    steps: list[Callable[..., object]] = []
    if augmentation == "none":
        steps = [v2.Resize(card.resize, interpolation), v2.CenterCrop(card.crop)]
    elif augmentation == "shift":
        margin = max(1, card.crop // 4)
        steps = [
            v2.Resize(card.resize, interpolation),
            v2.CenterCrop(card.crop),
            v2.Pad(margin, padding_mode="edge"),  # what moves in looks like the edge, not black
            v2.RandomAffine(
                _TURN_DEGREES, (_SHIFT, _SHIFT), _SCALE, interpolation=InterpolationMode.BILINEAR
            ),
            v2.CenterCrop(card.crop),
        ]
    else:
        steps = [
            v2.RandomResizedCrop(card.crop, scale=(_LEAST_AREA, 1.0), interpolation=interpolation)
        ]
    if flip:
        steps.append(v2.RandomHorizontalFlip())
    more: Mapping[str, Callable[[], Callable[..., object]]] = {
        "trivial": v2.TrivialAugmentWide,
        "randaugment": v2.RandAugment,
        "autoaugment": v2.AutoAugment,
    }
    if augmentation in more:
        steps.append(more[augmentation]())
    steps.append(v2.PILToTensor())
    composed: TrainingTransform = v2.Compose(steps)
    return composed
