"""Counts the lines of Python that run between two waits of an event loop."""

import asyncio.events
import sys
from types import FrameType, TracebackType
from typing import Any

MOST_STEPS = 200_000
"""Lines that may run without a wait: they take some 10 ms."""


class TooManyStepsError(AssertionError):
    """More lines ran without a wait than may."""


class StepCounter:
    """Counts the lines that this thread runs, from each callback of a loop on; stops endless work.

    A loop in a comprehension counts too: each jump back to its line is one.
    """

    def __init__(self, most: int = MOST_STEPS) -> None:
        """Count nothing yet."""
        self.most = most
        self.longest = 0
        """The most lines without a wait so far."""
        self._num = 0
        self._before: Any = None

    def __enter__(self) -> "StepCounter":
        """Begin to count."""
        self._before = sys.gettrace()
        sys.settrace(self._trace)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Count no more."""
        sys.settrace(self._before)

    def _trace(self, frame: FrameType, event: str, argument: object) -> Any:
        if event == "call" and frame.f_code is asyncio.events.Handle._run.__code__:
            self._num = 0
        if event == "line":
            self._num += 1
            self.longest = max(self.longest, self._num)
            if self._num > self.most:
                sys.settrace(None)
                raise TooManyStepsError(f"over {self.most} lines ran without a wait")
        return self._trace
