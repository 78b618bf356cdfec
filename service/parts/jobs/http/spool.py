"""Writes the body of a new job to a disk, so that it is never whole in memory."""

import errno
import hashlib
import os
import tempfile
import threading
from pathlib import Path

from inferpool.models.files.writing import write_all
from inferpool.service.errors import StoreFullError, TooLargeError, UnavailableError
from inferpool.service.parts.jobs.threads import in_thread

_PIECE_BYTES = 256 * 1024
"""Pieces are collected to this size, so that a thread is not asked for each packet."""
_LARGE_BYTES = 16 * 2**20
"""The blocks of larger files are given back in a thread: that takes ext4 50 ms for 1 GiB, and 2.4 s
for 16 (measured on a virtual disk)."""
_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT)


class Spool:
    """A body in a file without a name, which goes with this process. One task at a time writes it.

    It need not outlive a crash: nobody was promised anything before the job is stored.
    """

    def __init__(self, folder: Path, most_bytes: int) -> None:
        """Create no file yet.

        Args:
            folder: Where the file will be.
            most_bytes: The longest body.
        """
        self._folder = folder
        self.num_bytes = 0
        """The length of the body so far."""
        self._most_bytes = most_bytes
        self._pending = bytearray()
        self._digest = hashlib.sha256()
        self._fd: int | None = None
        self._is_closed = False

    @property
    def path(self) -> Path:
        """The file, from `flush` to `close`: as this process alone may open it (proc(5))."""
        return Path(f"/proc/self/fd/{self._fd}")

    async def write(self, chunk: bytes) -> None:
        """Write the next piece of the body.

        Raises:
            StoreFullError: The disk is full, or this user's share of it.
            TooLargeError: The body is too long.
            UnavailableError: The file cannot be written.
        """
        if self.num_bytes + len(chunk) > self._most_bytes:
            raise TooLargeError(
                f"the body is larger than the limit of {self._most_bytes} bytes for its type"
            )
        self._pending += chunk
        self.num_bytes += len(chunk)
        if len(self._pending) >= _PIECE_BYTES:
            await self.flush()

    async def flush(self) -> None:
        """Write what is left, so that `path` holds all of the body so far.

        Raises:
            StoreFullError: The disk is full, or this user's share of it.
            UnavailableError: The file cannot be written.
        """
        assert not self._is_closed
        piece, self._pending = self._pending, bytearray()
        try:
            await in_thread(self._append, piece)
        except OSError as error:
            if error.errno in _FULL_ERRNOS:
                raise StoreFullError(
                    "the disk for the bodies of jobs is full; delete jobs that are over, or try "
                    "again later",
                    retry_after_s=10,
                ) from error
            raise UnavailableError(
                f"the body cannot be kept: {error.strerror}", retry_after_s=10
            ) from error

    def digest(self) -> str:
        """Return the SHA-256 of what was flushed, in hexadecimal digits."""
        return self._digest.hexdigest()

    def close(self) -> None:
        """Remove the file, if there is one. Code that has opened it may read on."""
        self._is_closed = True
        fd, self._fd = self._fd, None
        if fd is None:
            return
        if self.num_bytes < _LARGE_BYTES:
            os.close(fd)
        else:  # the last descriptor gives the blocks back
            threading.Thread(target=os.close, args=(fd,), name="remove a body").start()

    def _append(self, piece: bytearray) -> None:
        """Write a piece to the end of the file. Runs in a thread."""
        if self._fd is None:
            self._fd, name = tempfile.mkstemp(prefix="body-", dir=self._folder)
            os.unlink(name)
        self._digest.update(piece)
        write_all(self._fd, piece)
