"""The engine for this host: it starts each worker as a process, forked by a forkserver.

Runs in the front end's event loop, which never blocks on a worker.
"""

import asyncio
import atexit
import contextlib
import errno
import logging
import os
import traceback
from asyncio import Task
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import active_children
from multiprocessing.context import SpawnProcess
from multiprocessing.process import BaseProcess
from pathlib import Path

from inferpool.models.attached import attached
from inferpool.workers.host import forkserver
from inferpool.workers.host.attachment import AttachProcesses, Starter
from inferpool.workers.host.engine import (
    USUAL_PERIODS,
    ForkserverHealth,
    WorkerId,
    WorkerPeriods,
)
from inferpool.workers.host.forked import ForkedProcess, SpawnedProcess
from inferpool.workers.host.forkserver import (
    Forkserver,
    ForkserverLostError,
    can_fork,
)
from inferpool.workers.host.local_worker import LocalWorker
from inferpool.workers.host.observed import OomKills
from inferpool.workers.shared.arena import Arena
from inferpool.workers.shared.config import WorkerConfig
from inferpool.workers.shared.errors import WorkerStartError
from inferpool.workers.shared.memory import SharedMemoryError

logger = logging.getLogger(__name__)

_PRELOAD = ("inferpool.workers.inside.preload",)
_START_DESCRIPTORS = 20
"""More descriptors than the start of a process needs. It needs 17, for two queues, a heartbeat,
outputs, stacks, a lifeline, an answer, a handle and a copy."""
_WIRING_DESCRIPTORS = 8
"""More descriptors than the wiring of one rank to the others of its group needs."""
_RETRY_S = 0.1
MakeProcess = Callable[..., BaseProcess]
"""Class of the processes of a worker."""


def start_forkserver(extra: Sequence[str] = ()) -> None:
    """Start the forkserver early, so that it imports torch while the front end starts.

    Call it in the main thread: the kernel ends the forkserver when the thread that started it ends.
    On a host without forkserver this does nothing, and workers are spawned.

    Args:
        extra: More modules for it to import.

    Raises:
        OSError: There are too few processes or descriptors.
    """
    if can_fork():
        forkserver.start_forkserver(*_ours_and_others(extra))


@contextlib.contextmanager
def guest_forkserver(extra: Sequence[str] = ()) -> Iterator[None]:
    """Run a forkserver in a process of the user's; see `workers.host.forkserver`.

    Workers that still run when the interpreter exits are killed: it would wait for them for ever.
    """
    atexit.unregister(_kill_forked)
    atexit.register(_kill_forked)  # registered after multiprocessing's own, so it runs before that
    with contextlib.ExitStack() as stack:
        if can_fork():
            stack.enter_context(forkserver.guest_forkserver(*_ours_and_others(extra)))
        yield


