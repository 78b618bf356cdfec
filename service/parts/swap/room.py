"""Ensures that versions which are being loaded fit into memory together.

Memory is counted by place: that of the host, and that of each GPU.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache

from inferpool.models.spec import Placement
from inferpool.service.catalog.catalog import Catalog, ModelVersion
from inferpool.service.errors import (
    InvalidInputError,
    OverloadedError,
    ServiceError,
    UnavailableError,
    VersionRefusedError,
)
from inferpool.service.parts.swap.memory import (
    Memory,
    fits,
    most_of,
    num_fitting,
    refusal,
    refusal_for_processes,
    total_of,
)
from inferpool.service.parts.swap.requests import SwapOptions
from inferpool.service.queue.instance import Buffer
from inferpool.service.queue.pool import Pool
from inferpool.service.settings import unloadable
from inferpool.service.settings.model import ModelSettings
from inferpool.workers.host.devices import DeviceError
from inferpool.workers.host.engine import WorkerHandle
from inferpool.workers.host.slots import WorkerSlot
from inferpool.workers.shared.config import WorkerConfig
from inferpool.workers.shared.messages import ItemRef

logger = logging.getLogger(__name__)

_NUM_AT_ONCE = 4
"""Versions that are loaded at once: each uses cores of those that serve."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedWorkers:
    """The workers of a version that is to be loaded."""

    configs: Sequence[WorkerConfig]
    needs: Sequence[Memory]
    """The memory that each needs."""


class MemoryShare:
    """Memory that is kept for workers that load."""

    def __init__(self, room: "Room", needs: Sequence[Memory]) -> None:
        """Begin with nothing kept for workers that need this memory."""
        self.needs = needs
        self.num = 0
        """The workers that there is room for, counted from the first on."""
        self.left: Memory = {}
        """Free memory beside what is kept for others that load."""
        self.returning: Callable[[], Awaitable[Sequence[Memory]]] = _none
        """Tells what workers need that have died, and will be started again."""
        self._room = room

    @property
    def taken(self) -> Memory:
        """The memory of the workers that there is room for."""
        return total_of(self.needs[: self.num])

    async def look(self) -> None:
        """Measure how many there is room for now."""
        left = await self._room.left_beside(self)
        returning = total_of(await self.returning())  # read last: a worker may die meanwhile
        self.left = {place: num - returning.get(place, 0) for place, num in left.items()}
        self.num = num_fitting(self.needs, self.left)


