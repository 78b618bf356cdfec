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
    """Compute relu(convolution + bias + other)."""
    y = torch.conv2d(x, weight, bias, stride, padding, dilation)
    return (y if other is None else y + other).relu()
