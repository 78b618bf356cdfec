"""Records which files a model is loaded from. No torch.

Workers record them; the front end compares the records.
"""

import contextlib
import importlib.util
import os
import stat
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import msgspec

_NO_PART = ("/dev/", "/etc/", "/proc/", "/run/", "/sys/")
"""Folders of the system: a model may read them, but is not made of them."""
_OURS = tuple(f"{Path(__file__).parents[2] / name}/" for name in ("models", "service", "workers"))
_PART = "inferpool.part"
"""Audit event of `announce`."""
_LIBRARIES = tuple({f"{sysconfig.get_path(name)}/" for name in ("stdlib", "purelib", "platlib")})


class FileMark(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """State of a file when it was opened."""

    path: str
    num_bytes: int
    mtime_ns: int
    inode: int
    digest: bytes = b""
    """SHA-256 of its content, if another host compares it: date and inode mean nothing there."""


def mark_of(path: str) -> FileMark | None:
    """Return a file's state now; None if it is no regular file."""
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return None
    if not stat.S_ISREG(status.st_mode):
        return None
    return FileMark(path, status.st_size, status.st_mtime_ns, status.st_ino)


def announce(path: Path) -> None:
    """Record that a library is about to open a file of the model, which Python would not see."""
    sys.audit(_PART, str(path))


class OpenedFiles:
    """Files that this process opens for reading while it records.

    Python raises an audit event for each file that it opens, modules among them
    (https://docs.python.org/3/library/audit_events.html). Left out are installed libraries, except
    the model's own package; files that this process writes, or in folders that it makes; temporary
    files; and files that are gone at the end.

    Args:
        source: Source of the model, as the settings name it.
    """

    def __init__(self, source: str) -> None:
        own = source.partition(":")[0].partition(".")[0]
        self._own_parts = tuple(f"{library}{own}" for library in _LIBRARIES) if own else ()
        self._marks: dict[str, FileMark | None] = {}
        self._written: set[str] = set()
        self._made_folders: list[str] = []
        self._no_part = (*_NO_PART, *_temporary_folders())

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        """Record the files opened meanwhile, in all threads."""
        _hear_events()
        _recording.append(self)
        try:
            yield
        finally:
            _recording.remove(self)

    def marks(self) -> list[FileMark]:
        """Return the files that still exist, each as it was before it was first opened."""
        made = tuple(self._made_folders)
        return [
            mark
            for path, mark in self._marks.items()
            if mark is not None
            and path not in self._written
            and not path.startswith(made)
            and mark_of(path) is not None
        ]

    def on_event(self, event: str, args: tuple[object, ...]) -> None:
        """Record an audit event."""
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


_recording: list[OpenedFiles] = []
"""All that record now."""


@cache
def _hear_events() -> None:
    """Hear of audit events from now on. This cannot be undone, so it is done once in a process."""
    sys.addaudithook(_on_event)


def _on_event(event: str, args: tuple[object, ...]) -> None:
    for recorder in [*_recording]:  # another thread may begin or end one meanwhile
        recorder.on_event(event, args)


def _temporary_folders() -> Iterator[str]:
    """Yield the folders of temporary files; none if the working folder is in there."""
    with contextlib.suppress(FileNotFoundError):  # no folder can be written to
        folder = tempfile.gettempdir()
        if not Path.cwd().is_relative_to(os.path.realpath(folder)):
            yield from {f"{folder}/", f"{os.path.realpath(folder)}/"}


def _name_of(path: object) -> str:
    """Return the absolute path; empty for a descriptor."""
    return os.path.abspath(os.fsdecode(path)) if isinstance(path, str | bytes | os.PathLike) else ""
