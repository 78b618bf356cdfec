"""Which instances of a batch go together: as the model says, and can collate. Worker processes."""

import logging
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from inferpool.models.item import Features

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class ShapeGroup:
    """Instances of a batch that are computed together."""

    indices: list[int]
    batch: Features | None
    """Their collated features; None where they could not be collated."""


def grouped(
    indices: Sequence[int],
    features: Sequence[Features | None],
    buckets: Sequence[Hashable],
    collate: Callable[[Sequence[int]], Features],
) -> list[ShapeGroup]:
    """Collate instances: all of a bucket if they go together, else those that look alike.

    First those with the same names, dtypes and ranks, since a model may pad shapes; where that will
    not do, those of the same shapes.

    Args:
        indices: Which instances of the batch.
        features: Of all instances of the batch.
        buckets: What the model says of all instances of the batch.
        collate: Makes one batch of some instances, or raises.
    """
    return [
        group
        for part in _alike(indices, buckets.__getitem__)
        for group in _collated(part, features, collate)
    ]


def _collated(
    indices: list[int],
    features: Sequence[Features | None],
    collate: Callable[[Sequence[int]], Features],
) -> list[ShapeGroup]:
    try:
        return [ShapeGroup(indices, collate(indices))]
    except Exception:
        logger.debug("%d instances could not be collated", len(indices), exc_info=True)
    for look_of in (_layout_of, signature_of):
        parts = _alike(indices, lambda i: look_of(features[i]))  # noqa: B023 - called at once
        if len(parts) > 1:
            return [group for part in parts for group in _collated(part, features, collate)]
    return [ShapeGroup(indices, None)]


def _alike(indices: Iterable[int], name_of: Callable[[int], object]) -> list[list[int]]:
    """Those of the same name together, in the order in which each came first."""
    parts: dict[object, list[int]] = {}
    for i in indices:
        parts.setdefault(name_of(i), []).append(i)
    return list(parts.values())


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
