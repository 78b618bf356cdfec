"""Sizes of batches that a worker makes itself ready for before it serves. Worker processes only."""

from collections.abc import Sequence

from inferpool.models.accelerator.device import Device, is_accelerator
from inferpool.models.speed_names import MOST_GROWN


def largest_batch(device: Device, max_batch_size: int, *, may_grow: bool) -> int:
    """Return the most instances that service may compute at once on a device.

    Args:
        device: The device.
        max_batch_size: The most to begin with.
        may_grow: Whether the service tries larger batches, which pay on accelerators.
    """
    if may_grow and is_accelerator(device):
        return max(MOST_GROWN, max_batch_size)
    return max_batch_size


def sizes_to_warm(device: Device, most: int) -> Sequence[int]:
    """Return the batch sizes to compute before service, in rising order.

    On an accelerator they are those of `steps_to`, since libraries choose kernels, load code and
    reserve memory for each. On a CPU there is little to choose, and batches take long.
    """
    return steps_to(most) if is_accelerator(device) else sorted({1, most})


def steps_to(most: int) -> list[int]:
    """Return the powers of two below the largest size, and that size."""
    return [*(1 << power for power in range((most - 1).bit_length())), most]
