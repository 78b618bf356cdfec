"""Each life of a worker begins with nothing of another one: random numbers, signals, threads.

Workers are forked, and a fork copies all that the forkserver has. The table names what that is.
"""

import asyncio
import atexit
import concurrent.futures.thread
import contextvars
import decimal
import faulthandler
import gc
import hashlib
import inspect
import json
import logging
import multiprocessing
import multiprocessing.util
import os
import random
import secrets
import signal
import ssl
import sys
import tempfile
import threading
import uuid
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from inferpool.models.base import Model
from inferpool.models.item import Features, Item
from inferpool.models.spec import Placement
from inferpool.workers.host.engine import WorkerHandle
from inferpool.workers.host.local import LocalEngine
from inferpool.workers.shared.arena import Arena
from tests.apart_model import ApartModel
from tests.split_fault_model import SplitFaultModel
from tests.workers.contract import PATIENT, pid_of, started, until
from tests.workers.ranks.test_group import PairEngine

Look = Callable[[], Any]


@dataclass(frozen=True)
class CopiedState:
    """Something that a fork copies."""

    look: Look
    """Returns what a life has of it; JSON can say it. Called in `load`."""
    is_right: Callable[[Sequence[Any]], bool]
    """Returns whether it is right, given what each life has."""


def differs(look: Look) -> CopiedState:
    """Return a state that no two lives may share."""
    return CopiedState(look, lambda seen: len({json.dumps(each) for each in seen}) == len(seen))


def is_always(expected: object, look: Look) -> CopiedState:
    """Return a state that is the same in each life, and does no harm so."""
    return CopiedState(look, lambda seen: all(each == expected for each in seen))


def _seed_for_gpus() -> object:
    """Return the number that CUDA's generators begin with once CUDA is initialised."""
    callback, _ = torch.cuda._lazy_seed_tracker.manual_seed_all_cb
    return inspect.getclosurevars(callback).nonlocals["seed"]


def _handlers() -> dict[str, str]:
    found = {each.name: signal.getsignal(each) for each in signal.Signals}
    return {
        name: getattr(handler, "__qualname__", str(handler)).rpartition(".")[2]
        for name, handler in found.items()
        if handler not in (signal.SIG_DFL, None)
    }


def _loggers_with_handlers() -> list[str]:
    loggers = logging.Logger.manager.loggerDict.items()
    return [name for name, each in loggers if getattr(each, "handlers", [])]


def _fork_hooks() -> list[str]:
    hooks = multiprocessing.util._afterfork_registry.items()
    return sorted(type(object_).__name__ for _, object_ in hooks)


def _digest_of_authkey() -> str:
    return hashlib.sha256(bytes(multiprocessing.current_process().authkey)).hexdigest()


STATES = {
    # Random numbers, and names that are made of them.
    "torch": differs(lambda: torch.rand(3).tolist()),
    "torch on GPUs": differs(_seed_for_gpus),
    "numpy": differs(lambda: np.random.rand(3).tolist()),
    "random": differs(random.random),
    "secrets": differs(lambda: secrets.token_hex(8)),
    "ssl": differs(lambda: ssl.RAND_bytes(8).hex()),
    "uuid1": differs(lambda: str(uuid.uuid1())),
    "uuid4": differs(lambda: str(uuid.uuid4())),
    "names of temporary files": differs(lambda: next(tempfile._get_candidate_names())),
    # All lives of one forkserver order sets alike; clients never learn how.
    "seed of hashes": CopiedState(lambda: hash("a text"), lambda seen: len(set(seen)) == 1),
    # What says which process and thread this is.
    "process": differs(os.getpid),
    "main thread": is_always(
        True, lambda: threading.main_thread().native_id == os.getpid() == threading.get_native_id()
    ),
    "multiprocessing's process": is_always(
        True, lambda: multiprocessing.current_process().pid == os.getpid()
    ),
    # It is the front end's, as multiprocessing has it for all of its children.
    "key of multiprocessing": is_always(_digest_of_authkey(), _digest_of_authkey),
    # Threads, children, and what runs at a fork or at the end.
    "threads of Python": is_always(["MainThread"], lambda: [t.name for t in threading.enumerate()]),
    "threads of the kernel": is_always(1, lambda: len(os.listdir("/proc/self/task"))),
    "executors": is_always(0, lambda: len(concurrent.futures.thread._threads_queues)),
    "children": is_always([], multiprocessing.active_children),
    # Those of libraries, which make their locks and caches anew.
    "multiprocessing's fork hooks": is_always(["SharedCache", "_ResourceSharer"], _fork_hooks),
    "multiprocessing's finalizers": is_always(
        0, lambda: len(multiprocessing.util._finalizer_registry)
    ),
    # Workers leave by `os._exit`, which calls none: see the test of that.
    "atexit hooks": CopiedState(atexit._ncallbacks, lambda seen: len(set(seen)) == 1),
    "event loop": is_always(True, lambda: asyncio._get_running_loop() is None),
    # Signals.
    "signal handlers": is_always(
        {
            "SIGINT": "_go_on",
            "SIGHUP": "_go_on",
            "SIGQUIT": "_go_on",
            "SIGUSR2": "_go_on",
            "SIGTERM": "leave",
            "SIGPIPE": str(signal.SIG_IGN),
            "SIGXFSZ": str(signal.SIG_IGN),
        },
        _handlers,
    ),
    "signal wakeup descriptor": is_always(-1, lambda: signal.set_wakeup_fd(-1)),
    "blocked signals": is_always([], lambda: list(signal.pthread_sigmask(signal.SIG_BLOCK, []))),
    "alarms": is_always([0.0, 0.0], lambda: list(signal.getitimer(signal.ITIMER_REAL))),
    "fault handler": is_always(True, faulthandler.is_enabled),
    # The log and all that is printed go to the front end.
    "handlers of the log": is_always(
        ["LineHandler"], lambda: [type(each).__name__ for each in logging.getLogger().handlers]
    ),
    # Those that torch makes in any process.
    "handlers of loggers": CopiedState(
        _loggers_with_handlers,
        lambda seen: all(set(each) <= set(_loggers_with_handlers()) for each in seen),
    ),
    "stdout and stderr": is_always(
        ["PrintedLines"] * 2, lambda: [type(each).__name__ for each in (sys.stdout, sys.stderr)]
    ),
    # A warning that was shown during an import is not shown once more.
    "filters of warnings": CopiedState(
        lambda: len(warnings.filters), lambda seen: len(set(seen)) == 1
    ),
    # Settings of threads and libraries.
    "context variables": is_always(
        [], lambda: [v.name for v in contextvars.copy_context() if v.name != "decimal_context"]
    ),
    "decimal": is_always(28, lambda: decimal.getcontext().prec),
    "tracing": is_always(True, lambda: sys.gettrace() is sys.getprofile() is None),
    "collector": is_always(True, gc.isenabled),
    "torch's threads": is_always(1, torch.get_num_threads),
    "torch's devices": is_always(False, torch.cuda.is_initialized),
    "torch's groups": is_always(False, torch.distributed.is_initialized),
    "torch's readers": is_always(True, lambda: torch.utils.data.get_worker_info() is None),
    "folder": is_always(os.getcwd(), os.getcwd),
    "folder of temporary files": is_always(tempfile.gettempdir(), tempfile.gettempdir),
}
"""All that a fork copies, and whether it must be another or may be the same in each life."""


