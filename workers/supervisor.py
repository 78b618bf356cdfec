"""Keeps each worker slot filled: start, announce, wait for the end, back off, start again."""

import asyncio
import logging
from asyncio import Task
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from workers.config import WorkerConfig
from workers.engine import Cause, Engine, WorkerHandle, WorkerId
from workers.errors import WorkerStartError

logger = logging.getLogger(__name__)

State = Literal["starting", "ready", "backoff", "failed", "stopped"]

_FIRST_BACKOFF_S = 0.5
_MAX_BACKOFF_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPolicy:
    """How often a worker may end before it is given up (OTP calls this the restart intensity)."""

    max_restarts: int = 5
    window_s: float = 60.0


@dataclass(slots=True, kw_only=True)
class Slot:
    """What is known of one worker over all its incarnations. Written by its task alone."""

    config: WorkerConfig
    id: WorkerId
    state: State = "starting"
    stage: str = "waiting to start"
    """What it is doing while it starts, for a person."""
    reason: str = ""
    """Why the last incarnation ended, or did not start."""
    cause: Cause = "start"
    """What kind of end that was."""
    num_restarts: int = 0
    handle: WorkerHandle | None = None
    failures: deque[float] = field(default_factory=deque)
    """When incarnations ended without having done any work, lately."""


class Watcher(Protocol):
    """Who is told of what happens to the workers."""

    def on_progress(self, slot: Slot) -> None:
        """It is doing something else now (`slot.stage`)."""

    def on_ready(self, slot: Slot) -> None:
        """`slot.handle` takes batches."""

    def on_down(self, slot: Slot) -> None:
        """It ended, or did not start: `slot.state` and `slot.reason` say how it goes on."""


class Supervisor:
    """Runs one task per slot until told to stop."""

    def __init__(self, engine: Engine, watcher: Watcher, policy: RestartPolicy) -> None:
        self.slots: list[Slot] = []
        self._engine = engine
        self._watcher = watcher
        self._policy = policy
        self._tasks: list[Task[None]] = []
        self._is_stopping = False

    def start(self, model: str, configs: Sequence[WorkerConfig]) -> None:
        """Begin to keep one worker per config."""
        for number, config in enumerate(configs):
            slot = Slot(config=config, id=WorkerId(model=model, slot=number))
            self.slots.append(slot)
            self._tasks.append(asyncio.create_task(self._keep(slot), name=f"keep {slot.id}"))

    async def stop(self, grace_s: float) -> None:
        """Send every worker its sentinel, and see each of them out."""
        self._is_stopping = True
        handles = [slot.handle for slot in self.slots if slot.handle]
        await asyncio.gather(*(handle.stop(grace_s) for handle in handles))
        for task in self._tasks:
            task.cancel()
        results = await asyncio.gather(*self._tasks, return_exceptions=True)
        for result in results:
            if isinstance(result, Exception):
                logger.error("a supervising task failed", exc_info=result)

    async def _keep(self, slot: Slot) -> None:
        try:
            while True:
                is_permanent = await self._live_once(slot)
                if self._is_stopping:
                    return
                pause_s = self._judge(slot, is_permanent=is_permanent)
                self._watcher.on_down(slot)
                if pause_s is None:
                    return
                slot.num_restarts += 1
                await asyncio.sleep(pause_s)
                slot.id = WorkerId(
                    model=slot.id.model, slot=slot.id.slot, incarnation=slot.id.incarnation + 1
                )
        finally:
            if slot.state != "failed":
                slot.state = "stopped"

    async def _live_once(self, slot: Slot) -> bool:
        """One incarnation, from start to end; whether its failure to start is permanent."""
        slot.state = "starting"
        did_work = False

        def on_progress(stage: str) -> None:
            slot.stage = stage
            self._watcher.on_progress(slot)

        try:
            slot.handle = await self._engine.start(slot.id, slot.config, on_progress)
        except WorkerStartError as error:
            slot.cause, slot.reason = "start", str(error)
            logger.error("%s did not start: %s", slot.id, error)
            self._note_failure(slot)
            return error.permanent
        slot.state, slot.stage = "ready", ""
        self._watcher.on_ready(slot)
        try:
            ending = await slot.handle.wait()
            slot.cause, slot.reason = ending.cause, ending.reason
            did_work = slot.handle.has_worked
        finally:
            slot.handle = None
        if not self._is_stopping:
            logger.warning("%s ended: %s", slot.id, slot.reason)
            if not did_work:
                self._note_failure(slot)
        return False

    def _note_failure(self, slot: Slot) -> None:
        slot.failures.append(asyncio.get_running_loop().time())

    def _judge(self, slot: Slot, *, is_permanent: bool) -> float | None:
        """How long to wait before the next incarnation; None gives the slot up.

        An end after work was done is no sign of a crash loop: it restarts at once.
        """
        now = asyncio.get_running_loop().time()
        while slot.failures and slot.failures[0] < now - self._policy.window_s:
            slot.failures.popleft()
        num_failures = len(slot.failures)
        if is_permanent or num_failures > self._policy.max_restarts:
            slot.state = "failed"
            if not is_permanent:
                slot.reason += (
                    f" ({num_failures} times within {self._policy.window_s:g} s: given up)"
                )
            logger.error("%s is given up: %s", slot.id, slot.reason)
            return None
        slot.state = "backoff"
        if num_failures <= 1:
            return 0.0
        return min(_FIRST_BACKOFF_S * 2.0 ** (num_failures - 2), _MAX_BACKOFF_S)
