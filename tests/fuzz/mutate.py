"""Damages bytes: a good input becomes one that is nearly good."""

from collections.abc import Sequence
from random import Random

_MAGIC = (
    *(b"\x00", b"\xff", b"\x7f", b"\x80", b"\xff\xff", b"\x7f\xff\xff\xff", b"\xff\xff\xff\xff"),
    *(b"\x80\x00\x00\x00", b"\xff\xff\xff\xff\xff\xff\xff\x7f", b"\r\n", b"\r\n\r\n", b"\0"),
    *(b"{", b"}", b"[", b"]", b'"', b",", b":", b"\\", b"\\u0000", b"\\ud800"),
    *(b"-", b"1e999", b"NaN", b"null", b"0", b"-1", b"9223372036854775808"),
    *(b"18446744073709551616", b"\xc3\x28", b"\xed\xa0\x80", b"%00"),
    *(b"\xff\xd8", b"\xff\xda", b"\xff\xd9"),
)
"""Pieces that mean something to a parser: sizes, ends, and the marks of JPEG."""
_CHANGES = (
    *("flip", "flip", "replace", "cut off", "cut out", "repeat", "insert", "insert"),
    *("overwrite", "overwrite near the head", "splice"),
)


def mutate(random: Random, data: bytes, others: Sequence[bytes] = ()) -> bytes:
    """Change a few things; now and then nothing.

    Args:
        random: Source of all choices.
        data: A good input, as a rule.
        others: Further inputs, whose ends may replace its own.
    """
    changed = bytearray(data)
    for _ in range(random.choice((0, 1, 1, 1, 2, 2, 3, 5, 12))):
        if changed:
            _change(random, changed, others)
    return bytes(changed)


def _change(random: Random, data: bytearray, others: Sequence[bytes]) -> None:
    place = random.randrange(len(data))
    magic = random.choice(_MAGIC)
    match random.choice(_CHANGES):
        case "flip":
            data[place] ^= 1 << random.randrange(8)
        case "replace":
            data[place] = random.randrange(256)
        case "cut off":
            del data[place:]
        case "cut out":
            del data[place : place + random.choice((1, 2, 4, 16, 256))]
        case "repeat":
            piece = data[place : place + random.choice((1, 4, 16, 64))]
            data[place:place] = piece * random.choice((1, 2, 8, 60))
        case "insert":
            data[place:place] = magic
        case "overwrite":
            data[place : place + len(magic)] = magic
        case "overwrite near the head":  # where lengths and sizes are
            place %= 64
            data[place : place + len(magic)] = magic
        case "splice" if others:
            other = random.choice(others)
            data[place:] = other[random.randrange(len(other) + 1) :]
