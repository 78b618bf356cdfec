"""Bodies of requests: their limits, their timing, and the form in which codecs return them."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence

import msgspec

from inferpool.models.spec import USUAL_INTERFACE, Interface, Kind, TensorHeader, TensorSpec
from inferpool.service.errors import (
    BadRequestError,
    ServiceError,
    SlowBodyError,
    TooLargeError,
)
from inferpool.service.queue.instance import Buffer

_MAX_DIGITS = 18
"""Longer numbers are not read; Python reads 4,300 digits at most."""


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """How much one HTTP call may ask for."""

    max_body_bytes: int = 16 * 2**20
    max_json_bytes: int = 4 * 2**20
    """JSON is parsed in the event loop, so its limit is lower than that of other bodies."""
    max_job_bytes: int = 0
    """For bodies of jobs, which go to a disk; 0 if there are no jobs."""
    max_instances: int = 256
    default_timeout_s: float = 30.0
    max_timeout_s: float = 300.0
    stream_buffer_parts: int = 64
    stream_buffer_bytes: int = 2**20
    body_gap_s: float = 10.0
    """In each such period `MIN_PROGRESS_BYTES` of a body must come, or the rest of it."""

    def timeout_s(self, header: bytes) -> float:
        """Return how long a caller waits, by its `X-Timeout-Ms`; at most `max_timeout_s`.

        Raises:
            BadRequestError: It is no number.
        """
        digits = header.lstrip(b"0")
        if not digits.isdigit():
            raise BadRequestError("X-Timeout-Ms: must be a whole number of milliseconds, from 1")
        longest_s = self.max_timeout_s
        return min(int(digits) / 1e3, longest_s) if len(digits) < _MAX_DIGITS else longest_s

    def check_length(self, header: bytes, *, of_job: bool = False) -> None:
        """Check a `Content-Length` against the limit.

        Raises:
            BadRequestError: It is no number.
            TooLargeError: It is over the limit.
        """
        if not header.isdigit():
            raise BadRequestError("Content-Length: is not a number")
        if len(header) > _MAX_DIGITS or int(header) > self.most_bytes(of_job=of_job):
            raise self.too_large(of_job=of_job)

    def most_bytes(self, *, of_job: bool) -> int:
        """Return the limit for the body of a job, or of any other call."""
        return self.max_job_bytes or self.max_body_bytes if of_job else self.max_body_bytes

    def too_large(self, *, of_job: bool = False) -> TooLargeError:
        """Return the error for a body over the limit."""
        most = self.most_bytes(of_job=of_job)
        return TooLargeError(f"the body is larger than the limit of {most} bytes")


MIN_PROGRESS_BYTES = 4096
"""Progress that earns a slow body another `body_gap_s`; a modem of 1990 was faster."""


_MIN_PIECE_BYTES = 4096
"""Shorter pieces are joined: as an object of its own, each would take some 50 bytes more."""


def add_piece(pieces: list[Buffer], piece: Buffer) -> None:
    """Add a piece of a body to the earlier ones, with little memory besides its bytes."""
    if len(piece) >= _MIN_PIECE_BYTES or not pieces:
        pieces.append(piece)
    elif isinstance(pieces[-1], bytearray):
        pieces[-1] += piece
    else:
        pieces.append(bytearray(piece))


class BodyTimer:
    """Ends a body that stops coming, or comes too slowly. Lives in the event loop."""

    __slots__ = (
        "_count", "_deadline", "_gap_s", "_is_paused", "_num_bytes", "_on_slow", "_timer", "is_on",
    )  # fmt: skip

    def __init__(
        self,
        limits: Limits,
        count: Callable[[], int],
        on_slow: Callable[[ServiceError], None],
        is_paused: Callable[[], bool] = lambda: False,
    ) -> None:
        """Time nothing yet.

        `count` returns how many bytes have come, and `is_paused` whether we have stopped reading.
        `on_slow` gets the error of a body that is too slow.
        """
        self._gap_s = limits.body_gap_s
        self._count = count
        self._on_slow = on_slow
        self._is_paused = is_paused
        self._timer: asyncio.TimerHandle | None = None
        self.is_on = False
        """A body is timed."""
        self._deadline = 0.0
        self._num_bytes = 0

    def start(self, deadline: float) -> None:
        """Begin to time a body until its call's deadline (CLOCK_MONOTONIC), unless one is timed."""
        if not self.is_on:
            self.is_on = True
            self._deadline = deadline
            self._num_bytes = self._count()
            self._look_at(min(deadline, time.monotonic() + self._gap_s))

    def stop(self) -> None:
        """Stop: the body has arrived, or nobody waits for it."""
        self.is_on = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look_at(self, moment: float) -> None:
        self._timer = asyncio.get_running_loop().call_at(moment, self._look)

    def _look(self) -> None:
        self._timer = None
        now, num_bytes = time.monotonic(), self._count()
        if self._is_paused():
            self._look_at(now + self._gap_s)
        elif now >= self._deadline:
            self.is_on = False
            self._on_slow(SlowBodyError("the body was not complete before the deadline"))
        elif num_bytes - self._num_bytes < MIN_PROGRESS_BYTES:
            self.is_on = False
            self._on_slow(
                SlowBodyError(
                    f"the body came too slowly: less than {MIN_PROGRESS_BYTES} bytes in "
                    f"{self._gap_s:g} s"
                )
            )
        else:
            self._num_bytes = num_bytes
            self._look_at(min(self._deadline, now + self._gap_s))


class BodyContext(msgspec.Struct, frozen=True, gc=False):
    """Everything besides the content type that decides how a body is read."""

    headers: Mapping[bytes, bytes]
    """Names in lower case."""
    query: bytes
    """Without the "?"."""
    inputs: Sequence[TensorSpec]
    """The model's inputs; empty if unknown."""
    limits: Limits
    interface: Interface = USUAL_INTERFACE


class Payload(msgspec.Struct, frozen=True, gc=False):
    """One instance in a body."""

    kind: Kind
    chunks: Sequence[Buffer]
    """The bytes, in pieces as they came."""
    headers: tuple[TensorHeader, ...] = ()
    """For kind "tensors": the place of each tensor in the joined chunks."""


class Decoded(msgspec.Struct, frozen=True, gc=False):
    """The instances of one HTTP call."""

    payloads: list[Payload]
    is_batch: bool
    """They came as a list or along a batch dimension, and are answered so even if there is one."""
    parameters: bytes = b""
    """A JSON object for the model, or nothing."""
    is_whole: bool = False
    """The only instance is the body as it came, and nobody looked at it: another body of the same
    length under the same head is read alike."""


def joined(headers: Sequence[tuple[bytes, bytes]]) -> dict[bytes, bytes]:
    """Return headers by name, repeated ones joined by commas (RFC 9110, 5.2)."""
    found: dict[bytes, bytes] = {}
    for name, value in headers:
        found[name] = found[name] + b", " + value if name in found else value
    return found
