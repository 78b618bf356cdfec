"""torchvision, which ships no annotations, as the tests compare with it."""

import torchvision  # type: ignore[import-untyped]
from torchvision.models import SqueezeNet1_1_Weights  # type: ignore[import-untyped]
from torchvision.models._meta import _IMAGENET_CATEGORIES  # type: ignore[import-untyped]
from torchvision.transforms import InterpolationMode  # type: ignore[import-untyped]
from torchvision.transforms._presets import ImageClassification  # type: ignore[import-untyped]

IMAGENET_CATEGORIES = _IMAGENET_CATEGORIES

__all__ = [
    "IMAGENET_CATEGORIES",
    "ImageClassification",
    "InterpolationMode",
    "SqueezeNet1_1_Weights",
    "torchvision",
]
