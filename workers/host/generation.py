"""The files that the workers of a model were made of, and whether a later one would be the same.

Runs in the front end: `FilesOfAll` in its event loop, what reads files in threads.
"""

import asyncio
import hashlib
import logging
import threading
from asyncio import Task
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from inferpool.models.files.opened import FileMark, mark_of
from inferpool.workers.errors import FilesChangedError, WorkerStartError
from inferpool.workers.host.engine import Incarnation, WorkerId

logger = logging.getLogger(__name__)

_PIECE_BYTES = 1 << 20
_SHOWN = 3
_NUM_TORN = 3
"""A file that changes during so many loads of a worker in a row does so all the time."""


L = TypeVar("L", bound=Incarnation)


class FilesOfAll(Generic[L]):
    """Sees that all workers of a model serve with the same files."""

    def __init__(
        self,
        files_of: Callable[[L], Sequence[FileMark]],
        on_others: Callable[[], None] = lambda: None,
    ) -> None:
        """Know of no files yet.

        Args:
            files_of: The files that a worker has loaded.
            on_others: Called when later workers are to load other files than those before.
        """
        self._files_of = files_of
        self._on_others = on_others
        self._present: Generation | None = None
        """What those serve with that are ready; None before the first, or if all are gone."""
        self._num_torn: dict[str, dict[str, int]] = {}
        """By worker and file: in how many loads in a row the file has changed."""
        self._remembering: set[Task[None]] = set()

    @property
    def present(self) -> "Generation | None":
        """The files that all later workers are to load; None if any will do."""
        return self._present

    async def check(self, id: WorkerId, *, renews: bool) -> None:
        """See that what is on disk is what the others serve with, unless it is to renew that.

        Raises:
            FilesChangedError: It is not.
        """
        present = None if renews else self._present
        changed = await asyncio.to_thread(present.changed) if present else []
        if changed and present is self._present:
            raise _outdated(id, changed)

    async def judge(self, worker: L, *, renews: bool) -> "Generation | None":
        """See that a worker that is ready has what the others serve with, or that it may differ.

        Returns:
            Its files, for `adopt`, if it is the first that has them.

        Raises:
            FilesChangedError: It has others.
            WorkerStartError: They changed while it loaded them.
        """
        id, marks = worker.id, self._files_of(worker)
        if not marks:
            return None
        torn = set(await asyncio.to_thread(_changed_since, marks))
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
                differing = await asyncio.to_thread(present.changed)  # with what is not opened now
            if present is not self._present:
                continue
            if not differing:
                return None
            if renews:
                break
            raise _outdated(id, differing)
        return Generation(marks)

    def adopt(self, generation: "Generation") -> None:
        """Have all later workers load these files."""
        before, self._present = self._present, generation
        if before is not None:
            before.close()
            self._on_others()
        generation.open()
        task = asyncio.create_task(asyncio.to_thread(generation.remember))
        self._remembering.add(task)
        task.add_done_callback(self._remembering.discard)

    async def give_up_if_gone(self, id: WorkerId, is_any_serving: Callable[[], bool]) -> None:
        """Let all load what is on disk now, if that has changed and nobody serves what was there.

        Args:
            id: The worker that is about to load it.
            is_any_serving: Whether a worker has what was there.
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
            "%s: files of the model changed on disk, and no worker is left that had loaded what "
            "was there: all serve what is there now",
            id.model,
        )
        self._on_others()

    async def until_remembered(self) -> None:
        """Wait until the bytes of all files are known, and not their dates alone."""
        await asyncio.gather(*self._remembering)

    async def close(self) -> None:
        """Read no more."""
        if self._present is not None:
            self._present.close()
        await asyncio.gather(*self._remembering, return_exceptions=True)


class Generation:
    """The files of a model as the workers have them that serve now."""

    def __init__(self, marks: Sequence[FileMark]) -> None:
        """Take the files of the first of these workers."""
        self._marks = {mark.path: mark for mark in marks}
        self._digests: dict[str, bytes] = {}
        self._lock = threading.Lock()
        self._is_closed = False

    def open(self) -> None:
        """Read again, after `close`."""
        self._is_closed = False

    def close(self) -> None:
        """Read no more."""
        self._is_closed = True

    def remember(self) -> None:
        """Take the digest of each file, so that it is known again where only its date changes."""
        for mark in list(self._marks.values()):
            with self._lock:
                if mark.path not in self._digests and (digest := self._digest(mark)):
                    self._digests[mark.path] = digest

    def changed(self) -> list[str]:
        """The files that are not on disk any more as they were."""
        now = {path: mark_of(path) for path in self._marks}
        return [path for path, mark in now.items() if not self._is_same(path, mark)]

    def differing(self, marks: Sequence[FileMark]) -> list[str]:
        """The files that another worker has otherwise."""
        common = [mark for mark in marks if mark.path in self._marks]
        return [mark.path for mark in common if not self._is_same(mark.path, mark)]

    def _is_same(self, path: str, mark: FileMark | None) -> bool:
        if mark is None or mark == self._marks[path]:
            return mark is not None
        if mark.num_bytes != self._marks[path].num_bytes:
            return False
        with self._lock:
            known = self._digests.get(path)
            if known is None or self._digest(mark) != known:
                return False
            self._marks[path] = mark
            return True

    def _digest(self, mark: FileMark) -> bytes | None:
        """Hash a file; None if it is not as it was any more."""
        digest = hashlib.sha256()
        try:
            with open(mark.path, "rb") as file:
                while (piece := file.read(_PIECE_BYTES)) and not self._is_closed:
                    digest.update(piece)
        except OSError:
            return None
        is_same = mark_of(mark.path) == mark and not self._is_closed
        return digest.digest() if is_same else None


def _changed_since(marks: Sequence[FileMark]) -> list[str]:
    """The files that were changed after they were opened."""
    return [mark.path for mark in marks if mark_of(mark.path) != mark]


def _outdated(id: WorkerId, changed: Sequence[str]) -> FilesChangedError:
    return FilesChangedError(
        f"{_listed(changed)} changed on disk after {id.model} was loaded, and replicas are not to "
        f"differ: restart all workers of {id.model} to serve what is there now "
        f"(POST /admin/models/{id.model}/restart), or put back what was there"
    )


def _listed(paths: Sequence[str]) -> str:
    """Files for a person."""
    more = f" and {len(paths) - _SHOWN} more" if len(paths) > _SHOWN else ""
    return ", ".join(paths[:_SHOWN]) + more
