"""All the workers of one model, with the dispatcher that feeds them."""

import asyncio
import contextlib
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Literal, Protocol, get_args

import msgspec

from models.spec import TensorSpec
from models.speed.names import SpeedReport
from models.split.report import SplitReport
from service.dispatcher import Dispatcher
from service.errors import GivenUpError, RestartFailedError, ServiceError, UnavailableError
from service.instance import Instance
from service.metrics import ModelMetrics, Reading
from service.request import CallOptions, Payload
from workers.config import WorkerConfig
from workers.engine import Cause, Engine, RankVitals, WorkerHandle, WorkerId
from workers.errors import WorkerStartError
from workers.memory import available_bytes
from workers.messages import UNREADABLE
from workers.supervisor import RestartPolicy, Slot, State, Supervisor

logger = logging.getLogger(__name__)

_NUM_ENDINGS = 20
"""That are kept for people to look at."""
_NUM_TRIES = 3
"""How often a restart tries each worker, once one has been replaced."""
_MOMENT_S = 1.0
"""A model that loads within this is worth waiting for when all its workers are down."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How one life of a worker ended, or that it did not start."""

    id: WorkerId
    time: float
    """Seconds of the Unix epoch."""
    cause: Cause
    reason: str


RestartState = Literal["none", "running", "done", "failed"]


@dataclass(slots=True, kw_only=True)
class Restart:
    """How the last restart goes that was asked for."""

    state: RestartState = "none"
    text: str = ""
    """What is being done, or why it failed; for a person."""


class Announcer(Protocol):
    """Who tells a person how the workers come up."""

    def progress(self, worker: str, stage: str) -> None:
        """A worker that loads is doing something else now."""

    def ready(self, worker: str, seconds: float) -> None:
        """A worker takes batches."""

    def failed(self, worker: str, reason: str) -> None:
        """A worker ended or did not start."""