class LivingModel(Model):
    """Writes what its process has of each state; answers numbers that it draws."""

    def __init__(self, *, folder: str) -> None:
        self._folder = Path(folder)

    def load(self, placement: Placement) -> None:
        seen = {name: state.look() for name, state in STATES.items()}
        (self._folder / str(os.getpid())).write_text(json.dumps(seen))
        atexit.register((self._folder / "exited").touch)

    def preprocess(self, item: Item) -> Features:
        return {"x": torch.rand(1)}


def seen_by(folder: Path, worker: WorkerHandle) -> dict[str, Any]:
    return dict(json.loads((folder / str(pid_of(worker))).read_text()))


async def test_nothing_that_a_fork_copies_makes_two_lives_alike(
    engine: LocalEngine, tmp_path: Path
):
    source, options = f"{__name__}:LivingModel", {"folder": str(tmp_path)}
    lives = []
    for _ in range(3):
        worker = await started(engine, source=source, options=options)
        lives.append(seen_by(tmp_path, worker))
        await worker.stop(60)
    for name, state in STATES.items():
        seen = [life[name] for life in lives]
        assert state.is_right(seen), (name, seen)
    assert not (tmp_path / "exited").exists()


class DrawingApart(ApartModel):
    """An `ApartModel` that writes a number which each of its processes draws."""

    def __init__(self, *, folder: str) -> None:
        super().__init__()
        write_number(folder)


class DrawingPair(SplitFaultModel):
    """A `SplitFaultModel` that writes a number which each of its ranks draws."""

    def __init__(self, *, folder: str) -> None:
        super().__init__()
        write_number(folder)


def write_number(folder: str) -> None:
    Path(folder, str(os.getpid())).write_text(str(torch.rand(1, dtype=torch.float64).item()))


async def numbers_of(engine: LocalEngine, source: type, folder: Path, num: int) -> list[str]:
    """Return the numbers that the processes of a worker have drawn."""
    folder.mkdir()
    worker = await started(
        engine, source=f"{__name__}:{source.__name__}", options={"folder": str(folder)}, decoders=2
    )
    await until(lambda: len(list(folder.iterdir())) == num)
    await worker.stop(60)
    return [each.read_text() for each in folder.iterdir()]


async def test_decoders_draw_other_numbers_than_their_worker(engine: LocalEngine, tmp_path: Path):
    assert len(set(await numbers_of(engine, DrawingApart, tmp_path / "one", 3))) == 3


async def test_ranks_draw_the_same_numbers_and_each_group_others(arena: Arena, tmp_path: Path):
    engine = PairEngine(arena, PATIENT)
    first, again = [
        set(await numbers_of(engine, DrawingPair, tmp_path / name, 2)) for name in ("one", "two")
    ]
    assert (len(first), len(again)) == (1, 1)
    assert first != again
