"""Keeps the choice of a preset from one start to the next. Worker processes only."""

import contextlib
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
from inferpool.models.files.writing import lock, replacing
from inferpool.models.speed.attempts import LOADING, is_left, loading_prefix
from inferpool.models.speed_names import CHOICES, SpeedReport

logger = logging.getLogger(__name__)

_LOCK_POLL_S = 0.05
_PIECE_BYTES = 1 << 20
_DIGEST_LEAD = b"\nsha256:"
_DIGEST_BYTES = len(_DIGEST_LEAD) + 64 + 1
"""Length of the digest that ends a file: readers of zip archives pass over what follows those."""
_LAYOUT = 2
"""Version of the files' layout; files of another one are not used."""
_MAX_REASON = 200
_OPENING = "-opening-"
_CUT_SHORT_HOLDS_S = 3600.0
"""Lifetime of a verdict cut short: enough for other replicas and repeated starts, while a later
start may find the machine less busy."""


def fingerprint(network: nn.Module, tolerance: object, *facts: object) -> str:
    """Return a short digest of all that a verdict depends on.

    That is the network's weights, structure and code, the model's tolerance, this machine's
    processor, torch's version, and the given facts.
    """
    digest = hashlib.sha256()

    def add(value: object) -> None:
        digest.update(repr(value).encode())

    add(tolerance if is_dataclass(tolerance) else type(tolerance))  # others have no lasting name
    for fact in (*facts, _LAYOUT, CHOICES, torch.__version__, _processor(), str(network)):
        add(fact)
    for kind in sorted({type(module) for module in network.modules()}, key=repr):
        if kind.__module__.startswith("torch."):
            continue  # torch's version says it, and parsing its files takes a quarter of a second
        with contextlib.suppress(OSError, TypeError):  # it has no source
            add(inspect.getsource(kind))
    for name, tensor in network.state_dict().items():
        add((name, tensor.dtype, tuple(tensor.shape)))
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        digest.update(flat.view(torch.uint8).numpy())
    return digest.hexdigest()[:32]


class VerdictStore:
    """A folder of verdicts and compiled packages. Its failures cost time, and nothing else.

    Each file ends with a digest. A file that is damaged, or was being loaded when a process died,
    is moved aside and made again.
    """

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        """None keeps nothing."""
        self._has_warned = False
        self._checked: dict[Path, tuple[int, int, int]] = {}
        """Size, time and inode of the packages that were found undamaged."""
        self._told: set[Path] = set()
        """Files that the log has called unusable."""

    def read(self, key: str) -> SpeedReport | None:
        """Return the kept verdict, if there is one."""
        if self.folder is None:
            return None
        path = self.folder / f"{key}.json"
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
        """Store a verdict, if the folder can be written."""
        if self.folder is None:
            return
        try:
            content = msgspec.json.format(msgspec.json.encode(report))
            write_with_digest(self.folder / f"{key}.json", content)
        except OSError as error:
            self._warn(error)

    def package(self, key: str, preset: str) -> Path | None:
        """Return the path of a preset's package, if it exists and is undamaged."""
        if self.folder is None:
            return None
        path = self.folder / f"{key}-{preset}.pt2"
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
        """Write a package by `make`, and keep it.

        Raises:
            Exception: Raised by `make`, or by writing to the folder.
        """
        assert self.folder is not None
        path = self.folder / f"{key}-{preset}.pt2"
        with replacing(path, ".draft") as draft:
            make(draft)
            _add_digest(draft)

    @contextlib.contextmanager
    def loading(self, path: Path) -> Iterator[None]:
        """Load a package and call it once; move it aside if that fails or kills this process.

        Torch unpacks it into TMPDIR, where a killed process would leave it. So TMPDIR becomes a
        folder beside the package, which also marks the attempt: this process holds a lock on it
        while it lives. Files mapped from the folder outlive its removal.
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
                lock(descriptor)
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
        """Move a package aside if a process died while loading it, and remove what that left."""
        for mark in path.parent.glob(f"{path.stem}{LOADING}*"):
            if is_left(mark):
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
            logger.warning("%s %s; making it again takes time", path, reason)
        self._told.add(path)

    @contextlib.contextmanager
    def turn(self, key: str, timeout_s: float, on_wait: Callable[[], None]) -> Iterator[None]:
        """Measure alone: other processes wait, and then find the verdict.

        Without a writable folder, or after the timeout, each process measures. The kernel releases
        the lock of a process that dies.
        """
        with self._locked(self.folder and self.folder / f"{key}.lock", timeout_s, on_wait):
            yield

    @contextlib.contextmanager
    def host_turn(self, timeout_s: float, on_wait: Callable[[], None]) -> Iterator[None]:
        """Search alone among this user's processes on this host, for all folders."""
        path = Path(tempfile.gettempdir(), f"inferpool-search-{os.geteuid()}.lock")
        with self._locked(path, timeout_s, on_wait):
            yield

    @contextlib.contextmanager
    def _locked(
        self, path: Path | None, timeout_s: float, on_wait: Callable[[], None]
    ) -> Iterator[None]:
        descriptor = None
        try:
            if path is not None:
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            self._warn(error)
        if descriptor is None:
            yield
            return
        try:
            _lock(descriptor, timeout_s, on_wait)
            yield
        finally:
            os.close(descriptor)

    def _warn(self, error: OSError) -> None:
        if not self._has_warned:
            text = "verdicts on speed presets are not kept, since %s cannot be written: %s"
            logger.warning(text, self.folder, error)
        self._has_warned = True


def _remove(path: Path) -> None:
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
            lock(descriptor)
            return
        except BlockingIOError:
            if not has_waited:
                on_wait()
            has_waited = True
            time.sleep(_LOCK_POLL_S)
        except OSError:
            return  # a file system without locks


def _processor() -> str:
    """Return the kernel's name for the processor, and the instructions that torch uses."""
    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                name = line
                break
    return f"{name} {torch.backends.cpu.get_cpu_capability()}"


class DamagedError(Exception):
    """Raised if a file's content is not what was written."""


def write_with_digest(path: Path, content: bytes) -> None:
    """Write a file with its digest, atomically."""
    with replacing(path, f".{os.getpid()}") as draft:
        draft.write_bytes(content)
        _add_digest(draft)


def _add_digest(draft: Path) -> None:
    with draft.open("r+b") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        file.seek(0, os.SEEK_END)
        file.write(_DIGEST_LEAD + digest.encode() + b"\n")


def checked_content(content: bytes) -> bytes:
    """Return a file's content without the digest.

    Raises:
        DamagedError: It has changed since it was written.
    """
    own, end = content[:-_DIGEST_BYTES], content[-_DIGEST_BYTES:]
    if end != _DIGEST_LEAD + hashlib.sha256(own).hexdigest().encode() + b"\n":
        raise DamagedError("its digest does not fit")
    return own


def check_digest(path: Path) -> None:
    """Check a file, which may be large, by its digest.

    Raises:
        DamagedError: It has changed since it was written.
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
