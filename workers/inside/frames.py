"""The framing of private queues: how messages follow one another in a pipe. Both of its ends.

It is that of multiprocessing.connection: a signed 32-bit length, big-endian, or -1 and an unsigned
64-bit one, and then so many bytes.
"""

import struct
from collections.abc import Iterable, Iterator

MAX_FRAME_BYTES = 1 << 30


class FrameError(Exception):
    """The other end wrote something that is no frame."""


class Frames:
    """Makes frames of what is read, and keeps what is half a frame."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterable[bytes]:
        """The frames that are whole now, to be gone through at once.

        Raises:
            FrameError: A length is out of bounds.
        """
        if not self._buffer and len(data) >= 4 and int.from_bytes(data[:4], "big") == len(data) - 4:
            return (data[4:],)  # the usual case: exactly one frame
        return self._cut(data)

    def _cut(self, data: bytes) -> Iterator[bytes]:
        buffer = self._buffer
        buffer += data
        while len(buffer) >= 4:
            start, length = _parse_head(buffer)
            if length is None or len(buffer) < start + length:
                return
            frame = bytes(memoryview(buffer)[start : start + length])
            del buffer[: start + length]
            yield frame


def _parse_head(buffer: bytearray) -> tuple[int, int | None]:
    """Where the first frame's body starts, and its length if that has arrived."""
    (length,) = struct.unpack_from("!i", buffer)
    start = 4
    if length == -1:
        if len(buffer) < 12:
            return 12, None
        (length,) = struct.unpack_from("!Q", buffer, 4)
        start = 12
    if not 0 <= length <= MAX_FRAME_BYTES:
        raise FrameError(f"a frame of {length} bytes")
    return start, length
