"""Keeps each slot filled: start, announce, wait for the end, back off, start again.

Workers and fronts are kept alike. Runs in the main process's event loop.
"""

import asyncio
import contextlib
import logging
import random
import re
from asyncio import Task
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, Literal, Protocol, TypeVar

from inferpool.workers.config import WorkerConfig
from inferpool.workers.errors import FilesChangedError, WorkerStartError
from inferpool.workers.host.engine import Cause, Incarnation, WorkerHandle, WorkerId
from inferpool.workers.host.generation import FilesOfAll, Generation
from inferpool.workers.log_lines import log_line
from inferpool.workers.messages import LogLine

logger = logging.getLogger(__name__)

State = Literal["starting", "ready", "backoff", "failed", "stopped"]

_FIRST_BACKOFF_S = 0.5
_MAX_BACKOFF_S = 30.0
_STABLE_S = 60.0
"""An incarnation that was ready for this long was well, even if it had nothing to do."""
_MAX_JITTER = 0.2
"""Of a pause, so that workers that fell together do not rise together."""
_NUMBERS = re.compile(r"0x[0-9a-fA-F]+|\d+")
"""What differs between an error and the same one again: addresses, bytes, seconds."""


C = TypeVar("C")
"""What an incarnation is told: a `WorkerConfig`, or a front's `Part`."""
L = TypeVar("L", bound=Incarnation)


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPolicy:
    """How often a process may fail before it is given up (OTP calls this the restart intensity)."""

    max_restarts: int = 5
    """Restarts in a row that came to nothing."""


@dataclass(slots=True, kw_only=True)
class Slot(Generic[C, L]):
    """What is known of one process over all its incarnations. Written by its task alone."""

    config: C
    id: WorkerId
    state: State = "starting"
    stage: str = "waiting to start"
    """What it is doing while it starts, for a person."""
    reason: str = ""
    """Why the last incarnation ended, or did not start."""
    cause: Cause = "start"
    """What kind of end that was."""
    ended_at: float | None = None
    """When that was, in the loop's time; None before the first."""
    num_restarts: int = 0
    handle: L | None = None
    generation: Generation | None = None
    """The files that its incarnation serves with; None if they are not known."""
    num_failures: int = 0
    """Incarnations in a row that did not start, or ended without having been of use."""
    num_deaths_at_work: int = 0
    """Incarnations in a row that ended at work and had not answered anything."""
    was_ever_ready: bool = False
    due: float = 0.0
    """When the next incarnation is to be started, on the event loop's clock."""
    is_asked_to_leave: bool = False
    """Its incarnation is to be replaced, though nothing is wrong with it."""
    may_renew: bool = False
    """Its next incarnation may load other files than those that the others serve with."""
    is_asked_to_start: asyncio.Event = field(default_factory=asyncio.Event)
    """Its next incarnation is to be started at once, whatever the pause."""
    raised: str = ""
    """The traceback of the last start, without numbers, if the model raised."""
    told_with: str = ""
    """The incarnation, of this worker or of another, with which it was logged."""
    settled: asyncio.Event = field(default_factory=asyncio.Event)
    """It is known whether the newest incarnation came up."""


class Watcher(Protocol[C, L]):
    """Who is told of what happens to the slots."""

    def on_progress(self, slot: Slot[C, L]) -> None:
        """It is doing something else now (`slot.stage`)."""

    def on_ready(self, slot: Slot[C, L]) -> None:
        """`slot.handle` takes work."""

    def on_gone(self, handle: L) -> None:
        """This incarnation takes no more work."""

    def on_down(self, slot: Slot[C, L]) -> None:
        """It ended, or did not start: `slot.state` and `slot.reason` say how it goes on."""


