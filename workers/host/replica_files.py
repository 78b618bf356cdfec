"""Keeps all replicas of a model on the same files, although the files may change on disk.

Runs in the front end: `ReplicaFiles` in its event loop, and the reading of files in threads. The
files of workers on other hosts cannot be read here: their agents send digests with the marks.
"""

import asyncio
import hashlib
import logging
import threading
from asyncio import Task
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

from inferpool.models.files.opened import FileMark, mark_of
from inferpool.workers.host.engine import Incarnation, WorkerId
from inferpool.workers.shared.errors import FilesChangedError, WorkerStartError

logger = logging.getLogger(__name__)

_PIECE_BYTES = 1 << 20
_SHOWN = 3
_NUM_TORN = 3
"""Loads in a row with a change of a file, after which it counts as always changing."""


L = TypeVar("L", bound=Incarnation)


class ReplicaFiles(Generic[L]):
    """Check that all workers of a model have loaded the same files."""

    def __init__(
        self,
        files_of: Callable[[L], Sequence[FileMark]],
        on_others: Callable[[], None] = lambda: None,
    ) -> None:
        """Store what lists a worker's files, and what to call when later workers may differ."""
        self._files_of = files_of
        self._on_others = on_others
        self._present: ModelFiles | None = None
        """Files of the ready workers; None before the first is ready, or if all are gone."""
        self._num_torn: dict[str, dict[str, int]] = {}
        """Number of loads in a row during which a file changed, by worker and file."""
        self._remembering: set[Task[None]] = set()

    @property
    def present(self) -> "ModelFiles | None":
        """Files that all later workers must load; None if they may load any."""
        return self._present

    async def load(
        self,
        id: WorkerId,
        start: Callable[[], Awaitable[L]],
        is_any_serving: Callable[[], bool],
        *,
        renews: bool,
    ) -> "tuple[L, ModelFiles | None]":
        """Start a worker with the same files as the others, or with new ones if it `renews`.

        Args:
            id: The worker.
            start: Starts it; raises `WorkerStartError` if that fails.
            is_any_serving: Returns True if a worker has the files of before.
            renews: It may load other files.

        Returns:
            The worker, and its files if it is the first that has loaded them.

        Raises:
            FilesChangedError: The files on disk differ from those of the other workers.
            WorkerStartError: It did not start, or its files changed while it loaded them.
        """
        await self.check(id, renews=renews)
        try:
            worker = await start()
        except WorkerStartError:
            await self.check(id, renews=renews)  # changed files explain the failure better
            raise
        try:
            files = await self.judge(worker, is_any_serving, renews=renews)
        except (WorkerStartError, asyncio.CancelledError):
            await worker.stop(0)
            raise
        return worker, files

    async def check(self, id: WorkerId, *, renews: bool) -> None:
        """Check that the files on disk are those of the other workers, unless the worker `renews`.

        Raises:
            FilesChangedError: They have changed.
        """
        present = None if renews else self._present
        changed = await asyncio.to_thread(present.changed) if present else []
        if changed and present is self._present:
            raise _outdated(id, changed)

    async def judge(
        self, worker: L, is_any_serving: Callable[[], bool], *, renews: bool
    ) -> "ModelFiles | None":
        """Check that a new worker has loaded the files of the others, unless it `renews`.

        A worker on another host may also have other files once no worker has the former ones.

        Args:
            worker: The new worker.
            is_any_serving: Returns True if a worker has the files of before.
            renews: It may differ.

        Returns:
            Its files, for `adopt`, if it is the first that has loaded them.

        Raises:
            FilesChangedError: It has loaded other files.
            WorkerStartError: The files changed while it loaded them.
        """
        id, marks = worker.id, self._files_of(worker)
        if not marks:
            return None
        here = [mark for mark in marks if not mark.digest]
        torn = set(await asyncio.to_thread(_changed_since, here))
        before = self._num_torn.pop(id.worker, {})
        if torn:
            num_torn = self._num_torn[id.worker] = {path: before.get(path, 0) + 1 for path in torn}
            if min(num_torn.values()) < _NUM_TORN:
                text = f"{_listed(sorted(torn))} changed on disk while the model was loaded"
                raise WorkerStartError(text, permanent=False)
            text = "%s: %s changes all the time: replicas may differ in it"
            logger.warning(text, id.model, _listed(sorted(torn)))
            marks = [mark for mark in marks if mark.path not in torn]
        while (present := self._present) is not None:
            differing = await asyncio.to_thread(present.differing, marks)
            if renews and not differing:
                differing = await asyncio.to_thread(present.changed)  # also unopened files
            if present is not self._present:
                continue
            if not differing:
                return None
            if renews:
                break
            if any(mark.digest for mark in marks if mark.path in differing):
                if not is_any_serving():
                    break
                raise _unlike(id, differing)
            raise _outdated(id, differing)
        return ModelFiles(marks)

    def adopt(self, files: "ModelFiles") -> None:
        """Require these files of all later workers."""
        before, self._present = self._present, files
        if before is not None:
            before.close()
            self._on_others()
        files.open()
        task = asyncio.create_task(asyncio.to_thread(files.remember))
        self._remembering.add(task)
        task.add_done_callback(self._remembering.discard)

    async def give_up_if_gone(self, id: WorkerId, is_any_serving: Callable[[], bool]) -> None:
        """Accept the files on disk if they have changed and no worker has the old ones any more.

        Args:
            id: The worker that is about to load them.
            is_any_serving: Returns True if a worker has the old files.
        """
        present = self._present
        if present is None or is_any_serving():
            return
        changed = await asyncio.to_thread(present.changed)
        if not changed or present is not self._present or is_any_serving():
            return
        present.close()
        self._present = None
        logger.warning(
            "%s: files of the model changed on disk, and no worker with the old ones is left: "
            "all workers load the new ones",
            id.model,
        )
        self._on_others()

    async def until_remembered(self) -> None:
        """Wait until the digests of all files are known."""
        await asyncio.gather(*self._remembering)

    async def close(self) -> None:
        """Stop reading files."""
        if self._present is not None:
            self._present.close()
        await asyncio.gather(*self._remembering, return_exceptions=True)


