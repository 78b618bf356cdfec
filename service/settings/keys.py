"""API keys. Only their digests are kept, so nothing that prints settings can print a key."""

import hashlib
import hmac
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

MIN_KEY_LENGTH = 16
"""The shortest key. Shorter ones can be guessed over a network in time."""
_MAX_KEY_LENGTH = 4096
_KEY = re.compile(r"[\x21-\x2b\x2d-\x7e]+")
"""The characters that a header carries unchanged: visible ASCII, without the separating comma."""
_QUOTES = ("'", '"')
_FINGERPRINT_LENGTH = 8


@dataclass(frozen=True, slots=True)
class Keys:
    """Keys with the same rights. There may be several, so that one can be replaced in service."""

    digests: frozenset[bytes] = frozenset()

    def __len__(self) -> int:
        """Return the number of keys."""
        return len(self.digests)

    def __or__(self, other: "Keys") -> "Keys":
        """Return the keys of both."""
        return Keys(self.digests | other.digests)

    def __str__(self) -> str:
        """Return how many there are, for people, and nothing more."""
        return f"{len(self)} hidden" if self.digests else "none"


def read_keys(text: str) -> Keys:
    """Read keys, one to a line or separated by commas. Lines that begin with `#` are comments.

    Raises:
        ValueError: A key is too short, has odd characters or stands in quotes. The message holds
            none of the text.
    """
    return Keys(frozenset(digest_of(key.encode()) for key in _checked(_words(text))))


def first_key(text: str) -> str:
    """Return the first key in a text like that of `read_keys`, or an empty string.

    Raises:
        ValueError: See `read_keys`.
    """
    return next(_checked(_words(text)), "")


def digest_of(key: bytes) -> bytes:
    """Return the digest of a key, which is all that is kept of it."""
    return hashlib.sha256(key).digest()


def is_same(digest: bytes, other: bytes) -> bool:
    """Compare digests in constant time."""
    return hmac.compare_digest(digest, other)


def fingerprint_of(digest: bytes) -> str:
    """Return a few digits to tell keys apart in logs. `sha256sum` of the key begins with them."""
    return digest.hex()[:_FINGERPRINT_LENGTH]


def _words(text: str) -> Iterator[str]:
    for line in text.splitlines():
        if not line.lstrip().startswith("#"):
            yield from (word.strip() for word in line.split(",") if word.strip())


def _checked(words: Iterable[str]) -> Iterator[str]:
    for number, word in enumerate(words, 1):
        if word.startswith(_QUOTES) and word.endswith(_QUOTES):
            raise ValueError(
                f"key {number} has quotes around it, which would be part of it; take them away"
            )
        if len(word) < MIN_KEY_LENGTH:
            raise ValueError(
                f"key {number} has fewer than {MIN_KEY_LENGTH} characters; "
                "`openssl rand -hex 32` makes a good one"
            )
        if len(word) > _MAX_KEY_LENGTH:
            raise ValueError(f"key {number} has more than {_MAX_KEY_LENGTH} characters")
        if not _KEY.fullmatch(word):
            raise ValueError(f"key {number} has a character that is not visible ASCII")
        yield word
