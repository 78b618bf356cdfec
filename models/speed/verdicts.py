"""Remembers which preset was chosen, from one start to the next. Worker processes only."""

import contextlib
import fcntl
import hashlib
import inspect
import logging
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass
from pathlib import Path

import msgspec
import torch
from torch import nn

from inferpool.models.files.reading import read_file
from inferpool.models.speed.attempts import LOADING, attempt, loading_prefix
from inferpool.models.speed.names import CHOICES, SpeedReport

logger = logging.getLogger(__name__)

_LOCK_POLL_S = 0.05
_PIECE_BYTES = 1 << 20
_DIGEST_LEAD = b"\nsha256:"
_DIGEST_BYTES = len(_DIGEST_LEAD) + 64 + 1
"""Length of the digest that ends a file: readers of zip archives pass over what follows those."""
_LAYOUT = 2
"""Verdicts and packages that were kept in another layout are not used."""
_MAX_REASON = 200
_OPENING = "-opening-"
_CUT_SHORT_HOLDS_S = 3600.0
"""A verdict cut short serves the other replicas, and a service that is started over and over; a
later start may find the machine less busy."""


def fingerprint(network: nn.Module, tolerance: object, *facts: object) -> str:
    """Say in a few characters all that a verdict depends on.

    That is the weights, the structure and the code of a network, what still counts as its answer,
    this machine's processor, torch, and the facts given.
    """
    digest = hashlib.sha256()

    def add(value: object) -> None:
        digest.update(repr(value).encode())

    add(tolerance if is_dataclass(tolerance) else type(tolerance))  # others have no lasting name
    for fact in (*facts, _LAYOUT, CHOICES, torch.__version__, _processor(), str(network)):
        add(fact)
    for kind in sorted({type(module) for module in network.modules()}, key=repr):
        with contextlib.suppress(OSError, TypeError):  # it has no source
            add(inspect.getsource(kind))
    for name, tensor in network.state_dict().items():
        add((name, tensor.dtype, tuple(tensor.shape)))
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        digest.update(flat.view(torch.uint8).numpy())
    return digest.hexdigest()[:32]


class VerdictStore:
    """A folder of verdicts and packages. Whatever goes wrong with it costs time, and nothing else.

    All of them are sealed. What is damaged, and what was being loaded when a process died, is moved
    aside, and made again.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._has_warned = False
        self._checked: dict[Path, tuple[int, int, int]] = {}
        """The packages that were whole, as the file system knew them then."""
        self._told: set[Path] = set()
        """What the log says that it could not be used."""

    def read(self, key: str) -> SpeedReport | None:
        """What was found out before, if it was."""
        if self._folder is None:
            return None
        path = self._folder / f"{key}.json"
        try:
            content = checked_content(read_file(path))
            report = msgspec.json.decode(content, type=SpeedReport)
            age_s = time.time() - path.stat().st_mtime
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, DamagedError, msgspec.MsgspecError, ValueError, RecursionError) as error:
            self._set_aside(path, f"cannot be used ({_reason(error)})")
            return None
        return None if report.is_cut_short and age_s > _CUT_SHORT_HOLDS_S else report

    def write(self, key: str, report: SpeedReport) -> None:
        """Keep it, if that can be done."""
        if self._folder is None:
            return
        try:
            content = msgspec.json.format(msgspec.json.encode(report))
            write_with_digest(self._folder / f"{key}.json", content)
        except OSError as error:
            self._warn(error)

    @property
    def has_room_for_packages(self) -> bool:
        """There is a folder to keep them in."""
        return self._folder is not None

    def package(self, key: str, preset: str) -> Path | None:
        """The network that was compiled for a preset, if it is there and whole."""
        if self._folder is None:
            return None
        path = self._folder / f"{key}-{preset}.pt2"
        self._judge_loads(path)
        try:
            status = path.lstat()
            seen = (status.st_size, status.st_mtime_ns, status.st_ino)
            if self._checked.get(path) != seen:
                check_digest(path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, DamagedError) as error:
            self._set_aside(path, f"cannot be used ({_reason(error)})")
            return None
        self._checked[path] = seen
        return path

    def make_package(self, key: str, preset: str, make: Callable[[Path], None]) -> None:
        """Have a package written, and keep it.

        Raises:
            Exception: Whatever `make` raises, or there is no way to keep it.
        """
        assert self._folder is not None
        path = self._folder / f"{key}-{preset}.pt2"
        draft = path.with_suffix(".draft")
        make(draft)
        add_digest(draft, path)

    @contextlib.contextmanager
    def loading(self, path: Path) -> Iterator[None]:
        """Load a package and call it once: if it fails or this process dies, it is set aside.

        Torch unpacks it into TMPDIR, and would leave that to whoever comes after a killed process.
        Meanwhile this is a folder beside the package, which is the mark of the attempt as well: it
        is locked for as long as this process lives. What is mapped of it outlives its removal.
        """
        prefix = f"{path.stem}{_OPENING}"
        try:
            scratch = Path(tempfile.mkdtemp(prefix=prefix, dir=path.parent))
        except OSError:  # the cache can only be read: there is no mark then
            scratch = Path(tempfile.mkdtemp(prefix=prefix))
        descriptor = os.open(scratch, os.O_RDONLY | os.O_CLOEXEC)
        before = os.environ.get("TMPDIR")
        try:
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            unique = scratch.name.removeprefix(prefix)
            mark = scratch.with_name(f"{loading_prefix(path.stem, os.getpid())}{unique}")
            scratch = scratch.rename(mark)
            os.environ["TMPDIR"] = str(scratch)
            yield
        except TimeoutError:
            raise  # which says nothing of the package
        except Exception as error:
            # It may have damaged this process's memory, which then dies of something else.
            self._set_aside(path, f"cannot be loaded ({_reason(error)})")
            raise
        finally:
            if before is None:
                os.environ.pop("TMPDIR", None)
            else:
                os.environ["TMPDIR"] = before
            shutil.rmtree(scratch, ignore_errors=True)
            os.close(descriptor)

    def _judge_loads(self, path: Path) -> None:
        """Move a package aside that was being loaded when a process died; clear up after that."""
        for mark in path.parent.glob(f"{path.stem}{LOADING}*"):
            if _is_left(mark):
                self._set_aside(path, "was being loaded when a process died")
                shutil.rmtree(mark, ignore_errors=True)

    def _set_aside(self, path: Path, reason: str) -> None:
        aside = path.with_name(f"{path.name}.aside")
        try:
            _remove(aside)
            path.replace(aside)
        except FileNotFoundError:
            return  # another worker was faster
        except OSError as error:
            reason = f"{reason}, and cannot be moved away ({error.strerror})"
        if path not in self._told:
            logger.warning("%s %s: it is made again, which takes time", path, reason)
        self._told.add(path)

    @contextlib.contextmanager
    def turn(self, key: str, timeout_s: float, on_wait: Callable[[], None]) -> Iterator[None]:
        """Be the only one that measures this: the others wait, and find the verdict.

        Where the folder cannot be written, or the wait is over, each does it alone. The kernel
        gives the lock of a process back when that ends, however it ends.
        """
        with self._locked(self._folder and self._folder / f"{key}.lock", timeout_s, on_wait):
            yield

    @contextlib.contextmanager
    def host_turn(self, timeout_s: float, on_wait: Callable[[], None]) -> Iterator[None]:
        """Be the only one of this user on this host, whatever its folder."""
        path = Path(tempfile.gettempdir(), f"inferpool-search-{os.geteuid()}.lock")
        with self._locked(path, timeout_s, on_wait):
            yield

    @contextlib.contextmanager
    def attempt(self, key: str) -> Iterator[bool]:
        """Begin what may take too much memory; see `models.speed.attempts`."""
        if self._folder is None:
            yield True
            return
        with attempt(self._folder, key) as is_first:
            yield is_first

    @contextlib.contextmanager
    def _locked(
        self, path: Path | None, timeout_s: float, on_wait: Callable[[], None]
    ) -> Iterator[None]:
        descriptor = self._open_lock(path)
        if descriptor is None:
            yield
            return
        try:
            _lock(descriptor, timeout_s, on_wait)
            yield
        finally:
            os.close(descriptor)

    def _open_lock(self, path: Path | None) -> int | None:
        if path is None:
            return None
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            self._warn(error)
            return None

    def _warn(self, error: OSError) -> None:
        if not self._has_warned:
            text = "what is found out about speed is not kept, as %s cannot be written: %s"
            logger.warning(text, self._folder, error)
        self._has_warned = True


def _is_left(mark: Path) -> bool:
    """Whether nobody has the mark of an attempt any more."""
    try:
        descriptor = os.open(mark, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


def _remove(path: Path) -> None:
    """Remove a file, or a folder with all that is in it, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _reason(error: Exception) -> str:
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return str(text).splitlines()[0][:_MAX_REASON]


