"""gzip and deflate for bodies and answers. Imported with the first body that has one.

Bodies are inflated in steps, up to the limit for bodies: in the event loop while they are small,
else in a few threads. Deflate may have the frame of zlib (RFC 1950), as RFC 9110 says, or none.
"""

import zlib
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache

from inferpool.service.api.codecs.answers import qualities_in
from inferpool.service.errors import (
    BadRequestError,
    TooLargeError,
    UnsupportedTypeError,
)
from inferpool.service.queue.instance import Buffer

ENCODINGS = (b"gzip", b"deflate")
SMALL_BYTES = 1 << 20
"""Bodies up to this size are inflated in the event loop: some 5 ms."""
_MAX_DEFLATED = 1 << 18
"""Answers up to this size are deflated, in the event loop: some 7 ms for numbers."""
_NUM_THREADS = 2
"""Bodies that are inflated at once: each may take the memory of the largest body."""
_STEP_BYTES = 1 << 18
_TAKEN_BYTES = 1 << 16
"""Bytes that zlib gets at once: with each step it copies those that it has not used."""
_MAX_MEMBERS = 64
"""Most parts of a body of gzip; programs that compress in blocks make a few."""
_LEVEL = 1
_GZIP, _ZLIB, _BARE = 31, 15, -15
"""Kinds of frames, as zlib's `wbits`."""


class Inflation:
    """A body that is inflated step by step. One thread at a time."""

    def __init__(self, encoding: bytes, chunks: Iterable[Buffer], most_bytes: int) -> None:
        """Inflate nothing yet; `encoding` is one of `ENCODINGS`."""
        self._is_gzip = encoding == b"gzip"
        self._most_bytes = most_bytes
        self._data = memoryview(b"".join(chunks))
        self._position = 0
        self._tail: Buffer = b""
        """The bytes that zlib got and has not used."""
        self._num_members = 0
        self._num_bytes = 0
        self._pieces: list[bytes] = []
        self._is_stopped = False
        self._begin()

    def stop(self) -> None:
        """Do no more: nobody waits for the body. Another thread may run it."""
        self._is_stopped = True

    def run(self, until_bytes: int | None = None) -> list[bytes] | None:
        """Inflate up to a size, or all; return the body in pieces if it is whole, else None.

        Raises:
            BadRequestError: It is damaged, or cut off.
            TooLargeError: It is over the limit.
        """
        while not self._is_whole():
            if self._is_stopped or (until_bytes is not None and self._num_bytes >= until_bytes):
                return None
            if not self._tail:
                self._tail = self._data[self._position : self._position + _TAKEN_BYTES]
                self._position += len(self._tail)
            try:
                piece = self._inflater.decompress(self._tail, _STEP_BYTES)
            except zlib.error as error:
                raise BadRequestError(f"the body: damaged {self._name} ({error})") from None
            self._tail = self._inflater.unconsumed_tail
            self._num_bytes += len(piece)
            if self._num_bytes > self._most_bytes:
                raise TooLargeError(
                    f"the body is larger than the limit of {self._most_bytes} bytes, once it is "
                    "inflated"
                )
            if piece:
                self._pieces.append(piece)
            elif not self._num_left and not self._inflater.eof:
                raise BadRequestError(f"the body: the {self._name} is cut off")
        return self._pieces or [b""]

    @property
    def expected_bytes(self) -> int:
        """Size of the whole body, if its rest is as dense as what was inflated."""
        total = len(self._data)
        done = total - self._num_left
        ratio = self._num_bytes / done if done else 1.0
        return min(self._most_bytes, max(total, int(ratio * total)))

    @property
    def _num_left(self) -> int:
        return len(self._tail) + len(self._data) - self._position

    @property
    def _name(self) -> str:
        return "gzip" if self._is_gzip else "deflate"

    def _begin(self) -> None:
        """Begin a member of gzip, or the only one of deflate."""
        self._num_members += 1
        if self._is_gzip:
            wbits = _GZIP
        else:
            start = self._data[:2]
            has_frame = start[:1] and start[0] & 15 == 8 and int.from_bytes(start, "big") % 31 == 0
            wbits = _ZLIB if has_frame else _BARE
        self._inflater = zlib.decompressobj(wbits)

    def _is_whole(self) -> bool:
        if not self._inflater.eof:
            return False
        self._tail = self._inflater.unused_data
        if not self._num_left:
            return True
        if not self._is_gzip or self._num_members == _MAX_MEMBERS:
            raise BadRequestError(f"the body: {self._num_left} bytes follow the {self._name}")
        self._begin()
        return False


@cache
def inflaters() -> ThreadPoolExecutor:
    """Return the threads that inflate large bodies of this process; made with the first."""
    return ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="inflate")


def encoding_of(headers: Mapping[bytes, bytes]) -> bytes:
    """Return the encoding of a body, one of `ENCODINGS`, or nothing.

    Raises:
        UnsupportedTypeError: It is another one.
    """
    given = headers.get(b"content-encoding", b"").strip().lower()
    if given in (b"", b"identity"):
        return b""
    given = given.removeprefix(b"x-")
    if given in ENCODINGS:
        return given
    error = UnsupportedTypeError(
        f"Content-Encoding: {given[:40].decode('latin-1')} is not supported; use gzip, deflate, or "
        "none"
    )
    error.is_encoding = True
    raise error


def deflated(
    headers: Sequence[tuple[bytes, bytes]], body: bytes, accept: bytes
) -> tuple[list[tuple[bytes, bytes]], bytes]:
    """Return an answer with an encoding that `Accept-Encoding` names; large ones as they are."""
    qualities = qualities_in(accept)
    best = max(ENCODINGS, key=lambda each: qualities.get(each, 0.0))
    if not qualities.get(best) or not 0 < len(body) <= _MAX_DEFLATED:
        return list(headers), body
    deflater = zlib.compressobj(_LEVEL, wbits=_GZIP if best == b"gzip" else _ZLIB)
    packed = deflater.compress(body) + deflater.flush()
    return [*headers, (b"content-encoding", best)], packed
