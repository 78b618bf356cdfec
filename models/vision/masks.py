"""Masks of pictures: as runs of pixels, and as PNGs with a palette. Worker processes only.

Axes: H height, W width, h and w those of a part; N runs.
"""

# ruff: noqa: N803, N806 - arrays carry their axes in their names

from collections.abc import Sequence
from io import BytesIO

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.nn import functional

_NUM_COLORS = 256


def runs_by_label(labels_HW: NDArray[np.uint8]) -> dict[int, dict[str, list[int]]]:
    """Return the pixels of each label that occurs, as COCO's uncompressed runs.

    These are lengths of runs along the columns, from left to right, the first one outside:
    `{"size": [H, W], "counts": [...]}` (pycocotools, `frPyObjects`).
    """
    flat = labels_HW.T.reshape(-1)
    starts_N = np.concatenate([[0], np.flatnonzero(np.diff(flat)) + 1])
    ends_N = np.concatenate([starts_N[1:], [flat.size]])
    found = flat[starts_N]
    return {
        int(label): _runs(starts_N[found == label], ends_N[found == label], labels_HW.shape)
        for label in np.unique(found)
    }


def runs_in_box(
    mask_mm: Tensor, box: Sequence[float], size: tuple[int, int]
) -> dict[str, list[int]]:
    """Return the mask of one instance within a picture, as COCO's uncompressed runs.

    The pixels are those of torchvision's `paste_masks_in_image` with more than 0.5; the rest of the
    picture is never made.

    Args:
        mask_mm: Probabilities within the box, float32.
        box: Its corners: left, top, right, bottom.
        size: Height and width of the picture.
    """
    part_hw, (top, left) = _pasted(mask_mm, box, size)
    height, width = size
    h, w = part_hw.shape
    bounded = np.zeros((w, h + 1), dtype=np.int8)
    bounded[:, :h] = part_hw.T
    steps = np.diff(bounded.reshape(-1), prepend=0)
    starts_N, ends_N = (
        (left + places // (h + 1)) * height + top + places % (h + 1)
        for places in (np.flatnonzero(steps == 1), np.flatnonzero(steps == -1))
    )
    joined = np.flatnonzero(ends_N[:-1] == starts_N[1:])  # over the edge of a picture
    return _runs(np.delete(starts_N, joined + 1), np.delete(ends_N, joined), (height, width))


def labels_at(scores_KHW: Tensor, size: tuple[int, int], *, most_numbers: int = 1 << 24) -> Tensor:
    """Return the best label of each pixel, uint8, with the scores enlarged to a size before that.

    They are enlarged as `interpolate` does with "bilinear", some rows at a time.

    Args:
        scores_KHW: Scores of K labels.
        size: Height and width of the result.
        most_numbers: Scores to make at once.
    """
    num_labels, from_height = scores_KHW.shape[:2]
    height, width = size
    step = max(1, most_numbers // (num_labels * width))
    rows = (torch.arange(height, device=scores_KHW.device) + 0.5) * (from_height / height) - 0.5
    rows = rows.clamp(0, from_height - 1)
    above = rows.floor().long()
    below = (above + 1).clamp(max=from_height - 1)
    share = (rows - above).view(-1, 1)
    labels = torch.empty(size, dtype=torch.uint8, device=scores_KHW.device)
    for first in range(0, height, step):
        some = slice(first, first + step)
        part = scores_KHW[:, above[some]].lerp(scores_KHW[:, below[some]], share[some])
        wide = functional.interpolate(
            part[None], (part.shape[1], width), mode="bilinear", align_corners=False
        )
        labels[some] = wide[0].argmax(0)
    return labels


def palette_png(labels_HW: NDArray[np.uint8]) -> bytes:
    """Return a picture of labels as a PNG: its pixels are the labels, its palette that of VOC."""
    image = Image.fromarray(labels_HW)
    image.putpalette(_PALETTE)
    encoded = BytesIO()
    image.save(encoded, "PNG")
    return encoded.getvalue()


def _color(label: int) -> list[int]:
    """Return the colour of a label in PASCAL VOC's palette (VOCdevkit, `VOClabelcolormap`)."""
    channels = [0, 0, 0]
    for bit in range(8):
        for channel in range(3):
            channels[channel] |= (label >> (3 * bit + channel) & 1) << (7 - bit)
    return channels


_PALETTE = [channel for label in range(_NUM_COLORS) for channel in _color(label)]


def _runs(
    starts_N: NDArray[np.int64], ends_N: NDArray[np.int64], size: Sequence[int]
) -> dict[str, list[int]]:
    total = size[0] * size[1]
    edges = np.empty(2 * len(starts_N) + 2, dtype=np.int64)
    edges[0], edges[-1] = 0, total
    edges[1:-1:2], edges[2:-1:2] = starts_N, ends_N
    counts = np.diff(edges)
    if counts[-1] == 0 and len(counts) > 1:
        counts = counts[:-1]
    return {"size": [int(size[0]), int(size[1])], "counts": counts.tolist()}


def _pasted(
    mask_mm: Tensor, box: Sequence[float], size: tuple[int, int]
) -> tuple[NDArray[np.bool_], tuple[int, int]]:
    """Enlarge a mask to the part of its box that lies in the picture; return that, and its corner.

    The steps are those of torchvision's `paste_mask_in_image`: a margin of one pixel around the
    mask, a box that grows with it, whole pixels.
    """
    num = mask_mm.shape[-1]
    padded = functional.pad(mask_mm, (1, 1, 1, 1))
    scale = (num + 2) / num
    corners = torch.tensor(box, dtype=torch.float32)
    half_w, half_h = (corners[2] - corners[0]) * 0.5, (corners[3] - corners[1]) * 0.5
    center_x, center_y = (corners[2] + corners[0]) * 0.5, (corners[3] + corners[1]) * 0.5
    half_w, half_h = half_w * scale, half_h * scale
    left, top, right, bottom = (
        int(edge)
        for edge in (center_x - half_w, center_y - half_h, center_x + half_w, center_y + half_h)
    )
    w, h = max(right - left + 1, 1), max(bottom - top + 1, 1)
    x_0, x_1 = max(left, 0), min(right + 1, size[1])
    y_0, y_1 = max(top, 0), min(bottom + 1, size[0])
    if x_0 >= x_1 or y_0 >= y_1:
        return np.zeros((1, 1), dtype=np.bool_), (0, 0)
    full = functional.interpolate(
        padded[None, None], size=(h, w), mode="bilinear", align_corners=False
    )[0, 0]
    part: NDArray[np.bool_] = (full[y_0 - top : y_1 - top, x_0 - left : x_1 - left] > 0.5).numpy()
    return part, (y_0, x_0)
