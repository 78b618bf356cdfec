"""The engine of this host: one process per worker, started by a forkserver that holds torch.

It runs in the front end's event loop, which never waits for a worker.
"""

import asyncio
import errno
import logging
import multiprocessing
import os
import signal
import traceback
from asyncio import Task
from collections.abc import Callable, Sequence
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess

from workers.arena import Arena
from workers.config import WorkerConfig
from workers.endings import OomKills
from workers.engine import WorkerId
from workers.errors import WorkerStartError
from workers.local_worker import EXIT_WAIT_S, LocalWorker
from workers.memory import SharedMemoryError
from workers.rank_process import RankProcess

logger = logging.getLogger(__name__)

_PRELOAD = ("workers.forkserver_guard", "workers.preload")
_START_DESCRIPTORS = 16
"""More than the start of a process needs: two queues, a heartbeat, outputs, the stacks, a socket,
two pipes and a copy make 14."""
_WIRING_DESCRIPTORS = 8
"""More than the wiring of one rank to the others of its group needs, in our hands at once."""


def start_forkserver(extra: Sequence[str] = ()) -> None:
    """Start the process that forks workers, which imports torch meanwhile. Main thread only.

    The kernel ends it with the thread that started it, so that thread must be the one that lives as
    long as the front end. Where there is no forkserver this does nothing, and workers are spawned.

    Args:
        extra: Modules that it should import besides.

    Raises:
        OSError: There is no process, no descriptor or no writable temporary folder to be had.
    """
    if _start_method() == "forkserver":
        multiprocessing.get_context("forkserver").set_forkserver_preload([*_PRELOAD, *extra])
        _ensure_forkserver()


def _ensure_forkserver() -> None:
    """Start it unless it runs, without the current directory in front of its `sys.path`.

    A user's project nearly always has a package `models` of its own, which must not pass for ours.
    """
    before = os.environ.get("PYTHONSAFEPATH")
    os.environ["PYTHONSAFEPATH"] = "1"
    try:
        forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ["PYTHONSAFEPATH"]
        else:
            os.environ["PYTHONSAFEPATH"] = before


def _require_descriptors(num_ranks: int) -> None:
    """Raise OSError now where descriptors would run out halfway, which leaks those opened by then.

    `multiprocessing` does so between the two pipes that it makes for a process.
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


def _start_method() -> str:
    return "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"


class LocalEngine:
    """Starts workers as processes of this host."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._context = multiprocessing.get_context(_start_method())
        self._oom_kills = OomKills()
        self._is_torch_imported = False
        """By the forkserver, so that a start need not wait for it."""
        self._launches: set[Task[None]] = set()

    async def close(self) -> None:
        """Leave no thread that waits for a forkserver which does not answer. Starts are over.

        Such a thread would hold up the end of this process for ever.
        """
        if not self._launches:
            return
        if self._is_torch_imported:
            logger.error("the process that forks workers does not answer: killing it")
        else:
            logger.info("the process that forks workers is still importing torch: killing it")
        if pid := getattr(forkserver._forkserver, "_forkserver_pid", None):
            os.kill(pid, signal.SIGKILL)
        await asyncio.wait(self._launches, timeout=EXIT_WAIT_S)

    async def start(
        self, id: WorkerId, config: WorkerConfig, on_progress: Callable[[str], None]
    ) -> LocalWorker:
        """Start a process, and wait until its model is loaded and has answered a canary.

        Raises:
            WorkerStartError: It ended, failed or took too long before that.
        """
        try:
            _require_descriptors(config.placement.num_ranks)
            worker = LocalWorker(id, config, on_progress, self._oom_kills)
        except SharedMemoryError as error:
            raise WorkerStartError(str(error), permanent=False) from error
        except OSError as error:
            hint = " (ulimit -n)" if error.errno == errno.EMFILE else ""
            message = f"no queues for it: {error.strerror}{hint}"
            raise WorkerStartError(message, permanent=False) from error
        if not self._is_torch_imported:
            on_progress("importing torch")
        # A process that is half started cannot be killed yet: each way out waits for this first.
        launch = asyncio.create_task(self._launch(worker, config))
        self._launches.add(launch)
        launch.add_done_callback(self._on_launched)
        try:
            async with asyncio.timeout(config.load_timeout_s):
                await asyncio.shield(launch)
                await asyncio.shield(worker.started)
        except TimeoutError:
            reason = f"not ready after {config.load_timeout_s:g} s"
            await _give_up(worker, launch, reason, with_stacks=True)
            raise WorkerStartError(
                f"the model was not loaded within {config.load_timeout_s:g} s (load_timeout_s)",
                permanent=False,
            ) from None
        except (WorkerStartError, asyncio.CancelledError):
            await _give_up(worker, launch, "the start was given up")
            raise
        except Exception as error:  # whatever the start of a process may raise
            raise WorkerStartError(
                f"the process could not be started: {error!r}", permanent=False
            ) from error
        return worker

    def _on_launched(self, launch: Task[None]) -> None:
        self._launches.discard(launch)
        if not launch.cancelled():
            launch.exception()  # it is retrieved, even if the start was given up before

    async def _launch(self, worker: LocalWorker, config: WorkerConfig) -> None:
        """Start all processes of a worker, or leave none, nor anything that was made for them."""
        processes: list[BaseProcess] = []
        try:
            for rank in worker.ranks:
                processes.append(self._process_of(rank, worker, config))
                await self._start_process(processes[-1])
                if worker.is_given_up:
                    raise InterruptedError("the start was given up")
            worker.attach(processes)
        except Exception:
            await asyncio.to_thread(_kill, processes)
            await worker.kill("could not be started")
            raise

    def _process_of(
        self, rank: RankProcess, worker: LocalWorker, config: WorkerConfig
    ) -> BaseProcess:
        from workers import entry

        ends = worker.wiring.ends_of(rank.number)
        shared = (worker.outputs.memory, ends, rank.stacks)
        row = rank.heartbeat.memory
        process: BaseProcess = self._context.Process(  # type: ignore[attr-defined]  # BaseContext lacks it
            target=entry.follow if rank.number else entry.run,
            name=rank.name,
            args=(config, rank.outbox, row, ends, rank.stacks)
            if rank.number
            else (config, worker.inbox, rank.outbox, self._arena.memory, row, *shared),
        )
        return process

    async def _start_process(self, process: BaseProcess) -> None:
        if self._context.get_start_method() == "forkserver":
            _ensure_forkserver()  # here, since the kernel ties it to this thread
            # The forkserver answers only when it has imported torch: wait for that off the loop.
            # The fork happens over there, so no signal of the kernel follows this thread.
            try:
                await asyncio.to_thread(process.start)
            except Exception as error:
                # What it had opened is closed with its locals, which the error holds otherwise.
                traceback.clear_frames(error.__traceback__)
                raise
            self._is_torch_imported = True
        else:
            process.start()


async def _give_up(
    worker: LocalWorker, launch: Task[None], reason: str, *, with_stacks: bool = False
) -> None:
    """End a worker that starts.

    A process that is only half started is not waited for much longer: its launch kills it.
    """
    worker.is_given_up = True
    await asyncio.wait([launch], timeout=EXIT_WAIT_S)
    if worker.lead.is_attached:
        await worker.kill(reason, with_stacks=with_stacks)


def _kill(processes: Sequence[BaseProcess]) -> None:
    for process in processes:
        if process.pid is not None:
            process.kill()
    for process in processes:
        if process.pid is not None:
            process.join(EXIT_WAIT_S)
