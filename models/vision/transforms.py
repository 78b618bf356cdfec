"""Turns pictures into the pixels that a network takes, exactly or fast. Worker processes only.

Axes: B batch, H height, W width, C = 3 colours.
"""

# ruff: noqa: N803, N806 - tensors carry their axes in their names

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from inferpool.models.vision.images import check_size
from inferpool.models.vision.resampling import Window, resampled

_QUICK_OPS = {
    Image.Resampling.BILINEAR: torch.ops.aten._upsample_bilinear2d_aa.out,
    Image.Resampling.BICUBIC: torch.ops.aten._upsample_bicubic2d_aa.out,
}
"""Kernels of `torch.nn.functional.interpolate`, which itself accepts neither scale nor layout."""
_LEAST_SCALED = 2
"""Least short edge of a picture decoded smaller, as a multiple of what it is resized to. With 1, on
224 views of photographs, 1 in 45 changed its label."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageTransform:
    """Resizes by the short edge and crops the middle, as most classifiers are trained."""

    resize: int
    """Short edge after resizing, in pixels."""
    crop: int
    """Both edges after cropping, in pixels."""
    interpolation: Image.Resampling = Image.Resampling.BILINEAR
    mean: tuple[float, float, float] = (0.485, 0.456, 0.406)
    """Means of red, green and blue, each between 0 and 1."""
    std: tuple[float, float, float] = (0.229, 0.224, 0.225)

    @property
    def can_be_quick(self) -> bool:
        """True if `quick_pixels` can be used."""
        return self.interpolation in _QUICK_OPS and self.crop <= self.resize

    @property
    def least_edge(self) -> int:
        """Least short edge of a picture for `quick_pixels`."""
        return _LEAST_SCALED * self.resize

    def pixels(self, image: Image.Image) -> Tensor:
        """Resize and crop an RGB image to uint8 [crop, crop, C].

        The pixels equal those of torchvision's ImageClassification preset for a PIL image.

        Raises:
            InputError: It is so elongated that resizing its short edge makes it too large.
        """
        width, height = self._resized(image.size)
        left, top = _margin(width, self.crop), _margin(height, self.crop)
        if (width, height) != image.size:
            cut = self._cut(image.size, (width, height), (left, top))
            if cut is None:
                image = image.resize((width, height), self.interpolation)
            else:
                size, box, (left, top) = cut
                image = image.resize(size, self.interpolation, box)
        if image.size != (self.crop, self.crop):
            # Past the edges, where the crop is the larger, `crop` fills with black.
            image = image.crop((left, top, left + self.crop, top + self.crop))
        return torch.from_numpy(np.array(image))

    def quick_pixels(self, image: Image.Image, full_size: tuple[int, int]) -> Tensor:
        """Resize and crop nearly three times as fast, with some pixels off by one and few by two.

        Args:
            image: The picture, or a smaller one down to `least_edge`, with pixels that differ as
                much as that scaling differs from the resizing.
            full_size: Width and height of the full picture.

        Raises:
            InputError: See `pixels`.
        """
        width, height = self._resized(full_size)
        left, top = _margin(width, self.crop), _margin(height, self.crop)
        # Torch does not resize an edge that is to be as long as it was, at any scale.
        num_rows = height if top + self.crop == image.height else top + self.crop
        x_1CHW = _view(image).permute(2, 0, 1)[None]
        y_1CHW = torch.empty(
            (1, x_1CHW.shape[1], num_rows, width),
            dtype=torch.uint8,
            memory_format=torch.channels_last,
        )
        # By the scale of the full picture: the edges of one scaled down have been rounded up.
        vertical = height / full_size[1] * round(full_size[1] / image.height)
        horizontal = width / full_size[0] * round(full_size[0] / image.width)
        resize = _QUICK_OPS[self.interpolation]
        resize(x_1CHW, y_1CHW.shape[2:], False, vertical, horizontal, out=y_1CHW)
        y_CHW = y_1CHW[0, :3, top : top + self.crop, left : left + self.crop]
        return y_CHW.permute(1, 2, 0).contiguous()

    def device_pixels(self, images_CHW: Sequence[Tensor]) -> list[Tensor]:
        """Resize and crop pictures uint8 [C, H, W] together on their device to [crop, crop, C].

        The pixels are about those of `quick_pixels`.
        """
        if not images_CHW:
            return []
        windows = [
            Window(rows=rows, columns=columns, top=top, left=left, edge=self.crop)
            for rows, columns, top, left in self.windows([x.shape[1:] for x in images_CHW]).tolist()
        ]
        return resampled(images_CHW, windows, self.interpolation)

    def windows(self, sizes: Sequence[Sequence[int]]) -> NDArray[np.int64]:
        """Return where the crop lies in resized pictures, [B, 4]: rows, columns, top, left.

        Args:
            sizes: Height and width of each, which `check` accepts.
        """
        edges_B2 = np.array(sizes, np.int64)
        short_B1 = edges_B2.min(1, keepdims=True)
        long_B1 = (self.resize * edges_B2.max(1, keepdims=True) / short_B1).astype(np.int64)
        is_short_B2 = edges_B2 == short_B1
        resized_B2 = np.where(is_short_B2, self.resize, long_B1)
        margins_B2 = resized_B2 - self.crop
        leads_B2 = np.where(margins_B2 < 0, -(-margins_B2 // 2), np.rint(margins_B2 / 2))
        return np.concatenate([resized_B2, leads_B2.astype(np.int64)], 1)

    def check(self, size: tuple[int, int]) -> None:
        """Refuse a width and height that `pixels` would refuse.

        Raises:
            InputError: See `pixels`.
        """
        self._resized(size)

    def _resized(self, size: tuple[int, int]) -> tuple[int, int]:
        width, height = size
        short, long = sorted(size)
        # torchvision rounds the long edge down.
        resized_long = int(self.resize * long / short)
        check_size(self.resize, resized_long)
        return (self.resize, resized_long) if width <= height else (resized_long, self.resize)

    def _cut(
        self, full: tuple[int, int], resized: tuple[int, int], lead: tuple[int, int]
    ) -> tuple[tuple[int, int], tuple[float, float, float, float], tuple[int, int]] | None:
        """Find how to crop while resizing, with the same result as afterwards.

        Pillow takes windows in single precision, so this works along edges with a scale that is
        a multiple of a power of 1/2, such as any edge that becomes 256.

        Returns:
            The size to resize to, the window to resize, and where the crop then begins; None if
            nothing can be cropped early.
        """
        if self.interpolation is Image.Resampling.NEAREST:
            return None  # Pillow's is another algorithm
        size, start, end, left = list(resized), [0.0, 0.0], [*map(float, full)], list(lead)
        for axis in (0, 1):
            if self.crop < resized[axis] and _is_dyadic(full[axis], resized[axis]):
                scale = full[axis] / resized[axis]
                start[axis], end[axis] = lead[axis] * scale, (lead[axis] + self.crop) * scale
                size[axis], left[axis] = self.crop, 0
        if size == [*resized] or is_vertical_first(full, (*size,)) != is_vertical_first(
            full, resized
        ):
            return None
        return (size[0], size[1]), (start[0], start[1], end[0], end[1]), (left[0], left[1])


class Normalize(nn.Module):
    """Turns pixels into a network's input, on the device that it is moved to."""

    mean: Tensor
    std: Tensor

    def __init__(self, transform: ImageTransform) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor(transform.mean))
        self.register_buffer("std", torch.tensor(transform.std))

    def forward(
        self, x_BHWC: Tensor, memory_format: torch.memory_format = torch.contiguous_format
    ) -> Tensor:
        """Turn uint8 [B, H, W, C] into float32 [B, C, H, W] in the order of torchvision's steps."""
        if memory_format is torch.channels_last:
            # As rows of numbers: six times as fast as axes of three.
            B, H, W, C = x_BHWC.shape
            x_BHR = x_BHWC.reshape(B, H, W * C).to(torch.float32)
            x_BHR.div_(255).sub_(self.mean.repeat(W)).div_(self.std.repeat(W))
            return x_BHR.view(B, H, W, C).permute(0, 3, 1, 2)
        x_BCHW = x_BHWC.permute(0, 3, 1, 2).to(torch.float32, memory_format=torch.contiguous_format)
        mean, std = self.mean.view(1, 3, 1, 1), self.std.view(1, 3, 1, 1)
        return x_BCHW.div_(255).sub_(mean).div_(std)


