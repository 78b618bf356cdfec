"""Facts of a batch of pictures, by which a kernel finds and resizes them. Worker processes only.

A few calls of NumPy make the table for all of them.

Axes: B batch, C colours, H height, W width, S steps along an edge of the result, F facts.
"""

# ruff: noqa: N803, N806 - tensors carry their axes in their names

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from inferpool.models.vision.transforms import is_vertical_first

REACHES = {
    Image.Resampling.NEAREST: 0,
    Image.Resampling.BILINEAR: 1,
    Image.Resampling.BICUBIC: 2,
    Image.Resampling.LANCZOS: 3,
}
"""How far each filter reaches to both sides, in pixels of the smaller picture."""


def facts_of(
    images_CHW: Sequence[Tensor],
    windows_B4: NDArray[np.int64],
    interpolation: Image.Resampling,
    out_BCSS: Tensor,
) -> NDArray[np.int64]:
    """Make the table [B, F].

    The facts of a picture: where it begins, and the bytes from one colour to the next; then for the
    axis resized first, and for the other: length, length after resizing, where the crop begins,
    elements from one pixel to the next in the picture and in the result, and number of pixels under
    the filter. For NEAREST the pixel of each step along both axes follows; -1 is black.

    Args:
        images_CHW: Pictures uint8 [C, H, W] of any strides.
        windows_B4: What `ImageTransform.windows` returns for them.
        interpolation: One of `REACHES`.
        out_BCSS: The result to make.
    """
    # Pairs are rows and columns, until they are put in order.
    B, S = len(out_BCSS), out_BCSS.shape[-1]
    places = [(each.data_ptr(), *each.stride(), *each.shape[1:]) for each in images_CHW]
    places_B6 = np.array(places, np.int64)
    steps_B2, edges_B2 = places_B6[:, 2:4], places_B6[:, 4:]
    resized_B2, leads_B2 = windows_B4[:, :2], windows_B4[:, 2:]
    reaches_B2 = REACHES[interpolation] * np.maximum(edges_B2 / resized_B2, 1)
    taps_B2 = np.ceil(reaches_B2).astype(np.int64) * 2 + 1
    steps_out_B2 = np.broadcast_to(np.array(out_BCSS.stride()[2:]), (B, 2))
    axes_B2F = np.stack([edges_B2, resized_B2, leads_B2, steps_B2, steps_out_B2, taps_B2], 2)
    if interpolation is Image.Resampling.NEAREST:
        nearest_B2S = _nearest(edges_B2, resized_B2, leads_B2, S)
    else:
        nearest_B2S = np.empty((B, 2, 0), np.int64)
    swaps_B = ~is_vertical_first((*edges_B2.T[::-1],), (*resized_B2.T[::-1],))
    for pairs in (axes_B2F, nearest_B2S):
        pairs[swaps_B] = pairs[swaps_B, ::-1]
    return np.concatenate(
        [places_B6[:, :2], axes_B2F.reshape(B, -1), nearest_B2S.reshape(B, -1)], 1
    )


def _nearest(
    edges_B2: NDArray[np.int64], resized_B2: NDArray[np.int64], leads_B2: NDArray[np.int64], S: int
) -> NDArray[np.int64]:
    """Return the pixel nearest to each step, [B, 2, S], as Pillow's sums of steps find it.

    (Geometry.c, `ImagingScaleAffine`.)
    """
    scales_B21 = (edges_B2 / resized_B2)[..., None]
    steps_B2S = leads_B2[..., None] + np.arange(S)
    sums = np.repeat(scales_B21, max(1, int(steps_B2S.max()) + 1), 2)
    sums[..., 0] *= 0.5
    np.cumsum(sums, 2, out=sums)
    found_B2S = np.take_along_axis(sums, steps_B2S.clip(0), 2).astype(np.int64)
    is_black = (steps_B2S < 0) | (steps_B2S >= resized_B2[..., None])
    found_B2S[is_black | (found_B2S >= edges_B2[..., None])] = -1
    return found_B2S
