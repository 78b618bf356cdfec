"""Photographs to try classifiers on, from scikit-image's collection. Worker processes only.

Public domain: astronaut (NASA), clock (Stefan van der Walt), rocket (SpaceX). CC0: camera (Lav
Varshney), chelsea (Stefan van der Walt), coffee (Rachel Michetti, at Pikolo Espresso Bar). All are
scaled down.
"""

from importlib.resources import files
from io import BytesIO

from PIL import Image

_NAMES = ("astronaut", "camera", "chelsea", "clock", "coffee", "rocket")
_PART = 0.7


def sample_views() -> list[Image.Image]:
    """Sixty pictures: each photograph, its four corners, and all of these mirrored."""
    views = []
    for name in _NAMES:
        data = files("models.photos").joinpath(f"{name}.jpg").read_bytes()
        photo = Image.open(BytesIO(data)).convert("RGB")
        width, height = photo.size
        part_width, part_height = int(width * _PART), int(height * _PART)
        left, top = width - part_width, height - part_height
        corners = [
            photo.crop((x, y, x + part_width, y + part_height)) for x in (0, left) for y in (0, top)
        ]
        for view in (photo, *corners):
            views += [view, view.transpose(Image.Transpose.FLIP_LEFT_RIGHT)]
    return views
