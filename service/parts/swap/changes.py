"""Changes of models that an operator asks for: one at a time for each model.

A version that is asked for is loaded beside the one that serves, and judged. The switch is one
step in the event loop. The former version stays loaded for a while, to go back to.
"""

import asyncio
import logging
from collections.abc import Mapping
from functools import partial

from inferpool.service.catalog.catalog import Catalog
from inferpool.service.catalog.own_paths import path_fault
from inferpool.service.errors import (
    ConflictError,
    ServiceError,
    UnavailableError,
    UnknownModelError,
    VersionRefusedError,
)
from inferpool.service.parts.speed import SpeedSearch
from inferpool.service.parts.swap.records import (
    Change,
    ChangeKind,
    ModelInfo,
)
from inferpool.service.parts.swap.requests import read_add, read_swap
from inferpool.service.parts.swap.room import Room
from inferpool.service.parts.swap.shown import ShownModels
from inferpool.service.parts.swap.steps import Steps, VersionSteps
from inferpool.service.telemetry.metrics import Metrics

logger = logging.getLogger(__name__)


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
            speed_search: Searches for faster presets meanwhile; None if nothing does.
            room: Reserves memory while versions load.
            grace_s: How long calls may take to end when their version leaves.
        """
        self.shown = ShownModels(catalog)
        """The versions and changes, for people."""
        self._history = self.shown.history
        self._speed_search = speed_search
        self._busy = catalog.busy
        self._catalog = catalog
        self._changes = self.shown.ongoing
        self._versions = VersionSteps(
            catalog, metrics, room, self._history, self._begin, grace_s=grace_s
        )

    def model_info(self, name: str) -> ModelInfo:
        """Return one model: also one that is on its way in or out, or that failed to come."""
        if name not in self._changes and not self._history.changes(name):
            self._check_known(name)
        return self.shown.info(name)

    @property
    def served(self) -> frozenset[str]:
        """The names of the models that are served."""
        return frozenset(self._catalog.serving)

    def begin_add(self, settings: Mapping[str, object]) -> str:
        """Begin to load a model with the settings of one `[models.NAME]`; return its name."""
        self._catalog.check_hosts()
        name, model, is_ephemeral = read_add(settings, self._catalog.serving)
        self._check_path(name, model.path)
        self._begin(name, "add", partial(self._versions.add, name, model, is_ephemeral))
        return name

    def begin_remove(self, name: str, *, ephemeral: bool = False) -> None:
        """Serve a model no longer, and begin to drain it. If ephemeral, a start serves it again."""
        self._check_known(name)
        self._begin(name, "remove", partial(self._versions.remove, name, ephemeral))

    def begin_swap(self, name: str, request: Mapping[str, object]) -> None:
        """Begin to load another version of a model, which takes over if it is good enough."""
        self._check_known(name)
        self._catalog.check_hosts()
        model, options = read_swap(request, self._catalog.version(name).settings)
        self._check_path(name, model.path)
        self._begin(name, "swap", partial(self._versions.swap, name, model, options, ""))

    def number_next(self, name: str, number: int) -> int:
        """Number the version that begins to load, with this number if it is the largest up to now.

        Returns:
            Its number.
        """
        return self._catalog.number_next(name, number)

    def begin_rollback(self, name: str) -> None:
        """Begin to switch back to the version that served before."""
        self._check_known(name)
        self.shown.remember_all(name)
        former = self._history.former(name, self._catalog.serving[name].version)
        if former is None:
            raise ConflictError(f"{name} has no earlier version to go back to")
        self._begin(name, "rollback", self._versions.way_back(name, former, "it was asked for"))

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
        """Begin no further change, and end all where they are; the versions that serve go on."""
        if self._versions.is_ending:
            return
        self._versions.is_ending = True
        for task in self._tasks():
            task.cancel()

    async def stop(self) -> None:
        """End all changes, and wait for them."""
        self.end()
        await asyncio.gather(*self._tasks(), return_exceptions=True)

    def _tasks(self) -> list[asyncio.Task[None]]:
        tasks = [change.task for change in self._changes.values() if change.task is not None]
        return tasks + self._versions.watches

    def _check_path(self, name: str, path: str | None) -> None:
        """Refuse a path that the model may not have, before anything is loaded."""
        catalog = self._catalog
        fault = path_fault(name, path or "", catalog.loaded, catalog.settings.root_path)
        if fault:
            raise ConflictError(f"path: {path!r} {fault}")

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

    def _begin(self, name: str, kind: ChangeKind, steps: Steps) -> None:
        self._check_idle(name)
        if self._versions.is_ending:
            raise ConflictError("the service is shutting down")
        self._busy.begin(name, f"it is being changed ({kind})")
        decided = asyncio.get_running_loop().create_future()
        change = Change(kind=kind, what=kind, decided=decided)
        self._changes[name] = change
        change.task = asyncio.create_task(self._run(name, change, steps), name=f"{kind} {name}")
        # A task that is cancelled before its first step runs none of its own.
        change.task.add_done_callback(lambda _: self._close(name, change))

    def _close(self, name: str, change: Change) -> None:
        """Open the model to the next change."""
        if self._versions.is_ending:
            change.fail(UnavailableError("the service is shutting down", retry_after_s=1))
        if self._changes.get(name) is not change:
            return
        del self._changes[name]
        self._busy.end(name)
        self._history.note(name, change.info(), self.served)
        if self._speed_search and name in self._catalog.serving and not self._versions.is_ending:
            self._speed_search.add(self._catalog.serving[name])

    async def _run(self, name: str, change: Change, steps: Steps) -> None:
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
