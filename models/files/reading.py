"""Reads small files that other programs wrote, and never waits forever. No torch."""

import errno
import os
import select
import stat
import time
from pathlib import Path

_MAX_BYTES = 16 << 20
"""More than any file of settings, keys or verdicts has."""
_PIECE_BYTES = 1 << 16


def read_file(path: Path, *, wait_s: float = 0.0) -> bytes:
    """Read a whole file, or what another process writes into a pipe.

    Args:
        path: Path of the file.
        wait_s: Longest wait for a pipe. By default pipes are refused.

    Raises:
        OSError: It cannot be read: it is a folder, a link to nothing, a pipe that nobody writes
            into,
            or too large. `strerror` says which.
    """
    try:
        # Without O_NONBLOCK, to open a pipe waits until somebody writes into it.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    except FileNotFoundError as error:
        if path.is_symlink():
            reason = f"it is a link to {os.readlink(path)}, which is not there"
            raise FileNotFoundError(error.errno, reason) from None
        raise
    try:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, "it is a folder, not a file")
        if not stat.S_ISREG(mode) and not wait_s:
            raise OSError(errno.EINVAL, "it is no regular file")
        return _read_all(descriptor, None if stat.S_ISREG(mode) else wait_s)
    finally:
        os.close(descriptor)


def _read_all(descriptor: int, wait_s: float | None) -> bytes:
    pieces: list[bytes] = []
    num_bytes = 0
    until = time.monotonic() + (wait_s or 0.0)
    while True:
        if wait_s is not None:
            left_s = max(0.0, until - time.monotonic())
            if not select.select([descriptor], [], [], left_s)[0]:
                reason = f"it is a pipe, and nobody wrote all of it within {wait_s:g} s"
                raise TimeoutError(errno.ETIMEDOUT, reason)
        piece = os.read(descriptor, _PIECE_BYTES)
        if not piece:
            return b"".join(pieces)
        pieces.append(piece)
        num_bytes += len(piece)
        if num_bytes > _MAX_BYTES:
            raise OSError(errno.EFBIG, f"it has more than {_MAX_BYTES >> 20} MiB")
