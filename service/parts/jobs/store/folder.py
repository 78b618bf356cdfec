"""Holds the folder of a store, so that one service at a time uses it."""

import contextlib
import os
import weakref
from pathlib import Path

from inferpool.models.files.writing import lock, sync_folder
from inferpool.service.errors import StartError

_LOCK = "in-use"


class HeldFolder:
    """A folder that no other service has until this is closed, or its process ends."""

    def __init__(self, path: Path) -> None:
        """Create the folder, and lock it.

        Raises:
            OSError: It cannot be made.
            StartError: Another service has it.
        """
        self.path = path
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        for above in path.absolute().parents:
            with contextlib.suppress(OSError):  # one that may not be read was not made here
                sync_folder(above)
        held = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self.close = weakref.finalize(self, os.close, held)
        try:
            lock(held)
        except BlockingIOError:
            self.close()
            raise StartError(
                f"another service keeps its jobs in {path}; name another folder in job_store, or "
                "a PostgreSQL database, which several services can share"
            ) from None
        self._lock = os.fstat(held)

    @property
    def is_there(self) -> bool:
        """The folder is where it was, so that what is written to it can be found again."""
        return _is_same(self.path / _LOCK, self._lock)


class FileOnDisk:
    """An open file that another program may remove."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._found = path.stat()

    @property
    def is_there(self) -> bool:
        """It is where it was."""
        return _is_same(self.path, self._found)

    @property
    def may_be_opened(self) -> bool:
        """There is one again, or an empty folder on the same disk.

        An empty folder on another disk is what an unmounted one leaves. One with other files lacks
        this one, which may still come back.
        """
        folder = self.path.parent
        try:
            if self.path.exists():
                return True
            is_empty = {each.name for each in folder.iterdir()} <= {_LOCK}
            return is_empty and folder.stat().st_dev == self._found.st_dev
        except OSError:
            return False


def _is_same(path: Path, found: os.stat_result) -> bool:
    try:
        return os.path.samestat(path.stat(), found)
    except OSError:
        return False
