"""Searches for faster speed presets while workers serve, and changes over to what is found.

It lives in the event loop. The search itself is a process at idle priority; see
`workers.beside.searching`.
"""

import asyncio
import logging
import os
import shutil
from asyncio import Task
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import Literal

import psutil

from inferpool.models.speed.names import SpeedReport
from inferpool.service.queue.pool import Pool
from inferpool.service.settings.settings import Settings
from inferpool.workers.beside.searching import SearchFailedError
from inferpool.workers.cgroups import read_limits
from inferpool.workers.config import WorkerConfig
from inferpool.workers.host.supervisor import WorkerSlot

logger = logging.getLogger(__name__)

SearchState = Literal["off", "waiting", "searching", "changing", "done", "failed"]

Search = Callable[[WorkerConfig, str, Callable[[str], None]], Awaitable[SpeedReport]]
"""Searches for what is kept under a cache key, and reports progress; see
`workers.beside.searching`."""

_NEEDED_BYTES = 2 << 30
"""The most that compiling resnet18 took, in two processes. Each also holds the model."""


@dataclass(slots=True, kw_only=True)
class SearchProgress:
    """The progress of the search for one model."""

    state: SearchState = "waiting"
    text: str = ""
    """The current step, or the result, for people."""


class SpeedCache:
    """The cache folder of the settings, or a temporary one if that cannot be used.

    A temporary folder lets the workers of one run share what one of them measures.
    """

    def __init__(self, settings: Settings) -> None:
        self.folder = settings.cache_folder()
        """The folder; None if there is nothing to keep, or no folder can be made."""
        self._temporary: TemporaryDirectory[str] | None = None
        if all(model.speed == "exact" for model in settings.models.values()):
            return
        if self.folder is not None:
            error = _try_to_write(Path(self.folder))
            if error is None:
                return
            text = (
                "the cache folder %s cannot be written (%s): each start will measure speed presets "
                "anew; set cache_dir to another folder, or to none"
            )
            logger.warning(text, self.folder, error.strerror)
        try:
            self._temporary = TemporaryDirectory(prefix="inferpool-", ignore_cleanup_errors=True)
            self.folder = self._temporary.name
        except OSError:
            self.folder = None

    def close(self) -> None:
        """Remove a temporary folder."""
        if self._temporary is not None:
            self._temporary.cleanup()


