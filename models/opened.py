"""Notes which files a model is made of, as they are opened while it loads. No torch.

Worker processes note; the front end compares what they have noted.
"""

import contextlib
import importlib.util
import os
import stat
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import msgspec

_NO_PART = ("/dev/", "/etc/", "/proc/", "/run/", "/sys/")
"""The system's own files: a model may read them, but is not made of them."""
_OURS = tuple(f"{Path(__file__).parents[1] / name}/" for name in ("models", "service", "workers"))
_LIBRARIES = tuple({f"{sysconfig.get_path(name)}/" for name in ("stdlib", "purelib", "platlib")})


class FileMark(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A file as the file system knew it when it was opened."""

    path: str
    num_bytes: int
    mtime_ns: int
    inode: int


def mark_of(path: str) -> FileMark | None:
    """A file as it is now; None if there is no regular file."""
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return None
    if not stat.S_ISREG(status.st_mode):
        return None
    return FileMark(path, status.st_size, status.st_mtime_ns, status.st_ino)


def announce(path: Path) -> None:
    """Say that a file is about to be opened by a library that Python does not see opening files."""
    sys.audit("open", str(path), "rb", os.O_RDONLY)


class OpenedFiles:
    """What this process opens for reading while it is told to note that.

    Python tells by an audit event of each file that it opens, modules among them
    (https://docs.python.org/3/library/audit_events.html). Installed libraries are left out, but for
    the package that the model itself is in. So are files that this process writes.
    """

    def __init__(self, source: str) -> None:
        """Note what is opened for the model that a source names."""
        own = source.partition(":")[0].partition(".")[0]
        self._own_parts = tuple(f"{library}{own}" for library in _LIBRARIES) if own else ()
        self._marks: dict[str, FileMark | None] = {}
        self._written: set[str] = set()
        self._is_noting = False

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        """Note what is opened meanwhile. To be called once in the life of a process."""
        self._is_noting = True
        sys.addaudithook(self._on_event)  # which cannot be taken back
        try:
            yield
        finally:
            self._is_noting = False

    def marks(self) -> list[FileMark]:
        """Each file, as it was before it was opened first."""
        return [
            mark
            for path, mark in self._marks.items()
            if mark is not None and path not in self._written
        ]

    def _on_event(self, event: str, args: tuple[object, ...]) -> None:
        if not self._is_noting or event != "open":
            return
        file, _, flags = args
        if not isinstance(file, str | bytes | os.PathLike) or not isinstance(flags, int):
            return
        path = os.path.abspath(os.fsdecode(file))
        if flags & os.O_ACCMODE != os.O_RDONLY:
            self._written.add(path)
            return
        if path.endswith(".pyc"):
            with contextlib.suppress(ValueError):  # it is not in a cache
                path = importlib.util.source_from_cache(path)
        if path not in self._marks and self._is_part(path):
            self._marks[path] = mark_of(path)

    def _is_part(self, path: str) -> bool:
        if path.startswith((*_NO_PART, *_OURS)):
            return False
        return not path.startswith(_LIBRARIES) or path.startswith(self._own_parts)
