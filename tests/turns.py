"""Which tests may run beside which, where several processes run them (`pytest -n 2`).

Those marked `alone` look at what others change, such as times and the host's shared memory: none of
the others runs meanwhile.
"""

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def turn(folder: Path, *, alone: bool) -> Iterator[None]:
    """Wait for one's turn, and have it.

    Args:
        folder: The same one for all who take turns.
        alone: Whether nobody else may have a turn meanwhile.
    """
    with (folder / "queue").open("w") as queue, (folder / "floor").open("w") as floor:
        # Whoever waits for the floor holds the queue: those who share it cannot go on overtaking.
        fcntl.flock(queue, fcntl.LOCK_EX)
        fcntl.flock(floor, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(queue, fcntl.LOCK_UN)
        try:
            yield
        finally:
            fcntl.flock(floor, fcntl.LOCK_UN)  # which a forked child may still have open
