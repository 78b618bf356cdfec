"""Reads API keys from a text, and refuses invalid ones."""

import re
from collections.abc import Iterator

_MIN_LENGTH = 16
"""The shortest key. Shorter ones can be guessed over a network in time."""
_MAX_LENGTH = 4096
_KEY = re.compile(r"[\x21-\x2b\x2d-\x7e]+")
"""The characters that a header carries unchanged: visible ASCII, without the separating comma."""
_QUOTES = ("'", '"')


def keys_in(text: str) -> Iterator[str]:
    """Yield keys, one to a line or separated by commas. Lines that begin with `#` are comments.

    Raises:
        ValueError: A key is too short, has odd characters or stands in quotes. The message holds
            none of the text.
    """
    for number, word in enumerate(_words(text), 1):
        if word.startswith(_QUOTES) and word.endswith(_QUOTES):
            raise ValueError(
                f"key {number} has quotes around it, which would be part of it; take them away"
            )
        if len(word) < _MIN_LENGTH:
            raise ValueError(
                f"key {number} has fewer than {_MIN_LENGTH} characters; "
                "`openssl rand -hex 32` makes a good one"
            )
        if len(word) > _MAX_LENGTH:
            raise ValueError(f"key {number} has more than {_MAX_LENGTH} characters")
        if not _KEY.fullmatch(word):
            raise ValueError(f"key {number} has a character that is not visible ASCII")
        yield word


def first_key(text: str) -> str:
    """Return the first key in a text, or an empty string.

    Raises:
        ValueError: It is invalid, as in `keys_in`.
    """
    return next(keys_in(text), "")


def _words(text: str) -> Iterator[str]:
    for line in text.splitlines():
        if not line.lstrip().startswith("#"):
            yield from (word.strip() for word in line.split(",") if word.strip())