class SpeedSearch:
    """Searches for some models, each once its workers are up, and one at a time.

    Models come and go while it runs. All methods are for the event loop.
    """

    def __init__(self, search: Search, *, grace_s: float) -> None:
        self._search = search
        self._grace_s = grace_s
        self._progress: dict[str, SearchProgress] = {}
        self._tasks: dict[str, Task[None]] = {}
        self._turn = asyncio.Lock()
        """Held while a search process runs: two would compete for idle cores and memory."""
        self._changed = asyncio.Event()

    def add(self, pool: Pool) -> None:
        """Begin to wait for the workers of a model, and then to search for it.

        An earlier search for a model of this name must be forgotten first.
        """
        assert pool.name not in self._tasks
        progress = self._progress[pool.name] = SearchProgress()
        name = f"search for speed of {pool.name}"
        self._tasks[pool.name] = asyncio.create_task(self._run(pool, progress), name=name)

    async def forget(self, model: str) -> None:
        """Cancel the search for a model, if there is one, and wait for the end of its process.

        Workers that have changed over stay as they are, and so do the others.
        """
        self._progress.pop(model, None)
        task = self._tasks.pop(model, None)
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def stop(self) -> None:
        """Cancel all searches."""
        await asyncio.gather(*map(self.forget, list(self._tasks)))

    def on_change(self) -> None:
        """Note that a worker has come up or gone down."""
        self._changed.set()

    def progress(self, model: str) -> SearchProgress:
        """Return the progress for a model."""
        return self._progress.get(model, SearchProgress(state="off"))

    async def _run(self, pool: Pool, progress: SearchProgress) -> None:
        try:
            await self._until_settled(pool)
            async with self._turn:
                await self._improve(pool, progress)
        except Exception:
            logger.exception("%s speed: the search failed", pool.name)
            progress.state, progress.text = "failed", "a mistake of the service"

    async def _until_settled(self, pool: Pool) -> None:
        """Wait until each worker is ready or given up."""
        while not all(slot.handle or slot.state == "failed" for slot in pool.slots):
            self._changed.clear()
            await self._changed.wait()

    async def _improve(self, pool: Pool, progress: SearchProgress) -> None:
        progress.state = "off"
        present: dict[str, list[WorkerSlot]] = {}
        for slot in pool.slots:
            speed = slot.handle.ready.speed if slot.handle else SpeedReport()
            if not speed.is_final:
                present.setdefault(speed.key, []).append(slot)
            elif speed.key:  # everything was tried, now or at an earlier start
                progress.state, progress.text = "done", "nothing is left to try"
        for key, slots in present.items():  # the number of threads is part of the key
            if obstacle := _obstacle(slots[0]):
                text = "%s speed: not searching for a faster preset: %s"
                logger.info(text, pool.name, obstacle)
                progress.state, progress.text = "off", obstacle
                return
            await self._improve_some(pool, key, slots, progress)

    async def _improve_some(
        self, pool: Pool, key: str, slots: Sequence[WorkerSlot], progress: SearchProgress
    ) -> None:
        """Search for workers that share a cache key."""
        preset = _preset_of(slots[0])
        text = "%s speed: searching for a faster preset than %s, in the time left over"
        logger.info(text, pool.name, preset)
        progress.state = "searching"

        def on_progress(stage: str) -> None:
            progress.text = stage
            logger.debug("%s speed: %s", pool.name, stage)

        try:
            found = await self._search(slots[0].config, key, on_progress)
        except SearchFailedError as error:
            logger.warning("%s speed: %s stays, as the search failed: %s", pool.name, preset, error)
            progress.state, progress.text = "failed", str(error)
            return
        figures = f" ({found.note})" if found.note else ""
        if found.preset == preset:
            logger.info("%s speed: %s stays%s", pool.name, preset, figures)
            progress.state, progress.text = "done", f"{preset} stays{figures}"
            return
        logger.info("%s speed: changing from %s to %s%s", pool.name, preset, found.text(), figures)
        progress.state, progress.text = "changing", f"from {preset} to {found.text()}"
        for slot in slots:
            if not await pool.replacer.change_over(slot, found.preset, self._grace_s):
                text = "%s speed: %s did not come up with %s, so the others stay as they are"
                logger.warning(text, pool.name, slot.id.worker, found.preset)
                progress.state = "failed"
                progress.text = f"{slot.id.worker} did not come up with {found.preset}"
                return
        logger.info("%s speed: changed from %s to %s", pool.name, preset, found.text())
        progress.state, progress.text = "done", f"changed from {preset} to {found.text()}{figures}"


def compiler_name() -> str:
    """Return the C++ compiler that torch would call."""
    return os.environ.get("CXX", "g++")


def find_compiler() -> str | None:
    """Return the path of the compiler; None if it is not installed."""
    return shutil.which(compiler_name())


def _preset_of(slot: WorkerSlot) -> str:
    return slot.handle.ready.speed.preset if slot.handle else "exact"


def _obstacle(slot: WorkerSlot) -> str:
    """Return why nothing can be compiled now; empty if it can."""
    if find_compiler() is None:
        return f"there is no C++ compiler ({compiler_name()})"
    replica_bytes = slot.handle.vitals().rss_bytes if slot.handle else 0
    needed = _NEEDED_BYTES + 2 * replica_bytes
    left = read_limits().memory_left_bytes
    free = psutil.virtual_memory().available
    free = free if left is None else min(free, left)
    if free < needed:
        return f"it takes {needed / 2**30:.1f} GiB of memory, and {free / 2**30:.1f} GiB are free"
    return ""


def _try_to_write(folder: Path) -> OSError | None:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with TemporaryFile(dir=folder) as file:
            file.write(b"x")
    except OSError as error:
        return error
    return None