class Supervisor(Generic[C, L]):
    """Runs one task per slot until told to stop."""

    def __init__(
        self,
        start: Callable[[WorkerId, C, Callable[[str], None]], Awaitable[L]],
        watcher: Watcher[C, L],
        policy: RestartPolicy,
        files: FilesOfAll[L] | None = None,
    ) -> None:
        """Start nothing yet.

        Args:
            start: Starts an incarnation and waits until it is ready, as `Engine.start` does. It
                raises `WorkerStartError` where that fails.
            watcher: Told of what happens.
            policy: When a slot is given up.
            files: Sees that all of them serve with the same files, if they load any.
        """
        self.slots: list[Slot[C, L]] = []
        self._start = start
        self._watcher = watcher
        self._policy = policy
        self._tasks: list[Task[None]] = []
        self._leaving: list[L] = []
        """Those whose successors are ready already."""
        self._starts_more = True
        self._is_stopping = False
        self._files = files or FilesOfAll[L](lambda _: ())

    def start(self, model: str, configs: Sequence[C]) -> None:
        """Begin to keep one process per config."""
        for number, config in enumerate(configs):
            slot = Slot[C, L](config=config, id=WorkerId(model=model, slot=number))
            self.slots.append(slot)
            self._tasks.append(asyncio.create_task(self._keep(slot), name=f"keep {slot.id}"))

    def start_no_more(self) -> None:
        """Let those that are ready go on until they end, and end those that start or pause."""
        if not self._starts_more:
            return
        self._starts_more = False
        for slot, task in zip(self.slots, self._tasks, strict=True):
            if slot.handle is None:
                task.cancel()

    async def stop(self, grace_s: float) -> None:
        """Tell all of them to leave, and see each of them out."""
        self._is_stopping = True
        self.start_no_more()
        handles = [slot.handle for slot in self.slots if slot.handle]
        await asyncio.gather(*(handle.stop(grace_s) for handle in (*handles, *self._leaving)))
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._files.close()

    async def replace(self, slot: Slot[C, L], grace_s: float, *, renews: bool = False) -> bool:
        """Let a worker finish what it holds and leave; wait for its successor.

        A worker that pauses is started at once, and one that was given up is tried again.

        Args:
            slot: The worker.
            grace_s: How long it may take to finish.
            renews: Let the successor load what lies on disk now, whatever the others serve with.

        Returns:
            Whether the successor is ready.
        """
        slot.settled.clear()
        slot.may_renew = renews
        handle = slot.handle
        if handle is not None:
            slot.is_asked_to_leave = True
            self._watcher.on_gone(handle)
            await handle.stop(grace_s)
        elif slot.state == "failed" and self._starts_more:
            slot.num_failures = 0
            slot.id = slot.id.next_life()
            task = asyncio.create_task(self._keep(slot), name=f"keep {slot.id}")
            self._tasks[self.slots.index(slot)] = task
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
        """Start a ready worker's next incarnation beside it; then let the old one finish and leave.

        There is always one that takes batches.

        Args:
            slot: The worker.
            config: What the successor is told.
            grace_s: How long the old one may take to finish.
            on_progress: Told what the successor is doing.
            renews: Let it load what lies on disk now, whatever the others serve with.

        Raises:
            WorkerStartError: The successor did not come up, or the worker came to an end meanwhile
                or was asked to leave. The worker goes on as it was.
        """
        predecessor = slot.handle
        if predecessor is None:
            raise WorkerStartError(f"{slot.id} is not ready", permanent=False)
        id = slot.id.next_life()
        try:
            successor, generation = await self._bring_up(id, config, on_progress, renews=renews)
        except WorkerStartError as error:
            self._tell_raised(slot, id, error)
            again = _as_told(slot, id)
            logger.warning("%s did not start%s, and %s stays: %s", id, again, slot.id, error)
            raise
        if slot.handle is not predecessor or slot.is_asked_to_leave or not self._starts_more:
            await successor.stop(0)
            raise WorkerStartError(f"{predecessor.id} ended meanwhile", permanent=False)
        slot.id, slot.handle, slot.config, slot.raised = id, successor, config, ""
        self._adopt(slot, generation)
        slot.num_restarts += 1
        self._watcher.on_ready(slot)
        self._watcher.on_gone(predecessor)
        self._leaving.append(predecessor)
        await predecessor.stop(grace_s)
        self._leaving.remove(predecessor)

    def outdated(self) -> list[Slot[C, L]]:
        """The slots that serve with other files than all later incarnations will."""
        present = self._files.present
        return [slot for slot in self.slots if slot.handle and slot.generation is not present]

    def choose_files(self) -> list[Slot[C, L]]:
        """Decide which files all are to serve with, where workers differ after a restart.

        It is the new ones if two workers serve with them, since they could be loaded twice. Else
        it is those that most of the other workers have.

        Returns:
            The slots that serve with other files.
        """
        held = Counter(slot.generation for slot in self.slots if slot.handle)
        if held.pop(self._files.present, 0) <= 1:
            generation = max(held, key=held.__getitem__, default=None)
            if generation is not None:
                self._files.adopt(generation)
        return self.outdated()

    async def _keep(self, slot: Slot[C, L]) -> None:
        try:
            while True:
                is_permanent = await self._live_once(slot)
                if not self._starts_more:
                    return
                pause_s = self._judge(slot, is_permanent=is_permanent)
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
            logger.critical("%s is no longer looked after", slot.id, exc_info=True)
            slot.state, slot.reason = "failed", "a mistake of the service; its log has more"
            self._watcher.on_down(slot)
        finally:
            if slot.state != "failed":
                slot.state = "stopped"
            slot.settled.set()

    async def _live_once(self, slot: Slot[C, L]) -> bool:
        """One incarnation, from start to end; whether its failure to start is permanent."""
        slot.state = "starting"

        def on_progress(stage: str) -> None:
            slot.stage = stage
            self._watcher.on_progress(slot)

        try:
            await self._files.give_up_if_gone(slot.id, self._is_present_served)
            handle, generation = await self._bring_up(
                slot.id, slot.config, on_progress, renews=slot.may_renew
            )
        except WorkerStartError as error:
            slot.cause = "files" if isinstance(error, FilesChangedError) else "start"
            slot.reason = str(error)
            self._tell_raised(slot, slot.id, error)
            slot.ended_at = asyncio.get_running_loop().time()
            slot.num_failures += 1
            slot.settled.set()
            return error.permanent
        if not self._starts_more:
            await handle.stop(0)
            return False
        slot.handle, slot.was_ever_ready, slot.raised = handle, True, ""
        self._adopt(slot, generation)
        slot.state, slot.stage = "ready", ""
        self._watcher.on_ready(slot)
        slot.settled.set()
        began = asyncio.get_running_loop().time()
        try:
            while (ending := await handle.wait()) and slot.handle is not handle:
                assert slot.handle is not None, "only this task leaves a slot empty"
                logger.info("%s ended, as it was asked to: %s took over", handle.id, slot.id)
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
            logger.info("%s ended, as it was asked to", slot.id)
            return False
        if not self._is_stopping:
            logger.warning("%s ended: %s", slot.id, slot.reason)
        was_stable = slot.ended_at - began > _STABLE_S
        if handle.has_worked or was_stable:
            slot.num_failures = slot.num_deaths_at_work = 0
        elif ending.was_at_work:  # the batch is to blame, and its requests are counted
            slot.num_deaths_at_work += 1
        else:
            slot.num_failures += 1
        return False

    async def _bring_up(
        self,
        id: WorkerId,
        config: C,
        on_progress: Callable[[str], None],
        *,
        renews: bool,
    ) -> tuple[L, Generation | None]:
        """Start an incarnation that answers as those do that serve, unless it is to renew them.

        Returns:
            The worker, and its files for all to follow, if it is the first that has them.

        Raises:
            FilesChangedError: It would answer differently.
            WorkerStartError: It did not come up, or its files changed while it did.
        """
        await self._files.check(id, renews=renews)
        try:
            handle = await self._start(id, config, on_progress)
        except WorkerStartError:
            await self._files.check(id, renews=renews)  # which says more than what they broke
            raise
        try:
            return handle, await self._files.judge(handle, renews=renews)
        except (WorkerStartError, asyncio.CancelledError):
            await handle.stop(0)
            raise

    def _adopt(self, slot: Slot[C, L], generation: Generation | None) -> None:
        """Have all later incarnations load the files of this one, if it is the first with them."""
        if generation is not None:
            self._files.adopt(generation)
        slot.generation = self._files.present

    def _is_present_served(self) -> bool:
        return any(slot.handle and slot.generation is self._files.present for slot in self.slots)

    def _tell_raised(self, slot: Slot[C, L], id: WorkerId, error: WorkerStartError) -> None:
        """Log what a model raised as it was loaded, unless it is in the log already."""
        raised = _NUMBERS.sub("", error.traceback)
        told = (each.told_with for each in self.slots if each.raised == raised)
        slot.raised, slot.told_with = raised, next(told, str(id))
        if raised and slot.told_with == str(id):
            text = f"{id} cannot load its model"
            line = LogLine(logging.ERROR, __name__, text, traceback=error.traceback)
            log_line(line, {"worker": str(id)})

    def _judge(self, slot: Slot[C, L], *, is_permanent: bool) -> float | None:
        """How long to wait before the next incarnation; None gives the slot up.

        A worker that was ready once is never given up: its pauses grow, and it is tried again.
        Even a model that cannot be loaded now may be mended on disk.
        """
        has_failed_enough = slot.num_failures > self._policy.max_restarts
        may_be_given_up = not slot.was_ever_ready and slot.cause != "files"
        if (is_permanent or has_failed_enough) and may_be_given_up:
            slot.state = "failed"
            if not is_permanent:
                slot.reason += f" ({slot.num_failures} times in a row: given up)"
            return None  # which the watcher tells, with the reason
        if slot.cause in ("start", "files"):
            again = _as_told(slot, slot.id)
            logger.error("%s did not start%s: %s", slot.id, again, slot.reason)
        slot.state = "backoff"
        # Inputs that kill are sent again at once; a worker that dies of all of them is no use.
        num_in_row = max(slot.num_failures, slot.num_deaths_at_work - 1)
        return _pause_after(num_in_row)


WorkerSlot = Slot[WorkerConfig, WorkerHandle]
WorkerSupervisor = Supervisor[WorkerConfig, WorkerHandle]


def _as_told(slot: Slot[C, L], id: WorkerId) -> str:
    """To go behind "did not start": that of whom the log says why at length; empty if it is new."""
    return f", as {slot.told_with} did not" if slot.raised and slot.told_with != str(id) else ""


def _pause_after(num_in_row: int) -> float:
    """Seconds to wait before the next start, after so many ends in a row that came to nothing."""
    if num_in_row <= 1:
        return 0.0
    pause_s = min(_FIRST_BACKOFF_S * 2.0 ** (num_in_row - 2), _MAX_BACKOFF_S)
    return pause_s * (1 + random.random() * _MAX_JITTER)
