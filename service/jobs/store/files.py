"""Payloads and results that are too large for SQLite to keep well: each in a file of its own."""

import contextlib
import os
import shutil
from collections.abc import Collection
from pathlib import Path

INLINE_BYTES = 64 * 1024
"""SQLite reads values up to about 100 KB faster than files (sqlite.org/intern-v-extern-blob)."""


class PartFiles:
    """The files of parts, in a folder for each job. Files are written once and never changed."""

    def __init__(self, folder: Path | None) -> None:
        """Keep files in a folder; None: the database keeps everything."""
        self._folder = folder
        if folder is not None:
            folder.mkdir(mode=0o700, exist_ok=True)

    def takes(self, content: bytes) -> bool:
        """Return whether a value belongs into a file rather than the database."""
        return self._folder is not None and len(content) > INLINE_BYTES

    def write(self, job: int, name: str, content: bytes) -> None:
        """Write a file, and return when a power cut cannot undo it.

        Raises:
            OSError: It could not be written; nothing of it is left.
        """
        folder = self._of(job)
        if not folder.is_dir():
            folder.mkdir(mode=0o700)
            _sync_folder(folder.parent)
        path = folder / name
        try:
            with path.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            _sync_folder(folder)
        except OSError:
            path.unlink(missing_ok=True)
            raise

    def read(self, job: int, name: str) -> bytes:
        """Return what a file holds."""
        return (self._of(job) / name).read_bytes()

    def remove(self, job: int, name: str) -> None:
        """Remove a file of a job, if it is there."""
        if self._folder is not None:
            with contextlib.suppress(OSError):
                (self._of(job) / name).unlink()

    def remove_all(self, job: int) -> None:
        """Remove all files of a job."""
        if self._folder is not None:
            shutil.rmtree(self._of(job), ignore_errors=True)

    def keep_only(self, jobs: Collection[int]) -> None:
        """Remove the files of all other jobs."""
        if self._folder is None:
            return
        for folder in self._folder.iterdir():
            if not folder.name.isdecimal() or int(folder.name) not in jobs:
                shutil.rmtree(folder, ignore_errors=True)

    def _of(self, job: int) -> Path:
        assert self._folder is not None
        return self._folder / str(job)


def _sync_folder(folder: Path) -> None:
    """Make new names in a folder last (fsync(2): a file's own fsync does not)."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
