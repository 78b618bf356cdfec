"""What every codec of the request side takes and gives, and the limits that it keeps."""

import time
from collections.abc import Mapping, Sequence

import msgspec

from models.spec import TensorSpec
from service.api.errors import SlowBodyError
from service.request import Buffer, Payload


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """How much one HTTP call may ask for."""

    max_body_bytes: int = 16 * 2**20
    max_json_bytes: int = 4 * 2**20
    """JSON is parsed in the event loop, so it is held shorter than other bodies."""
    max_instances: int = 256
    default_timeout_s: float = 30.0
    max_timeout_s: float = 300.0
    body_gap_s: float = 10.0
    """Each such time must bring some of a body: `MIN_PROGRESS_BYTES`, or the rest of it."""


MIN_PROGRESS_BYTES = 4096
"""What keeps a slow body alive for another `body_gap_s`; a modem of 1990 was faster."""


_MIN_PIECE_BYTES = 4096
"""Shorter pieces are put together: an object of its own takes each some 50 bytes besides."""


def add_piece(pieces: list[Buffer], piece: Buffer) -> None:
    """Add what has come of a body to its earlier pieces, so that it takes little more memory."""
    if len(piece) >= _MIN_PIECE_BYTES or not pieces:
        pieces.append(piece)
    elif isinstance(pieces[-1], bytearray):
        pieces[-1] += piece
    else:
        pieces.append(bytearray(piece))


class BodyPace:
    """Tells a body that is slow to come from one that is held back, whoever reads it.

    All moments are seconds of CLOCK_MONOTONIC, which the event loop counts too.
    """

    __slots__ = ("_deadline", "_gap_s", "_num_bytes", "next_check")

    def __init__(self, deadline: float, started: float, limits: Limits, num_bytes: int = 0) -> None:
        """Begin to time a body whose call has a deadline, and of which some bytes have come."""
        self._deadline = deadline
        self._gap_s = limits.body_gap_s
        self._num_bytes = num_bytes
        self.next_check = min(deadline, started + self._gap_s)
        """The moment at which to look again."""

    def has_moved_on(self, num_bytes: int) -> bool:
        """Whether enough has come since the last time to wait longer; moves `next_check` then."""
        now = time.monotonic()
        if num_bytes - self._num_bytes < MIN_PROGRESS_BYTES or now >= self._deadline:
            return False
        self._num_bytes = num_bytes
        self.next_check = min(self._deadline, now + self._gap_s)
        return True

    def error(self) -> SlowBodyError:
        """What to answer at `next_check`, when the body is still not there."""
        if self.next_check >= self._deadline:
            return SlowBodyError("the body was not complete before the deadline")
        return SlowBodyError(
            f"the body came too slowly: less than {MIN_PROGRESS_BYTES} bytes in {self._gap_s:g} s"
        )


class Head(msgspec.Struct, frozen=True, gc=False):
    """What describes a body besides its content type."""

    headers: Mapping[bytes, bytes]
    """Names in lower case."""
    query: bytes
    """Without the "?"."""
    inputs: Sequence[TensorSpec]
    """What the model takes; empty where that is not known."""
    limits: Limits


class Decoded(msgspec.Struct, frozen=True, gc=False):
    """The instances of one HTTP call."""

    payloads: list[Payload]
    is_batch: bool
    """They came as a list or along a batch dimension, and are answered so even if there is one."""
    parameters: bytes = b""
    """A JSON object for the model, or nothing."""
    is_whole: bool = False
    """The only instance is the body as it came, which was not looked at: another body of the same
    length under the same head is read alike."""


def joined(headers: Sequence[tuple[bytes, bytes]]) -> dict[bytes, bytes]:
    """Headers by name, those that came several times joined (RFC 9110, 5.2)."""
    found: dict[bytes, bytes] = {}
    for name, value in headers:
        found[name] = found[name] + b", " + value if name in found else value
    return found