class _ArrowArray(ctypes.Structure):
    """The fields read here of struct ArrowArray in the Arrow C data interface, version 1.0."""


_ArrowArray._fields_ = [
    ("length", ctypes.c_int64),
    ("null_count", ctypes.c_int64),
    ("offset", ctypes.c_int64),
    ("n_buffers", ctypes.c_int64),
    ("n_children", ctypes.c_int64),
    ("buffers", ctypes.POINTER(ctypes.c_void_p)),
    ("children", ctypes.POINTER(ctypes.POINTER(_ArrowArray))),
]
_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype, _capsule_pointer.argtypes = (
    ctypes.c_void_p,
    [ctypes.py_object, ctypes.c_char_p],
)


def _view(image: Image.Image) -> Tensor:
    """Return an RGB image's pixels in place, as uint8 [H, W, 4], valid while the image lives.

    An image of more than 16 MiB lies in several pieces, and is copied to [H, W, 3].
    """
    try:
        _, capsule = image.__arrow_c_array__()
    except ValueError:
        return torch.from_numpy(np.array(image))
    array = _ArrowArray.from_address(_capsule_pointer(capsule, b"arrow_array"))
    values = array.children[0].contents
    pixels = (ctypes.c_uint8 * values.length).from_address(values.buffers[1])
    return torch.frombuffer(pixels, dtype=torch.uint8).view(image.height, image.width, 4)


def _is_dyadic(full: int, resized: int) -> bool:
    """Return whether full / resized and its multiples are exact in single precision."""
    gcd = np.gcd(full, resized)
    denominator = resized // int(gcd)
    return denominator & (denominator - 1) == 0 and full * denominator < 1 << 22


def is_vertical_first(full: tuple[Any, ...], resized: tuple[Any, ...]) -> Any:
    """Return whether Pillow resizes columns first (ImagingResampleInner); this affects rounding.

    Args:
        full: Width and height, or an array of each.
        resized: Those after resizing.
    """
    shrinks_by = full[1] - resized[1]
    return (shrinks_by > 0) & (shrinks_by > 2 * (full[0] - resized[0]))


def _margin(edge: int, crop: int) -> int:
    """Return where a centred crop begins; negative if the crop is the larger.

    Halves are rounded to even, as in torchvision's center_crop.
    """
    return round((edge - crop) / 2) if edge >= crop else -((crop - edge) // 2)
