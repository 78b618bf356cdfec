"""Types of command-line flags, whose errors say what a value has to be. Imports little."""

from argparse import ArgumentTypeError
from math import isfinite
from pathlib import Path


def count(text: str) -> int:
    """Read a whole number from 1."""
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"{text!r} is not a whole number from 1")
    return int(text)


def positive(text: str) -> float:
    """Read a number above 0."""
    number = _finite(text)
    if number is None or number <= 0:
        raise ArgumentTypeError(f"{text!r} is not a number above 0")
    return number


def non_negative(text: str) -> float:
    """Read a number from 0."""
    number = _finite(text)
    if number is None or number < 0:
        raise ArgumentTypeError(f"{text!r} is not a number from 0")
    return number


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


def _finite(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if isfinite(number) else None
