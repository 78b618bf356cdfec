"""Ids of requests (`X-Request-ID`) and of traces (W3C Trace Context, level 2)."""

import random
from collections.abc import Callable, Mapping
from itertools import chain

_ID_CHARACTERS = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._:-"
_MAX_ID_LENGTH = 128
_HEX = b"0123456789abcdef"
_VERSION_00_LENGTH = 55
_KNOWN_FLAGS = 0x03
"""Sampled, and random (level 2, 3.2.2.3.2)."""
_MAX_STATE_MEMBERS = 32
_MAX_STATE_BYTES = 1024
"""The recommendation asks for 512 at least (3.3.1.5)."""

_random = random.Random()  # noqa: S311 RUF100  # unique, and nobody's secret
_NUM_AT_ONCE = 64


def _make_ids() -> list[tuple[str, str]]:
    digits = _random.randbytes(24 * _NUM_AT_ONCE).hex()
    return [
        (digits[start : start + 32], digits[start + 32 : start + 48])
        for start in range(0, len(digits), 48)
    ]


new_ids: Callable[[], tuple[str, str]] = chain.from_iterable(iter(_make_ids, None)).__next__
"""Makes a request or trace id and a span id: 128 and 64 random bits in hexadecimal digits.

They come from a generator that the operating system has seeded once, because `os.urandom` costs a
system call; and 64 pairs at a time, which costs a fifth.
"""


def request_id_of(value: bytes | None) -> str:
    """Return a client's request id if it may be logged and sent back, else nothing."""
    if not value or len(value) > _MAX_ID_LENGTH or value.translate(None, _ID_CHARACTERS):
        return ""
    return value.decode("ascii")


def trace_of(value: bytes) -> tuple[str, str, str] | None:
    """Return trace id, span id and flags of a `traceparent`; None if a new trace must be started.

    Versions above 00 are read by their first four fields (3.2.3).
    """
    if (
        len(value) < _VERSION_00_LENGTH
        or value[:_VERSION_00_LENGTH].translate(None, _HEX) != b"---"
    ):
        return None
    if not value[2] == value[35] == value[52] == 0x2D:
        return None
    version = value[:2]
    if version == b"ff":
        return None
    if len(value) > _VERSION_00_LENGTH and (version == b"00" or value[55] != 0x2D):
        return None
    if not value[3:35].strip(b"0") or not value[36:52].strip(b"0"):
        return None
    flags = int(value[53:55], 16) & _KNOWN_FLAGS
    return value[3:35].decode(), value[36:52].decode(), f"{flags:02x}"


def trace_state_of(headers: Mapping[bytes, bytes]) -> bytes:
    """Return the `tracestate` to pass on beside a valid `traceparent`, or nothing."""
    state = headers.get(b"tracestate", b"")
    if len(state) > _MAX_STATE_BYTES or state.count(b",") >= _MAX_STATE_MEMBERS:
        return b""
    return state if state.isascii() and state.decode().isprintable() else b""
