"""Wakes what is due: one timer per tick rather than one per request."""

import asyncio
from collections.abc import Callable
from math import ceil
from typing import Generic, TypeVar

T = TypeVar("T")

TICK_S = 0.01
"""How late a deadline may be noticed, at most, while the event loop turns."""


class Deadlines(Generic[T]):
    """A timing wheel: things are kept by the tick in which they are due.

    Varghese and Lauck, "Hashed and hierarchical timing wheels", SOSP 1987.
    """

    def __init__(self, on_due: Callable[[T], None]) -> None:
        self._on_due = on_due
        self._ticks: dict[int, set[T]] = {}

    def add(self, thing: T, deadline: float) -> int:
        """Remember a thing; returns the tick that `discard` wants to know."""
        tick = ceil(deadline / TICK_S)
        try:
            self._ticks[tick].add(thing)
        except KeyError:
            self._ticks[tick] = {thing}
            asyncio.get_running_loop().call_at(tick * TICK_S, self._fire, tick)
        return tick

    def discard(self, thing: T, tick: int) -> None:
        """Forget a thing, if it has not been due yet."""
        things = self._ticks.get(tick)
        if things is not None:
            things.discard(thing)

    def _fire(self, tick: int) -> None:
        for thing in self._ticks.pop(tick):
            self._on_due(thing)
