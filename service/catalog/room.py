"""Sees to it that versions which are being loaded fit into memory together.

Memory is counted by place: that of the host, and that of each GPU.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from math import inf

from inferpool.models.spec import Placement
from inferpool.service.catalog.catalog import Catalog, ModelVersion
from inferpool.service.errors import InvalidInputError, VersionRefusedError
from inferpool.service.queue.pool import Pool
from inferpool.service.settings.model import ModelSettings
from inferpool.workers.config import WorkerConfig
from inferpool.workers.host.device_memory import HOST
from inferpool.workers.host.devices import DeviceError
from inferpool.workers.host.engine import WorkerHandle

logger = logging.getLogger(__name__)

_NUM_AT_ONCE = 4
"""Versions that are loaded at once: each takes cores from those that serve."""

Memory = Mapping[str, int]
"""Bytes by place; see `DeviceMemory`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedWorkers:
    """The workers of a version that is to be loaded."""

    configs: Sequence[WorkerConfig]
    needs: Sequence[Memory]
    """The memory that each needs."""


class MemoryShare:
    """Memory that is kept for workers that load."""

    def __init__(self, room: "Room", needs: Sequence[Memory]) -> None:
        """Keep nothing yet for workers that need so much."""
        self.needs = needs
        self.num = 0
        """The workers that there is room for, counted from the first on."""
        self.left: Memory = {}
        """Free memory beside what is kept for others that load."""
        self._room = room

    @property
    def taken(self) -> Memory:
        """The memory of the workers that there is room for."""
        return total_of(self.needs[: self.num])

    async def look(self) -> None:
        """Look how many there is room for now."""
        self.left = await self._room.left_beside(self)
        self.num = 0
        while self.num < len(self.needs) and fits(total_of(self.needs[: self.num + 1]), self.left):
            self.num += 1


class Room:
    """Gives out memory to versions while they load. Lives in the event loop."""

    def __init__(
        self,
        estimate: Callable[[ModelSettings, Placement], Memory],
        free: Callable[[], Memory],
        used_by: Callable[[WorkerHandle], Memory],
    ) -> None:
        """Give out nothing yet.

        Args:
            estimate: Returns what a worker will need at least, before it is loaded.
            free: Returns what is free. Blocks.
            used_by: Returns what a worker has. Blocks.
        """
        self._estimate = estimate
        self._free = free
        self._used_by = used_by
        self._shares: list[MemoryShare] = []
        self._returned = asyncio.Condition()

    async def plan(self, catalog: Catalog, name: str, model: ModelSettings) -> PlannedWorkers:
        """Plan the workers of a version. Those of the one that serves show what one takes.

        Raises:
            InvalidInputError: A requested device is missing.
        """
        try:
            configs = catalog.plan(name, model)
        except DeviceError as error:
            raise InvalidInputError(str(error)) from error
        known = await self.used_by(catalog.serving[name]) if name in catalog.serving else []
        return PlannedWorkers(
            configs=configs,
            needs=[_most_of(self._estimate(model, each.placement), known) for each in configs],
        )

    async def used_by(self, pool: Pool) -> list[Memory]:
        """Return what each ready worker of a version has."""
        workers = [slot.handle for slot in pool.slots if slot.handle is not None]
        return await asyncio.to_thread(lambda: [self._used_by(worker) for worker in workers])

    @asynccontextmanager
    async def share(self, needs: Sequence[Memory]) -> AsyncIterator[MemoryShare]:
        """Wait until all workers fit in beside the others that load, or nothing else loads.

        Yields:
            What is kept for them. There may be room for fewer of them, or for none.
        """
        share = MemoryShare(self, needs)
        async with self._returned:
            while True:
                await share.look()
                fits_beside = share.num == len(needs) and len(self._shares) < _NUM_AT_ONCE
                if fits_beside or not self._shares:
                    break
                await self._returned.wait()
            self._shares.append(share)
        try:
            yield share
        finally:
            self._shares.remove(share)
            async with self._returned:
                self._returned.notify_all()

    @asynccontextmanager
    async def taken(
        self, catalog: Catalog, name: str, model: ModelSettings
    ) -> AsyncIterator[PlannedWorkers]:
        """Keep the memory of a version while it loads, as `share` does.

        Raises:
            InvalidInputError: A requested device is missing.
            VersionRefusedError: It doesn't fit, even if nothing else loads; has the figures.
        """
        plan = await self.plan(catalog, name, model)
        async with self.share(plan.needs) as share:
            if share.num < len(plan.needs):
                raise refusal(name, plan.needs, share.left)
            yield plan

    async def needs(
        self, catalog: Catalog, name: str, model: ModelSettings, kept: ModelVersion
    ) -> bool:
        """Return whether a version fits in only if one that is kept leaves."""
        try:
            plan = await self.plan(catalog, name, model)
        except InvalidInputError:
            return False  # it is refused in any case
        needed, left = total_of(plan.needs), await self.left_beside(None)
        theirs = await self.used_by(kept.pool)
        return not fits(needed, left) and fits(needed, total_of([left, *theirs]))

    async def left_beside(self, share: MemoryShare | None) -> Memory:
        """Return what is free beside what is kept for others."""
        free = await asyncio.to_thread(self._free)
        kept = total_of([each.taken for each in self._shares if each is not share])
        return {place: num - kept.get(place, 0) for place, num in free.items()}


def total_of(memories: Sequence[Memory]) -> Memory:
    """Add up memory by place."""
    total: Counter[str] = Counter()
    for memory in memories:
        total.update(memory)
    return total


def fits(needed: Memory, left: Memory) -> bool:
    """Return whether there is enough in each place. A place that is not known has enough."""
    return all(num <= left.get(place, inf) for place, num in needed.items())


def refusal(
    name: str,
    needs: Sequence[Memory],
    left: Memory,
    why: str = "beside what serves",
    cure: str = "",
) -> VersionRefusedError:
    """Make the error for workers that do not fit, with the figures; and log it."""
    needed = total_of(needs)
    place = next(place for place in needed if needed[place] > left.get(place, inf))
    workers = f"{len(needs)} worker{'s' if len(needs) != 1 else ''}"
    where = "" if place == HOST else f" of GPU {place}"
    error = VersionRefusedError(
        f"it does not fit into memory: its {workers} need about {needed[place] / 2**20:,.0f} MiB"
        f"{where} {why}, and {left[place] / 2**20:,.0f} MiB are free; {cure}lower replicas, "
        "remove a model, or raise the container's limit"
    )
    error.figures = {"needed_bytes": needed[place], "free_bytes": left[place]}
    logger.warning("%s: a version is refused: %s", name, error.message)
    return error


def _most_of(estimate: Memory, known: Sequence[Memory]) -> Memory:
    """Return the most that a worker may need in each place that it uses."""
    most = {place: max(each.get(place, 0) for each in known) for place in estimate} if known else {}
    return {place: max(num, most.get(place, 0)) for place, num in estimate.items()}
