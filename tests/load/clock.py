"""An event loop that wakes in time: open loops are only as good as their timers."""

import asyncio
import select
import selectors
import sys

_FD_LIMIT = 1024
"""What select(2) can watch."""

if sys.platform == "linux":

    class PreciseSelector(selectors.EpollSelector):
        """Waits to the microsecond, where epoll_wait rounds up to a millisecond.

        A latency counted from the intended moment would otherwise have up to 1 ms of our own in it.
        """

        def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
            """As the base class does. An epoll is itself a file that select(2) can wait for."""
            if timeout is not None and 0 < timeout < 0.05 and self.fileno() < _FD_LIMIT:
                select.select([self.fileno()], [], [], timeout)
                timeout = 0
            return super().select(timeout)

else:  # kqueue waits to the nanosecond
    PreciseSelector = selectors.DefaultSelector


def precise_loop() -> asyncio.AbstractEventLoop:
    """A new event loop with such a selector."""
    return asyncio.SelectorEventLoop(PreciseSelector())
