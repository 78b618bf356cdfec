"""Marks of attempts that may take all the memory there is. Without torch."""

import contextlib
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from inferpool.models.files.reading import read_file

LOADING = "-loading-"
_HOLDS_S = 24 * 3600.0


@contextlib.contextmanager
def attempt(folder: Path, key: str) -> Iterator[bool]:
    """Begin what may take so much memory that the kernel ends us and others.

    Yields whether to go on: not if an attempt within the last day did not come to an end. Where
    that took the whole service with it, the next one would do so again.
    """
    mark = _mark(folder, key)
    with contextlib.suppress(OSError):
        if time.time() - mark.stat().st_mtime < _HOLDS_S:
            yield False
            return
    with contextlib.suppress(OSError):
        mark.unlink(missing_ok=True)  # it may be a pipe, which nobody reads
        mark.write_text(str(os.getpid()))
    try:
        yield True
    finally:
        with contextlib.suppress(OSError):
            mark.unlink()


def forget_attempt(folder: Path, key: str, pid: int) -> None:
    """Have an attempt not count whose process was ended on purpose, and clear up after it."""
    mark = _mark(folder, key)
    with contextlib.suppress(OSError):
        if read_file(mark) != str(pid).encode():
            return  # there is none, or it is another's
        for scratch in folder.glob(f"{key}-*-compiling-*"):
            shutil.rmtree(scratch, ignore_errors=True)
        mark.unlink()


def loading_prefix(stem: str, pid: int) -> str:
    """How the mark begins of a process that loads a package, a folder beside it."""
    return f"{stem}{LOADING}{pid}-"


def forget_load(folder: Path, pid: int) -> None:
    """Have a package that a process was loading not be blamed for its end, which was on purpose."""
    for mark in folder.glob(loading_prefix("*", pid) + "*"):
        shutil.rmtree(mark, ignore_errors=True)


def _mark(folder: Path, key: str) -> Path:
    return folder / f"{key}.begun"
