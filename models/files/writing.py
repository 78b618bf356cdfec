"""Replaces files so that each is there whole or not at all, and locks them. No torch."""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, TextIO


@contextlib.contextmanager
def replacing(path: Path, ending: str = ".new") -> Iterator[Path]:
    """Yield the path of a draft, and rename it to the file once it is on the disk.

    Args:
        path: The file. If anything fails, it is as it was, and the draft is gone.
        ending: The draft's name is the file's with this. The next draft of that name overwrites
            what a kill leaves; so writers that may work at the same time need one each.

    Raises:
        OSError: It cannot be written.
    """
    draft = path.with_name(f"{path.name}{ending}")
    try:
        yield draft
        _sync(draft, os.O_RDONLY)
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Force new names in a folder to the disk (fsync(2): a file's own fsync does not)."""
    _sync(folder, os.O_RDONLY | os.O_DIRECTORY)


def write_all(descriptor: int, content: bytes | bytearray) -> None:
    """Write to an open file until all of the content is there."""
    left = memoryview(content)
    while left:
        left = left[os.write(descriptor, left) :]


def lock(file: int | BinaryIO | TextIO) -> None:
    """Lock an open file, or a folder, for as long as this process has it open.

    Raises:
        BlockingIOError: Another process has locked it.
        OSError: The file system has no locks.
    """
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _sync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
