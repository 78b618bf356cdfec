"""The workers that an agent runs, from one connection to the next.

When a connection ends they stay loaded for a while. If the front end is back and asks for a worker
with the same configuration, it gets one of them instead of a new one that must load its model.
"""

import asyncio
import logging
from asyncio import Task
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import msgspec

from inferpool.models.files.opened import FileMark, mark_of
from inferpool.models.spec import Placement
from inferpool.workers.host.engine import ForkserverHealth, WorkerHandle, WorkerId
from inferpool.workers.host.local import LocalEngine
from inferpool.workers.host.replica_files import digest_of
from inferpool.workers.shared.config import WorkerConfig

logger = logging.getLogger(__name__)

_MOST_DIGESTS = 10_000
_KEPT_S = 30.0
"""Seconds after joining during which the front end may ask for a worker that is loaded already."""
_BURST_S = 1.0
_STOP_S = 5.0


@dataclass(slots=True, kw_only=True, eq=False)
class HostedWorker:
    """A worker of this host: it loads its model, or has loaded it."""

    key: WorkerConfig
    """The part of its configuration that another one must share to get it."""
    on_progress: Callable[[str], None] = lambda _: None
    stage: str = "waiting to start"
    loading: Task[WorkerHandle] = field(init=False)
    is_claimed: bool = True
    """A connection uses it."""
    is_ending: bool = False
    """It is being stopped, and no connection gets it any more."""

    @property
    def handle(self) -> WorkerHandle | None:
        """The worker, once it is ready."""
        loading = self.loading
        is_ready = loading.done() and not loading.cancelled() and loading.exception() is None
        return loading.result() if is_ready else None

    def tell(self, stage: str) -> None:
        """Report the present step of its start."""
        self.stage = stage
        self.on_progress(stage)

    async def stop(self, grace_s: float) -> None:
        """Stop it within `grace_s` seconds, or give up its start."""
        self.is_ending = True
        if not self.loading.done():
            self.loading.cancel()
            await asyncio.wait([self.loading])
        if (handle := self.handle) is not None:
            await handle.stop(grace_s)


