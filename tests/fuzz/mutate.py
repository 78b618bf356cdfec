"""Makes bytes wrong: one good input goes in, and something near it comes out."""

from collections.abc import Callable, Sequence
from random import Random

_MAGIC = (
    b"\x00",
    b"\xff",
    b"\x7f",
    b"\x80",
    b"\xff\xff",
    b"\x7f\xff\xff\xff",
    b"\xff\xff\xff\xff",
    b"\x80\x00\x00\x00",
    b"\xff\xff\xff\xff\xff\xff\xff\x7f",
    b"\r\n",
    b"\r\n\r\n",
    b"\0",
    b"{",
    b"}",
    b"[",
    b"]",
    b'"',
    b",",
    b":",
    b"\\",
    b"\\u0000",
    b"\\ud800",
    b"-",
    b"1e999",
    b"NaN",
    b"null",
    b"0",
    b"-1",
    b"9223372036854775808",
    b"18446744073709551616",
    b"\xc3\x28",
    b"\xed\xa0\x80",
    b"%00",
    b"\xff\xd8",
    b"\xff\xda",
    b"\xff\xd9",
)


def mutate(random: Random, data: bytes, others: Sequence[bytes] = ()) -> bytes:
    """Change a few things; now and then nothing.

    Args:
        random: Decides.
        data: A good input, as a rule.
        others: What pieces may be taken from.
    """
    changed = bytearray(data)
    for _ in range(random.choice((0, 1, 1, 1, 2, 2, 3, 5, 12))):
        if not changed:
            break
        random.choice(_CHANGES)(random, changed, others)
    return bytes(changed)


def _flip(random: Random, data: bytearray, _: Sequence[bytes]) -> None:
    data[random.randrange(len(data))] ^= 1 << random.randrange(8)


def _replace(random: Random, data: bytearray, _: Sequence[bytes]) -> None:
    data[random.randrange(len(data))] = random.randrange(256)


def _cut_off(random: Random, data: bytearray, _: Sequence[bytes]) -> None:
    del data[random.randrange(len(data)) :]


def _cut_out(random: Random, data: bytearray, _: Sequence[bytes]) -> None:
    begin = random.randrange(len(data))
    del data[begin : begin + random.choice((1, 2, 4, 16, 256))]


def _repeat(random: Random, data: bytearray, _: Sequence[bytes]) -> None:
    begin = random.randrange(len(data))
    piece = data[begin : begin + random.choice((1, 4, 16, 64))]
    data[begin:begin] = piece * random.choice((1, 2, 8, 60))


def _insert(random: Random, data: bytearray, _: Sequence[bytes]) -> None:
    place = random.randrange(len(data) + 1)
    data[place:place] = random.choice(_MAGIC)


def _overwrite(random: Random, data: bytearray, _: Sequence[bytes]) -> None:
    piece = random.choice(_MAGIC)
    place = random.randrange(len(data))
    data[place : place + len(piece)] = piece


def _overwrite_head(random: Random, data: bytearray, _: Sequence[bytes]) -> None:
    """Where lengths and sizes are."""
    piece = random.choice(_MAGIC)
    place = random.randrange(min(len(data), 64))
    data[place : place + len(piece)] = piece


def _splice(random: Random, data: bytearray, others: Sequence[bytes]) -> None:
    if others:
        other = random.choice(others)
        begin = random.randrange(len(other) + 1)
        data[random.randrange(len(data)) :] = other[begin:]


_CHANGES: Sequence[Callable[[Random, bytearray, Sequence[bytes]], None]] = (
    _flip,
    _flip,
    _replace,
    _cut_off,
    _cut_out,
    _repeat,
    _insert,
    _insert,
    _overwrite,
    _overwrite_head,
    _splice,
)
