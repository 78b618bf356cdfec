"""Real photographs as JPEG files of about 100 KB, from those that scikit-image ships."""

import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from tests.bench.processes import OUT

WANTED_BYTES = 100_000
_QUALITIES = range(98, 60, -1)


def photos() -> Sequence[Path]:
    """Write the photographs, where that is not done yet, and return their paths."""
    folder = OUT / "photos"
    files = [folder / f"{name}.jpg" for name in _arrays()]
    if not all(file.exists() for file in files):
        folder.mkdir(parents=True, exist_ok=True)
        for file, read in zip(files, _arrays().values(), strict=True):
            file.write_bytes(_nearest_jpeg(read()))
    return files


def _arrays() -> Mapping[str, Callable[[], np.ndarray]]:
    from skimage import data

    return {
        "astronaut": data.astronaut,
        "chelsea": data.chelsea,
        "coffee": data.coffee,
        "rocket": data.rocket,
        "immunohistochemistry": data.immunohistochemistry,
        "motorcycle": lambda: data.stereo_motorcycle()[0],
    }


def _nearest_jpeg(pixels: np.ndarray) -> bytes:
    """The image in the quality whose size is nearest to what is wanted."""
    image = Image.fromarray(pixels)

    def encoded(quality: int) -> bytes:
        file = io.BytesIO()
        image.save(file, "JPEG", quality=quality)
        return file.getvalue()

    return min(map(encoded, _QUALITIES), key=lambda jpeg: abs(len(jpeg) - WANTED_BYTES))
