"""One Triton kernel from a batch of pictures to a network's input. Worker processes only.

It resizes pictures of any sizes as Pillow does, crops, normalises and stores them in the network's
dtype and layout. A table says for each picture where it lies and how it is resized: the host makes
it with a few calls for the whole batch, and copies it at once.

Axes: B batch, C = 3 colours, H height, W width, S steps along an edge of the result, F facts.
"""

# ruff: noqa: N803, N806 - tensors carry their axes in their names

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from inferpool.models.vision.picture_facts import REACHES, facts_of

_NEAREST = tl.constexpr(Image.Resampling.NEAREST.value)
_BILINEAR = tl.constexpr(Image.Resampling.BILINEAR.value)
_BICUBIC = tl.constexpr(Image.Resampling.BICUBIC.value)
_AXIS_1, _AXIS_2, _NUM_FACTS = tl.constexpr(2), tl.constexpr(8), tl.constexpr(14)
"""Places in the facts of a picture: see `facts_of`."""
_FRACTION = tl.constexpr(22)
"""Bits behind the point of Pillow's weights (Resample.c, `PRECISION_BITS`)."""
_ONE, _HALF = tl.constexpr(1 << 22), tl.constexpr(1 << 21)
_ROWS, _COLUMNS = 8, 32
"""Pixels that one block of threads computes: steps of the other axis, and of the first."""


def transform(
    images_CHW: Sequence[Tensor],
    windows_B4: NDArray[np.int64],
    interpolation: Image.Resampling,
    normalization_2C: Tensor,
    out_BCSS: Tensor,
) -> None:
    """Resize, crop and normalise pictures on their device, on this thread's stream.

    Before they are normalised, pixels are those of Pillow, but for single ones that are off by 1.

    Args:
        images_CHW: Pictures uint8 [C, H, W] of any strides on the device of the others.
        windows_B4: What `ImageTransform.windows` returns for them.
        interpolation: NEAREST, BILINEAR, BICUBIC or LANCZOS.
        normalization_2C: Means and standard deviations, float32.
        out_BCSS: The result, in float32, fp16 or bf16 and any layout.

    Raises:
        torch.OutOfMemoryError: The device has no room for the table.
        Exception: Triton cannot compile or launch the kernel.
    """
    facts_BF = torch.from_numpy(facts_of(images_CHW, windows_B4, interpolation, out_BCSS))
    if out_BCSS.device.type == "cpu":  # Triton's interpreter computes
        _queue(facts_BF, interpolation, normalization_2C, out_BCSS)
        return
    with torch.accelerator.device_index(out_BCSS.device.index):
        facts_BF = facts_BF.pin_memory().to(out_BCSS.device, non_blocking=True)
        _queue(facts_BF, interpolation, normalization_2C, out_BCSS)


def _queue(
    facts_BF: Tensor, interpolation: Image.Resampling, normalization_2C: Tensor, out_BCSS: Tensor
) -> None:
    B, S = len(out_BCSS), out_BCSS.shape[-1]
    grid = (B, triton.cdiv(S, _ROWS), triton.cdiv(S, _COLUMNS))
    _transform[grid](
        facts_BF,
        normalization_2C,
        out_BCSS,
        *out_BCSS.stride()[:2],
        S,
        FACTS=facts_BF.shape[1],
        FILTER=interpolation.value,
        REACH=REACHES[interpolation],
        ROWS=_ROWS,
        COLUMNS=_COLUMNS,
        num_warps=4,
        enable_fp_fusion=False,
    )