class ModelFiles:
    """Files of a model in the state that the present workers have loaded."""

    def __init__(self, marks: Sequence[FileMark]) -> None:
        self._marks = {mark.path: mark for mark in marks}
        self._digests: dict[str, bytes] = {}
        self._lock = threading.Lock()
        self._is_closed = False

    def open(self) -> None:
        """Allow reading again, after `close`."""
        self._is_closed = False

    def close(self) -> None:
        """Stop reading files."""
        self._is_closed = True

    def remember(self) -> None:
        """Hash each file, so that a file with only a new date counts as unchanged."""
        for mark in list(self._marks.values()):
            if mark.digest:
                continue
            with self._lock:
                if mark.path not in self._digests and (digest := self._digest(mark)):
                    self._digests[mark.path] = digest

    def changed(self) -> list[str]:
        """Return the files of this host that have changed on disk, or are gone."""
        now = {path: mark_of(path) for path, mark in self._marks.items() if not mark.digest}
        return [path for path, mark in now.items() if not self._is_same(path, mark)]

    def differing(self, marks: Sequence[FileMark]) -> list[str]:
        """Return the files that another worker has loaded in another state."""
        common = [mark for mark in marks if mark.path in self._marks]
        return [mark.path for mark in common if not self._is_same(mark.path, mark)]

    def _is_same(self, path: str, mark: FileMark | None) -> bool:
        if mark is None or mark == self._marks[path]:
            return mark is not None
        if mark.digest or self._marks[path].digest:
            return mark.digest == self._marks[path].digest
        if mark.num_bytes != self._marks[path].num_bytes:
            return False
        with self._lock:
            known = self._digests.get(path)
            if known is None or self._digest(mark) != known:
                return False
            self._marks[path] = mark
            return True

    def _digest(self, mark: FileMark) -> bytes | None:
        return digest_of(mark, lambda: self._is_closed)


def digest_of(mark: FileMark, is_cancelled: Callable[[], bool] = lambda: False) -> bytes | None:
    """Hash a file; return None if it has changed meanwhile, or if that is cancelled."""
    digest = hashlib.sha256()
    try:
        with open(mark.path, "rb") as file:
            while (piece := file.read(_PIECE_BYTES)) and not is_cancelled():
                digest.update(piece)
    except OSError:
        return None
    is_same = mark_of(mark.path) == mark and not is_cancelled()
    return digest.digest() if is_same else None


def _changed_since(marks: Sequence[FileMark]) -> list[str]:
    """Return the files that have changed since they were opened."""
    return [mark.path for mark in marks if mark_of(mark.path) != mark]


def _outdated(id: WorkerId, changed: Sequence[str]) -> FilesChangedError:
    return FilesChangedError(
        f"{_listed(changed)} changed on disk after {id.model} was loaded, and replicas are not to "
        f"differ: restart all workers of {id.model} to serve what is there now "
        f"(POST /admin/models/{id.model}/restart), or put back what was there"
    )


def _unlike(id: WorkerId, differing: Sequence[str]) -> FilesChangedError:
    return FilesChangedError(
        f"{_listed(differing)} differ from what other workers of {id.model} have loaded, and "
        "replicas are not to differ: give all hosts the same files, then restart all workers "
        f"(POST /admin/models/{id.model}/restart)"
    )


def _listed(paths: Sequence[str]) -> str:
    more = f" and {len(paths) - _SHOWN} more" if len(paths) > _SHOWN else ""
    return ", ".join(paths[:_SHOWN]) + more
