"""Keeps tests from disturbing each other where several processes run them (`pytest -n 2`).

Tests marked `alone` measure what others change, such as times and the host's shared memory, so no
other test runs meanwhile. Whoever waits long says for whom.
"""

import contextlib
import fcntl
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

_PAUSE_S = 0.02


@contextlib.contextmanager
def turn(
    folder: Path, name: str, *, alone: bool, told_after_s: float = 10, given_up_after_s: float = 600
) -> Iterator[None]:
    """Wait for a turn, and have it for the block.

    Args:
        folder: The same one for all who take turns.
        name: Shown to those who wait for us.
        alone: Nobody else may have a turn meanwhile.
        told_after_s: Seconds until standard error says who is waited for.
        given_up_after_s: Seconds until the wait ends.

    Raises:
        TimeoutError: Others had their turn for all that time; it says who they are.
    """
    with (folder / "queue").open("w") as queue, (folder / "floor").open("w") as floor:
        wait = _Wait(folder, told_after_s, given_up_after_s)
        # Whoever waits for the floor holds the queue: those who share it cannot go on overtaking.
        wait.until_locked(queue, fcntl.LOCK_EX)
        wait.until_locked(floor, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(queue, fcntl.LOCK_UN)
        try:
            with _note(folder, name):
                yield
        finally:
            fcntl.flock(floor, fcntl.LOCK_UN)  # which a forked child may still have open


class _Wait:
    """One wait for all the locks of a turn."""

    def __init__(self, folder: Path, told_after_s: float, given_up_after_s: float) -> None:
        self._folder = folder
        self._begin = time.monotonic()
        self._given_up_after_s = given_up_after_s
        self._tell_after_s = told_after_s

    def until_locked(self, file: IO[str], kind: int) -> None:
        """Wait for a lock of a kind.

        Raises:
            TimeoutError: It was not free in time.
        """
        while not _is_locked(file, kind):
            waited_s = time.monotonic() - self._begin
            if waited_s >= self._tell_after_s:
                self._tell_after_s = float("inf")  # once is enough
                print(  # at once, past what captures the output of tests
                    f"\nwaiting for another process of tests: {_holders(self._folder)}",
                    file=sys.__stderr__,
                    flush=True,
                )
            if waited_s >= self._given_up_after_s:
                raise TimeoutError(
                    f"waited {waited_s:.0f} s for another process of tests: "
                    f"{_holders(self._folder)}; let them end, or end them, and try again"
                )
            time.sleep(_PAUSE_S)


@contextlib.contextmanager
def _note(folder: Path, name: str) -> Iterator[None]:
    """Write down who we are, in a file that we lock. It counts as long as we hold the lock."""
    path = folder / f"{os.getpid()}.turn"
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(name)
        file.flush()
        try:
            yield
        finally:
            path.unlink(missing_ok=True)
            fcntl.flock(file, fcntl.LOCK_UN)


def _holders(folder: Path) -> str:
    """Return the processes that have a turn. Files of processes that were killed are removed."""
    found = []
    for path in sorted(folder.glob("*.turn")):
        with contextlib.suppress(FileNotFoundError), path.open() as file:
            if _is_locked(file, fcntl.LOCK_SH):
                path.unlink(missing_ok=True)
            else:
                found.append(f"process {path.stem} in {file.read()}")
    return ", ".join(found) or "its process is unknown"


def _is_locked(file: IO[str], kind: int) -> bool:
    """Return whether we could lock a file."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
