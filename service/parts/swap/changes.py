"""Changes of models that an operator asks for: one at a time for each model.

A version that is asked for is loaded beside the one that serves, and judged. The switch is one
step in the event loop. The former version stays loaded for a while, to go back to.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from inferpool.service.api.routes.health import HealthReport, ModelHealth, SwapFigures
from inferpool.service.catalog.catalog import Catalog, ModelVersion
from inferpool.service.errors import (
    ConflictError,
    NotSavedError,
    ServiceError,
    UnavailableError,
    UnknownModelError,
    VersionRefusedError,
)
from inferpool.service.parts.speed import SpeedSearch
from inferpool.service.parts.swap.decision import SwapDecision
from inferpool.service.parts.swap.records import (
    Change,
    ChangeKind,
    ModelInfo,
    Record,
    VersionHistory,
    why_of,
)
from inferpool.service.parts.swap.requests import SwapOptions, read_add, read_swap
from inferpool.service.parts.swap.room import Room, Succession
from inferpool.service.parts.swap.validation import LabelledInput, read_cases
from inferpool.service.parts.swap.watching import FaultShare, VersionWatch
from inferpool.service.report import worker_health
from inferpool.service.settings.model import ModelSettings
from inferpool.service.telemetry.metrics import Metrics

logger = logging.getLogger(__name__)

_WATCH_EVERY_S = 0.5
_Steps = Callable[[Change], Coroutine[Any, Any, None]]
"""Takes the steps of a change."""


class Changes:
    """Adds, removes and swaps models: one change of each at a time. Lives in the event loop.

    What begins one raises `UnknownModelError`, `ConflictError` if the model is being changed, and
    `InvalidInputError` if the settings cannot be used.
    """

    def __init__(
        self,
        catalog: Catalog,
        metrics: Metrics,
        speed_search: SpeedSearch | None,
        room: Room,
        *,
        grace_s: float,
    ) -> None:
        """Change nothing yet.

        Args:
            catalog: The versions.
            metrics: Gets counters for each model.
            speed_search: Looks for faster presets meanwhile; None if nothing does.
            room: Gives out memory while versions load.
            grace_s: How long calls may take to end when their version leaves.
        """
        self._history = VersionHistory()
        self.steps = self._history.steps
        """The latest steps of changes, the newest first."""
        self._speed_search = speed_search
        self._claims = catalog.claims
        self._room = room
        self._catalog = catalog
        self._metrics = metrics
        self._grace_s = grace_s
        self._changes: dict[str, Change] = {}
        self._watches: dict[str, tuple[VersionWatch, asyncio.Task[None]]] = {}
        """Versions that are watched, each with the one to go back to."""
        self._is_ending = False

    def list_models(self) -> Sequence[ModelInfo]:
        """Return all models."""
        names = dict.fromkeys((*self._catalog.serving, *self._changes))
        return [self._info(name) for name in names]

    def model_info(self, name: str) -> ModelInfo:
        """Return one model: also one that is on its way in or out, or that failed to come."""
        if name not in self._changes and not self._history.changes(name):
            self._check_known(name)
        return self._info(name)

    def add_to_health(self, report: HealthReport) -> HealthReport:
        """Return a report of /health with versions and changes, and models that come or go."""
        served = {model.name: model for model in report.models}
        return replace(
            report,
            models=[
                replace(
                    served.get(info.name) or self._absent(info),
                    change=info.change,
                    versions=info.versions,
                )
                for info in self.list_models()
            ],
        )

    def _absent(self, info: ModelInfo) -> ModelHealth:
        """Return what /health shows of a model without a version that serves."""
        pools = [version.pool for version in self._catalog.versions(info.name)]
        return ModelHealth(
            name=info.name,
            ready=False,
            reason=info.change or "no version of it serves",
            other_workers=[worker_health(slot) for pool in pools for slot in pool.slots],
        )

    @property
    def served(self) -> frozenset[str]:
        """The names of the models that are served."""
        return frozenset(self._catalog.serving)

    def begin_add(self, settings: Mapping[str, object]) -> str:
        """Begin to load a model with the settings of one `[models.NAME]`; return its name."""
        self._catalog.check_hosts()
        name, model, is_ephemeral = read_add(settings, self._catalog.serving)
        self._begin(name, "add", partial(self._add, name, model, is_ephemeral))
        return name

    def begin_remove(self, name: str, *, ephemeral: bool = False) -> None:
        """Serve a model no longer, and begin to drain it. If ephemeral, a start serves it again."""
        self._check_known(name)
        self._begin(name, "remove", partial(self._remove, name, ephemeral))

    def begin_swap(self, name: str, request: Mapping[str, object]) -> None:
        """Begin to load another version of a model, which takes over if it is good enough."""
        self._check_known(name)
        self._catalog.check_hosts()
        model, options = read_swap(request, self._catalog.version(name).settings)
        self._begin(name, "swap", partial(self._swap, name, model, options, ""))

    def number_next(self, name: str, number: int) -> int:
        """Give the version that begins to load this number if that is the largest up to now.

        Returns:
            Its number.
        """
        return self._catalog.number_next(name, number)

    def begin_rollback(self, name: str) -> None:
        """Begin to let the version serve again that served before."""
        self._check_known(name)
        former = self._former(name)
        if former is None:
            raise ConflictError(f"{name} has no earlier version to go back to")
        self._begin(name, "rollback", self._way_back(name, former, "it was asked for"))

    def _way_back(self, name: str, former: Record, reason: str) -> _Steps:
        """Return the steps back to a former version, which is loaded again if it has left."""
        if former.number in {version.number for version in self._catalog.versions(name)}:
            return partial(self._go_back, name, reason)
        is_saved = self._catalog.is_saved(name)
        options = SwapOptions(policy="force", old_first=True, rollback_s=0, ephemeral=not is_saved)
        return partial(self._swap, name, former.settings, options, reason)

    def until_decided(self, name: str) -> asyncio.Future[None]:
        """Return a future that is done once the change of a model of now is decided.

        It fails with the `ServiceError` of a change that came to nothing, which says why, and what
        serves. Cancelling it leaves the change going on.
        """
        change = self._changes.get(name)
        if change is not None:
            return asyncio.shield(change.decided)
        over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        over.set_result(None)
        return over

    def end(self) -> None:
        """Begin no further change, and end all where they are; what serves goes on to serve."""
        if self._is_ending:
            return
        self._is_ending = True
        for task in self._tasks():
            task.cancel()

    async def stop(self) -> None:
        """End all changes, and wait for them."""
        self.end()
        await asyncio.gather(*self._tasks(), return_exceptions=True)

    def _tasks(self) -> list[asyncio.Task[None]]:
        tasks = [change.task for change in self._changes.values() if change.task is not None]
        return tasks + [task for _, task in self._watches.values()]

    def _check_known(self, name: str) -> None:
        if name not in self._catalog.serving:
            self._check_idle(name)
            names = ", ".join(self._catalog.serving) or "none"
            raise UnknownModelError(f"no model is called {name[:80]!r}; there are: {names}")

    def _check_idle(self, name: str) -> None:
        change = self._changes.get(name)
        if change is not None:
            what = change.what
            raise ConflictError(f"{name} is being changed already ({what})", retry_after_s=1)

    def _info(self, name: str) -> ModelInfo:
        change, pool = self._changes.get(name), self._catalog.serving.get(name)
        self._remember_all(name)
        reasons = {each.number: each.pool.reason for each in self._catalog.versions(name)}
        return ModelInfo(
            name=name,
            version=pool.version if pool else None,
            ready=pool.is_ready if pool else False,
            change=change.what if change else "",
            saved=self._catalog.is_saved(name),
            versions=[
                record.info(reasons.get(record.number, ""))
                for record in self._history.versions(name)
            ],
            changes=[*([change.info()] if change else ()), *self._history.changes(name)],
        )

    def _remember_all(self, name: str) -> None:
        """Make records of the versions that were there at the start."""
        serving = self._catalog.serving.get(name)
        for version in self._catalog.versions(name):
            self._history.record(version, "serving" if version.pool is serving else "loading")

    def _former(self, name: str) -> Record | None:
        """Return the version that served before the one of now."""
        self._remember_all(name)
        return self._history.former(name, self._catalog.serving[name].version)

    def _begin(self, name: str, kind: ChangeKind, steps: _Steps) -> None:
        self._check_idle(name)
        if self._is_ending:
            raise ConflictError("the service is shutting down")
        self._claims.take(name, f"it is being changed ({kind})")
        decided = asyncio.get_running_loop().create_future()
        change = Change(kind=kind, what=kind, decided=decided)
        self._changes[name] = change
        change.task = asyncio.create_task(self._run(name, change, steps), name=f"{kind} {name}")
        # A task that is cancelled before its first step runs none of its own.
        change.task.add_done_callback(lambda _: self._close(name, change))

    def _close(self, name: str, change: Change) -> None:
        """Open the model to the next change."""
        if self._is_ending:
            change.fail(UnavailableError("the service is shutting down", retry_after_s=1))
        if self._changes.get(name) is not change:
            return
        del self._changes[name]
        self._claims.give_back(name)
        self._history.note(name, change.info(), self.served)
        if self._speed_search and name in self._catalog.serving and not self._is_ending:
            self._speed_search.add(self._catalog.serving[name])

    async def _run(self, name: str, change: Change, steps: _Steps) -> None:
        """Run the steps of a change, and record how it ended."""
        try:
            if self._speed_search is not None:
                await self._speed_search.forget(name)
            await steps(change)
        except asyncio.CancelledError:
            change.fail(UnavailableError("the service is shutting down", retry_after_s=1))
            raise
        except VersionRefusedError as error:  # its record has told it
            change.fail(error)
        except ServiceError as error:
            logger.warning("%s: %s failed: %s", name, change.kind, error.message)
            change.fail(error)
        except Exception as error:
            logger.exception("%s: %s failed", name, change.kind)
            change.fail(error)
        else:
            if not change.decided.done():
                change.decided.set_result(None)
        finally:
            self._close(name, change)

    async def _add(
        self, name: str, model: ModelSettings, is_ephemeral: bool, change: Change
    ) -> None:
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

    async def _remove(self, name: str, is_ephemeral: bool, change: Change) -> None:
        if not is_ephemeral:
            await self._catalog.save(name, None)
        await self._end_watch(name)
        self._history.tell_removal(name)
        await self._catalog.remove(name, self._grace_s)
        self._history.forget(name)

    async def _swap(
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
            if watch is not None and not self._is_ending:
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
            while not watch.is_over or name in self._claims:
                await asyncio.sleep(_WATCH_EVERY_S)
                reason = "" if name in self._claims else await watch.look()
                if reason and name not in self._claims and not self._is_ending:
                    record = self._history.record(watch.new, "serving")
                    record.figures = watch.with_figures(record.figures or SwapFigures())
                    del self._watches[name]
                    former = self._history.record(watch.old, "serving")
                    self._begin(name, "rollback", self._way_back(name, former, reason))
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