class Room:
    """Reserves memory for versions while they load. Lives in the event loop."""

    def __init__(
        self,
        estimate: Callable[[ModelSettings, Placement], Memory],
        free: Callable[[], Memory],
        used_by: Callable[[WorkerHandle], Memory],
        processes_left: Callable[[], int | None] = lambda: None,
    ) -> None:
        """Begin with nothing given out.

        Args:
            estimate: Returns what a worker will need at least, before it is loaded.
            free: Returns what is free. Blocks.
            used_by: Returns what a worker has. Blocks.
            processes_left: Returns the processes and threads that may still be started; None if
                nothing limits them. Blocks.
        """
        self._estimate = estimate
        self._free = free
        self._used_by = used_by
        self._processes_left = processes_left
        self.is_known = True
        """The figures are known; if not, everything fits."""
        self._shares: list[MemoryShare] = []
        self._returned = asyncio.Condition()
        self._looking = asyncio.Lock()

    @classmethod
    def of_other_hosts(cls) -> "Room":
        """Return the room on hosts of a cluster. Their memory is not known here.

        A version is loaded beside the one that serves as if both fitted. If a worker does not come
        up because they do not, the version is refused, and the one that serves goes on. With
        `old_first` the former version leaves before, on all hosts at once.
        """
        room = cls(lambda model, placement: {}, dict, lambda worker: {})
        room.is_known = False
        return room

    async def plan(self, catalog: Catalog, name: str, model: ModelSettings) -> PlannedWorkers:
        """Plan the workers of a version. Those of the one that serves show what one takes.

        Raises:
            InvalidInputError: A requested device is missing, or the model cannot be loaded.
            UnavailableError: No host of the cluster is connected.
            VersionRefusedError: There are too few processes for its workers.
        """
        await self._check_processes(catalog, name, model)
        if self.is_known:  # else the files are on other hosts
            async with self._looking:  # it turns warnings off and on for the whole process
                found = await asyncio.to_thread(unloadable.problem_of, model)
            if found is not None:
                raise InvalidInputError(f"{found[0]}: {found[1]}")
        try:
            configs = catalog.plan(name, model)
        except DeviceError as error:
            raise InvalidInputError(str(error)) from error
        used = await self.used_by(catalog.serving[name]) if name in catalog.serving else {}
        known = [each for each in used.values() if each]

        @cache
        def need(placement: Placement) -> Memory:
            return most_of(self._estimate(model, placement), known)

        needs = [need(config.placement) for config in configs]
        return PlannedWorkers(configs=configs, needs=needs)

    async def used_by(self, pool: Pool) -> Mapping[int, Memory]:
        """Return what each worker of a version has, by slot: nothing if it isn't there."""
        workers = {slot.id.slot: slot.handle for slot in pool.slots}

        def read() -> dict[int, Memory]:
            return {n: self._used_by(each) if each else {} for n, each in workers.items()}

        return await asyncio.to_thread(read)

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
        """Reserve the memory of a version while it loads, as `share` does.

        Raises:
            InvalidInputError: A requested device is missing, or the model cannot be loaded.
            VersionRefusedError: It doesn't fit, even if nothing else loads; has the figures.
        """
        await self._check_memory(name, model)
        plan = await self.plan(catalog, name, model)
        async with self.share(plan.needs) as share:
            if share.num < len(plan.needs):
                raise refusal(name, plan.needs, share.left)
            yield plan

    async def _check_processes(self, catalog: Catalog, name: str, model: ModelSettings) -> None:
        """Check the numbers that the settings ask for before anything is planned for each of them.

        The workers of the version that serves may leave before, and count as free.

        Raises:
            VersionRefusedError: There are too few processes for them.
        """
        left = await asyncio.to_thread(self._processes_left)
        if left is not None and name in catalog.serving:
            left += catalog.version(name).settings.least_processes
        if left is not None and left < model.least_processes:
            raise refusal_for_processes(name, model.least_processes, left)

    async def _check_memory(self, name: str, model: ModelSettings) -> None:
        """Check the least memory of a new model before anything is planned for its workers.

        Raises:
            VersionRefusedError: There is too little.
        """
        if model.replicas == "auto" or self._shares:  # those may give memory back
            return
        worker = Placement(devices=("cpu",) * model.least_ranks)
        bare = model.model_copy(update={"weights": "none"})  # they may go to a GPU
        least = [self._estimate(bare, worker)] * model.replicas
        free = await self.left_beside(None)
        if not fits(total_of(least), free):
            raise refusal(name, least, free)

    async def needs(
        self, catalog: Catalog, name: str, model: ModelSettings, kept: ModelVersion
    ) -> bool:
        """Return whether a version fits in only if one that is kept leaves."""
        try:
            plan = await self.plan(catalog, name, model)
        except ServiceError:
            return False  # it is refused in any case
        needed, left = total_of(plan.needs), await self.left_beside(None)
        theirs = await self.used_by(kept.pool)
        return not fits(needed, left) and fits(needed, total_of([left, *theirs.values()]))

    async def left_beside(self, share: MemoryShare | None) -> Memory:
        """Return what is free beside what is kept for others."""
        free = await asyncio.to_thread(self._free)
        kept = total_of([each.taken for each in self._shares if each is not share])
        return {place: num - kept.get(place, 0) for place, num in free.items()}


