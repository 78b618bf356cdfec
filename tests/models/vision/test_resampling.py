import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional

from inferpool.models.vision import resampling
from inferpool.models.vision.transforms import ImageTransform

SIZES = ((480, 640), (640, 480), (256, 300), (64, 48), (1000, 333), (257, 256), (30, 40))


def pictures() -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randint(0, 256, (3, *size), dtype=torch.uint8) for size in SIZES]


def alone(transform: ImageTransform, x_CHW: Tensor) -> Tensor:  # noqa: N803
    """Resize one picture by torch's own function."""
    columns, rows = transform._resized((x_CHW.shape[2], x_CHW.shape[1]))
    top, left = round((rows - transform.crop) / 2), round((columns - transform.crop) / 2)
    mode = transform.interpolation.name.lower()
    y_1CHW = functional.interpolate(
        x_CHW[None].float(), size=(rows, columns), mode=mode, antialias=True
    )
    kept = y_1CHW[0, :, top : top + transform.crop, left : left + transform.crop]
    return kept.round().clamp(0, 255).to(torch.uint8).permute(1, 2, 0)


@pytest.mark.parametrize("interpolation", [Image.Resampling.BILINEAR, Image.Resampling.BICUBIC])
@pytest.mark.parametrize(("resize", "crop"), [(256, 224), (36, 32), (32, 32)])
def test_pictures_of_all_sizes_become_what_each_becomes_alone(interpolation, resize, crop):
    transform = ImageTransform(resize=resize, crop=crop, interpolation=interpolation)
    x = pictures()
    for y, x_CHW in zip(transform.device_pixels(x), x, strict=True):
        expected = alone(transform, x_CHW)
        assert y.shape == (crop, crop, 3)
        assert (y.int() - expected.int()).abs().max() <= 1  # where float32 rounds otherwise
        assert (y != expected).float().mean() < 0.001


def test_pictures_that_are_large_together_are_resized_in_parts(monkeypatch):
    transform = ImageTransform(resize=36, crop=32)
    x = pictures()
    expected = transform.device_pixels(x)
    sizes: list[int] = []
    canvas = resampling._canvas

    def note(images: list[Tensor]) -> Tensor:
        found = canvas(images)
        sizes.append(len(found) * resampling._num_bytes(*found.shape[2:], 32))
        return found

    monkeypatch.setattr(resampling, "_canvas", note)
    monkeypatch.setattr(resampling, "_MAX_BYTES", 7_000_000)
    found = transform.device_pixels(x)
    assert len(sizes) > 2
    assert max(sizes) <= 7_000_000
    for one, other in zip(found, expected, strict=True):
        assert (one.int() - other.int()).abs().max() <= 1
    assert transform.device_pixels([]) == []
