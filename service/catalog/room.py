"""Sees to it that versions which are being loaded fit into memory together."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import psutil

from inferpool.models.spec import Placement
from inferpool.service.catalog.catalog import Catalog, ModelVersion
from inferpool.service.errors import InvalidInputError, VersionRefusedError
from inferpool.service.queue.pool import Pool
from inferpool.service.settings.model import ModelSettings
from inferpool.workers.config import WorkerConfig
from inferpool.workers.host.devices import DeviceError
from inferpool.workers.host.engine import WorkerHandle
from inferpool.workers.memory import available_bytes

logger = logging.getLogger(__name__)

_NUM_AT_ONCE = 4
"""Versions that are loaded at once: each takes cores from those that serve."""


class Room:
    """Gives out memory of this host to versions while they load. Lives in the event loop."""

    def __init__(
        self,
        estimate: Callable[[ModelSettings, Placement], int],
        free_bytes: Callable[[], int] = available_bytes,
    ) -> None:
        """Give out nothing yet; `estimate` returns the memory of a worker before it is loaded."""
        self._estimate = estimate
        self._free_bytes = free_bytes
        self._given: list[int] = []
        self._returned = asyncio.Condition()

    @asynccontextmanager
    async def taken(
        self, catalog: Catalog, name: str, model: ModelSettings
    ) -> AsyncIterator[Sequence[WorkerConfig]]:
        """Wait until a version fits in beside the others that load, and keep its memory for it.

        Yields:
            The plan of its workers.

        Raises:
            InvalidInputError: A requested device is missing.
            VersionRefusedError: It doesn't fit, even if nothing else loads; has the figures.
        """
        try:
            configs = catalog.plan(name, model)
        except DeviceError as error:
            raise InvalidInputError(str(error)) from error
        needed = await self._needed(catalog, name, model, configs)
        async with self._returned:
            await self._returned.wait_for(lambda: self._is_turn(needed))
            free = self._free_bytes()
            if needed > free:
                refusal = _refusal(needed, free, len(configs))
                logger.warning("%s: a version is refused: %s", name, refusal.message)
                raise refusal
            self._given.append(needed)
        try:
            yield configs
        finally:
            self._given.remove(needed)
            async with self._returned:
                self._returned.notify_all()

    async def needs(
        self, catalog: Catalog, name: str, model: ModelSettings, kept: ModelVersion
    ) -> bool:
        """Return whether a version fits in only if one that is kept leaves."""
        try:
            configs = catalog.plan(name, model)
        except DeviceError:
            return False  # it is refused in any case
        needed = await self._needed(catalog, name, model, configs)
        theirs = sum(await asyncio.to_thread(_all_bytes, _workers_of(kept.pool)))
        free = self._free_bytes() - sum(self._given)
        return free < needed <= free + theirs

    async def _needed(
        self, catalog: Catalog, name: str, model: ModelSettings, configs: Sequence[WorkerConfig]
    ) -> int:
        """Estimate the memory of a version. Workers of the one that serves show what one takes."""
        workers = _workers_of(catalog.serving[name]) if name in catalog.serving else ()
        each = max(await asyncio.to_thread(_all_bytes, workers), default=0)
        return sum(max(each, self._estimate(model, config.placement)) for config in configs)

    def _is_turn(self, needed: int) -> bool:
        """Return whether a version fits in now, or never will."""
        if not self._given:
            return True
        left = self._free_bytes() - sum(self._given)
        return len(self._given) < _NUM_AT_ONCE and needed <= left


def _refusal(needed: int, free: int, num_workers: int) -> VersionRefusedError:
    workers = f"{num_workers} worker{'s' if num_workers != 1 else ''}"
    error = VersionRefusedError(
        f"it does not fit into memory: its {workers} need about {needed / 2**20:,.0f} MiB beside "
        f"what serves, and {free / 2**20:,.0f} MiB are free; lower replicas, remove a model, or "
        "raise the container's limit"
    )
    error.figures = {"needed_bytes": needed, "free_bytes": free}
    return error


def _workers_of(pool: Pool) -> Sequence[WorkerHandle]:
    return [slot.handle for slot in pool.slots if slot.handle is not None]


def _all_bytes(workers: Sequence[WorkerHandle]) -> list[int]:
    """Return the memory of each worker that it shares with no other process."""
    return [_bytes_of(worker) for worker in workers]


def _bytes_of(worker: WorkerHandle) -> int:
    vitals = worker.vitals()
    pids = [rank.pid for rank in vitals.ranks] or [vitals.pid]
    try:
        return sum(psutil.Process(pid).memory_full_info().uss for pid in pids)
    except (psutil.Error, ValueError):  # it has just ended
        return vitals.rss_bytes
