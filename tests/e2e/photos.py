"""Real photographs, as files."""

import io

import numpy as np
from PIL import Image
from skimage import data


def pixels(name: str) -> np.ndarray:
    """Return one of scikit-image's photographs, uint8 [H, W, 3]."""
    return getattr(data, name)()


def encoded(image: np.ndarray, form: str = "JPEG", **options: object) -> bytes:
    """Return a picture as a file."""
    file = io.BytesIO()
    Image.fromarray(image).save(file, form, **options)  # type: ignore[arg-type]
    return file.getvalue()


def jpeg(name: str) -> bytes:
    """Return a photograph as a JPEG file."""
    return encoded(pixels(name), quality=92)
