"""Photographs to try classifiers on, from scikit-image's collection. Worker processes only.

Public domain: astronaut (NASA), clock (Stefan van der Walt), rocket (SpaceX). CC0: camera (Lav
Varshney), chelsea (Stefan van der Walt), coffee (Rachel Michetti, at Pikolo Espresso Bar). All are
scaled down.
"""

from importlib.resources import files
from io import BytesIO

from PIL import Image

_ENLARGED_BY = 4
_QUALITY = 90
_NAMES = ("astronaut", "camera", "chelsea", "clock", "coffee", "rocket")
_PART = 0.7


def sample_views() -> list[Image.Image]:
    """Sixty pictures: each photograph, its four corners, and all of these mirrored."""
    views = []
    for name in _NAMES:
        data = files("inferpool.models.vision.photos").joinpath(f"{name}.jpg").read_bytes()
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


def sample_jpegs() -> list[bytes]:
    """Thirty JPEGs of the photographs and their corners, and six of the photographs enlarged."""
    views = sample_views()[::2]
    wholes = views[:: len(views) // len(_NAMES)]
    large = [each.resize([edge * _ENLARGED_BY for edge in each.size]) for each in wholes]
    jpegs = []
    for view in (*views, *large):
        encoded = BytesIO()
        view.save(encoded, "JPEG", quality=_QUALITY)
        jpegs.append(encoded.getvalue())
    return jpegs
