"""Pictures as detectors and segmenters get them, in any form. Worker processes only.

Axes: H height, W width.
"""

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from inferpool.models.errors import InputError
from inferpool.models.inputs import json_array, json_bytes, json_place, json_texts
from inferpool.models.item import Item
from inferpool.models.vision.images import check_size, decode_image, only_tensor

_TAKES = "this model takes an encoded image or its pixels (uint8 [height, width, 3])"
MIN_SCORE = 0.5
"""Least score of what is shown, unless the options or the call say another."""
_MOST_STRETCHED = 16
"""Longest proportions, since the shorter edge is enlarged to some hundred pixels: without a bound,
a picture of 180 x 1 would become one of 93,600 x 520."""


def picture_of(
    item: Item,
    *,
    max_pixels: int,
    check: Callable[[tuple[int, int]], None] = lambda _: None,
) -> Image.Image:
    """Return an instance as an upright RGB picture.

    Args:
        item: An encoded picture, or its pixels: uint8 [H, W, 3], [3, H, W] or gray [H, W] as a
            tensor, [H, W, 3] as JSON.
        max_pixels: A picture with more is refused.
        check: Called with the width and height before a picture is decoded; may raise `InputError`.

    Raises:
        InputError: It is no picture, a damaged one, or too large.
    """
    if item.kind == "tensors":
        return _from_pixels(_tensor_of(item), max_pixels, check)
    if item.kind != "json":
        return decode_image(item.payload, max_pixels=max_pixels, check=check)
    text = json_texts(item.payload, ["image"])["image"]
    where = json_place(item.payload, "image")
    if (encoded := json_bytes(text, where)) is not None:
        return decode_image(encoded, max_pixels=max_pixels, check=check)
    if bytes(text[:1]) == b'"':
        raise InputError(f"{where}: {_TAKES}, not a text")
    pixels = json_array(text, "uint8", shape=(-1, -1, 3), where=where)
    return _from_pixels(pixels, max_pixels, check)


def check_stretch(size: tuple[int, int]) -> None:
    """Refuse a picture much longer than wide, for networks that see it in its own proportions.

    Raises:
        InputError: It is refused.
    """
    short, long = sorted(size)
    if long > _MOST_STRETCHED * short:
        raise InputError(
            f"the image has {size[0]} x {size[1]} pixels; its longer edge may be at most "
            f"{_MOST_STRETCHED} times the shorter one"
        )


def share_of(parameters: object, name: str, default: float) -> float:
    """Return a parameter, or an option, that is a number from 0 to 1.

    Raises:
        InputError: It is something else.
    """
    value = parameters.get(name, default) if isinstance(parameters, dict) else default
    if type(value) not in (int, float) or not 0 <= value <= 1:
        raise InputError(f"parameter {name!r} must be a number from 0 to 1, not {value!r}")
    return float(value)


def _tensor_of(item: Item) -> NDArray[np.uint8]:
    tensor, header = only_tensor(item), item.headers[0]
    if tensor.dtype == torch.uint8:
        if tensor.dim() == 3 and tensor.shape[2] != 3 and tensor.shape[0] == 3:
            tensor = tensor.permute(1, 2, 0)
        if tensor.dim() == 2 or (tensor.dim() == 3 and tensor.shape[2] == 3):
            pixels: NDArray[np.uint8] = tensor.numpy()
            return pixels
    raise InputError(f"{_TAKES}, not {header.dtype} {list(header.shape)}")


def _from_pixels(
    pixels: NDArray[np.uint8], max_pixels: int, check: Callable[[tuple[int, int]], None]
) -> Image.Image:
    height, width = pixels.shape[:2]
    check_size(width, height, max_pixels=max_pixels)
    check((width, height))
    return Image.fromarray(np.ascontiguousarray(pixels)).convert("RGB")
