"""Payloads and results that are too large for SQLite to keep well: each in a file of its own."""

import contextlib
import os
import shutil
import threading
from collections.abc import Collection, Mapping
from pathlib import Path

from inferpool.models.files.writing import sync_folder, write_all

INLINE_BYTES = 100_000
"""SQLite reads values up to about 100 KB faster than files (sqlite.org/intern-v-extern-blob)."""


class PartFiles:
    """The files of parts, in a folder for each job. Files are written once and never changed."""

    def __init__(self, folder: Path | None) -> None:
        """Store files in a folder; None: the database stores everything."""
        self._folder = folder
        self._making = threading.Lock()
        """Held until a new folder is durable, so that a folder which is there is."""
        if folder is not None:
            folder.mkdir(mode=0o700, exist_ok=True)
            sync_folder(folder.parent)
            sync_folder(folder)  # the last service may have ended before it did

    def takes(self, content: bytes) -> bool:
        """Return whether a value belongs into a file rather than the database."""
        return self._folder is not None and len(content) > INLINE_BYTES

    def write(self, job: str, contents: Mapping[str, bytes]) -> None:
        """Write files of a job, and return when a power cut cannot undo it.

        A file that is there already is the work of an earlier attempt, and stays as it is.

        Raises:
            OSError: They could not be written; nothing of the new ones is left.
        """
        if not contents:
            return
        folder = self._of(job)
        with self._making:
            if not folder.is_dir():
                folder.mkdir(mode=0o700)
                sync_folder(folder.parent)
        written: list[Path] = []
        try:
            with contextlib.ExitStack() as files:
                descriptors = []
                for name, content in contents.items():
                    with contextlib.suppress(FileExistsError):
                        file = files.enter_context((folder / name).open("xb", buffering=0))
                        written.append(folder / name)
                        write_all(file.fileno(), content)
                        descriptors.append(file.fileno())
                for descriptor in descriptors:  # the disk has begun with all of them
                    os.fsync(descriptor)
            sync_folder(folder)
        except BaseException:
            for path in written:
                with contextlib.suppress(OSError):
                    path.unlink()
            raise

    def read(self, job: str, name: str) -> bytes | None:
        """Return what a file holds; None if it is not there.

        Raises:
            OSError: It cannot be read.
        """
        if self._folder is None:
            return None
        try:
            return (self._of(job) / name).read_bytes()
        except FileNotFoundError:
            return None

    def remove(self, job: str, name: str) -> None:
        """Remove a file of a job, if it is there."""
        if self._folder is not None:
            with contextlib.suppress(OSError):
                (self._of(job) / name).unlink()

    def remove_all(self, job: str) -> None:
        """Remove all files of a job."""
        if self._folder is not None:
            shutil.rmtree(self._of(job), ignore_errors=True)

    def jobs(self) -> Collection[str]:
        """Return the jobs that have a folder."""
        return [] if self._folder is None else [each.name for each in self._folder.iterdir()]

    def keep_only(self, job: str, names: Collection[str]) -> None:
        """Remove all other files of a job."""
        for file in self._of(job).iterdir():
            if file.name not in names:
                file.unlink()

    def _of(self, job: str) -> Path:
        assert self._folder is not None
        return self._folder / job
