"""Replaces workers while they serve, each by a successor that is ready before it leaves."""

import asyncio
import logging
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, replace

from inferpool.models.speed_names import SpeedReport
from inferpool.service.errors import RestartFailedError
from inferpool.workers.host.engine import WorkerHandle, WorkerId
from inferpool.workers.host.slots import WorkerSlot
from inferpool.workers.host.supervisor import WorkerSupervisor
from inferpool.workers.shared.config import WorkerConfig
from inferpool.workers.shared.errors import WorkerStartError
from inferpool.workers.shared.memory import available_bytes

logger = logging.getLogger(__name__)

_NUM_TRIES = 3
"""Times that a restart tries each worker, once one has been replaced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartHealth:
    """The last restart that an operator asked for."""

    state: str
    """`none`, `running`, `done` or `failed`."""
    text: str = ""
    """Its progress, or why it failed and what still serves."""


class Replacer:
    """Replaces the workers of one model, one at a time."""

    def __init__(
        self,
        name: str,
        supervisor: WorkerSupervisor,
        on_succession: Callable[[WorkerId], None],
        on_renewal: Callable[[], None],
    ) -> None:
        """Store what to call when a worker was replaced, and before all of them load new files."""
        self.restart = RestartHealth(state="none")
        self._name = name
        self._supervisor = supervisor
        self._on_succession = on_succession
        self._on_renewal = on_renewal
        self._lock = asyncio.Lock()
        """Held while a worker is replaced: a restart and a change of presets take turns."""

    async def replace(
        self, slots: Sequence[WorkerSlot], grace_s: float, *, old_first: bool = False
    ) -> None:
        """Replace workers one after another, each by a successor that is ready before it leaves.

        If all workers are replaced, they load the files as they are now. One worker alone must not
        differ from the others, so it keeps to their files.

        If the first successor does not come up, all workers stay as they are. If a later one does
        not come up, it is tried again, and its old worker serves on. But replicas must not serve
        different files for long: if two workers have loaded the new files, those with the old ones
        leave, and otherwise the one with the new files leaves.

        Args:
            slots: The workers.
            grace_s: How long each may take to finish what it holds.
            old_first: Stop each before its successor starts, if memory is short for both.

        Raises:
            RestartFailedError: A successor did not come up; says why, and which workers serve on.
        """
        self.restart = RestartHealth(state="running")
        try:
            async with self._lock:
                await self._replace_all(slots, grace_s, old_first=old_first)
        except RestartFailedError as error:
            self.restart = RestartHealth(state="failed", text=error.message)
            logger.error("%s: restart failed: %s", self._name, error.message)
            raise
        except asyncio.CancelledError:
            self.restart = RestartHealth(state="failed", text="the service was told to stop")
            raise
        self.restart = RestartHealth(state="done", text="")

    async def _replace_all(
        self, slots: Sequence[WorkerSlot], grace_s: float, *, old_first: bool
    ) -> None:
        # Each loads the files as they are at that time. If they have changed since the first was
        # replaced, it is replaced again.
        renews = len(slots) == len(self._supervisor.slots)
        if renews:
            self._on_renewal()
        waiting, replaced = list(slots), set[WorkerSlot]()
        for _ in range(_NUM_TRIES):
            errors: dict[str, str] = {}
            for slot in waiting:
                error = await self._replace(slot, grace_s, old_first=old_first, renews=renews)
                if slot not in self._supervisor.slots:
                    continue  # its host was lost, and it with it
                if error:
                    errors[slot.id.worker] = error
                    if not replaced:
                        raise RestartFailedError(error)
                    if old_first:
                        break  # or all would leave for a model that cannot be loaded
                else:
                    replaced.add(slot)
            waiting = self._still_to_replace(slots, replaced, renews=renews)
            if not waiting:
                if not replaced:
                    raise RestartFailedError("the hosts of all workers were lost meanwhile")
                return
        for slot in self._supervisor.choose_files():
            logger.warning("%s leaves, since it serves other files than the rest", slot.id)
            self.restart = replace(self.restart, text=f"{slot.id.worker} starts again")
            errors.pop(slot.id.worker, None)
            if not await self._supervisor.replace(slot, grace_s):
                errors[slot.id.worker] = (
                    f"{slot.id.worker} served with other files than the rest, so it left, and is "
                    f"tried again from time to time: {slot.reason}"
                )
        if errors:
            raise RestartFailedError("; ".join(errors.values()))

    def _still_to_replace(
        self, slots: Sequence[WorkerSlot], replaced: Container[WorkerSlot], *, renews: bool
    ) -> list[WorkerSlot]:
        """Return the workers that have not been replaced, or were with files of before.

        If all are replaced, so are those that joined meanwhile with the files of before.
        """
        outdated = set(self._supervisor.outdated())
        return [
            slot
            for slot in self._supervisor.slots
            if (slot in slots and (slot not in replaced or slot in outdated))
            or (renews and slot in outdated)
        ]

    async def _replace(
        self, slot: WorkerSlot, grace_s: float, *, old_first: bool, renews: bool
    ) -> str:
        """Replace a worker, and return why that failed, or an empty string."""
        config = replace(slot.config, chosen=None)  # the best preset may be another now
        if slot.handle is not None and not old_first:
            try:
                # Of the memory of another host nothing is known here: its agent finds out.
                if not slot.config.host and (shortage := _shortage(slot.handle)):
                    raise WorkerStartError(shortage, permanent=False)
                await self._succeed(slot, config, grace_s, renews=renews)
            except WorkerStartError as error:
                return f"{slot.id.worker} was not replaced, and serves on as it was: {error}"
            return ""
        slot.config = config
        self.restart = replace(self.restart, text=f"{slot.id.worker} starts again")
        if await self._supervisor.replace(slot, grace_s, renews=renews):
            return ""
        return (
            f"{slot.id.worker} did not come up again, and is tried again from time to time: "
            f"{slot.reason}"
        )

    async def _succeed(
        self, slot: WorkerSlot, config: WorkerConfig, grace_s: float, *, renews: bool = False
    ) -> None:
        """Run `WorkerSupervisor.succeed`, and show its progress."""
        predecessor = slot.id

        def on_progress(stage: str) -> None:
            self.restart = replace(self.restart, text=f"{predecessor.next_life()}: {stage}")

        await self._supervisor.succeed(slot, config, grace_s, on_progress, renews=renews)
        self._on_succession(predecessor)

    async def change_over(self, slot: WorkerSlot, found: SpeedReport, grace_s: float) -> bool:
        """Replace a worker by one that serves with a speed preset and decoder from the cache.

        The new one is ready before the old one leaves, so that no request waits for it.

        Returns:
            Whether it came up with them. If it did not come up, the old one stays.
        """
        config = replace(slot.config, chosen=None)
        if slot.handle is None:
            slot.config = config  # its next incarnation will use the preset
            return True
        try:
            async with self._lock:
                await self._succeed(slot, config, grace_s)
        except WorkerStartError:  # the supervisor has logged it
            return False
        return slot.handle is not None and slot.handle.ready.speed.way == found.way


def _shortage(worker: WorkerHandle) -> str:
    """Return why there is no memory for a successor beside a worker; empty if there is."""
    needed, free = worker.vitals().rss_bytes, available_bytes()
    if needed <= free:
        return ""
    return (
        f"its successor needs {needed / 2**20:,.0f} MiB of memory beside it, and "
        f"{free / 2**20:,.0f} MiB are free; free some, or restart with old_first=true, which lets "
        "the old one leave first"
    )