def _lock(descriptor: int, timeout_s: float, on_wait: Callable[[], None]) -> None:
    until = time.monotonic() + timeout_s
    has_waited = False
    while time.monotonic() < until:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if not has_waited:
                on_wait()
            has_waited = True
            time.sleep(_LOCK_POLL_S)
        except OSError:
            return  # a file system without locks


def _processor() -> str:
    """The processor as the kernel names it, with what torch makes of its instructions."""
    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                name = line
                break
    return f"{name} {torch.backends.cpu.get_cpu_capability()}"


class DamagedError(Exception):
    """The content of a file is not what was written."""


def write_with_digest(path: Path, content: bytes) -> None:
    """Write a file with its digest, all at once.

    Raises:
        OSError: It cannot be written.
    """
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    draft.write_bytes(content)
    add_digest(draft, path)


def add_digest(draft: Path, path: Path) -> None:
    """Give a file its digest, and then its name.

    Raises:
        OSError: It cannot be written.
    """
    with draft.open("r+b") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        file.seek(0, os.SEEK_END)
        file.write(_DIGEST_LEAD + digest.encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)


def checked_content(content: bytes) -> bytes:
    """What was written, of the whole of a file.

    Raises:
        DamagedError: It has changed since.
    """
    own, end = content[:-_DIGEST_BYTES], content[-_DIGEST_BYTES:]
    if end != _DIGEST_LEAD + hashlib.sha256(own).hexdigest().encode() + b"\n":
        raise DamagedError("its digest does not fit")
    return own


def check_digest(path: Path) -> None:
    """See that a file, which may be large, is what was written.

    Raises:
        DamagedError: It has changed since.
        OSError: It cannot be read.
    """
    if not path.is_file() or path.is_symlink():
        raise DamagedError("it is no regular file")
    digest = hashlib.sha256()
    with path.open("rb") as file:
        left = os.fstat(file.fileno()).st_size - _DIGEST_BYTES
        while left > 0:
            piece = file.read(min(_PIECE_BYTES, left))
            if not piece:
                raise DamagedError("it has become shorter")
            digest.update(piece)
            left -= len(piece)
        if left or file.read() != _DIGEST_LEAD + digest.hexdigest().encode() + b"\n":
            raise DamagedError("its digest does not fit")
