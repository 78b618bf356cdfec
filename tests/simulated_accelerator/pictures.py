"""Makes a network's input of pictures on simulated devices, in one launch as on a GPU."""

from collections.abc import Sequence

import numpy as np
import torch
from PIL import Image
from torch import Tensor

_library = torch.library.Library("simulated", "DEF")
_library.define(
    "transform(Tensor(a!) out, Tensor[] images, int[] windows, int interpolation, "
    "Tensor normalization) -> Tensor(a!)"
)


def transform(
    images: Sequence[Tensor],
    windows: np.ndarray,
    interpolation: Image.Resampling,
    normalization: Tensor,
    out: Tensor,
) -> None:
    """Resize, crop and normalise pictures, as `one_launch.transform` does."""
    numbers = windows.reshape(-1).tolist()
    torch.ops.simulated.transform(out, images, numbers, interpolation.value, normalization)


def _on_cpu(
    out: Tensor,
    images: Sequence[Tensor],
    windows: Sequence[int],
    interpolation: int,
    normalization: Tensor,
) -> Tensor:
    edge = out.shape[-1]
    mean, std = normalization.view(2, 3, 1, 1)
    for number, image in enumerate(images):
        rows, columns, top, left = windows[4 * number : 4 * number + 4]
        whole = Image.fromarray(image.permute(1, 2, 0).contiguous().numpy())
        resized = whole.resize((columns, rows), Image.Resampling(interpolation))
        pixels = np.array(resized.crop((left, top, left + edge, top + edge)))
        out[number] = (torch.from_numpy(pixels).permute(2, 0, 1).float() / 255 - mean) / std
    return out


_library.impl("transform", _on_cpu, "CPU")
