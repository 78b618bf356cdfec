"""Types of command-line flags; their errors say which values are valid. Imports little."""

from argparse import ArgumentTypeError
from collections.abc import Callable, Mapping
from math import isfinite, nan
from pathlib import Path

Count = int
Positive = float
NonNegative = float
Seconds = float
Folder = Path
Existing = Path


def count(text: str) -> int:
    """Read a whole number from 1."""
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"{text!r} is not a whole number from 1")
    return int(text)


def positive(text: str) -> float:
    """Read a number above 0."""
    return _number(text, "above 0", lambda number: number > 0)


def non_negative(text: str) -> float:
    """Read a number from 0."""
    return _number(text, "from 0", lambda number: number >= 0)


def existing(text: str) -> Path:
    """Read the path of a file or folder that is there."""
    path = Path(text)
    if not path.exists():
        raise ArgumentTypeError(f"there is no {text}")
    return path


def folder(text: str) -> Path:
    """Read the path of a folder that is there."""
    path = Path(text)
    if not path.is_dir():
        raise ArgumentTypeError(f"{text} is no folder")
    return path


def _number(text: str, what: str, fits: Callable[[float], bool]) -> float:
    try:
        number = float(text)
    except ValueError:
        number = nan
    if not isfinite(number) or not fits(number):
        raise ArgumentTypeError(f"{text!r} is not a number {what}")
    return number


READERS: Mapping[str, tuple[Callable[[str], object], str]] = {
    "Count": (count, "N"),
    "Positive": (positive, "X"),
    "NonNegative": (non_negative, "X"),
    "Seconds": (non_negative, "S"),
    "Folder": (folder, "DIR"),
    "Existing": (existing, "PATH"),
}
"""Readers of values of fields with these annotations, for `settings.fields.add_flag`."""
