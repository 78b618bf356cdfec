"""The main process as the only front, and the metrics of fronts."""

import asyncio
import os
from collections.abc import Callable, Collection, Iterator, Sequence

from inferpool.service.api.routes.health import FrontHealth
from inferpool.service.api.wire.budgets import EdgeUse
from inferpool.service.telemetry.metrics import Reading

_LIMITS = ("max_unfinished_bytes", "max_unread_bytes")


class OnlyFront:
    """The main process as the only front: it accepts connections, and has nothing to start."""

    used_bytes = 0
    """Bytes of the arena that other processes use."""

    def __init__(self, *, is_up: bool = True) -> None:
        """Accept connections from now on, or once `up` is set."""
        self.traced = (0, 0)
        """Calls traced by other processes: exported, and dropped."""
        self.connections: Collection[object] = ()
        """Open connections; set once there is a server."""
        self.use: Callable[[], EdgeUse] = EdgeUse
        """Returns what the connections hold; set once there is a server."""
        self.up = asyncio.Event()
        """Set once there is a server."""
        if is_up:
            self.up.set()

    async def until_up(self) -> None:
        """Wait until it accepts connections."""
        await self.up.wait()

    def tell_models(self) -> None:
        """Do nothing: it knows the models."""

    async def until_known(self) -> None:
        """Do nothing: it knows the models."""

    async def stop(self) -> None:
        """Do nothing: it ends with the main process."""

    def health(self) -> list[FrontHealth]:
        """Return its state now."""
        state = "up" if self.up.is_set() else "starting"
        num = len(self.connections)
        return [FrontHealth(name="front/0", state=state, pid=os.getpid(), num_connections=num)]

    def read_gauges(self) -> Iterator[Reading]:
        """Return the metrics of the only front."""
        return read_fronts(self.health(), [self.use()])


def read_fronts(fronts: Sequence[FrontHealth], uses: Sequence[EdgeUse]) -> Iterator[Reading]:
    """Return the metrics of fronts, in order, and of their connections."""
    for number, front in enumerate(fronts):
        labels = (str(number),)
        yield Reading(name="front_up", value=front.state == "up", labels=labels)
        yield Reading(name="front_connections", value=front.num_connections, labels=labels)
        yield Reading(name="front_restarts", value=front.restarts, labels=labels)
    yield Reading(name="connections", value=sum(front.num_connections for front in fronts))
    for name in EdgeUse.__struct_fields__:
        values = [getattr(use, name) for use in uses]
        # All fronts keep to one limit together.
        yield Reading(name=name, value=max(values, default=0) if name in _LIMITS else sum(values))
