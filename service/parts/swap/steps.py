"""Runs the steps of each change of a model: loads versions, switches between them, goes back."""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any

from inferpool.service.api.routes.health import SwapFigures
from inferpool.service.catalog.catalog import Catalog, ModelVersion
from inferpool.service.errors import NotSavedError, VersionRefusedError
from inferpool.service.parts.swap.decision import SwapDecision
from inferpool.service.parts.swap.records import Change, ChangeKind, Record, VersionHistory, why_of
from inferpool.service.parts.swap.requests import SwapOptions
from inferpool.service.parts.swap.room import Room, Succession
from inferpool.service.parts.swap.validation import LabelledInput, read_cases
from inferpool.service.parts.swap.watching import FaultShare, VersionWatch
from inferpool.service.settings.model import ModelSettings
from inferpool.service.telemetry.metrics import Metrics

logger = logging.getLogger(__name__)

_WATCH_EVERY_S = 0.5
Steps = Callable[[Change], Coroutine[Any, Any, None]]
"""Takes the steps of a change."""


class VersionSteps:
    """The steps of changes, and the watch over the version that a swap has made serve."""

    def __init__(
        self,
        catalog: Catalog,
        metrics: Metrics,
        room: Room,
        history: VersionHistory,
        begin: Callable[[str, ChangeKind, Steps], None],
        *,
        grace_s: float,
    ) -> None:
        """Watch nothing yet.

        Args:
            catalog: The versions.
            metrics: Gets counters for each model.
            room: Reserves memory while versions load.
            history: Records what becomes of the versions.
            begin: Begins a change of a model, when a version that is watched is worse.
            grace_s: How long calls may take to end when their version leaves.
        """
        self.is_ending = False
        """No change begins any more, and those that run are cancelled."""
        self._catalog = catalog
        self._busy = catalog.busy
        self._metrics = metrics
        self._room = room
        self._history = history
        self._begin = begin
        self._grace_s = grace_s
        self._watches: dict[str, tuple[VersionWatch, asyncio.Task[None]]] = {}
        """Versions that are watched, each with the one to go back to."""

    @property
    def watches(self) -> list[asyncio.Task[None]]:
        """The tasks that watch versions."""
        return [task for _, task in self._watches.values()]

    async def add(
        self, name: str, model: ModelSettings, is_ephemeral: bool, change: Change
    ) -> None:
        """Load a model, and have it serve."""
        self._metrics.add(name)
        version = None
        try:
            async with self._room.taken(self._catalog, name, model) as plan:
                version = self._catalog.load(name, model, plan.configs)
                self._history.record(version, "loading").tell()
                if not is_ephemeral:
                    await self._catalog.save_number(version)
                await self._until_loaded(version, change)
            if not is_ephemeral:
                await self._catalog.save(name, version)
        except BaseException as error:
            if version is not None:
                self._history.record(version, "loading").become("refused", why_of(error))
                await self._catalog.unload(version, 0.0)
            self._catalog.forget(name)
            raise
        self._serve(version)

    async def remove(self, name: str, is_ephemeral: bool, change: Change) -> None:
        """Have a model serve no longer, and its versions leave."""
        if not is_ephemeral:
            await self._catalog.save(name, None)
        await self._end_watch(name)
        self._history.tell_removal(name)
        await self._catalog.remove(name, self._grace_s)
        self._history.forget(name)

    async def swap(
        self, name: str, model: ModelSettings, options: SwapOptions, reason: str, change: Change
    ) -> None:
        """Replace the version of now by another; `reason` says why it is rolled back, if it is."""
        watch = await self._end_watch(name)
        try:
            if watch is not None and await self._room.needs(self._catalog, name, model, watch.old):
                self._leave(watch.old)
                watch = None
            await self._catalog.until_left(name)
            old = self._catalog.version(name)
            new, faults_before, succession = await self._decided(old, model, options, change)
        except BaseException:
            if watch is not None and not self.is_ending:
                self._begin_watch(watch)
            raise
        self._serve(new)
        succession.release()
        if reason:
            self._history.record(old, "serving").become("rolled_back", reason)
        if watch is not None:
            self._leave(watch.old)
        if succession.is_tight:
            change.decided.set_result(None)
            change.what = f"{change.kind}: version {old.number} leaves, and more workers load"
            self._leave(old, "memory is too short for both versions: to go back loads it again")
            await succession.finish()
        elif options.rollback_s:
            why = f"for {options.rollback_s:g} s, to go back to"
            self._history.record(old, "serving").become("kept", why)
        else:
            self._leave(old)
        if options.rollback_s:
            self._begin_watch(VersionWatch(old, new, options, faults_before))

    async def _decided(
        self, old: ModelVersion, model: ModelSettings, options: SwapOptions, change: Change
    ) -> tuple[ModelVersion, FaultShare, Succession]:
        """Load another version, and return it if it may serve.

        Returns:
            The version, the counts of the one that serves before they were compared, and how the
            one follows the other.

        Raises:
            VersionRefusedError: There is no room, or it did not come up or is not good enough.
        """
        cases: Sequence[LabelledInput] = ()
        if options.validation is not None:
            cases = await asyncio.to_thread(read_cases, options.validation)
        name, catalog = old.name, self._catalog

        def say(text: str) -> None:
            change.what = f"{change.kind}: {text}"

        succession = Succession(catalog, self._room, old, options, self._grace_s)
        plan = await self._room.plan(catalog, name, model)
        async with self._room.share(plan.needs) as share:
            await succession.plan(share)
            new = catalog.load(name, model, plan.configs, paused=True)
            decision = SwapDecision(catalog, old, new, options, say, cases)
            record = self._history.record(new, "loading")
            record.become("loading", succession.text)
            until_loaded = partial(self._until_loaded, new, change)
            try:
                if not options.ephemeral:
                    await catalog.save_number(new)
                await succession.begin(new, share, until_loaded, decision.record)
            except BaseException as error:
                await self._refuse(new, error, succession)
                raise
        try:
            record.become("comparing")
            await decision.decide()
            await succession.load((len(plan.needs) + 1) // 2)
            if not options.ephemeral:
                await catalog.save(name, new)
        except BaseException as error:
            record.figures = decision.figures
            await self._refuse(new, error, succession)
            raise
        record.figures = decision.figures
        return new, decision.faults_before, succession

    async def _refuse(
        self, version: ModelVersion, error: BaseException, succession: Succession
    ) -> None:
        self._history.record(version, "loading").become("refused", why_of(error))
        await succession.undo(version)

    async def _until_loaded(self, version: ModelVersion, change: Change) -> None:
        """Wait until all workers of a version are ready.

        Raises:
            VersionRefusedError: One did not come up.
        """
        kind, pool = change.what, version.pool
        change.version = version.number
        while slots := [each for each in pool.slots if not each.handle and not each.is_paused]:
            for slot in slots:
                if slot.state in ("backoff", "failed"):
                    raise VersionRefusedError(f"{slot.id.worker} did not come up: {slot.reason}")
            change.what = f"{kind}: version {version.number} {pool.reason or 'starting'}"
            await self._catalog.until_changed()
        if not pool.slots:
            raise VersionRefusedError("all hosts that were to run it were lost")
        change.what = kind

    def _serve(self, version: ModelVersion) -> None:
        record = self._history.record(version, "serving")
        self._catalog.serve(version)
        record.become("serving")

    def _leave(self, version: ModelVersion, reason: str = "") -> None:
        """Have a version leave. The record of one that was rolled back stays as it is."""
        if version not in self._catalog.versions(version.name):
            return  # memory was too short to keep it
        record = self._history.record(version, "serving")
        if record.state == "rolled_back":
            self._catalog.let_go(version, self._grace_s)
            return
        record.become("leaving", reason)
        leaving = self._catalog.let_go(version, self._grace_s)
        leaving.add_done_callback(lambda _: record.become("gone", reason))

    def _begin_watch(self, watch: VersionWatch) -> None:
        """Begin to watch a version that serves, or go on with it."""
        name = watch.new.name
        task = asyncio.create_task(self._watch(name, watch), name=f"watch {name}")
        self._watches[name] = watch, task

    async def _end_watch(self, name: str) -> VersionWatch | None:
        """End the watch over a version that serves, and return it: it can begin again."""
        watch, task = self._watches.pop(name, (None, None))
        if task is not None:
            task.cancel()
            await asyncio.wait([task])
        return watch

    async def _watch(self, name: str, watch: VersionWatch) -> None:
        """Watch the new version for a while, and go back to the former one if it is worse."""
        watch.begin()
        try:
            while not watch.is_over or name in self._busy:
                await asyncio.sleep(_WATCH_EVERY_S)
                reason = "" if name in self._busy else await watch.look()
                if reason and name not in self._busy and not self.is_ending:
                    record = self._history.record(watch.new, "serving")
                    record.figures = watch.with_figures(record.figures or SwapFigures())
                    del self._watches[name]
                    former = self._history.record(watch.old, "serving")
                    self._begin(name, "rollback", self.way_back(name, former, reason))
                    return
        finally:
            watch.stop()
        del self._watches[name]
        self._leave(watch.old)

    async def _go_back(self, name: str, reason: str, change: Change) -> None:
        """Have the version that is kept serve again, at once."""
        await self._end_watch(name)
        new = self._catalog.version(name)
        (old,) = (each for each in self._catalog.versions(name) if each is not new)
        change.version = old.number
        try:
            if self._catalog.is_saved(name):
                await self._catalog.save(name, old)
        except NotSavedError as error:  # the better version serves in any case
            text = "%s: the next start will serve version %d again: %s"
            logger.error(text, name, new.number, error.__cause__)
        self._history.record(new, "serving").become("rolled_back", reason)
        self._serve(old)
        self._leave(new)

    def way_back(self, name: str, former: Record, reason: str) -> Steps:
        """Return the steps back to a former version, which is loaded again if it has left."""
        if former.number in {version.number for version in self._catalog.versions(name)}:
            return partial(self._go_back, name, reason)
        is_saved = self._catalog.is_saved(name)
        options = SwapOptions(policy="force", old_first=True, rollback_s=0, ephemeral=not is_saved)
        return partial(self.swap, name, former.settings, options, reason)
