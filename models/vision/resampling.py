"""Resizes and crops pictures of several sizes at once, on their device. Worker processes only.

A row of the result is a weighted sum of the picture's rows, and a column one of its columns. So
pictures are resized by two products of matrices; their weights depend on each picture's size.

Axes: N 2 (rows, columns), B batch, C = 3 colours, H height, W width, S steps along an edge of the
result, P positions along an edge of the pictures.
"""

# ruff: noqa: N803, N806 - tensors carry their axes in their names

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from PIL import Image
from torch import Tensor

_MAX_BYTES = 400_000_000
"""Most memory of the device that the pictures resized at once take. One alone may take 700 MB, if
it is 65,000 pixels long."""
_PIXEL_BYTES = 15
"""Memory for each pixel of the size that several pictures are filled up to."""
_WEIGHT_BYTES = 40
"""Memory for each step and position. With this estimate, 2 to 64 pictures of 64 to 12,000 pixels an
edge took 0.4 to 1 times as much at their peak, as the simulated device's allocator counted it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """The part of a resized picture that is kept: a square."""

    rows: int
    """Height of the whole picture after resizing."""
    columns: int
    """Width of the whole picture after resizing."""
    top: int
    left: int
    edge: int


def resampled(
    images_CHW: Sequence[Tensor], windows: Sequence[Window], interpolation: Image.Resampling
) -> list[Tensor]:
    """Resize and crop pictures as `torch.nn.functional.interpolate` does with antialiasing.

    This queues a few dozen operations for all pictures together, and one for each.

    Args:
        images_CHW: Pictures uint8 [C, H, W], all on one device.
        windows: The part of each that is kept, all of one size.
        interpolation: Bilinear or bicubic.

    Returns:
        Pictures uint8 [edge, edge, C].
    """
    found: dict[int, Tensor] = {}
    edge = windows[0].edge if windows else 0
    for chosen in _parts([tuple(each.shape[1:]) for each in images_CHW], edge):
        some_CHW = [images_CHW[i] for i in chosen]
        x_BCHW = _canvas(some_CHW)
        weights = _weights(some_CHW, [windows[i] for i in chosen], x_BCHW, _FILTERS[interpolation])
        y_BHWC = _products(x_BCHW, weights)
        found.update(zip(chosen, y_BHWC.unbind(), strict=True))
    return [found[i] for i in range(len(images_CHW))]


def _parts(sizes: Sequence[tuple[int, ...]], edge: int) -> Iterator[list[int]]:
    """Divide pictures into parts of similar sizes that can be resized at once."""
    part: list[int] = []
    height = width = 0
    for i in sorted(range(len(sizes)), key=sizes.__getitem__):
        taller, wider = max(height, sizes[i][0]), max(width, sizes[i][1])
        if part and (len(part) + 1) * _num_bytes(taller, wider, edge) > _MAX_BYTES:
            yield part
            part, (taller, wider) = [], sizes[i]
        part.append(i)
        height, width = taller, wider
    if part:
        yield part


def _num_bytes(height: int, width: int, edge: int) -> int:
    """Estimate the memory that resizing one of several pictures takes."""
    return _PIXEL_BYTES * height * width + _WEIGHT_BYTES * edge * max(height, width, edge)


def _canvas(images_CHW: Sequence[Tensor]) -> Tensor:
    """Copy pictures into the corners of larger ones of one size; other pixels are random."""
    height = max(each.shape[1] for each in images_CHW)
    width = max(each.shape[2] for each in images_CHW)
    first = images_CHW[0]
    x_BCHW = torch.empty(
        (len(images_CHW), first.shape[0], height, width), dtype=torch.uint8, device=first.device
    )
    step = x_BCHW.stride()
    corners = [
        x_BCHW.as_strided(each.shape, step[1:], i * step[0]) for i, each in enumerate(images_CHW)
    ]
    torch._foreach_copy_(corners, list(images_CHW))
    return x_BCHW


def _weights(
    images_CHW: Sequence[Tensor],
    windows: Sequence[Window],
    x_BCHW: Tensor,
    filter_of: Callable[[Tensor], Tensor],
) -> Tensor:
    """Compute each picture's weights [N, B, S, P], which are 0 past its edges.

    Those of torch (aten/src/ATen/native/cuda/UpSample.cuh, `_compute_weights_span` and
    `_compute_weights`), for all positions, as the filters are 0 outside the span.
    """
    pairs = list(zip(images_CHW, windows, strict=True))
    rows = [[x.shape[1], x.shape[1] / to.rows, to.top + 0.5] for x, to in pairs]
    columns = [[x.shape[2], x.shape[2] / to.columns, to.left + 0.5] for x, to in pairs]
    facts = torch.tensor([rows, columns]).to(x_BCHW.device)
    edge, scale, lead = facts[..., None, None].unbind(2)
    steps_S1 = torch.arange(windows[0].edge, dtype=torch.float32, device=edge.device)[:, None]
    middles_P = torch.arange(max(x_BCHW.shape[2:]), dtype=torch.float32, device=edge.device) + 0.5
    distances = (middles_P - (steps_S1 + lead) * scale) / scale.clamp(min=1)
    weights = filter_of(distances.abs_()).mul_(middles_P < edge)
    return weights.div_(weights.sum(-1, keepdim=True))


def _products(x_BCHW: Tensor, weights_NBSP: Tensor) -> Tensor:
    """Multiply pictures uint8 by the weights of rows and columns, to uint8 [B, S, S, C]."""
    B, C, H, W = x_BCHW.shape
    rows_BSP, columns_BSP = weights_NBSP.unbind()
    S = rows_BSP.shape[1]
    x_BRS = torch.bmm(x_BCHW.float().view(B, C * H, W), columns_BSP[..., :W].transpose(1, 2))
    x_BHR = x_BRS.view(B, C, H, S).transpose(1, 2).reshape(B, H, C * S)
    y_BSR = torch.bmm(rows_BSP[..., :H], x_BHR).round_().clamp_(0, 255)
    return (
        y_BSR.view(B, S, C, S)
        .transpose(2, 3)
        .to(torch.uint8, memory_format=torch.contiguous_format)
    )


def _bilinear(x: Tensor) -> Tensor:
    return (1 - x).clamp_(min=0)


def _bicubic(x: Tensor) -> Tensor:
    """Keys's cubic convolution with a = -0.5, as in Pillow and in torch with antialiasing."""
    near = (1.5 * x - 2.5) * x * x + 1
    far = ((-0.5 * x + 2.5) * x - 4) * x + 2
    return torch.where(x < 1, near, far) * (x < 2)


_FILTERS = {Image.Resampling.BILINEAR: _bilinear, Image.Resampling.BICUBIC: _bicubic}
"""Weights by the distance from a position, in pixels of the smaller picture."""