@triton.jit
def _transform(
    facts,
    normalization,
    out,
    step_picture,
    step_colour,
    S,
    FACTS: tl.constexpr,
    FILTER: tl.constexpr,
    REACH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Compute some pixels of a picture: x counts along the axis resized first, y the other."""
    n = tl.program_id(0).to(tl.int64)
    picture = facts + n * FACTS
    source = tl.load(picture).to(tl.pointer_type(tl.uint8))
    colour = tl.load(picture + 1).to(tl.int32)
    pixels = tl.arange(0, ROWS * COLUMNS)
    x = tl.program_id(2) * COLUMNS + pixels % COLUMNS
    y = tl.program_id(1) * ROWS + pixels // COLUMNS
    is_kept = (x < S) & (y < S)
    step_x = tl.load(picture + _AXIS_1 + 3).to(tl.int32)
    step_y = tl.load(picture + _AXIS_2 + 3).to(tl.int32)
    if FILTER == _NEAREST:
        from_x = tl.load(picture + _NUM_FACTS + x, mask=is_kept, other=-1).to(tl.int32)
        from_y = tl.load(picture + _NUM_FACTS + S + y, mask=is_kept, other=-1).to(tl.int32)
        is_there = (from_x >= 0) & (from_y >= 0)
        place = source + from_x * step_x + from_y * step_y
        red = tl.load(place, mask=is_there, other=0)
        green = tl.load(place + colour, mask=is_there, other=0)
        blue = tl.load(place + 2 * colour, mask=is_there, other=0)
    else:
        red, green, blue = _filtered(
            picture, source, colour, x, y, step_x, step_y, FILTER, REACH, ROWS * COLUMNS
        )
    to_x = tl.load(picture + _AXIS_1 + 4).to(tl.int32)
    to_y = tl.load(picture + _AXIS_2 + 4).to(tl.int32)
    place = out + n * step_picture + x * to_x + y * to_y
    _store(place, red, normalization, is_kept)
    _store(place + step_colour, green, normalization + 1, is_kept)
    _store(place + 2 * step_colour, blue, normalization + 2, is_kept)


@triton.jit
def _filtered(
    picture,
    source,
    colour,
    x,
    y,
    step_x,
    step_y,
    FILTER: tl.constexpr,
    REACH: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Weigh the pixels under the filter; like Pillow, round to levels after either axis."""
    first_x, num_x, offset_x, inverse_x = _span(picture + _AXIS_1, x, REACH)
    first_y, num_y, offset_y, inverse_y = _span(picture + _AXIS_2, y, REACH)
    taps_x = tl.load(picture + _AXIS_1 + 5).to(tl.int32)
    taps_y = tl.load(picture + _AXIS_2 + 5).to(tl.int32)
    share_x = _share(taps_x, num_x, offset_x, inverse_x, FILTER)
    share_y = _share(taps_y, num_y, offset_y, inverse_y, FILTER)
    half = tl.zeros([SIZE], dtype=tl.int32) + _HALF
    red, green, blue = half, half, half
    for j in range(taps_y):
        row = source + (first_y + j) * step_y
        r, g, b = half, half, half
        for i in range(taps_x):
            weight = _fixed(i, num_x, offset_x, inverse_x, share_x, FILTER)
            place = row + (first_x + i) * step_x
            is_there = (i < num_x) & (j < num_y)
            r += tl.load(place, mask=is_there, other=0).to(tl.int32) * weight
            g += tl.load(place + colour, mask=is_there, other=0).to(tl.int32) * weight
            b += tl.load(place + 2 * colour, mask=is_there, other=0).to(tl.int32) * weight
        weight = _fixed(j, num_y, offset_y, inverse_y, share_y, FILTER)
        red += _level(r) * weight
        green += _level(g) * weight
        blue += _level(b) * weight
    return _level(red), _level(green), _level(blue)


@triton.jit
def _span(axis, step, REACH: tl.constexpr):
    """Find the pixels under the filter: the first, how many, its distance, and 1 / scale."""
    edge = tl.load(axis).to(tl.int32)
    resized = tl.load(axis + 1).to(tl.int32)
    step += tl.load(axis + 2).to(tl.int32)
    scale = edge.to(tl.float64) / resized.to(tl.float64)
    wide = tl.maximum(scale, 1.0)
    middle = (step.to(tl.float64) + 0.5) * scale
    first = tl.maximum((middle - REACH * wide + 0.5).to(tl.int32), 0)
    end = tl.minimum((middle + REACH * wide + 0.5).to(tl.int32), edge)
    num = tl.where((step >= 0) & (step < resized), end - first, 0)
    return (
        first,
        num,
        (first.to(tl.float64) - middle + 0.5).to(tl.float32),
        (1 / wide).to(tl.float32),
    )


@triton.jit
def _weight(i, num, offset, inverse, FILTER: tl.constexpr):
    """Weigh a pixel by its distance from the filter's middle (Resample.c)."""
    x = tl.abs((i + offset) * inverse)
    if FILTER == _BILINEAR:
        weight = tl.maximum(1 - x, 0.0)
    elif FILTER == _BICUBIC:
        near = (1.5 * x - 2.5) * x * x + 1
        far = ((-0.5 * x + 2.5) * x - 4) * x + 2
        weight = tl.where(x < 1, near, tl.where(x < 2, far, 0.0))
    else:
        angle = tl.where(x == 0, 1.0, x * 3.141592653589793)
        lobes = tl.sin(angle) * tl.sin(angle / 3) * 3 / (angle * angle)
        weight = tl.where(x == 0, 1.0, tl.where(x < 3, lobes, 0.0))
    return tl.where(i < num, weight, 0.0)


@triton.jit
def _share(taps, num, offset, inverse, FILTER: tl.constexpr):
    """Return what makes the weights of all pixels under the filter sum up to 1."""
    whole = _weight(0, num, offset, inverse, FILTER)
    for i in range(1, taps):
        whole += _weight(i, num, offset, inverse, FILTER)
    return 1 / tl.where(num > 0, whole, 1.0)


@triton.jit
def _fixed(i, num, offset, inverse, share, FILTER: tl.constexpr):
    """Return a pixel's part of the whole weight in fixed point, as Pillow rounds it."""
    part = _weight(i, num, offset, inverse, FILTER) * share
    return tl.floor(part * _ONE + 0.5).to(tl.int32)


@triton.jit
def _level(total):
    return tl.minimum(tl.maximum(total >> _FRACTION, 0), 255)


@triton.jit
def _store(place, level, normalization, is_kept):
    """Normalise in the order of `Normalize`, which divides exactly."""
    mean, std = tl.load(normalization), tl.load(normalization + 3)
    share = tl.div_rn(level.to(tl.float32), 255.0) - mean
    tl.store(place, tl.div_rn(share, std).to(place.dtype.element_ty), mask=is_kept)
