"""Remembers which preset was chosen, from one start to the next. Worker processes only."""

import contextlib
import fcntl
import hashlib
import inspect
import logging
import os
import platform
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass
from pathlib import Path

import msgspec
import torch
from torch import nn

from models.speed.attempts import attempt
from models.speed.names import CHOICES, SpeedReport

logger = logging.getLogger(__name__)

_LOCK_POLL_S = 0.05
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
    for fact in (*facts, CHOICES, torch.__version__, _processor(), str(network)):
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
    """A folder of verdicts. Whatever goes wrong with it costs time, and nothing else."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._has_warned = False

    def package(self, key: str, preset: str) -> Path | None:
        """Where the network belongs that is compiled for a preset."""
        return self._folder / f"{key}-{preset}.pt2" if self._folder else None

    def read(self, key: str) -> SpeedReport | None:
        """What was found out before, if it was."""
        if self._folder is None:
            return None
        path = self._folder / f"{key}.json"
        try:
            report = msgspec.json.decode(path.read_bytes(), type=SpeedReport)
            age_s = time.time() - path.stat().st_mtime
        except (OSError, msgspec.MsgspecError):
            return None
        return None if report.is_cut_short and age_s > _CUT_SHORT_HOLDS_S else report

    def write(self, key: str, report: SpeedReport) -> None:
        """Keep it, if that can be done."""
        if self._folder is None:
            return
        path = self._folder / f"{key}.json"
        draft = path.with_suffix(f".{os.getpid()}")
        try:
            draft.write_bytes(msgspec.json.format(msgspec.json.encode(report)))
            draft.replace(path)
        except OSError as error:
            self._warn(error)

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
