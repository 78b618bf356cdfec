"""Searches for faster speed presets while workers serve, and changes over to what is found.

It lives in the event loop. The search itself is a process at low priority; see
`workers.speed.host_side`.
"""

import asyncio
import logging
from asyncio import Task
from collections.abc import Awaitable, Callable, Container, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import Literal

from inferpool.models.speed_names import SpeedReport
from inferpool.service.api.routes.health import HealthReport, SpeedSearchHealth
from inferpool.service.queue.pool import Pool
from inferpool.service.settings.settings import Settings
from inferpool.workers.host.slots import WorkerSlot
from inferpool.workers.shared.config import WorkerConfig
from inferpool.workers.shared.memory import available_bytes
from inferpool.workers.speed.host_side import SearchFailedError, compiler_name, find_compiler

logger = logging.getLogger(__name__)

SearchState = Literal["off", "waiting", "searching", "changing", "done", "failed"]

Search = Callable[[WorkerConfig, str, Callable[[str], None]], Awaitable[SpeedReport]]
"""Searches for what is kept under a cache key, and reports progress; see
`workers.speed.host_side`."""

_COMPILER_BYTES = 2 << 30
"""The most that compiling resnet18 took, in two processes. Each also holds the model."""


@dataclass(slots=True, kw_only=True)
class SearchProgress:
    """The progress of the search for one model."""

    state: SearchState = "waiting"
    text: str = ""
    """The current step, or the result, for people."""


