"""Notes which files a model is made of, as they are opened while it loads. No torch.

Worker processes note; the front end compares what they have noted.
"""

import contextlib
import importlib.util
import os
import stat
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec

_NO_PART = ("/dev/", "/etc/", "/proc/", "/run/", "/sys/")
"""The system's own files: a model may read them, but is not made of them."""
_OURS = tuple(f"{Path(__file__).parents[2] / name}/" for name in ("models", "service", "workers"))
_PART = "inferpool.part"
"""The audit event of `announce`."""
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
    """Say that a file is part of the model, wherever it is, and about to be opened by a library.

    Python does not see each library opening files.
    """
    sys.audit(_PART, str(path))


class OpenedFiles:
    """What this process opens for reading while it is told to note that.

    Python tells by an audit event of each file that it opens, modules among them
    (https://docs.python.org/3/library/audit_events.html). Installed libraries are left out, but for
    the package that the model itself is in. So are files that this process writes, what is in
    folders that it makes, temporary files, and files that are gone when it has loaded the model.
    """

    def __init__(self, source: str) -> None:
        """Note what is opened for the model that a source names."""
        own = source.partition(":")[0].partition(".")[0]
        self._own_parts = tuple(f"{library}{own}" for library in _LIBRARIES) if own else ()
        self._marks: dict[str, FileMark | None] = {}
        self._written: set[str] = set()
        self._made_folders: list[str] = []
        self._no_part = (*_NO_PART, *_temporary_folders())
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
        """Each file that is there now, as it was before it was opened first."""
        made = tuple(self._made_folders)
        return [
            mark
            for path, mark in self._marks.items()
            if mark is not None
            and path not in self._written
            and not path.startswith(made)
            and mark_of(path) is not None
        ]

    def _on_event(self, event: str, args: tuple[object, ...]) -> None:
        if not self._is_noting:
            return
        if event == "open":
            file, _, flags = args
            if isinstance(flags, int) and (name := _name_of(file)):
                self._on_open(name, flags)
        elif event == _PART:
            path = _name_of(args[0])
            self._marks.setdefault(path, mark_of(path))
        elif event == "os.rename":
            if name := _name_of(args[1]):
                self._written.add(name)
        elif event == "os.mkdir" and (name := _name_of(args[0])) and not os.path.lexists(name):
            self._made_folders.append(f"{name}/")

    def _on_open(self, path: str, flags: int) -> None:
        if flags & os.O_ACCMODE != os.O_RDONLY:
            self._written.add(path)
            return
        if path.endswith(".pyc"):
            with contextlib.suppress(ValueError):  # it is not in a cache
                path = importlib.util.source_from_cache(path)
        if path not in self._marks and self._is_part(path):
            self._marks[path] = mark_of(path)

    def _is_part(self, path: str) -> bool:
        if path.startswith((*self._no_part, *_OURS)):
            return False
        return not path.startswith(_LIBRARIES) or path.startswith(self._own_parts)


def _temporary_folders() -> Iterator[str]:
    """Where temporary files are; nothing if the working folder is there, with a model to try."""
    with contextlib.suppress(FileNotFoundError):  # no folder can be written to
        folder = tempfile.gettempdir()
        if not Path.cwd().is_relative_to(os.path.realpath(folder)):
            yield from {f"{folder}/", f"{os.path.realpath(folder)}/"}


def _name_of(path: object) -> str:
    """The absolute path that Python was given; empty if it was given a descriptor."""
    return os.path.abspath(os.fsdecode(path)) if isinstance(path, str | bytes | os.PathLike) else ""
