"""The main process as the only front that there is."""

import asyncio
import os
from collections.abc import Callable, Collection, Iterator

from service.api.budgets import EdgeUse
from service.api.health import FrontHealth
from service.fronts.edge import readings_of
from service.metrics import Reading


class OnlyFront:
    """Takes connections itself; there is nothing to start, to count or to stop."""

    used_bytes = 0
    """Of the arena, by others than the main process."""
    traced = (0, 0)
    """Calls traced by others: exported, and dropped."""

    def __init__(self) -> None:
        self.connections: Collection[object] = ()
        """Those that are open; set once there is a server."""
        self.use: Callable[[], EdgeUse] = EdgeUse
        """What they hold; set with them."""
        self.up = asyncio.Event()
        """Set once there is."""

    def start(self) -> None:
        """It has started."""

    async def until_up(self) -> None:
        """Wait until it takes connections."""
        await self.up.wait()

    def tell_inputs(self) -> None:
        """It knows what the models take."""

    async def stop(self) -> None:
        """It ends with the main process."""

    def health(self) -> list[FrontHealth]:
        """Itself now."""
        state = "up" if self.up.is_set() else "starting"
        num = len(self.connections)
        return [FrontHealth(name="front 0", state=state, pid=os.getpid(), num_connections=num)]

    def read_gauges(self) -> Iterator[Reading]:
        """What `/metrics` shows of it now."""
        num = len(self.connections)
        yield Reading(name="front_up", value=self.up.is_set(), labels=("0",))
        yield Reading(name="front_connections", value=num, labels=("0",))
        yield Reading(name="front_restarts", value=0, labels=("0",))
        yield Reading(name="connections", value=num)
        yield from readings_of([self.use()])
