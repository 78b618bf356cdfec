"""Guesses a file's type from its name. Imports little, for use without a service."""

import os
from collections.abc import Mapping
from typing import Literal, TypeAlias

FileKind: TypeAlias = Literal["image", "json", "text", "npy", "bytes"]
"""Content of a file by its name: an encoded picture, a JSON value, a text, an array, or anything
else, which is a picture too if it begins like one."""

_IMAGES = frozenset(
    (
        *(".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".gif", ".bmp", ".webp", ".tif", ".tiff"),
        *(".ppm", ".pgm", ".pbm", ".jp2", ".ico", ".tga", ".avif", ".qoi", ".dds", ".pcx"),
        *(".psd", ".sgi", ".im", ".msp", ".icns", ".fli", ".xbm", ".xpm"),
    )
)
_OTHERS: Mapping[str, FileKind] = {".json": "json", ".txt": "text", ".npy": "npy"}
_LABELS = ("cls", "label")


def kind_by_name(name: str) -> FileKind:
    """Return what a file holds by the end of its name."""
    suffix = os.path.splitext(name)[1].lower()
    return "image" if suffix in _IMAGES else _OTHERS.get(suffix, "bytes")


def is_label(name: str) -> bool:
    """Return whether a file is the label of the file beside it with the same stem (webdataset)."""
    return name.rpartition("/")[2].partition(".")[2].lower() in _LABELS
