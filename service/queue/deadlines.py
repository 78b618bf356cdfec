"""Wakes what is due: one timer per tick rather than one per request."""

import asyncio
from collections.abc import Callable, Iterable
from math import ceil
from typing import Generic, Protocol, TypeVar

from inferpool.workers.messages import ItemRef

TICK_S = 0.01
"""How late a deadline may be noticed, at most, while the event loop turns."""
FAR_S = 1.0
"""What is due later than this is left alone until its time comes near.

Nearly all of it has its answer before, and was never touched.
"""
_LOOK_S = 0.5
NO_TICK = 0
"""Of a thing that is in no tick (yet)."""


class Due(Protocol):
    """What has a deadline."""

    ref: ItemRef
    """Its deadline is in seconds of the event loop's clock."""
    tick: int
    """Written here; `NO_TICK` (0) at first."""


T = TypeVar("T", bound=Due)


class Deadlines(Generic[T]):
    """A timing wheel: things are kept by the tick in which they are due, once that is near.

    Varghese and Lauck, "Hashed and hierarchical timing wheels", SOSP 1987. Those that are far off
    are not kept: every half second all that is waiting is looked through for what has come near,
    which costs less than to put each into a second wheel and to take it out again.
    """

    def __init__(self, on_due: Callable[[T], None], waiting: Callable[[], Iterable[T]]) -> None:
        """Begin empty.

        Args:
            on_due: Told each thing at its deadline; some may have been discarded a moment before.
            waiting: Names everything that was added and not discarded yet; more does no harm.
        """
        self._on_due = on_due
        self._waiting = waiting
        self._loop = asyncio.get_running_loop()
        self._ticks: dict[int, set[T]] = {}
        self._is_looking = False

    def add(self, thing: T, now: float) -> None:
        """Remember a thing."""
        if thing.ref.deadline - now <= FAR_S:
            self._keep(thing)
        elif not self._is_looking:
            self._is_looking = True
            self._loop.call_later(_LOOK_S, self._look)

    def discard(self, thing: T) -> None:
        """Forget a thing, if it has not been due yet, nor is far from it."""
        things = self._ticks.get(thing.tick)
        if things is not None:
            things.discard(thing)

    def _keep(self, thing: T) -> None:
        thing.tick = tick = ceil(thing.ref.deadline / TICK_S)
        things = self._ticks.get(tick)
        if things is None:
            things = self._ticks[tick] = set()
            self._loop.call_at(tick * TICK_S, self._fire, tick)
        things.add(thing)

    def _look(self) -> None:
        self._is_looking = False
        near = self._loop.time() + FAR_S
        for thing in self._waiting():
            if thing.tick != NO_TICK:
                continue
            if thing.ref.deadline <= near:
                self._keep(thing)
            elif not self._is_looking:
                self._is_looking = True
                self._loop.call_later(_LOOK_S, self._look)

    def _fire(self, tick: int) -> None:
        for thing in self._ticks.pop(tick):
            self._on_due(thing)