class Pool:
    """One model: its supervisor and its dispatcher, wired to each other."""

    def __init__(
        self,
        *,
        name: str,
        configs: Sequence[WorkerConfig],
        engine: Engine,
        dispatcher: Dispatcher,
        policy: RestartPolicy,
        metrics: ModelMetrics,
        announcer: Announcer,
        on_change: Callable[[], None],
    ) -> None:
        self.name = name
        self.dispatcher = dispatcher
        self.example: object = None
        """An instance that the model takes, as JSON; None until a worker has shown one."""
        self.reads_own_form = False
        """What clients send is not what `inputs` say, so nobody can make an instance up."""
        self.endings: deque[Ending] = deque(maxlen=_NUM_ENDINGS)
        """The latest, the newest last."""
        self.restart = Restart()
        self._replacing = asyncio.Lock()
        """One worker at a time: an operator's restart and a change of presets take turns."""
        self._configs = configs
        self._metrics = metrics
        self._announcer = announcer
        self._on_change = on_change
        self._started_at: dict[str, float] = {}
        """When those that start said so first, by worker, in the loop's time."""
        self._told_speeds: set[tuple[str, str]] = set()
        self._told_parts: Sequence[str] = ()
        self._load_s = 0.0
        """What the last incarnation took to load."""
        self._is_expecting = False
        """None is ready, but one will be within a moment: what comes may wait for it."""
        self._supervisor = Supervisor(engine, self, policy)

    @property
    def inputs(self) -> Sequence[TensorSpec]:
        """What the model takes; empty until a worker is ready."""
        return self.dispatcher.inputs

    @property
    def slots(self) -> Sequence[Slot]:
        """The workers."""
        return self._supervisor.slots

    @property
    def is_draining(self) -> bool:
        """Nothing more is admitted."""
        return self.dispatcher.is_draining

    @property
    def is_ready(self) -> bool:
        """A worker that shows signs of life takes batches, and new work is welcome."""
        return self.dispatcher.num_responsive > 0 and not self.is_draining

    @property
    def is_lost(self) -> bool:
        """Every worker is given up: this model will never be served again."""
        return all(slot.state == "failed" for slot in self.slots)

    @property
    def has_served(self) -> bool:
        """A worker was ready once."""
        return any(slot.was_ever_ready for slot in self.slots)

    @property
    def reason(self) -> str:
        """Why it is not ready, for a person; empty if it is."""
        if self.is_draining:
            return "draining"
        if self.is_ready:
            return ""
        if self.dispatcher.num_ready:
            return "stalled: no worker shows a sign of life"
        slot = min(self.slots, key=lambda slot: slot.state == "failed")
        about = slot.stage if slot.state == "starting" else slot.reason
        return f"{slot.state}: {about}" if about else slot.state

    def read_gauges(self) -> Iterator[Reading]:
        """What `/metrics` shows of it now."""
        yield Reading(name="queue_depth", value=self.dispatcher.num_queued, labels=(self.name,))
        limit = self.dispatcher.max_queue_length
        yield Reading(name="max_queue_length", value=limit, labels=(self.name,))
        yield Reading(name="queue_bytes", value=self.dispatcher.queued_bytes, labels=(self.name,))
        yield Reading(
            name="max_batch_size", value=self.dispatcher.max_batch_size, labels=(self.name,)
        )
        yield Reading(
            name="quarantined_inputs", value=self.dispatcher.num_quarantined, labels=(self.name,)
        )
        yield Reading(name="model_ready", value=self.is_ready, labels=(self.name,))
        states = Counter(slot.state for slot in self.slots)
        for state in get_args(State):
            yield Reading(name="workers", value=states[state], labels=(self.name, state))
        for slot in self.slots:
            labels = (self.name, str(slot.id.slot))
            device = str(slot.config.placement)
            yield Reading(name="worker_up", value=slot.state == "ready", labels=(*labels, device))
            yield Reading(name="worker_incarnation", value=slot.id.incarnation, labels=labels)
            if slot.handle:
                yield from _worker_gauges(labels, slot.handle)

    def start(self) -> None:
        """Begin to start the workers."""
        self._supervisor.start(self.name, self._configs)

    def submit(self, payload: Payload, options: CallOptions, request_id: str) -> Instance:
        """Admit one instance; see `Dispatcher.submit`.

        Raises:
            UnavailableError: No worker is ready, nor will be within a moment.
            GivenUpError: None ever will be.
        """
        dispatcher = self.dispatcher
        if not dispatcher.num_ready and not self._is_expecting and not dispatcher.is_draining:
            self._metrics.rejected["unavailable"] += 1
            raise self._nobody()
        return dispatcher.submit(payload, options, request_id)

    async def drain(self, grace_s: float) -> None:
        """Finish what was accepted."""
        await self.dispatcher.drain(grace_s)

    def cut_off(self, reason: str) -> None:
        """Answer all that is in flight now, and admit nothing more."""
        self.dispatcher.cut_off(reason)

    async def replace(
        self, slots: Sequence[Slot], grace_s: float, *, old_first: bool = False
    ) -> None:
        """Replace workers one after another, each by a successor that is ready before it leaves.

        If it is all of them, they load what lies on disk now; one alone may not differ from the
        others. Where the first successor does not come up, all stay as they are. Others that do not
        come up are tried again. If that does not help, their old workers serve on; but where their
        files differ, those of the new version leave, or those of the old one if the new one could
        be loaded twice: replicas are not to differ for long.

        Args:
            slots: The workers.
            grace_s: How long each may take to finish what it holds.
            old_first: Let each leave before its successor starts, for want of memory for both.

        Raises:
            RestartFailedError: A successor did not come up; says why, and what goes on serving.
        """
        self.restart = Restart(state="running")
        try:
            async with self._replacing:
                await self._replace_all(slots, grace_s, old_first=old_first)
        except RestartFailedError as error:
            self.restart = Restart(state="failed", text=error.message)
            logger.error("%s: restart failed: %s", self.name, error.message)
            raise
        except asyncio.CancelledError:
            self.restart = Restart(state="failed", text="the service was told to stop")
            raise
        self.restart = Restart(state="done", text="")

    async def _replace_all(self, slots: Sequence[Slot], grace_s: float, *, old_first: bool) -> None:
        # Each loads what is on disk by then; where that is not what the first loaded, the first
        # is replaced again. One alone is not to differ.
        renews = len(slots) == len(self.slots)
        waiting, replaced = list(slots), set[int]()
        for _ in range(_NUM_TRIES):
            errors: dict[str, str] = {}
            for slot in waiting:
                error = await self._replace(slot, grace_s, old_first=old_first, renews=renews)
                if error:
                    errors[slot.id.worker] = error
                    if not replaced:
                        raise RestartFailedError(error)
                    if old_first:
                        break  # lest they all leave for a model that cannot be loaded
                else:
                    replaced.add(slot.id.slot)
            current = replaced - {slot.id.slot for slot in self._supervisor.outdated()}
            waiting = [slot for slot in slots if slot.id.slot not in current]
            if not waiting:
                return
        for slot in self._supervisor.choose_files():
            logger.warning("%s leaves: it serves with other files than the rest", slot.id)
            self.restart.text = f"{slot.id.worker} starts again"
            errors.pop(slot.id.worker, None)
            if not await self._supervisor.replace(slot, grace_s):
                errors[slot.id.worker] = (
                    f"{slot.id.worker} served with other files than the rest, so it left, and is "
                    f"tried again from time to time: {slot.reason}"
                )
        if errors:
            raise RestartFailedError("; ".join(errors.values()))

    async def _replace(self, slot: Slot, grace_s: float, *, old_first: bool, renews: bool) -> str:
        """Replace a worker; why that failed, or nothing."""
        config = replace(slot.config, chosen=None)  # something may have changed
        if slot.handle is not None and not old_first:
            try:
                if shortage := _shortage(slot.handle):
                    raise WorkerStartError(shortage, permanent=False)
                await self._succeed(slot, config, grace_s, renews=renews)
            except WorkerStartError as error:
                return f"{slot.id.worker} was not replaced, and serves on as it was: {error}"
            return ""
        slot.config = config
        self.restart.text = f"{slot.id.worker} starts again"
        if await self._supervisor.replace(slot, grace_s, renews=renews):
            return ""
        return (
            f"{slot.id.worker} did not come up again, and is tried again from time to time: "
            f"{slot.reason}"
        )

    async def _succeed(
        self, slot: Slot, config: WorkerConfig, grace_s: float, *, renews: bool = False
    ) -> None:
        """See `Supervisor.succeed`; what it is doing is shown meanwhile."""
        predecessor = slot.id

        def on_progress(stage: str) -> None:
            self.restart.text = f"{predecessor.next_life()}: {stage}"

        await self._supervisor.succeed(slot, config, grace_s, on_progress, renews=renews)
        self._metrics.restarts["asked"] += 1
        self._note_ending(predecessor, "asked", "its successor took over")

    async def change_over(self, slot: Slot, preset: str, grace_s: float) -> bool:
        """Replace a worker by one that serves with another preset, which it finds in the cache.

        The new one is ready before the old one leaves, so that no request waits for it.

        Returns:
            Whether that is how it came up; otherwise the old one stays, where it can.
        """
        config = replace(slot.config, chosen=None)
        if slot.handle is None:
            slot.config = config  # it will come up with it
            return True
        try:
            async with self._replacing:
                await self._succeed(slot, config, grace_s)
        except WorkerStartError:  # which is in the log
            return False
        return slot.handle is not None and slot.handle.ready.speed.preset == preset

    async def stop(self, grace_s: float) -> None:
        """See every worker out."""
        await self._supervisor.stop(grace_s)

    def on_progress(self, slot: Slot) -> None:
        """See `Watcher`."""
        self._started_at.setdefault(slot.id.worker, asyncio.get_running_loop().time())
        self._announcer.progress(slot.id.worker, slot.stage)

    def on_ready(self, slot: Slot) -> None:
        """See `Watcher`."""
        assert slot.handle is not None
        self.dispatcher.attach(slot.handle)
        ready = slot.handle.ready
        self._load_s = ready.load_s
        self._expect()
        now = asyncio.get_running_loop().time()
        began = self._started_at.pop(slot.id.worker, now - self._load_s)
        self._announcer.ready(slot.id.worker, now - began)
        if slot.config.speed != "exact" or slot.config.decode == "fast":
            self._tell_speed(slot, ready.speed)
            slot.config = replace(slot.config, chosen=ready.speed)  # for its next life
        self.reads_own_form = ready.reads_own_form
        if ready.example:
            with contextlib.suppress(*UNREADABLE):
                self.example = msgspec.json.decode(ready.example)
        if ready.split is not None:
            self._tell_split(slot, ready.split)
            slot.config = replace(slot.config, known_split=ready.split)
        self._on_change()

    def on_gone(self, handle: WorkerHandle) -> None:
        """See `Watcher`."""
        self.dispatcher.detach(handle)
        self._expect()

    def on_down(self, slot: Slot) -> None:
        """See `Watcher`."""
        self._started_at.pop(slot.id.worker, None)
        self._note_ending(slot.id, slot.cause, slot.reason)
        self._expect()
        if slot.state == "failed":
            self._announcer.failed(slot.id.worker, slot.reason)
        else:
            self._metrics.restarts[slot.cause] += 1
        if self.is_lost:
            self.dispatcher.abandon(self._nobody)
        self._on_change()

    def _note_ending(self, id: WorkerId, cause: Cause, reason: str) -> None:
        self.endings.append(Ending(id=id, time=time.time(), cause=cause, reason=reason))

    def _tell_speed(self, slot: Slot, speed: SpeedReport) -> None:
        """Log which preset it serves with, once per model for as long as that is the same."""
        told = (speed.preset, speed.decode)
        level = logging.DEBUG if told in self._told_speeds else logging.INFO
        self._told_speeds.add(told)
        logger.log(level, "%s speed: %s", self.name, speed.text())
        logger.debug("%s tried: %s", slot.id, speed.note)

    def _tell_split(self, slot: Slot, split: SplitReport) -> None:
        """Log which rank holds what, once per model for as long as that is the same."""
        assert slot.handle is not None
        ranks = slot.handle.vitals().ranks
        parts = [_part_text(rank) for rank in ranks]
        level = logging.DEBUG if parts == self._told_parts else logging.INFO
        self._told_parts = parts
        note = split.note
        for text in {rank.part.text for rank in ranks if rank.part}:
            note = note.removeprefix(text).removeprefix("; ")
        why = f"; {note}" if note else ""
        how = slot.config.placement.split
        logger.log(level, "%s %s: %s%s", self.name, how, ", ".join(parts), why)

    def _expect(self) -> None:
        """Whether one of the workers will be back in no time, so that no caller need be told.

        Not so one that has failed before, or takes long to load.
        """
        self._is_expecting = self._load_s <= _MOMENT_S and any(
            slot.was_ever_ready and slot.num_failures <= 1 and slot.state != "failed"
            for slot in self.slots
        )

    def _nobody(self) -> ServiceError:
        """Why there is no worker, and when there may be one."""
        if self.is_lost:
            return GivenUpError(f"no worker of {self.name} can be started ({self.reason})")
        now = asyncio.get_running_loop().time()
        pauses_s = [max(0.0, slot.due - now) for slot in self.slots if slot.state != "failed"]
        return UnavailableError(
            f"no worker is ready ({self.reason})",
            retry_after_s=max(1, ceil(min(pauses_s, default=0.0) + self._load_s)),
        )


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


def _rank_gauges(labels: tuple[str, str], ranks: Sequence[RankVitals]) -> Iterator[Reading]:
    for rank in ranks:
        named = (*labels, str(rank.rank))
        yield Reading(name="worker_rank_resident_memory_bytes", value=rank.rss_bytes, labels=named)
        if rank.part is not None:
            yield Reading(
                name="worker_rank_parameter_bytes", value=rank.part.num_bytes, labels=named
            )


def _shortage(worker: WorkerHandle) -> str:
    """Why there is no room for a successor beside a worker; empty if there is."""
    needed, free = worker.vitals().rss_bytes, available_bytes()
    if needed <= free:
        return ""
    return (
        f"its successor needs {needed / 2**20:,.0f} MiB of memory beside it, and "
        f"{free / 2**20:,.0f} MiB are free; free some, or restart with old_first=true, which lets "
        "the old one leave first"
    )


def _part_text(rank: RankVitals) -> str:
    if rank.part is None:
        return f"rank {rank.rank} on {rank.device}"
    mib = rank.part.num_bytes / (1 << 20)
    return f"rank {rank.rank} on {rank.device} holds {mib:,.1f} MiB ({rank.part.text})"
