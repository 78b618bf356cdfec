"""A model whose code writes to every descriptor of its process but its standard streams."""

import contextlib
import mmap
import os
import select

from inferpool.models.item import Features, Item
from tests.fault_model import FaultModel

JUNK = b"\xff" * 64


class ScribblingModel(FaultModel):
    """A `FaultModel` that scribbles on inputs of 666 while it prepares them, maybe in a decoder."""

    prepares_apart = True

    def preprocess(self, item: Item) -> Features:
        features = super().preprocess(item)
        if int(features["x"][0]) == 666:
            scribble()
        return features


def scribble() -> None:
    """Write to each descriptor in every way that it allows."""
    for fd in sorted(map(int, os.listdir("/proc/self/fd"))):
        if fd <= 2 or not is_ready(fd):
            continue
        with contextlib.suppress(OSError):
            os.pwrite(fd, JUNK, 0)
        with contextlib.suppress(OSError):
            os.ftruncate(fd, 0)
        with contextlib.suppress(OSError, ValueError):
            size = os.fstat(fd).st_size
            with mmap.mmap(fd, size) as mapped:
                mapped[:] = JUNK[:1] * size
        with contextlib.suppress(OSError):
            os.write(fd, JUNK)


def is_ready(fd: int) -> bool:
    """Return True if a write would not block."""
    poll = select.poll()
    poll.register(fd, select.POLLOUT)
    return any(events & select.POLLOUT for _, events in poll.poll(0))
