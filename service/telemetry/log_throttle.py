"""Log lines that a client or an outage can cause by the thousand. Lives in the event loop."""

import asyncio
from collections.abc import Callable

_PERIOD_S = 1.0


class LogThrottle:
    """Lets the first few lines of each second be written, and then counts the rest."""

    def __init__(self, write_rest: Callable[[int], None], *, most: int = 1) -> None:
        """Begin with none written.

        Args:
            write_rest: Told at the end of a second how many were left out, if any were.
            most: How many may be written in a second.
        """
        self._write_rest = write_rest
        self._most = most
        self._num = 0
        self._timer: asyncio.TimerHandle | None = None

    def may_write(self) -> bool:
        """Count a line, and say whether it may be written."""
        if self._timer is None:
            self._num = 0
            self._timer = asyncio.get_running_loop().call_later(_PERIOD_S, self._end)
        self._num += 1
        return self._num <= self._most

    def _end(self) -> None:
        self._timer = None
        if self._num > self._most:
            self._write_rest(self._num - self._most)
