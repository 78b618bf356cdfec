"""Marks of attempts that may kill their process, as by using up all memory. No torch."""

import contextlib
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from inferpool.models.files.reading import read_file
from inferpool.models.files.writing import lock

LOADING = "-loading-"
_HOLDS_S = 24 * 3600.0


@contextlib.contextmanager
def attempt(
    folder: Path | None, key: str, *, fatal: type[Exception] | tuple[()] = ()
) -> Iterator[bool]:
    """Mark an attempt that may kill this process, such as one that uses up all memory.

    Yields whether to go on: False if an attempt of the last day never ended, or ended with an error
    of the type `fatal`. It may have killed the whole service, and would do so again. Without a
    folder nobody knows of earlier ones.
    """
    if folder is None:
        yield True
        return
    if _is_marked(folder, key):
        yield False
        return
    mark = _mark(folder, key)
    descriptor = None
    with contextlib.suppress(OSError):
        mark.unlink(missing_ok=True)  # it may be a pipe, which nobody reads
        mark.write_text(str(os.getpid()))
        descriptor = os.open(mark, os.O_RDONLY | os.O_CLOEXEC)
        lock(descriptor)  # as long as this process lives
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
        if descriptor is not None:
            os.close(descriptor)


def was_killed(folder: Path | None, key: str) -> bool:
    """Return whether the process of an attempt of the last day ended before the attempt."""
    return folder is not None and _is_marked(folder, key) and is_left(_mark(folder, key))


def is_left(mark: Path) -> bool:
    """Return whether the process that made a mark is gone; each holds a lock on its own."""
    try:
        descriptor = os.open(mark, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        lock(descriptor)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


def _is_marked(folder: Path, key: str) -> bool:
    """Return whether an attempt of the last day has not ended."""
    with contextlib.suppress(OSError):
        return time.time() - _mark(folder, key).stat().st_mtime < _HOLDS_S
    return False


def forget_attempts(folder: Path, key: str, pid: int) -> None:
    """Remove the marks of attempts that we ended on purpose, and what their process left.

    Args:
        folder: Folder of the marks.
        key: How the keys of these attempts begin.
        pid: The process.
    """
    for mark in folder.glob(f"{key}*.begun"):
        with contextlib.suppress(OSError):
            if read_file(mark) != str(pid).encode():
                continue  # it belongs to another process
            for scratch in folder.glob(f"{key}-*-compiling-*"):
                shutil.rmtree(scratch, ignore_errors=True)
            mark.unlink()


def loading_prefix(stem: str, pid: int) -> str:
    """Return how the name of a mark begins while a process loads a package."""
    return f"{stem}{LOADING}{pid}-"


def forget_load(folder: Path, pid: int) -> None:
    """Remove the mark of a package that a process was loading when we ended it on purpose."""
    for mark in folder.glob(loading_prefix("*", pid) + "*"):
        shutil.rmtree(mark, ignore_errors=True)


def _mark(folder: Path, key: str) -> Path:
    return folder / f"{key}.begun"
