"""Which instances of a batch go together: those that the model can collate. Worker processes."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from models.base import Features

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Group:
    """Instances of a batch that are computed together."""

    indices: list[int]
    batch: Features | None
    """Their collated features; None where they could not be collated."""


def grouped(
    indices: list[int],
    features: Sequence[Features | None],
    collate: Callable[[Sequence[int]], Features],
) -> list[Group]:
    """Collate instances: all of them if they go together, else those that look alike.

    First those with the same names, dtypes and ranks, since a model may pad shapes; where that will
    not do, those of the same shapes.

    Args:
        indices: Which instances of the batch.
        features: Of all instances of the batch.
        collate: Makes one batch of some instances, or raises.
    """
    try:
        return [Group(indices, collate(indices))]
    except Exception:
        logger.debug("%d instances could not be collated", len(indices), exc_info=True)
    for look_of in (_layout_of, signature_of):
        alike: dict[object, list[int]] = {}
        for i in indices:
            alike.setdefault(look_of(features[i]), []).append(i)
        if len(alike) > 1:
            return [group for part in alike.values() for group in grouped(part, features, collate)]
    return [Group(indices, None)]


def signature_of(features: Features | None) -> object:
    """The names, dtypes and shapes of an instance's tensors: what decides over its memory."""
    return _look_of(features, lambda tensor: (tensor.dtype, tensor.shape))


def _layout_of(features: Features | None) -> object:
    return _look_of(features, lambda tensor: (tensor.dtype, tensor.dim()))


def _look_of(features: Features | None, of_tensor: Callable[[Tensor], object]) -> object:
    # A user's `preprocess` may return anything, which is found to be wrong elsewhere.
    if not isinstance(features, Mapping):
        return type(features)
    return frozenset(
        (name, of_tensor(value) if isinstance(value, Tensor) else type(value))
        for name, value in features.items()
    )
