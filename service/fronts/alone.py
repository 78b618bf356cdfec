"""The main process as the only front that there is, and what is shown of any fronts."""

import asyncio
import os
from collections.abc import Callable, Collection, Iterator, Sequence

from inferpool.service.api.routes.health import FrontHealth
from inferpool.service.api.wire.budgets import EdgeUse
from inferpool.service.telemetry.metrics import Reading


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
        return [FrontHealth(name="front/0", state=state, pid=os.getpid(), num_connections=num)]

    def read_gauges(self) -> Iterator[Reading]:
        """What `/metrics` shows of it now."""
        return read_fronts(self.health(), [self.use()])


def read_fronts(fronts: Sequence[FrontHealth], uses: Sequence[EdgeUse]) -> Iterator[Reading]:
    """What `/metrics` shows of fronts.

    Args:
        fronts: Each of them, in order.
        uses: What their connections hold.
    """
    for number, front in enumerate(fronts):
        labels = (str(number),)
        yield Reading(name="front_up", value=front.state == "up", labels=labels)
        yield Reading(name="front_connections", value=front.num_connections, labels=labels)
        yield Reading(name="front_restarts", value=front.restarts, labels=labels)
    yield Reading(name="connections", value=sum(front.num_connections for front in fronts))
    for name, attribute in (
        ("unfinished_bytes", "unfinished_bytes"),
        ("max_unfinished_bytes", "max_unfinished_bytes"),
        ("unread_bytes", "unread_bytes"),
        ("max_unread_bytes", "max_unread_bytes"),
        ("unfinished_refused", "num_refused"),
        ("readers_cut", "num_cut"),
    ):
        yield Reading(name=name, value=sum(getattr(use, attribute) for use in uses))
