"""Keeps processes running: starts each, announces it, waits for its end, and starts it again.

It supervises workers, and front processes too. Runs in the main process's event loop.
"""

import asyncio
import contextlib
import functools
import logging
import re
from asyncio import Task
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Generic

from inferpool.workers.host.engine import WorkerHandle, WorkerId
from inferpool.workers.host.replica_files import ModelFiles, ReplicaFiles
from inferpool.workers.host.restart_policy import RestartPolicy
from inferpool.workers.host.slots import C, L, Slot, Watcher
from inferpool.workers.shared.config import WorkerConfig
from inferpool.workers.shared.errors import FilesChangedError, WorkerStartError
from inferpool.workers.shared.log_lines import log_line
from inferpool.workers.shared.messages import LogLine

logger = logging.getLogger(__name__)

_LEAVING_S = 60.0
"""Seconds before a worker that ended with its host is started again on a host that is still known:
hosts that leave end their workers one by one."""
_NUMBERS = re.compile(r"0x[0-9a-fA-F]+|\d+")
"""Parts that may differ in two tracebacks of the same error: addresses, bytes, seconds."""


class Supervisor(Generic[C, L]):
    """Supervisor of some processes, with one task for each, until `stop`."""

    def __init__(
        self,
        start: Callable[[WorkerId, C, Callable[[str], None]], Awaitable[L]],
        watcher: Watcher[C, L],
        policy: RestartPolicy,
        files: ReplicaFiles[L] | None = None,
    ) -> None:
        """Store the arguments; start nothing yet.

        Args:
            start: Starts an incarnation and returns once it is ready, like `Engine.start`; raises
                `WorkerStartError` if that fails.
            watcher: Listener.
            policy: Rule for giving up.
            files: Keeps all workers on the same model files; None if they load none.
        """
        self.slots: list[Slot[C, L]] = []
        self._start = start
        self._watcher = watcher
        self._policy = policy
        self._former: dict[int, Slot[C, L]] = {}
        """Slots that were removed, by number."""
        self._ending: set[Task[None]] = set()
        """Tasks of slots that were removed."""
        self._leaving: dict[L, Task[None]] = {}
        """Incarnations that finish while their successors serve, with the tasks that stop them."""
        self._starts_more = True
        self._is_stopping = False
        self._files = files or ReplicaFiles[L](lambda _: ())

    def start(
        self,
        model: str,
        configs: Sequence[C],
        version: int = 1,
        *,
        numbers: Sequence[int] | None = None,
        host: str = "",
        paused: bool = False,
    ) -> None:
        """Start one more process per config and keep it running, now or from its `resume` on.

        Args:
            model: Name of the model.
            configs: Their configurations.
            version: Version of the model.
            numbers: Numbers of the slots, which no present slot has; by default from 0 on.
            host: Name of the host that runs them; empty for this one.
            paused: Start none before its `resume`.
        """
        for number, config in zip(numbers or range(len(configs)), configs, strict=True):
            id = WorkerId(model=model, slot=number, version=version, host=host)
            former = self._former.pop(number, None)
            if former is not None:
                id = replace(former.id.next_life(), host=host)
            slot = Slot[C, L](config=config, id=id, state="stopped", is_paused=True)
            slot.was_ever_ready = former is not None and former.was_ever_ready
            self.slots.append(slot)
            if not paused:
                self.resume(slot)

    def remove(self, slot: Slot[C, L], reason: str) -> None:
        """Remove a process that was lost with its host, and start it no more.

        A replacement under way learns that it is not ready.
        """
        if slot not in self.slots:
            return
        self.slots.remove(slot)
        self._former[slot.id.slot] = slot
        was_up = slot.state in ("starting", "ready")
        handle, slot.handle = slot.handle, None
        slot.is_paused, slot.is_asked_to_leave = True, False
        slot.state, slot.stage, slot.cause, slot.reason = "stopped", "", "host", reason
        slot.ended_at = asyncio.get_running_loop().time()
        slot.settled.set()
        if slot.task is not None:
            slot.task.cancel()
            self._ending.add(slot.task)
            slot.task.add_done_callback(self._ending.discard)
        if handle is not None:
            self._watcher.on_gone(handle)
            self._let_go(handle, 0.0)
        if was_up:  # else its end is known
            self._watcher.on_down(slot)

    def start_no_more(self) -> None:
        """Start no process any more, and cancel all starts and pauses; ready ones go on."""
        if not self._starts_more:
            return
        self._starts_more = False
        for slot in self.slots:
            slot.is_paused = True
            if slot.handle is None and slot.task is not None:
                slot.task.cancel()

    async def stop(self, grace_s: float) -> None:
        """Stop all processes, and wait for their exits."""
        self._is_stopping = True
        self.start_no_more()
        handles = [slot.handle for slot in self.slots if slot.handle]
        await asyncio.gather(*(handle.stop(grace_s) for handle in (*handles, *self._leaving)))
        tasks = [slot.task for slot in self.slots if slot.task]
        tasks += [*self._ending, *self._leaving.values()]
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._files.close()

    async def pause(self, slot: Slot[C, L], grace_s: float) -> None:
        """Stop a process after what it holds, and start none in its place until `resume`."""
        slot.is_paused = True
        task = slot.task
        if task is None or slot not in self.slots:
            return
        if slot.handle is not None:
            slot.is_asked_to_leave = True
            self._watcher.on_gone(slot.handle)
            await slot.handle.stop(grace_s)
        else:
            task.cancel()
        await asyncio.wait([task])
        slot.state = "stopped"  # a task that is cancelled before its first step sets nothing
        slot.settled.set()

    def resume(self, slot: Slot[C, L]) -> None:
        """Start a process again that was paused or given up."""
        if not self._starts_more or slot not in self.slots:
            return
        if slot.task is not None:
            slot.id = slot.id.next_life()
        slot.is_paused, slot.num_failures, slot.state = False, 0, "starting"
        slot.task = asyncio.create_task(self._keep(slot), name=f"keep {slot.id}")

    async def replace(self, slot: Slot[C, L], grace_s: float, *, renews: bool = False) -> bool:
        """Stop a worker once it has finished its batches, then wait for its successor.

        A worker that pauses before its next start is started at once. One that was given up is
        tried again.

        Args:
            slot: The worker.
            grace_s: Seconds that it may take to finish.
            renews: Load the files that are on disk now, even if the other workers have older ones.

        Returns:
            True if the successor is ready.
        """
        if slot not in self.slots:
            return False
        slot.settled.clear()
        slot.may_renew = renews
        handle = slot.handle
        if handle is not None:
            slot.is_asked_to_leave = True
            self._watcher.on_gone(handle)
            await handle.stop(grace_s)
        elif slot.state in ("failed", "stopped"):
            self.resume(slot)
        elif slot.state == "backoff":
            slot.is_asked_to_start.set()
        await slot.settled.wait()
        slot.may_renew = False
        return slot.state == "ready"

    async def succeed(
        self,
        slot: Slot[C, L],
        config: C,
        grace_s: float,
        on_progress: Callable[[str], None] = lambda stage: None,
        *,
        renews: bool = False,
    ) -> None:
        """Start a worker's successor beside it; stop the old one only when the new one is ready.

        So one of the two accepts batches at any moment. If this is cancelled, either the worker
        goes on as before, or its successor has taken over and it leaves as it would.

        Args:
            slot: The worker, which is ready.
            config: Configuration of the successor.
            grace_s: Seconds that the old worker may take to finish its batches.
            on_progress: Called with each step of the successor's start.
            renews: Load the files that are on disk now, even if the other workers have older ones.

        Raises:
            WorkerStartError: The successor did not start, or the worker ended or was asked to leave
                meanwhile. The worker goes on as before.
        """
        predecessor = slot.handle
        if predecessor is None:
            raise WorkerStartError(f"{slot.id} is not ready", permanent=False)
        id = slot.id.next_life()
        try:
            successor, files = await self._bring_up(id, config, on_progress, renews=renews)
        except WorkerStartError as error:
            _tell_raised(self.slots, slot, id, error)
            again = _as_told(slot, id)
            text = "%s did not start%s, and %s stays: %s"
            logger.warning(text, id, again, slot.id, error, extra=id.log_fields)
            raise
        if slot.handle is not predecessor or slot.is_asked_to_leave or not self._starts_more:
            await successor.stop(0)
            raise WorkerStartError(f"{predecessor.id} ended meanwhile", permanent=False)
        slot.id, slot.handle, slot.config, slot.raised = id, successor, config, ""
        self._adopt(slot, files)
        slot.num_restarts += 1
        self._watcher.on_ready(slot)
        self._watcher.on_gone(predecessor)
        await asyncio.shield(self._let_go(predecessor, grace_s))

    def _let_go(self, handle: L, grace_s: float) -> Task[None]:
        """Begin to stop an incarnation that is in no slot any more."""
        leaving = asyncio.create_task(handle.stop(grace_s), name=f"stop {handle.id}")
        self._leaving[handle] = leaving
        leaving.add_done_callback(lambda _: self._leaving.pop(handle))
        return leaving

    def outdated(self) -> list[Slot[C, L]]:
        """Return the workers that have loaded other files than later incarnations will load."""
        present = self._files.present
        return [slot for slot in self.slots if slot.handle and slot.files is not present]

    def choose_files(self) -> list[Slot[C, L]]:
        """Choose the files for all workers, if they differ after a restart that was cut short.

        The new files win if at least two workers have loaded them, which shows that they can be
        loaded again. Else the files that most of the other workers have win.

        Returns:
            The workers that have loaded other files.
        """
        held = Counter(slot.files for slot in self.slots if slot.handle)
        if held.pop(self._files.present, 0) <= 1:
            files = max(held, key=held.__getitem__, default=None)
            if files is not None:
                self._files.adopt(files)
        return self.outdated()

    async def _keep(self, slot: Slot[C, L]) -> None:
        try:
            while True:
                is_permanent = await self._live_once(slot)
                if slot.is_paused:
                    return
                pause_s = _judge(slot, self._policy, is_permanent=is_permanent)
                slot.due = asyncio.get_running_loop().time() + (pause_s or 0.0)
                self._watcher.on_down(slot)
                if pause_s is None:
                    return
                slot.num_restarts += 1
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(slot.is_asked_to_start.wait(), pause_s)
                slot.is_asked_to_start.clear()
                slot.id = slot.id.next_life()
        except Exception:
            text = "%s is no longer supervised"
            logger.critical(text, slot.id, exc_info=True, extra=slot.id.log_fields)
            slot.state, slot.reason = "failed", "a mistake of the service; its log has more"
            self._watcher.on_down(slot)
        finally:
            if slot.state != "failed":
                slot.state = "stopped"
            slot.settled.set()

    async def _live_once(self, slot: Slot[C, L]) -> bool:
        """Run one incarnation from start to end; return True if it can never start."""
        slot.state = "starting"
        try:
            handle = await self._come_up(slot)
        except WorkerStartError as error:
            slot.cause = "files" if isinstance(error, FilesChangedError) else "start"
            slot.reason = str(error)
            _tell_raised(self.slots, slot, slot.id, error)
            slot.ended_at = asyncio.get_running_loop().time()
            slot.num_failures += 1
            slot.settled.set()
            return error.permanent
        if handle is not None:
            await self._see_out(slot, handle)
        return False

    async def _come_up(self, slot: Slot[C, L]) -> L | None:
        """Start and announce an incarnation; return None if its slot was paused meanwhile.

        Raises:
            WorkerStartError: It did not start.
        """

        def on_progress(stage: str) -> None:
            slot.stage = stage
            self._watcher.on_progress(slot)

        await self._files.give_up_if_gone(slot.id, self._is_present_served)
        handle, files = await self._bring_up(
            slot.id, slot.config, on_progress, renews=slot.may_renew
        )
        if slot.is_paused:
            await handle.stop(0)
            return None
        slot.handle, slot.was_ever_ready, slot.raised = handle, True, ""
        self._adopt(slot, files)
        slot.state, slot.stage = "ready", ""
        self._watcher.on_ready(slot)
        slot.settled.set()
        return handle

    async def _see_out(self, slot: Slot[C, L], handle: L) -> None:
        """Wait for the end of an incarnation, and of those that took its place; count it."""
        began = asyncio.get_running_loop().time()
        try:
            while (ending := await handle.wait()) and slot.handle is not handle:
                assert slot.handle is not None, "only this task leaves a slot empty"
                text = "%s ended, as it was asked to: %s took over"
                logger.info(text, handle.id, slot.id, extra=slot.id.log_fields)
                slot.cause, slot.reason = "asked", "its successor took over"
                slot.ended_at = began = asyncio.get_running_loop().time()
                handle = slot.handle
        finally:
            slot.handle = None
            self._watcher.on_gone(handle)
        slot.cause, slot.reason = ending.cause, ending.reason
        slot.ended_at = asyncio.get_running_loop().time()
        if slot.is_asked_to_leave:
            slot.is_asked_to_leave = False
            slot.cause, slot.num_failures = "asked", 0
            logger.info("%s ended, as it was asked to", slot.id, extra=slot.id.log_fields)
            return
        if not self._is_stopping:
            level = logging.INFO if ending.cause == "host" else logging.WARNING
            logger.log(level, "%s ended: %s", slot.id, slot.reason, extra=slot.id.log_fields)
        was_stable = slot.ended_at - began > self._policy.stable_s
        slot.count(ending, was_well=handle.has_worked or was_stable)

    async def _bring_up(
        self, id: WorkerId, config: C, on_progress: Callable[[str], None], *, renews: bool
    ) -> tuple[L, ModelFiles | None]:
        start = functools.partial(self._start, id, config, on_progress)
        return await self._files.load(id, start, self._is_present_served, renews=renews)

    def _adopt(self, slot: Slot[C, L], files: ModelFiles | None) -> None:
        """Require the files of this incarnation of all later ones, if it loaded new files."""
        if files is not None:
            self._files.adopt(files)
        slot.files = self._files.present

    def _is_present_served(self) -> bool:
        return any(slot.handle and slot.files is self._files.present for slot in self.slots)


