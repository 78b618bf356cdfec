"""The models that are served and their versions. Lives in the main process's event loop.

A version is a pool with workers and a queue of its own. One version of each model serves: calls
that name no version go to it. Others are loaded beside it, to be compared, or to be switched to or
back to.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from itertools import count
from typing import TYPE_CHECKING, get_args

from inferpool.models.spec import UNKNOWN_INTERFACE
from inferpool.service.api.exchange import path_of
from inferpool.service.catalog.own_paths import open_own_paths, starting_if_free
from inferpool.service.catalog.plans import HostPlans, place_text, planned, with_model
from inferpool.service.errors import ConflictError, NotSavedError, UnavailableError
from inferpool.service.queue.admission import Admission
from inferpool.service.queue.dispatcher import Dispatcher
from inferpool.service.queue.instance import CanaryShare
from inferpool.service.queue.pool import Pool
from inferpool.service.queue.quarantine import Quarantine
from inferpool.service.settings.model import ModelSettings
from inferpool.service.settings.settings import Settings
from inferpool.service.settings.state import StateFile
from inferpool.service.telemetry.metrics import Metrics, ModelMetrics, Reading
from inferpool.workers.host.devices import DeviceError, Host
from inferpool.workers.host.engine import Engine, RankHealth, WorkerHandle
from inferpool.workers.host.restart_policy import RestartPolicy
from inferpool.workers.host.shared_check import SharedCheck
from inferpool.workers.host.slots import State
from inferpool.workers.shared.arena import Arena
from inferpool.workers.shared.config import WorkerConfig

if TYPE_CHECKING:
    from inferpool.models.spec import TensorSpec
    from inferpool.service.telemetry.console import Console

logger = logging.getLogger(__name__)

_LARGEST_NUMBER = 10**15
"""The largest number that may be asked for. JavaScript is sure of those that follow, too."""


class ModelVersion:
    """One version of a model that is loaded, or is being loaded, as calls get to it."""

    def __init__(self, settings: ModelSettings, pool: Pool) -> None:
        """Create a version. No call reaches it before `Catalog.serve` or `Catalog.expose`."""
        self.name = pool.name
        """The name of the model."""
        self.number = self.version = pool.version
        """Counts the versions of the model, from 1."""
        self.path = path_of(self.name, self.number)
        """The rest of the path of calls that name it."""
        self.settings = settings
        self.pool = pool
        self.metrics = pool.dispatcher.metrics
        self.is_serving = False
        """Calls that name no version come here; if not, each call looks where it belongs."""
        self.canary: CanaryShare | None = None
        """The version that gets a share of its calls; calls must look anew meanwhile."""
        self.inputs: Sequence[TensorSpec] = ()
        self.outputs: Sequence[TensorSpec] = ()
        """The inputs and outputs of the model; empty until a worker is ready."""
        pool.interface_over = settings.interface_over
        self.interface = pool.interface = settings.interface_over(UNKNOWN_INTERFACE)
        self.submit = pool.submit  # without a step between, which each call would pay for


class BusyModels:
    """The models that are being changed or restarted, which exclude each other."""

    def __init__(self) -> None:
        """Begin with no model busy."""
        self._what: dict[str, str] = {}

    def __contains__(self, model: str) -> bool:
        """Return whether something is being done to a model."""
        return model in self._what

    def begin(self, model: str, what: str) -> None:
        """Mark a model as busy until `end`; `what` says what is done to it, as a sentence.

        Raises:
            ConflictError: Something else is being done to it.
        """
        if model in self._what:
            raise ConflictError(f"{model} is busy: {self._what[model]}", retry_after_s=1)
        self._what[model] = what

    def end(self, model: str) -> None:
        """Open a model to the next change or restart."""
        self._what.pop(model, None)


class Catalog:
    """All versions that are loaded, and which of them answer which calls."""

    def __init__(
        self,
        settings: Settings,
        host: Host | None,
        metrics: Metrics,
        announcer: "Console",
        *,
        cache_dir: str | None,
        on_change: Callable[[], None],
        until_known: Callable[[], Awaitable[None]],
        state: StateFile,
    ) -> None:
        """Decide what goes where, and start nothing yet.

        Args:
            settings: The settings at the start.
            host: The devices of this host; None: all workers run on hosts that join a cluster.
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
        self.on_load: list[Callable[[ModelVersion], None]] = []
        """Called with each version before its workers start. Parts add what they attach to it."""
        self.busy = BusyModels()
        """The models that are being changed or restarted."""
        self.serving: dict[str, Pool] = {}
        """The version of each model that serves, by name."""
        self.entries: dict[str, ModelVersion] = {}
        """The version that a call is for, by the rest of its path; see `path_of`."""
        self.loaded: dict[int, ModelVersion] = {}
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
        """The versions that leave. They keep leaving even if the task that asked is cancelled."""
        self.until_known = until_known
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
        number_of = self._state.number_of
        plans = [planned(name, number_of(name), each) for name, each in self.plans.items()]
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
        """Remove the workers on a host of the cluster that was lost; `reason` is for people."""
        self._hosts.leave(name)
        for version in list(self.loaded.values()):
            version.pool.withdraw(name, reason)

    def versions(self, name: str) -> Sequence[ModelVersion]:
        """Return the loaded versions of a model, the oldest first."""
        return list(self._versions.get(name, {}).values())

    def newest(self, name: str) -> int:
        """Return the largest number of a version of a model, also of those that are gone."""
        return self._newest.get(name) or self._state.newest_of(name)

    def number_next(self, name: str, number: int) -> int:
        """Return the number of the next version of a model: this one if it is larger than all."""
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

    def expose(self, version: ModelVersion) -> None:
        """Open a version to the calls that name it."""
        self.entries[version.path] = version
        self._metrics.show(version.metrics)
        self._on_change()

    def serve(self, version: ModelVersion) -> None:
        """Have a version answer all calls from now on that name no version.

        Each call belongs to one version from its submission on, so this is atomic.
        """
        name = version.name
        former = self.entries.get(name)
        if former is not None:
            former.is_serving, former.canary = False, None
        self.serving[name], self.entries[name] = version.pool, version
        version.is_serving = True
        self.settings = with_model(self.settings, name, version.settings)
        self.expose(version)

    def begin_canary(self, version: ModelVersion, share: float) -> None:
        """Have a version answer a share of the calls that name no version, by their ids."""
        serving = self.entries[version.name]
        serving.canary, serving.is_serving = CanaryShare(version.path, share), False
        self.expose(version)

    def end_canary(self, version: ModelVersion) -> None:
        """Have the version that serves answer all calls again that name no version."""
        serving = self.entries[version.name]
        serving.canary, serving.is_serving = None, True
        self._on_change()

    def let_go(self, version: ModelVersion, grace_s: float) -> asyncio.Task[None]:
        """Have a version answer what it has accepted, and then end its workers.

        Calls that are on their way to it go to the version that serves.

        Returns:
            The task of it, which goes on by itself.
        """
        task = self._leaving.get(version)
        if task is None:
            self._versions[version.name].pop(version.number)
            for path in [path for path, entry in self.entries.items() if entry is version]:
                del self.entries[path]
            version.is_serving = False
            task = asyncio.create_task(self._end(version, grace_s), name=f"unload {version.name}")
            self._leaving[version] = task
            task.add_done_callback(lambda task: self._record_left(version, task))
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
        self.loaded = {id: each for id, each in self.loaded.items() if each is not version}
        self._metrics.fold(version.metrics)
        self._announcer.left([slot.id.worker for slot in pool.slots])

    def _record_left(self, version: ModelVersion, task: asyncio.Task[None]) -> None:
        del self._leaving[version]
        if not task.cancelled() and (error := task.exception()):
            text = "%s: version %d has not left cleanly"
            logger.error(text, version.name, version.number, exc_info=error)

    async def save(self, name: str, version: ModelVersion | None) -> None:
        """Write down that the next start serves this version; None removes the model.

        Raises:
            NotSavedError: It could not be written.
        """
        newest = self.newest(name)
        number = newest if version is None else version.number
        model = None if version is None else version.settings
        await self._saved(self._state.save(name, model, version=number, newest=newest))

    async def save_number(self, version: ModelVersion) -> None:
        """Write down the number of this version, so that no other version ever gets it.

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
            yield from _model_gauges(pool, [each.pool for each in self.versions(name)])

    def _on_change(self) -> None:
        for version in self.loaded.values():
            pool = version.pool
            version.inputs, version.outputs = pool.inputs, pool.outputs
            version.interface = pool.interface
        open_own_paths(self.entries)
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
        pool = Pool(
            source=model.source,
            version=number,
            configs=configs,
            check=SharedCheck(
                starting_if_free(self._engine.start, name, model, self.loaded, self.settings)
            ),
            dispatcher=self.make_dispatcher(name, model),
            policy=RestartPolicy(max_restarts=model.max_restarts),
            announcer=self._announcer,
            on_change=self._on_change,
        )
        version = ModelVersion(model, pool)
        for callback in self.on_load:
            callback(version)
        self._versions.setdefault(name, {})[number] = version
        self.loaded[next(self._numbers)] = version
        return version

    def make_dispatcher(self, name: str, model: ModelSettings) -> Dispatcher:
        """Return a dispatcher without workers for instances of a model."""
        assert self._arena is not None, "it has been started"
        settings, metrics = self.settings, ModelMetrics(name)
        return Dispatcher(
            name=name,
            arena=self._arena,
            admission=_admission_of(model, settings, metrics),
            quarantine=Quarantine(name=name, duration_s=settings.quarantine_s),
            metrics=metrics,
            max_batch_size=None if model.max_batch_size == "auto" else model.max_batch_size,
            batch_wait_ms=model.batch_wait_ms,
            job_share=settings.job_share,
        )


def _admission_of(model: ModelSettings, settings: Settings, metrics: ModelMetrics) -> Admission:
    admission = Admission(
        max_queue_length=settings.max_queue_length,
        max_batch_size=model.batch_size,
        rejected=metrics.rejected,
        key_share=settings.key_share,
    )
    max_stream_s = settings.max_timeout_s if model.max_stream_s == "auto" else model.max_stream_s
    admission.stream_limits = model.stream_gap_s, max_stream_s, model.max_stream_parts
    return admission


def _model_gauges(serving: Pool, pools: Sequence[Pool]) -> Iterator[Reading]:
    """Yield the gauges of a model: of the version that serves, and of all that are loaded."""
    label, dispatcher = serving.name, serving.dispatcher
    for name, value in (
        ("model_version", serving.version),
        ("model_ready", serving.is_ready),
        ("max_queue_length", dispatcher.max_queue_length),
        ("max_batch_size", dispatcher.max_batch_size),
        ("queue_depth", sum(pool.dispatcher.num_queued for pool in pools)),
        ("background_depth", sum(pool.dispatcher.num_background for pool in pools)),
        ("open_streams", sum(each.num_open for pool in pools if (each := pool.dispatcher.streams))),
        ("queue_bytes", sum(pool.dispatcher.queued_bytes for pool in pools)),
        ("quarantined_inputs", sum(pool.dispatcher.num_quarantined for pool in pools)),
    ):
        yield Reading(name=name, value=value, labels=(label,))
    states = Counter(slot.state for pool in pools for slot in pool.slots)
    for state in get_args(State):
        yield Reading(name="workers", value=states[state], labels=(label, state))
    for pool in pools:
        yield from _pool_gauges(pool)


def _pool_gauges(pool: Pool) -> Iterator[Reading]:
    for slot in pool.slots:
        labels = (pool.name, slot.id.number)
        placed = (str(slot.config.placement), slot.config.host)
        place = placed if slot.config.host else placed[:1]
        yield Reading(name="worker_up", value=slot.state == "ready", labels=(*labels, *place))
        yield Reading(name="worker_incarnation", value=slot.id.incarnation, labels=labels)
        if slot.handle:
            yield from _worker_gauges(labels, slot.handle)


def _worker_gauges(labels: tuple[str, str], worker: WorkerHandle) -> Iterator[Reading]:
    vitals = worker.vitals()
    speed = worker.ready.speed
    for name, value in (
        ("stalled", worker.is_stalled),
        ("resident_memory_bytes", vitals.rss_bytes),
        ("beat_age_seconds", vitals.last_beat_age_s),
        ("answer_age_seconds", vitals.last_answer_age_s),
        ("batch_age_seconds", vitals.batch_age_s),
    ):
        yield Reading(name=f"worker_{name}", value=value, labels=labels)
    for name, value in (("gain", speed.gain), ("deviation", speed.deviation)):
        yield Reading(name=f"worker_speed_{name}", value=value, labels=(*labels, speed.preset))
    yield from _rank_gauges(labels, vitals.ranks)


def _rank_gauges(labels: tuple[str, str], ranks: Sequence[RankHealth]) -> Iterator[Reading]:
    for rank in ranks:
        named = (*labels, str(rank.rank))
        yield Reading(name="worker_rank_resident_memory_bytes", value=rank.rss_bytes, labels=named)
        if rank.part:
            yield Reading(name="worker_rank_parameter_bytes", value=rank.part_bytes, labels=named)
