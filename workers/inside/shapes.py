"""Groups the instances of a batch that can be computed together. Worker processes."""

import logging
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeGuard

import torch
from torch import Tensor

from inferpool.models.accelerator.failures import is_lost_device, is_out_of_memory, raised
from inferpool.models.item import Features
from inferpool.workers.inside.staging import Launch

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class ShapeGroup:
    """Instances of a batch that are computed together."""

    indices: list[int]
    batch: Features | None
    """Collated features; None if they could not be collated."""
    launch: Launch | None = None
    """Its computation on an accelerator, if that was told to begin with it."""
    memory_class: object = None
    """Names, dtypes and sizes that its memory depends on; None while nobody needs to know."""

    def classify(self, features: Sequence[Features | None], batch: Features | None = None) -> None:
        """Find the memory class, from the collated batch as long as it is there."""
        if self.memory_class is not None:
            return
        batch = self.batch if batch is None else batch
        if batch is not None:
            self.memory_class = _look_of(batch, lambda x: (x.dtype, _rounded(x.shape[1:])))
        else:
            first = features[self.indices[0]]
            self.memory_class = _look_of(first, lambda x: (x.dtype, _rounded(x.shape)))


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
    except raised() as error:
        if is_lost_device(error):
            raise
        is_shortage = is_out_of_memory(error)
        logger.debug("%d instances could not be collated", len(indices), exc_info=True)
    if is_shortage:
        return [ShapeGroup(indices, None)]  # to be halved
    for look_of in (_layout_of, _signature_of):
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


def _rounded(shape: torch.Size) -> tuple[int, ...]:
    """Round sizes up to powers of two, so that texts of 60 and of 61 tokens count as alike."""
    return tuple(1 << (size - 1).bit_length() if size else 0 for size in shape)


def _signature_of(features: Features | None) -> object:
    return _look_of(features, lambda tensor: (tensor.dtype, tensor.shape))


def _layout_of(features: Features | None) -> object:
    return _look_of(features, lambda tensor: (tensor.dtype, tensor.dim()))


def _look_of(features: Features | None, of_tensor: Callable[[Tensor], object]) -> object:
    # A user's `preprocess` may return anything; errors are reported elsewhere.
    if not isinstance(features, Mapping):
        return type(features)
    return frozenset(
        (name, of_tensor(value) if _has_sizes(value) else type(value))
        for name, value in features.items()
    )


def _has_sizes(value: object) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor) and not value.is_nested
