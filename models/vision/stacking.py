"""Stacks pictures that may lie side by side already. Worker processes only."""

from collections.abc import Callable

from torch import Tensor


def stacked(images: list[Tensor], stack: Callable[[list[Tensor]], Tensor]) -> Tensor:
    """Stack pictures of one shape, with `stack` if they do not lie side by side.

    Decoders write those of a batch side by side into shared memory, which may be pinned: these are
    not copied. So the result must not be written to.
    """
    first = images[0]
    step = first.numel()
    memory, begin = first.untyped_storage().data_ptr(), first.storage_offset()
    is_side_by_side = len(images) > 1 and all(
        image.is_contiguous()
        and image.shape == first.shape
        and image.dtype == first.dtype
        and image.untyped_storage().data_ptr() == memory
        and image.storage_offset() == begin + number * step
        for number, image in enumerate(images)
    )
    if not is_side_by_side:
        return stack(images)
    shape = (len(images), *first.shape)
    return first.as_strided(shape, (step, *first.stride()), begin)
