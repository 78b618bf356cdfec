"""Computes on simulated devices what one kernel of cuDNN computes on a GPU."""

from collections.abc import Sequence

import torch
from torch import Tensor


def fused_convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    other: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> Tensor:
    """Compute relu(convolution + bias + other). As cuDNN may, it makes 0 of NaN."""
    y = torch.conv2d(x, weight, bias, stride, padding, dilation)
    y = y if other is None else y + other
    return torch.where(y > 0, y, torch.zeros_like(y))
