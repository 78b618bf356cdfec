"""The files that the workers of a model were made of, and whether a later one would be the same.

Runs in the front end. All but `close` may take long, for files are read: threads call it.
"""

import hashlib
import threading
from collections.abc import Sequence

from models.opened import FileMark, mark_of

_PIECE_BYTES = 1 << 20
_SHOWN = 3


class Generation:
    """The files of a model as the workers have them that serve now."""

    def __init__(self, marks: Sequence[FileMark]) -> None:
        """Take the files of the first of these workers."""
        self._marks = {mark.path: mark for mark in marks}
        self._digests: dict[str, bytes] = {}
        self._lock = threading.Lock()
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
        """Of a file that is still as it was; None if it is not."""
        digest = hashlib.sha256()
        try:
            with open(mark.path, "rb") as file:
                while (piece := file.read(_PIECE_BYTES)) and not self._is_closed:
                    digest.update(piece)
        except OSError:
            return None
        is_same = mark_of(mark.path) == mark and not self._is_closed
        return digest.digest() if is_same else None


def changed_since(marks: Sequence[FileMark]) -> list[str]:
    """The files that were changed after they were opened."""
    return [mark.path for mark in marks if mark_of(mark.path) != mark]


def listed(paths: Sequence[str]) -> str:
    """Files for a person."""
    more = f" and {len(paths) - _SHOWN} more" if len(paths) > _SHOWN else ""
    return ", ".join(paths[:_SHOWN]) + more
