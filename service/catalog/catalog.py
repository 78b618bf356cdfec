"""The models that are served and their versions. Lives in the main process's event loop.

A version is a pool with workers and a queue of its own. One version of each model serves: calls
that name no version go to it. Others are loaded beside it, to be compared, or to be switched to or
back to.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count

from inferpool.service.api.predict import path_of
from inferpool.service.catalog.claims import Claims
from inferpool.service.catalog.plans import HostPlans, place_text, planned, with_model
from inferpool.service.errors import NotSavedError, OverloadedError, UnavailableError
from inferpool.service.parts.objective import Objective, ObjectiveAdmission
from inferpool.service.parts.turns.gate import DeviceGate
from inferpool.service.queue.admission import Admission
from inferpool.service.queue.dispatcher import Dispatcher
from inferpool.service.queue.gauges import read_model_gauges
from inferpool.service.queue.instance import Buffer, CanaryShare
from inferpool.service.queue.pool import Announcer, Pool
from inferpool.service.queue.quarantine import Quarantine
from inferpool.service.settings.model import ModelSettings
from inferpool.service.settings.settings import Settings
from inferpool.service.settings.state import StateFile
from inferpool.service.telemetry.metrics import Metrics, ModelMetrics, Reading
from inferpool.workers.host.devices import DeviceError, Host
from inferpool.workers.host.engine import Engine
from inferpool.workers.host.restart_policy import RestartPolicy
from inferpool.workers.shared.arena import Arena
from inferpool.workers.shared.config import WorkerConfig
from inferpool.workers.shared.messages import ItemRef

logger = logging.getLogger(__name__)

_LARGEST_NUMBER = 10**15
"""The largest number that may be asked for. JavaScript is sure of those that follow, too."""


@dataclass(slots=True, kw_only=True, eq=False)
class ModelVersion:
    """One version of a model that is loaded, or is being loaded."""

    number: int
    """Counts the versions of the model, from 1."""
    settings: ModelSettings
    pool: Pool
    metrics: ModelMetrics

    @property
    def name(self) -> str:
        """The name of the model."""
        return self.pool.name


class Catalog:
    """All versions that are loaded, and which of them answer which calls."""

    def __init__(
        self,
        settings: Settings,
        host: Host | None,
        metrics: Metrics,
        announcer: Announcer,
        *,
        cache_dir: str | None,
        on_change: Callable[[], None],
        until_known: Callable[[], Awaitable[None]],
        state: StateFile,
    ) -> None:
        """Decide what goes where, and start nothing yet.

        Args:
            settings: The settings at the start.
            host: The devices of this host; None: all workers run on hosts that join, as agents of
                a cluster. Models that share a device there do not take turns at it, since the gate
                of turns knows only devices of its own host.
            metrics: Gets counters for each version.
            announcer: Tells people what the workers do.
            cache_dir: The folder of verdicts on speed; None for none.
            on_change: Called when a worker or a version has come or gone.
            until_known: Waits until all fronts know what `on_change` has announced.
            state: Knows the numbers of versions before the start.

        Raises:
            DeviceError: A requested device is missing.
        """
        self.settings = settings
        """The settings, with the models as they are served now."""
        self._gate = None if host is None else DeviceGate(host.num_cores)
        self.claims = Claims()
        """The models that are being changed or restarted."""
        self.serving: dict[str, Pool] = {}
        """The version of each model that serves, by name."""
        self.entries: dict[str, Pool] = {}
        """The version that a call is for, by the rest of its path; see `path_of`."""
        self.pools: dict[int, Pool] = {}
        """All versions that are loaded, by numbers that no other version gets."""
        self._versions: dict[str, dict[int, ModelVersion]] = {}
        self._newest: dict[str, int] = {}
        self._numbers = count()
        self._state = state
        self._hosts = HostPlans(host, cache_dir)
        self._metrics = metrics
        self._announcer = announcer
        self._tell = on_change
        self._waiting: list[asyncio.Future[None]] = []
        self._leaving: dict[ModelVersion, asyncio.Task[None]] = {}
        """The versions that leave. They go on to leave if whoever has sent them is cancelled."""
        self.until_known = until_known
        """Waits until all fronts know what was changed."""
        self._engine: Engine | None = None
        self._arena: Arena | None = None
        self.plans: Mapping[str, Sequence[WorkerConfig]] = self._hosts.plan_all(settings)
        """The configurations of the workers at the start."""

    def start(self, engine: Engine, arena: Arena) -> None:
        """Start the workers of all models of the settings; payloads lie in the arena."""
        self._engine, self._arena = engine, arena
        for name, configs in self.plans.items():
            number = self._state.number_of(name)
            version = self._make(name, self.settings.models[name], configs, number)
            version.pool.start()
            self.serve(version)

    @property
    def planned(self) -> list[tuple[str, str]]:
        """Each worker at the start and its placement, for people."""
        plans = [
            planned(name, self._state.number_of(name), configs)
            for name, configs in self.plans.items()
        ]
        return [worker for plan in plans for worker in plan]

    def check_hosts(self) -> None:
        """Check that there is a host that workers can be started on.

        Raises:
            UnavailableError: No host of the cluster is connected.
        """
        if not self._hosts.has_hosts:
            raise UnavailableError("no host is connected; start an agent there", retry_after_s=1)

    def add_host(self, name: str, host: Host) -> None:
        """Begin to start workers of all loaded versions on a host of the cluster that has joined.

        A model that cannot be served there is logged, and left out on that host.
        """
        self._hosts.join(name, host)
        for version in [each for versions in self._versions.values() for each in versions.values()]:
            settings = with_model(self.settings, version.name, version.settings)
            try:
                configs = self._hosts.plan_on(name, version.name, settings)
            except DeviceError:
                continue
            slots = version.pool.extend(configs)
            self._announcer.planned([(slot.id.worker, place_text(slot.config)) for slot in slots])

    def remove_host(self, name: str, reason: str) -> None:
        """Forget the workers on a host of the cluster that was lost; `reason` is for people."""
        self._hosts.leave(name)
        for pool in list(self.pools.values()):
            pool.withdraw(name, reason)

    def versions(self, name: str) -> Sequence[ModelVersion]:
        """Return the loaded versions of a model, the oldest first."""
        return list(self._versions.get(name, {}).values())

    def newest(self, name: str) -> int:
        """Return the largest number of a version of a model, also of those that are gone."""
        return self._newest.get(name) or self._state.newest_of(name)

    def number_next(self, name: str, number: int) -> int:
        """Give the next version of a model this number if that is the largest; return its number.

        If it is not, or is too large, the next version gets the next number.
        """
        newest = self.newest(name)
        if newest < number <= _LARGEST_NUMBER:
            self._newest[name] = newest = number - 1
        return newest + 1

    def version(self, name: str) -> ModelVersion:
        """Return the version of a model that serves."""
        return self._versions[name][self.serving[name].version]

    async def until_changed(self) -> None:
        """Wait until a worker or a version has come or gone."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        await future

    def plan(self, name: str, model: ModelSettings) -> Sequence[WorkerConfig]:
        """Return the configurations of the workers of another version, on all hosts.

        Raises:
            DeviceError: A requested device is missing.
            UnavailableError: No host of the cluster is connected.
        """
        self.check_hosts()
        settings = with_model(self.settings, name, model)
        return self._hosts.plan(name, settings, is_successor=name in self.serving)

    def load(
        self,
        name: str,
        model: ModelSettings,
        configs: Sequence[WorkerConfig] | None = None,
        *,
        paused: bool = False,
    ) -> ModelVersion:
        """Begin to load a version beside the others, as planned. No call gets to it yet.

        If `paused`, none of its workers is started before `Pool.resume`.

        Raises:
            DeviceError: A requested device is missing.
            UnavailableError: No host of the cluster is connected.
        """
        if configs is None or self._hosts.is_cluster:  # hosts may have come or gone since the plan
            configs = self.plan(name, model)
        version = self._make(name, model, configs, self.newest(name) + 1)
        self._announcer.planned(planned(name, version.number, configs))
        version.pool.start(paused=paused)
        return version

    def hold(self, version: ModelVersion) -> None:
        """Let calls to a version wait until `Pool.release`, while it is compared.

        Their payloads leave half of the arena free for the inputs of the comparison.
        """
        arena, name, rejected = self._arena, version.name, version.metrics.rejected
        assert arena is not None, "it has been started"

        def leave_room(ref: ItemRef, chunks: Sequence[Buffer]) -> None:
            if 2 * arena.used_bytes > arena.num_bytes:
                rejected["arena_full"] += 1
                raise OverloadedError("too many calls wait for another version", retry_after_s=1)

        trial = self._make_dispatcher(name, version.settings, ModelMetrics(name))
        version.pool.hold(trial, leave_room)

    def expose(self, version: ModelVersion) -> None:
        """Let calls that name a version get to it."""
        self.entries[path_of(version.name, version.number)] = version.pool
        self._metrics.show(version.metrics)
        self._on_change()

    def serve(self, version: ModelVersion) -> None:
        """Let a version answer all calls from now on that name no version.

        Each call belongs to one version from its submission on, so this is atomic.
        """
        name = version.name
        former = self.serving.get(name)
        if former is not None:
            former.is_serving, former.canary = False, None
        self.serving[name] = self.entries[name] = version.pool
        version.pool.is_serving = True
        self.settings = with_model(self.settings, name, version.settings)
        self.expose(version)

    def begin_canary(self, version: ModelVersion, share: float) -> None:
        """Let a version answer a share of the calls that name no version, by their ids."""
        serving = self.serving[version.name]
        path = path_of(version.name, version.number)
        serving.canary, serving.is_serving = CanaryShare(path, share), False
        self.expose(version)

    def end_canary(self, version: ModelVersion) -> None:
        """Let the version that serves answer all calls again that name no version."""
        serving = self.serving[version.name]
        serving.canary, serving.is_serving = None, True
        self._on_change()

    def let_go(self, version: ModelVersion, grace_s: float) -> asyncio.Task[None]:
        """Let a version answer what it has accepted, and then end its workers.

        Calls that are on their way to it go to the version that serves.

        Returns:
            The task of it, which goes on by itself.
        """
        task = self._leaving.get(version)
        if task is None:
            pool = version.pool
            self._versions[version.name].pop(version.number)
            for path in [path for path, entry in self.entries.items() if entry is pool]:
                del self.entries[path]
            pool.is_serving = False
            ending = self._end(version, grace_s)
            task = asyncio.create_task(ending, name=f"unload {version.name}")
            self._leaving[version] = task
            task.add_done_callback(lambda task: self._note_left(version, task))
            self._on_change()
        return task

    async def unload(self, version: ModelVersion, grace_s: float) -> None:
        """Wait until a version has left; see `let_go`. It goes on if this is cancelled."""
        await asyncio.shield(self.let_go(version, grace_s))

    async def until_left(self, name: str) -> None:
        """Wait until the versions of a model that leave have gone."""
        leaving = [task for version, task in self._leaving.items() if version.name == name]
        await asyncio.gather(*map(asyncio.shield, leaving), return_exceptions=True)

    async def stop(self) -> None:
        """Wait for the versions that leave; their workers must have been stopped."""
        await asyncio.gather(*self._leaving.values(), return_exceptions=True)

    async def remove(self, name: str, grace_s: float) -> None:
        """Answer what a model has accepted, and serve it no longer. Its path is gone at once."""
        del self.serving[name]
        self.settings = with_model(self.settings, name, None)
        await asyncio.gather(*(self.unload(each, grace_s) for each in self.versions(name)))
        await self.until_left(name)
        self.forget(name)

    def forget(self, name: str) -> None:
        """Show a model no longer that has no version left."""
        self._versions.pop(name, None)
        self._metrics.remove(name)
        self._on_change()

    async def _end(self, version: ModelVersion, grace_s: float) -> None:
        pool = version.pool
        await self.until_known()
        await pool.dispatcher.drain(grace_s)
        await pool.stop(grace_s)
        self.pools = {number: each for number, each in self.pools.items() if each is not pool}
        self._metrics.fold(version.metrics)
        self._announcer.left([slot.id.worker for slot in pool.slots])

    def _note_left(self, version: ModelVersion, task: asyncio.Task[None]) -> None:
        del self._leaving[version]
        if not task.cancelled() and (error := task.exception()):
            text = "%s: version %d has not left cleanly"
            logger.error(text, version.name, version.number, exc_info=error)

    async def save(self, name: str, version: ModelVersion | None) -> None:
        """Let the next start of the service serve this version; None removes the model.

        Raises:
            NotSavedError: It could not be written.
        """
        newest = self.newest(name)
        number = newest if version is None else version.number
        model = None if version is None else version.settings
        await self._saved(self._state.save(name, model, version=number, newest=newest))

    async def save_number(self, version: ModelVersion) -> None:
        """Let no start of the service give the number of this version to another one.

        Raises:
            NotSavedError: It could not be written.
        """
        await self._saved(self._state.save_number(version.name, version.number))

    async def _saved(self, saving: Awaitable[None]) -> None:
        try:
            await saving
        except OSError as error:
            raise NotSavedError(
                f"nothing was changed, since {self._state.path} could not be written: "
                f"{error.strerror}; mend that, or name another file in state_file, or ask with "
                '"ephemeral": true, and the next start forgets the change'
            ) from error

    def is_saved(self, name: str) -> bool:
        """Return whether the next start of the service serves what serves now."""
        model = self.settings.models.get(name)
        return model is not None and self._state.models.get(name) == model

    def read_gauges(self) -> Iterator[Reading]:
        """Yield the gauges of all models."""
        for name, pool in self.serving.items():
            yield from read_model_gauges(pool, [each.pool for each in self.versions(name)])

    def _on_change(self) -> None:
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            if not future.done():
                future.set_result(None)
        self._tell()

    def _make(
        self, name: str, model: ModelSettings, configs: Sequence[WorkerConfig], number: int
    ) -> ModelVersion:
        assert self._engine is not None, "it has been started"
        self._newest[name] = max(number, self.newest(name))
        metrics = ModelMetrics(name)
        pool = Pool(
            name=name,
            source=model.source,
            version=number,
            configs=configs,
            engine=self._engine,
            dispatcher=self._make_dispatcher(name, model, metrics),
            policy=RestartPolicy(max_restarts=model.max_restarts),
            metrics=metrics,
            announcer=self._announcer,
            on_change=self._on_change,
            gate=self._gate,
            share=model.weight,
        )
        pool.is_serving = False
        version = ModelVersion(number=number, settings=model, pool=pool, metrics=metrics)
        self._versions.setdefault(name, {})[number] = version
        self.pools[next(self._numbers)] = pool
        return version

    def _make_dispatcher(
        self, name: str, model: ModelSettings, metrics: ModelMetrics
    ) -> Dispatcher:
        assert self._arena is not None, "it has been started"
        settings, p99_ms = self.settings, model.objective_p99_ms
        objective = Objective(p99_ms / 1000, model=name) if p99_ms else None
        kind = partial(ObjectiveAdmission, objective) if objective else Admission
        return Dispatcher(
            name=name,
            arena=self._arena,
            admission=kind(
                max_queue_length=settings.max_queue_length,
                max_batch_size=model.batch_size,
                rejected=metrics.rejected,
                key_share=settings.key_share,
            ),
            quarantine=Quarantine(name=name, duration_s=settings.quarantine_s),
            metrics=metrics,
            max_batch_size=None if model.max_batch_size == "auto" else model.max_batch_size,
            batch_wait_ms=model.batch_wait_ms,
            objective=objective,
            job_share=settings.job_share,
        )