class Succession:
    """Loads a version beside the one that serves, or worker by worker where memory is short.

    Where both do not fit, the one that serves gives up workers, the last one only if it was asked
    for. Lives in the event loop.
    """

    def __init__(
        self, catalog: Catalog, room: Room, old: ModelVersion, options: SwapOptions, grace_s: float
    ) -> None:
        """Load nothing yet.

        Args:
            catalog: The versions.
            room: Reserves memory.
            old: The version that serves.
            options: Decide whether it may leave first.
            grace_s: How long a worker may take to finish what it holds.
        """
        self.is_tight = False
        """Memory is too short for both versions as a whole."""
        self.has_gap = False
        """The former version leaves before there is another; calls wait meanwhile."""
        self._catalog = catalog
        self._room = room
        self._old = old
        self._options = options
        self._grace_s = grace_s
        self._new: ModelVersion | None = None
        self._needs: Sequence[Memory] = ()
        self._num_begun = 0
        self._gave_up: list[WorkerSlot] = []

    @property
    def text(self) -> str:
        """How it is loaded, for people; empty if both fit into memory."""
        if self.has_gap:
            why = ", since memory is too short for both" if self._room.is_known else ""
            return f"version {self._old.number} leaves first{why}"
        return "worker by worker, since memory is too short for both" if self.is_tight else ""

    async def plan(self, share: MemoryShare) -> None:
        """Find out how there can be room for the new version; change nothing.

        Args:
            share: What is kept for all its workers.

        Raises:
            VersionRefusedError: There can be no room; has the figures.
        """
        self._needs = share.needs
        if not self._room.is_known:
            needs_both = self._options.policy in ("shadow", "canary")
            self.is_tight = self.has_gap = self._options.old_first and not needs_both
            return
        self.is_tight = share.num < len(share.needs)
        if not self.is_tight:
            return
        name, number = self._old.name, self._old.number
        used = await self._room.used_by(self._old.pool)
        most = total_of([share.left, *used.values()])
        if not fits(total_of(share.needs), most):
            raise refusal(name, share.needs, most, f"even once version {number} has left")
        first, beside = share.needs[:1], [used[slot.id.slot] for slot in self._spare()]
        if share.num or fits(first[0], total_of([share.left, *beside])):
            return
        self.has_gap = True
        if not self._options.old_first:
            cure = "ask for it with old_first, and calls wait while it loads, or "
            raise refusal(name, first, share.left, f"beside version {number}", cure)
        if self._options.policy in ("shadow", "canary"):
            cure = "use another policy, which does not need both at once, or "
            raise refusal(name, first, share.left, f"beside version {number}", cure)

    async def begin(
        self,
        new: ModelVersion,
        share: MemoryShare,
        until_loaded: Callable[[], Awaitable[None]],
        before_gap: Callable[[], Awaitable[None]],
    ) -> None:
        """Load as many workers of the new version as there can be room for: at least one.

        Args:
            new: The version; all its workers are paused.
            share: What is kept for them.
            until_loaded: Waits until those that were resumed are ready.
            before_gap: Is called once before the former version leaves, if it must.

        Raises:
            VersionRefusedError: A worker did not come up, or there is no room any more.
        """
        self._new = new
        self._until_loaded = until_loaded
        if self.has_gap:
            await before_gap()
            self._hold(new)
            self._catalog.serve(new)
            await self._catalog.until_known()
            await self._old.pool.dispatcher.settled(self._grace_s)
        await self._load(share)

    def _hold(self, new: ModelVersion) -> None:
        """Hold calls to the new version, while its workers compute the inputs of the comparison.

        Their payloads leave half of the arena free for these inputs.
        """
        arena, rejected = new.pool.dispatcher.arena, new.metrics.rejected

        def leave_room(ref: ItemRef, chunks: Sequence[Buffer]) -> None:
            if 2 * arena.used_bytes > arena.num_bytes:
                rejected["arena_full"] += 1
                raise OverloadedError("too many calls wait for another version", retry_after_s=1)

        new.pool.attach(self._catalog.make_dispatcher(new.name, new.settings))
        self._unguard = new.pool.guard(leave_room)

    def release(self) -> None:
        """Allow the new version to compute the calls that wait, if any do."""
        if self.has_gap:
            assert self._new is not None, "it has begun"
            self._unguard()
            self._new.pool.attach(self._new.pool.dispatcher)

    async def load(self, num: int) -> None:
        """Load more workers of the new version, until it has `num`.

        Raises:
            VersionRefusedError: A worker did not come up, or there is no room any more.
        """
        while self._num_begun < num:
            async with self._room.share(self._needs[self._num_begun :]) as share:
                await self._load(share)

    async def finish(self) -> None:
        """Load the rest of the workers of a version that serves, once the former one has left."""
        assert self._new is not None, "it has begun"
        await self._catalog.until_left(self._old.name)
        try:
            await self.load(len(self._needs))
        except VersionRefusedError as error:
            text = "%s: version %d serves with fewer workers until they are restarted: %s"
            logger.error(text, self._new.name, self._new.number, error.message)

    async def undo(self, new: ModelVersion) -> None:
        """Have the new version leave, and give the former one its workers again."""
        if self.has_gap:
            self._catalog.serve(self._old)
            new.pool.dispatcher.abandon(_refused)
        is_canary = self._options.policy == "canary"  # it has clients' calls
        await self._catalog.unload(new, self._grace_s if is_canary else 0.0)
        # Those on hosts that have joined meanwhile were never started.
        joined = [each for each in self._old.pool.slots if each.is_paused and each.config.host]
        for slot in dict.fromkeys((*self._gave_up, *joined)):
            self._old.pool.resume(slot)
        while any(slot.state == "starting" for slot in self._gave_up):
            await self._catalog.until_changed()

    async def _load(self, share: MemoryShare) -> None:
        assert self._new is not None, "it has begun"
        share.returning = self._returning
        await share.look()  # a worker may have died meanwhile
        self.is_tight = self.is_tight or share.num < len(share.needs)
        if not share.num or (self.has_gap and not self._room.is_known):
            await self._make_way(share)
        begun, self._num_begun = self._num_begun, self._num_begun + share.num
        slots = self._new.pool.slots[begun : self._num_begun]
        if self._num_begun == len(self._needs):  # all, also on hosts that have joined meanwhile
            slots = [slot for slot in self._new.pool.slots if slot.is_paused]
        for slot in slots:
            self._new.pool.resume(slot)
        await self._until_loaded()

    async def _make_way(self, share: MemoryShare) -> None:
        """Have workers of the former version leave, until one of the new version fits."""
        assert self._new is not None, "it has begun"
        new = self._next
        why = "it makes room for " + (new.id.worker if new else f"version {self._new.number}")
        for slot in self._leaving() if self.has_gap else self._spare():
            self._gave_up.append(slot)
            await self._old.pool.pause(slot, self._grace_s, why)
            await share.look()
            if share.num and not self.has_gap:
                return
        if self.has_gap:  # the worker may have been killed with what it held
            self._old.pool.dispatcher.abandon(_refused)
        if not share.num:
            raise refusal(self._old.name, share.needs[:1], share.left, "now")

    async def _returning(self) -> list[Memory]:
        used = await self._room.used_by(self._old.pool)
        slots = [slot for slot in self._old.pool.slots if not slot.is_paused]
        return [*self._needs[:1]] * sum(not used.get(slot.id.slot) for slot in slots)

    @property
    def _next(self) -> WorkerSlot | None:
        """The next worker of the new version; None if it has lost its host, or there is none."""
        slots = self._new.pool.slots if self._new is not None else ()
        return slots[self._num_begun] if self._num_begun < len(slots) else None

    def _spare(self) -> list[WorkerSlot]:
        """Return the workers that the former version can lose and still answer, if it does."""
        leaving = self._leaving()
        return leaving[:-1] if leaving and leaving[-1].handle is not None else leaving

    def _leaving(self) -> list[WorkerSlot]:
        """Return the workers of the former version in the order in which they should leave."""
        devices = set(self._next.config.placement.visible) if self._next is not None else set()
        return sorted(
            (slot for slot in self._old.pool.slots if not slot.is_paused),
            key=lambda slot: (
                slot.handle is not None,
                devices.isdisjoint(slot.config.placement.visible),
            ),
        )


async def _none() -> Sequence[Memory]:
    return ()


def _refused() -> ServiceError:
    return UnavailableError("the version that was to compute it has left", retry_after_s=1)
