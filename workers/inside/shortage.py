"""Recovers from a lack of memory, on a device or on the host. Runs in workers."""

import traceback
from dataclasses import dataclass

from inferpool.models.accelerator.device import release_memory
from inferpool.workers.inside.allocator import give_back

_MAX_CLASSES = 256
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
    """Largest batch sizes that fit into memory, by what the memory depends on.

    That is a *memory class*: see `ShapeGroup`. Memory may be free again later, so a size grows
    after many good batches.
    """

    def __init__(self) -> None:
        self.are_all = True
        """No batch ever was too large."""
        self._sizes: dict[object, _SafeSize] = {}

    def note(self, memory_class: object, num_rows: int) -> int:
        """Record that `num_rows` did not fit; return how many to compute at once from now on."""
        self.are_all = False
        size = max(1, num_rows // 2)
        if memory_class not in self._sizes and len(self._sizes) >= _MAX_CLASSES:
            del self._sizes[next(iter(self._sizes))]
        known = self._sizes.get(memory_class)
        if known is not None and known.num_rows <= size:
            return known.num_rows
        self._sizes[memory_class] = _SafeSize(size)
        return size

    def record_good(self, memory_class: object, num_rows: int) -> None:
        """Count a good batch; after `_GOOD_BATCHES` full ones the size is doubled."""
        size = self._sizes.get(memory_class)
        if size is None or num_rows != size.num_rows:
            return
        size.num_good += 1
        if size.num_good >= _GOOD_BATCHES:
            size.num_rows, size.num_good = size.num_rows * 2, 0

    def split(self, indices: list[int], memory_class: object) -> list[list[int]]:
        """Return the indices of at least one item in pieces that are known to fit."""
        known = self._sizes.get(memory_class)
        size = len(indices) if known is None else known.num_rows
        return [indices[start : start + size] for start in range(0, len(indices), size)]
