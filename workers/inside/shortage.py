"""Recovers from a lack of memory, on a device or on the host. Runs in workers."""

import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from inferpool.models.accelerator.device import release_memory
from inferpool.workers.inside.allocator import give_back
from inferpool.workers.inside.shapes import signature_of

_MAX_SIGNATURES = 256
_GOOD_BATCHES = 100
"""Full batches of a safe size after which twice the size is tried, at the risk of one batch."""


def release(error: BaseException) -> None:
    """Free the memory of a failed computation, and return it to the device and the kernel.

    Args:
        error: The error; the frames of its traceback hold the tensors.
    """
    traceback.clear_frames(error.__traceback__)
    release_memory()
    give_back()


@dataclass(slots=True)
class _SafeSize:
    num_rows: int
    num_good: int = 0
    """Full batches of this size since the size was last changed."""


class SafeSizes:
    """Largest batch sizes that fit into memory, by the shapes of the instances.

    Memory may be free again later, so a size grows after many good batches.
    """

    def __init__(self) -> None:
        self._sizes: dict[object, _SafeSize] = {}

    def note(self, signature: object, num_rows: int) -> int:
        """Note that so many did not fit; return how many to compute at once from now on."""
        size = max(1, num_rows // 2)
        if signature not in self._sizes and len(self._sizes) >= _MAX_SIGNATURES:
            del self._sizes[next(iter(self._sizes))]
        known = self._sizes.get(signature)
        if known is not None and known.num_rows <= size:
            return known.num_rows
        self._sizes[signature] = _SafeSize(size)
        return size

    def note_good(
        self, indices: Sequence[int], features: Sequence[Mapping[str, Tensor] | None]
    ) -> None:
        """Note a good batch; after `_GOOD_BATCHES` full ones the size is doubled."""
        if not self._sizes:
            return
        for signature in {signature_of(features[i]) for i in indices}:
            size = self._sizes.get(signature)
            if size is None or len(indices) != size.num_rows:
                continue
            size.num_good += 1
            if size.num_good >= _GOOD_BATCHES:
                size.num_rows, size.num_good = size.num_rows * 2, 0

    def split(
        self, indices: list[int], features: Sequence[Mapping[str, Tensor] | None]
    ) -> list[list[int]]:
        """Return the indices in pieces that are known to fit."""
        if not self._sizes or not indices:
            return [indices]
        known = (self._sizes.get(signature_of(features[i])) for i in indices)
        size = min((each.num_rows for each in known if each is not None), default=len(indices))
        return [indices[start : start + size] for start in range(0, len(indices), size)]