WorkerSupervisor = Supervisor[WorkerConfig, WorkerHandle]


def _judge(slot: Slot[C, L], policy: RestartPolicy, *, is_permanent: bool) -> float | None:
    """Return the seconds to wait before the next start; None gives the worker up.

    A worker that was ready once is never given up: only its pauses grow. Even if its model
    cannot be loaded now, someone may repair the files.
    """
    has_failed_enough = slot.num_failures > policy.max_restarts
    may_be_given_up = not slot.was_ever_ready and slot.cause != "files"
    if (is_permanent or has_failed_enough) and may_be_given_up:
        slot.state = "failed"
        if not is_permanent:
            slot.reason += f" ({slot.num_failures} times in a row: given up)"
        return None  # the watcher logs the reason
    if slot.cause in ("start", "files"):
        again = _as_told(slot, slot.id)
        text = "%s did not start%s: %s"
        logger.error(text, slot.id, again, slot.reason, extra=slot.id.log_fields)
    slot.state = "backoff"
    if slot.cause == "host":
        return _LEAVING_S
    return policy.pause_s(slot.num_in_row)


def _as_told(slot: Slot[C, L], id: WorkerId) -> str:
    """Return a reference to the logged traceback of the same error; empty if there is none."""
    return f", as {slot.told_with} did not" if slot.raised and slot.told_with != str(id) else ""


def _tell_raised(
    slots: Sequence[Slot[C, L]], slot: Slot[C, L], id: WorkerId, error: WorkerStartError
) -> None:
    """Log the traceback of an error that a model raised in `load`, once for all workers."""
    raised = _NUMBERS.sub("", error.traceback)
    told = (each.told_with for each in slots if each.raised == raised)
    slot.raised, slot.told_with = raised, next(told, str(id))
    if raised and slot.told_with == str(id):
        text = f"{id} cannot load its model"
        line = LogLine(logging.ERROR, __name__, text, traceback=error.traceback)
        log_line(line, {"worker": str(id), **id.log_fields})
