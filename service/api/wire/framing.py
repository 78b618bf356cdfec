"""Bounds what a chunked body may cost besides its bytes: its chunks and its trailers. Event loop.

A chunk costs the parser, and us, about as much however short it is, and a trailer is kept by the
parser until it ends. What stands between chunks (sizes and extensions) is not kept by anybody.
"""

from inferpool.service.api.errors import LargeHeadError
from inferpool.service.errors import BadRequestError

MAX_TRAILER_BYTES = 64 * 1024
"""Names and values of all trailers of a message; nothing here reads them."""
_FREE_CHUNKS = 8192
"""Chunks that any body may have, of whatever size: some clients write JSON token by token."""
_MEAN_CHUNK_BYTES = 64
"""How long chunks must be on average beyond that. 16 MiB then take 270,000, which is 0.1 s of the
event loop, in turns of a few milliseconds."""


class ChunkLimits:
    """Counts the chunks and trailers of one message. Its errors end the message."""

    __slots__ = (
        "_has_moved_on",
        "_num_body_bytes",
        "_num_chunks",
        "_num_other_bytes",
        "_num_trailer_bytes",
    )

    def __init__(self) -> None:
        self._num_chunks = 0
        self._num_body_bytes = 0
        self._num_trailer_bytes = 0
        self._num_other_bytes = 0
        """Bytes of the latest reads, none of which brought any of the body."""
        self._has_moved_on = False
        """The newest read has brought some of the body."""

    def take_chunk(self, num_bytes: int) -> None:
        """Count a chunk, or as much of one as came in one read.

        Raises:
            BadRequestError: There are too many for what they hold.
        """
        self._has_moved_on = True
        self._num_chunks += 1
        self._num_body_bytes += num_bytes
        if self._num_chunks > _FREE_CHUNKS + self._num_body_bytes // _MEAN_CHUNK_BYTES:
            raise BadRequestError(
                f"the body has {self._num_chunks} chunks in its first {self._num_body_bytes} "
                f"bytes: send chunks of {_MEAN_CHUNK_BYTES} bytes or more, or a Content-Length"
            )

    def take_trailer(self, num_bytes: int) -> None:
        """Count a trailer.

        Raises:
            LargeHeadError: Together they are too long.
        """
        self._num_trailer_bytes += num_bytes
        if self._num_trailer_bytes > MAX_TRAILER_BYTES:
            raise _too_long()

    def take_read(self, num_bytes: int) -> None:
        """Count a read that began and ended in this message. Call it after the parser is fed.

        Raises:
            LargeHeadError: None of the latest reads brought any of the body, so that a trailer or
                a chunk extension does not end.
        """
        self._num_other_bytes = 0 if self._has_moved_on else self._num_other_bytes + num_bytes
        self._has_moved_on = False
        if self._num_other_bytes > MAX_TRAILER_BYTES:
            raise _too_long()


def _too_long() -> LargeHeadError:
    return LargeHeadError(f"trailers or chunk extensions have more than {MAX_TRAILER_BYTES} bytes")