class SpeedCache:
    """The cache folder of the settings, or a temporary one if that cannot be used.

    In a temporary folder, the workers of one run share what one of them measures.
    """

    def __init__(self, settings: Settings) -> None:
        self.folder = settings.cache_folder()
        """The folder; None if there is nothing to keep, or no folder can be made."""
        self._temporary: TemporaryDirectory[str] | None = None
        is_cluster = settings.cluster_port is not None  # agents have folders of their own
        if is_cluster or all(model.speed == "exact" for model in settings.models.values()):
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

    Args:
        search: Searches in a process of its own.
        grace_s: Time for a worker to end what it computes before it changes over.
        compiler_bytes: Memory that must be free to compile, beside that of two replicas.
    """

    def __init__(
        self, search: Search, *, grace_s: float, compiler_bytes: int = _COMPILER_BYTES
    ) -> None:
        self._search = search
        self._grace_s = grace_s
        self._compiler_bytes = compiler_bytes
        self._progress: dict[str, SearchProgress] = {}
        self._tasks: dict[str, Task[None]] = {}
        self._turn = asyncio.Lock()
        """Held while a search process runs: two would compete for idle cores and memory."""
        self._changed = asyncio.Event()

    def start(self, pools: Iterable[Pool]) -> None:
        """Search for each of these models."""
        for pool in pools:
            self.add(pool)

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
        """Wake the searches: a worker has come up or gone down."""
        self._changed.set()

    def progress(self, model: str) -> SearchProgress:
        """Return the progress for a model."""
        return self._progress.get(model, SearchProgress(state="off"))

    def add_to_health(self, report: HealthReport) -> HealthReport:
        """Return a report of /health with the progress for each model."""
        models = [
            replace(each, speed_search=SpeedSearchHealth(state=found.state, text=found.text))
            for each in report.models
            for found in [self.progress(each.name)]
        ]
        return replace(report, models=models)

    async def _run(self, pool: Pool, progress: SearchProgress) -> None:
        """Search as long as workers come up that may serve faster."""
        given_up: set[tuple[str, bool]] = set()
        while True:
            self._changed.clear()
            is_settled = all(slot.handle or slot.state == "failed" for slot in pool.slots)
            slots = _to_improve(pool, given_up) if is_settled else []
            if slots:
                question = _question(_speed_of(slots[0]))
                async with self._turn:
                    if not await self._improve_safely(pool, slots, progress):
                        given_up.add(question)
                continue
            if is_settled and progress.state == "waiting":
                is_judged = any(_speed_of(slot).key for slot in pool.slots)
                progress.state = "done" if is_judged else "off"
                progress.text = progress.text or ("nothing is left to try" if is_judged else "")
            await self._changed.wait()

    async def _improve_safely(
        self, pool: Pool, slots: Sequence[WorkerSlot], progress: SearchProgress
    ) -> bool:
        """Run `_improve`, and log a mistake of ours."""
        try:
            return await self._improve(pool, slots, progress)
        except Exception:
            logger.exception("%s speed: the search failed", pool.name)
            progress.state, progress.text = "failed", "a mistake of the service"
            return False

    async def _improve(
        self, pool: Pool, slots: Sequence[WorkerSlot], progress: SearchProgress
    ) -> bool:
        """Search for workers that serve alike, and change them over to what is found.

        Returns:
            Whether the same may be searched for again, for workers that have missed it.
        """
        present = _speed_of(slots[0])
        if obstacle := _obstacle(slots[0], present, self._compiler_bytes):
            logger.info("%s speed: not searching for a faster preset: %s", pool.name, obstacle)
            progress.state, progress.text = "off", obstacle
            return False
        text = "%s speed: searching for a faster preset than %s, in the time left over"
        logger.info(text, pool.name, present.preset)
        progress.state = "searching"

        def on_progress(stage: str) -> None:
            progress.text = stage
            logger.debug("%s speed: %s", pool.name, stage)

        try:
            config = replace(slots[0].config, chosen=present)
            found = await self._search(config, present.key, on_progress)
        except SearchFailedError as error:
            text = "%s speed: %s stays, as the search failed: %s"
            logger.warning(text, pool.name, present.preset, error)
            progress.state, progress.text = "failed", str(error)
            return False
        figures = f" ({found.note})" if found.note else ""
        if found.way == present.way:
            for slot in slots:
                slot.config = replace(slot.config, chosen=found)
            logger.info("%s speed: %s stays%s", pool.name, present.preset, figures)
            progress.state, progress.text = "waiting", f"{present.preset} stays{figures}"
            return found.is_final or present.is_provisional
        change = found.change_from(present)
        logger.info("%s speed: changing %s%s", pool.name, change, figures)
        progress.state, progress.text = "changing", change
        for slot in slots:
            if _speed_of(slot).key != present.key:
                continue  # it has loaded other weights meanwhile
            if not await pool.replacer.change_over(slot, found, self._grace_s):
                text = "%s speed: %s did not come up with %s, so the others stay as they are"
                logger.warning(text, pool.name, slot.id.worker, found.preset)
                progress.state = "failed"
                progress.text = f"{slot.id.worker} did not come up with {found.preset}"
                return False
        logger.info("%s speed: changed %s", pool.name, change)
        progress.state, progress.text = "waiting", f"changed {change}{figures}"
        return found.is_final or present.is_provisional


def _to_improve(pool: Pool, given_up: Container[tuple[str, bool]]) -> Sequence[WorkerSlot]:
    """Return workers that serve alike and may do so faster, the slowest first; empty if none may.

    The number of threads is part of the key, and a worker that ended meanwhile may be behind.

    Args:
        pool: The model.
        given_up: Questions that no search is to answer again.
    """
    alike: dict[tuple[str, ...], list[WorkerSlot]] = {}
    for slot in pool.slots:
        speed = _speed_of(slot)
        is_open = speed.is_provisional or not speed.is_final
        if slot.handle and is_open and _question(speed) not in given_up:
            alike.setdefault((speed.key, *speed.way), []).append(slot)
    return min(alike.values(), key=lambda slots: _speed_of(slots[0]).gain, default=[])


def _speed_of(slot: WorkerSlot) -> SpeedReport:
    """Return what is known of a worker's speed; a search may know more than the worker."""
    if slot.config.chosen is not None:
        return slot.config.chosen
    return slot.handle.ready.speed if slot.handle else SpeedReport()


def _question(speed: SpeedReport) -> tuple[str, bool]:
    """Return what a search would find out: it measures, or compiles, for workers with a key."""
    return speed.key, speed.is_provisional


def _obstacle(slot: WorkerSlot, speed: SpeedReport, compiler_bytes: int) -> str:
    """Return why nothing can be measured or compiled now; empty if it can."""
    replica_bytes = slot.handle.vitals().rss_bytes if slot.handle else 0
    needed = 2 * replica_bytes
    if not speed.is_provisional:  # the next step is to compile
        if find_compiler() is None:
            return f"there is no C++ compiler ({compiler_name()})"
        needed += compiler_bytes
    free = available_bytes()
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