def _ours_and_others(extra: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """Return the modules of ours to import, and the others, which might not be safe."""
    ours = [name for name in extra if name.startswith("inferpool.")]
    return [*_PRELOAD, *ours], [name for name in extra if name not in ours]


def _kill_forked() -> None:
    for process in active_children():
        if isinstance(process, ForkedProcess | SpawnProcess):
            process.kill()


def _require_descriptors(num_ranks: int) -> None:
    """Raise OSError now if there are too few descriptors to start a process.

    If they ran out halfway, `multiprocessing` would leak those that it has opened by then.
    """
    taken: list[int] = []
    num_needed = _START_DESCRIPTORS
    if num_ranks > 1:
        num_needed = (_START_DESCRIPTORS + _WIRING_DESCRIPTORS) * num_ranks
    try:
        while len(taken) < num_needed:
            taken.extend(os.pipe())
    finally:
        for descriptor in taken:
            os.close(descriptor)


class LocalEngine:
    """Engine that starts workers as processes of this host."""

    def __init__(self, arena: Arena, periods: WorkerPeriods = USUAL_PERIODS) -> None:
        self._arena = arena
        self._periods = periods
        self._oom_kills = OomKills()
        self._forkserver: Forkserver | None = None
        """Forkserver; None before the first start, and on hosts that have none."""
        self._launches: set[Task[None]] = set()

    def forkserver_vitals(self) -> ForkserverHealth | None:
        """Return the state of the forkserver; None if there is none (yet)."""
        return self._forkserver.vitals() if self._forkserver else None

    async def close(self) -> None:
        """Release the threads that wait for a forkserver which does not answer.

        They would keep this process from exiting. Call it once no worker is started any more.
        """
        if self._forkserver is not None:
            await self._forkserver.close()
        if self._launches:
            await asyncio.wait(self._launches, timeout=self._periods.exit_s)

    async def start(
        self, id: WorkerId, config: WorkerConfig, on_progress: Callable[[str], None]
    ) -> LocalWorker:
        """Start a worker, and return once it has loaded its model and answered a canary.

        Raises:
            WorkerStartError: It ended, failed or took too long before that.
        """
        if self._forkserver is None and can_fork():
            self._forkserver = self._get_forkserver()
        until = asyncio.get_running_loop().time() + config.load_timeout_s
        while True:
            try:
                return await self._start_once(id, config, on_progress, until)
            except ForkserverLostError as error:
                logger.info("%s is started once more: %s", id, error)
                await asyncio.sleep(_RETRY_S)

    def _get_forkserver(self) -> Forkserver:
        try:
            return forkserver.start_forkserver(_PRELOAD, ())
        except OSError as error:
            raise WorkerStartError(f"no forkserver: {error.strerror}", permanent=False) from error

    async def _start_once(
        self, id: WorkerId, config: WorkerConfig, on_progress: Callable[[str], None], until: float
    ) -> LocalWorker:
        """Try to start a worker until that time of the event loop's clock.

        Raises:
            WorkerStartError: See `start`.
            ForkserverLostError: The forkserver ended meanwhile; nothing is left of the worker.
        """
        make = await self._way_to_start(config, on_progress, until)
        try:
            _require_descriptors(config.placement.num_ranks)
            worker = self._make(id, config, on_progress)
        except SharedMemoryError as error:
            raise WorkerStartError(str(error), permanent=False) from error
        except OSError as error:
            hint = " (ulimit -n)" if error.errno == errno.EMFILE else ""
            message = f"no queues for it: {error.strerror}{hint}"
            raise WorkerStartError(message, permanent=False) from error
        # A half-started process cannot be killed yet, so each way out waits for the launch first.
        launch = asyncio.create_task(self._launch(worker, make))
        self._launches.add(launch)
        launch.add_done_callback(self._on_launched)
        try:
            async with asyncio.timeout_at(until):
                await asyncio.shield(launch)
                await asyncio.shield(worker.started)
        except TimeoutError:
            reason = f"not ready after {config.load_timeout_s:g} s"
            await self._give_up(worker, launch, reason, with_stacks=True)
            raise _not_loaded(config) from None
        except WorkerStartError:
            await self._give_up(worker, launch, "the start was given up")
            raise
        except asyncio.CancelledError:
            await self._give_up(worker, launch, "the start was given up")
            if config.cache_dir is not None:
                forget_load = attached("forget a load")
                for rank in worker.ranks:
                    await asyncio.to_thread(forget_load, Path(config.cache_dir), rank.pid)
            raise
        except ForkserverLostError:
            raise
        except Exception as error:  # anything that the start of a process may raise
            raise WorkerStartError(
                f"the process could not be started: {error!r}", permanent=False
            ) from error
        return worker

    async def _way_to_start(
        self, config: WorkerConfig, on_progress: Callable[[str], None], until: float
    ) -> MakeProcess:
        """Return what makes the processes of a worker: without a forkserver they are spawned.

        Raises:
            WorkerStartError: The first forkserver is not ready in time.
        """
        if self._forkserver is None:
            return SpawnProcess
        if not self._forkserver.is_ready:
            on_progress("importing torch")
        try:
            async with asyncio.timeout_at(until):
                return ForkedProcess if await self._forkserver.ready_or_lost() else SpawnedProcess
        except TimeoutError:
            raise _not_loaded(config) from None

    async def _give_up(
        self,
        worker: LocalWorker,
        launch: Task[None],
        reason: str,
        *,
        with_stacks: bool = False,
    ) -> None:
        """End a worker that is being started.

        If its launch does not finish soon, the launch itself kills the process later.
        """
        worker.is_given_up = True
        await asyncio.wait([launch], timeout=self._periods.give_up_s)
        if worker.ranks[0].is_attached:
            await worker.kill(reason, with_stacks=with_stacks)

    def _on_launched(self, launch: Task[None]) -> None:
        self._launches.discard(launch)
        if not launch.cancelled():
            launch.exception()  # mark it as retrieved: the start may have been given up

    def _make(
        self, id: WorkerId, config: WorkerConfig, on_progress: Callable[[str], None]
    ) -> LocalWorker:
        is_alone = config.placement.num_ranks == 1
        kind: type[LocalWorker] = LocalWorker if is_alone else attached("ranked worker")
        worker = kind(id, config, on_progress, self._oom_kills, self._periods)
        # A worker watches attached processes by descriptors, which hosts without forkserver lack.
        if self._forkserver is not None and config.decoders:
            starter = Starter(
                arena=self._arena.memory,
                oom_kills=self._oom_kills,
                periods=self._periods,
                until_ready=self._forkserver.ready,
                start=self._start_attached,
            )
            attach: AttachProcesses = attached("decoders")
            worker.attachments["decoders"] = attach(id, config, starter, worker.settle)
        return worker

    async def _launch(self, worker: LocalWorker, make: MakeProcess) -> None:
        """Start all processes of a worker; on an error, leave nothing of it behind."""
        processes: list[BaseProcess] = []
        try:
            for rank in worker.ranks:
                target, args = worker.program_of(rank, self._arena.memory)
                processes.append(make(target=target, name=rank.name, args=args))
                await self._start_process(processes[-1])
                if worker.is_given_up:
                    raise InterruptedError("the start was given up")
            worker.attach(processes)
        except Exception:
            await asyncio.to_thread(_kill, processes, self._periods.exit_s)
            await worker.kill("could not be started")
            raise

    async def _start_attached(
        self, target: Callable[..., None], name: str, args: tuple[object, ...]
    ) -> BaseProcess:
        """Start a process that is attached to a worker.

        Raises:
            Exception: It could not be started.
        """
        _require_descriptors(1)
        process = ForkedProcess(target=target, name=name, args=args)
        await self._start_process(process)
        return process

    async def _start_process(self, process: BaseProcess) -> None:
        if self._forkserver is None:
            process.start()
            return
        try:
            await asyncio.to_thread(process.start)  # it waits for the forkserver's answer
        except Exception as error:
            # Descriptors in its local variables are closed with them; the error would keep them.
            traceback.clear_frames(error.__traceback__)
            raise


def _not_loaded(config: WorkerConfig) -> WorkerStartError:
    text = f"the model was not loaded within {config.load_timeout_s:g} s (load_timeout_s)"
    return WorkerStartError(text, permanent=False)


def _kill(processes: Sequence[BaseProcess], exit_s: float) -> None:
    for process in processes:
        if process.pid is not None:
            process.kill()
    for process in processes:
        if process.pid is not None:
            process.join(exit_s)
            if process.exitcode is not None:
                process.close()