class HostedWorkers:
    """All workers of this host. Used in the agent's event loop."""

    def __init__(
        self, engine: LocalEngine, cache_dir: str | None, *, burst_s: float = _BURST_S
    ) -> None:
        """Start nothing yet.

        Args:
            engine: Starts them.
            cache_dir: Folder for verdicts on speed presets; None for none.
            burst_s: Seconds within which a front end asks for all that it wants at first.
        """
        self._engine = engine
        self._cache_dir = cache_dir
        self._burst_s = burst_s
        self._workers: list[HostedWorker] = []
        self._watching: set[Task[None]] = set()
        self._joined_at = 0.0
        self._digests: dict[FileMark, bytes] = {}

    @property
    def forkserver(self) -> ForkserverHealth | None:
        """State of the forkserver."""
        return self._engine.forkserver_vitals()

    def begin(self) -> None:
        """Stop workers later that the front end just joined has not claimed by then."""
        loop = asyncio.get_running_loop()
        self._joined_at = loop.time()
        loop.call_later(_KEPT_S, self._stop_unclaimed, self._joined_at)

    async def claim(
        self, id: WorkerId, config: WorkerConfig, on_progress: Callable[[str], None]
    ) -> HostedWorker:
        """Return a worker that is loaded or being loaded already, or begin to load one.

        Unclaimed workers on the same devices are stopped before a new one is loaded.
        """
        key = replace(config, chosen=None, known_split=None, checked=None, host="", cache_dir=None)
        if (worker := await self._loaded(key)) is not None:
            logger.info("%s: a worker that is loaded already is used again", id)
        else:
            await self._make_room(config.placement)
            worker = HostedWorker(key=key)
            config = replace(config, host="", cache_dir=self._cache_dir)
            start = self._engine.start(id, config, worker.tell)
            worker.loading = asyncio.create_task(start, name=f"start {id}")
            self._workers.append(worker)
            watching = asyncio.create_task(self._forget_at_end(worker))
            self._watching.add(watching)
            watching.add_done_callback(self._watching.discard)
        worker.on_progress = on_progress
        if not worker.loading.done():
            on_progress(worker.stage)
        return worker

    async def files_of(self, handle: WorkerHandle) -> list[FileMark]:
        """Return the files that a worker has loaded, with their digests."""
        if len(self._digests) > _MOST_DIGESTS:
            self._digests.clear()  # the files change, again and again
        return await asyncio.to_thread(with_digests, handle.ready.files, self._digests)

    def release(self) -> None:
        """Release all workers of a connection. They stay for the next one."""
        self._joined_at = 0.0  # unclaimed workers are stopped only while there is a front end
        for worker in self._workers:
            worker.is_claimed = False
            worker.on_progress = lambda _: None

    async def stop(self, grace_s: float) -> None:
        """Stop all workers, and release what the engine holds."""
        await asyncio.gather(*(worker.stop(grace_s) for worker in list(self._workers)))
        for task in self._watching:
            task.cancel()
        await asyncio.gather(*self._watching, return_exceptions=True)
        await self._engine.close()

    async def _loaded(self, key: WorkerConfig) -> HostedWorker | None:
        """Claim a worker of that configuration, if it has loaded the files that are on disk now."""
        for worker in list(self._unclaimed()):
            if worker.key != key or worker.is_claimed or worker.is_ending:
                continue
            if worker.loading.done() and worker.handle is None:
                continue  # its start has failed
            worker.is_claimed = is_theirs = True  # now, since others may look for one meanwhile
            try:
                files = worker.handle.ready.files if worker.handle else []
                is_theirs = await asyncio.to_thread(_are_unchanged, files)
                is_theirs = is_theirs and worker in self._workers and not worker.is_ending
            except asyncio.CancelledError:
                is_theirs = False
                raise
            finally:
                worker.is_claimed = is_theirs
            if is_theirs:
                return worker
        return None

    async def _make_room(self, placement: Placement) -> None:
        """Stop the unclaimed workers on the devices of a placement."""
        if not any(self._sharing(placement)):
            return
        loop = asyncio.get_running_loop()
        await asyncio.sleep(max(0.0, self._joined_at + self._burst_s - loop.time()))
        in_the_way = list(self._sharing(placement))
        await asyncio.gather(*(worker.stop(_STOP_S) for worker in in_the_way))

    def _sharing(self, placement: Placement) -> Iterator[HostedWorker]:
        names = set(placement.names)
        for worker in self._unclaimed():
            if names & set(worker.key.placement.names):
                yield worker

    def _unclaimed(self) -> Iterator[HostedWorker]:
        return (worker for worker in self._workers if not worker.is_claimed)

    def _stop_unclaimed(self, joined_at: float) -> None:
        if joined_at != self._joined_at:
            return  # another connection has begun since
        for worker in list(self._unclaimed()):
            logger.info("a worker that nobody has asked for is stopped")
            stopping = asyncio.create_task(worker.stop(_STOP_S))
            self._watching.add(stopping)
            stopping.add_done_callback(self._watching.discard)

    async def _forget_at_end(self, worker: HostedWorker) -> None:
        try:
            await asyncio.wait([worker.loading])
            if (handle := worker.handle) is not None:
                await handle.wait()
        finally:
            self._workers.remove(worker)


def _are_unchanged(files: Sequence[FileMark]) -> bool:
    return all(mark_of(file.path) == file for file in files)


def with_digests(marks: Sequence[FileMark], known: dict[FileMark, bytes]) -> list[FileMark]:
    """Return marks of files of this host with their digests, for another host. Reads the files.

    A file that has changed since it was opened gets no digest. For `ReplicaFiles` it then
    counts as changed while it was loaded.

    Args:
        marks: The files that a worker has opened.
        known: Digests of files that were read before. Gets those that are read now.
    """
    told = []
    for mark in marks:
        digest = known.get(mark) if mark_of(mark.path) == mark else None
        if digest is None and (digest := digest_of(mark)) is not None:
            known[mark] = digest
        told.append(msgspec.structs.replace(mark, digest=digest or b""))
    return told
