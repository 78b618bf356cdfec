"""What a batch takes of its own, where others are under way: without its waits for them."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class OwnTime:
    """A clock that stands still while its batch waits for another. Used by one thread."""

    def __init__(self, show: Callable[[float], None] = lambda since: None) -> None:
        """Start it.

        Args:
            show: Is told since when it would have run if it had never stood still, whenever that
                changes, in seconds of CLOCK_MONOTONIC; infinity while it stands still.
        """
        self.waited_s = 0.0
        """For how long it has stood still."""
        self._show = show
        self._since = time.monotonic()
        show(self._since)

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """The batch waits for another, whose clock runs."""
        began = time.monotonic()
        self._show(math.inf)
        try:
            yield
        finally:
            self._shift(time.monotonic() - began)

    def take_back(self, seconds: float) -> None:
        """The batch got on, as it turns out, for so much of the time in which it stood still."""
        self._shift(-seconds)

    def progressed(self) -> None:
        """The next part of the batch begins, which has all the time of a batch."""
        self._since = time.monotonic()
        self._show(self._since)

    def end(self) -> None:
        """The batch is done."""
        self._show(math.inf)

    def _shift(self, seconds: float) -> None:
        self.waited_s += seconds
        self._since += seconds
        self._show(self._since)
