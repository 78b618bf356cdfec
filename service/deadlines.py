"""Wakes what is due: one timer per tick rather than one per request."""

import asyncio
from collections.abc import Callable
from math import ceil, floor
from typing import Generic, TypeVar

T = TypeVar("T")

TICK_S = 0.01
"""How late a deadline may be noticed, at most, while the event loop turns."""
_FAR_S = 1.0
"""What is due later than this is kept by coarse ticks, and moved when its time comes near.

Nearly all of it has its answer before. A fine tick for each hundredth of the next half minute would
keep thousands of sets alive, between which the heap of a busy service falls to pieces.
"""
_COARSE_S = 0.5


class Deadlines(Generic[T]):
    """A timing wheel of two levels: things are kept by the tick in which they are due.

    Varghese and Lauck, "Hashed and hierarchical timing wheels", SOSP 1987.
    """

    def __init__(self, on_due: Callable[[T], None]) -> None:
        """Begin empty.

        Args:
            on_due: Told each thing at its deadline; some may have been discarded a moment before.
        """
        self._on_due = on_due
        self._ticks: dict[int, set[T]] = {}
        self._far: dict[int, dict[T, float]] = {}
        """Things and their deadlines, by coarse tick, counted downwards from -1."""

    def add(self, thing: T, deadline: float) -> int:
        """Remember a thing; returns the tick that `discard` wants to know."""
        loop = asyncio.get_running_loop()
        if deadline - loop.time() > _FAR_S:
            tick = -1 - floor(deadline / _COARSE_S)
            try:
                self._far[tick][thing] = deadline
            except KeyError:
                self._far[tick] = {thing: deadline}
                # Half a second before the first of them can be due.
                loop.call_at((-2 - tick) * _COARSE_S, self._come_near, tick)
            return tick
        tick = ceil(deadline / TICK_S)
        try:
            self._ticks[tick].add(thing)
        except KeyError:
            self._ticks[tick] = {thing}
            loop.call_at(tick * TICK_S, self._fire, tick)
        return tick

    def discard(self, thing: T, tick: int) -> None:
        """Forget a thing, if it has not been due yet, nor near to it."""
        if tick < 0:
            far = self._far.get(tick)
            if far is not None:
                far.pop(thing, None)
            return
        things = self._ticks.get(tick)
        if things is not None:
            things.discard(thing)

    def _come_near(self, tick: int) -> None:
        for thing, deadline in self._far.pop(tick).items():
            self.add(thing, deadline)

    def _fire(self, tick: int) -> None:
        for thing in self._ticks.pop(tick):
            self._on_due(thing)
