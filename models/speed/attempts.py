"""Marks of attempts that may kill their process, as by using up all memory. No torch."""

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
def attempt(folder: Path, key: str, *, fatal: type[Exception] | tuple[()] = ()) -> Iterator[bool]:
    """Begin an attempt that may kill this process, or use so much memory that the kernel does.

    Yields whether to go on: False if an attempt of the last day never ended, or ended with an error
    of the type `fatal`. It may have killed the whole service, and would do so again.
    """
    mark = _mark(folder, key)
    with contextlib.suppress(OSError):
        if time.time() - mark.stat().st_mtime < _HOLDS_S:
            yield False
            return
    with contextlib.suppress(OSError):
        mark.unlink(missing_ok=True)  # it may be a pipe, which nobody reads
        mark.write_text(str(os.getpid()))
    is_over = True
    try:
        yield True
    except fatal:
        is_over = False
        raise
    finally:
        if is_over:
            with contextlib.suppress(OSError):
                mark.unlink()


def forget_attempt(folder: Path, key: str, pid: int) -> None:
    """Forget the attempt of a process that we ended on purpose, and remove what it left."""
    mark = _mark(folder, key)
    with contextlib.suppress(OSError):
        if read_file(mark) != str(pid).encode():
            return  # there is none, or it is another's
        for scratch in folder.glob(f"{key}-*-compiling-*"):
            shutil.rmtree(scratch, ignore_errors=True)
        mark.unlink()


def loading_prefix(stem: str, pid: int) -> str:
    """Return how the name of a mark begins while a process loads a package."""
    return f"{stem}{LOADING}{pid}-"


def forget_load(folder: Path, pid: int) -> None:
    """Forget which package a process was loading when we ended it on purpose."""
    for mark in folder.glob(loading_prefix("*", pid) + "*"):
        shutil.rmtree(mark, ignore_errors=True)


def _mark(folder: Path, key: str) -> Path:
    return folder / f"{key}.begun"
