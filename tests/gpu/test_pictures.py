"""A network's input made of pictures by one launch on the device, against the exact way."""

import numpy as np
import pytest
import torch
from PIL import Image

from inferpool.models.vision.device_pictures import pictures_on
from inferpool.models.vision.transforms import ImageTransform, Normalize
from tests.gpu.conftest import Devices

_SIZES = [(375, 500), (500, 375), (48, 61), (224, 224), (256, 256), (768, 1024), (31, 400)]
_MOST_LEVELS = {torch.float32: 1.01, torch.float16: 1.2, torch.bfloat16: 2.2}
"""Levels of 256 that a value may be off: one, and the rounding of its dtype."""


@pytest.mark.parametrize("dtype", _MOST_LEVELS, ids=str)
@pytest.mark.parametrize("interpolation", ["NEAREST", "BILINEAR", "BICUBIC", "LANCZOS"])
def test_pictures_of_any_sizes_are_at_most_a_level_off_by_one_launch(
    devices: Devices, interpolation: str, dtype: torch.dtype, record_property
):
    transform = ImageTransform(resize=256, crop=224, interpolation=Image.Resampling[interpolation])
    pictures = pictures_on(torch.device(devices.kind, 0), transform)
    assert pictures is not None, "the log says why the kernel is not used"
    sizes = _SIZES[:3] if devices.is_simulated else _SIZES
    random = np.random.default_rng(0)
    images = [random.integers(0, 256, (*size, 3), np.uint8) for size in sizes]
    wanted = Normalize(transform)(
        torch.stack([transform.pixels(Image.fromarray(each)) for each in images])
    )
    found = pictures.inputs(
        [torch.from_numpy(each).permute(2, 0, 1) for each in images],
        [False] * len(images),
        dtype,
        torch.channels_last,
    )
    assert found.dtype is dtype
    assert found.is_contiguous(memory_format=torch.channels_last)
    std = torch.tensor(transform.std).view(3, 1, 1)
    off = (found.float().cpu() - wanted).abs() * std * 255
    record_property("share off by half a level or more", (off > 0.5).float().mean().item())
    assert off.max().item() <= _MOST_LEVELS[dtype]
