"""API keys. Only their digests are kept, so nothing that prints settings can print a key."""

import hashlib
import hmac
from dataclasses import dataclass

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


def digest_of(key: bytes) -> bytes:
    """Return the digest of a key, which is all that is kept of it."""
    return hashlib.sha256(key).digest()


def is_same(digest: bytes, other: bytes) -> bool:
    """Compare digests in constant time."""
    return hmac.compare_digest(digest, other)


def fingerprint_of(digest: bytes) -> str:
    """Return a few digits to tell keys apart in logs. `sha256sum` of the key begins with them."""
    return digest.hex()[:_FINGERPRINT_LENGTH]
