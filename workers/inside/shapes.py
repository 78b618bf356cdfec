"""Groups the instances of a batch that can be computed together. Worker processes."""

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
    """Collated features; None if they could not be collated."""


def grouped(
    indices: Sequence[int],
    features: Sequence[Features | None],
    buckets: Sequence[Hashable],
    collate: Callable[[Sequence[int]], Features],
) -> list[ShapeGroup]:
    """Collate instances: all of a bucket together if possible, else similar ones.

    Similar means the same names, dtypes and ranks, since a model may pad shapes; if these cannot be
    collated either, the same shapes.

    Args:
        indices: Instances to group.
        features: Features of all instances of the batch.
        buckets: Return values of the model's `bucket` for all instances of the batch.
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
    """Group indices by name, in the order in which each name first occurs."""
    parts: dict[object, list[int]] = {}
    for i in indices:
        parts.setdefault(name_of(i), []).append(i)
    return list(parts.values())


def signature_of(features: Features | None) -> object:
    """Return the names, dtypes and shapes of an instance's tensors, which determine its memory."""
    return _look_of(features, lambda tensor: (tensor.dtype, tensor.shape))


def _layout_of(features: Features | None) -> object:
    return _look_of(features, lambda tensor: (tensor.dtype, tensor.dim()))


def _look_of(features: Features | None, of_tensor: Callable[[Tensor], object]) -> object:
    # A user's `preprocess` may return anything; errors are reported elsewhere.
    if not isinstance(features, Mapping):
        return type(features)
    return frozenset(
        (name, of_tensor(value) if isinstance(value, Tensor) else type(value))
        for name, value in features.items()
    )
