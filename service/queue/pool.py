"""All the workers of one model, with the dispatcher that feeds them."""

import asyncio
import contextlib
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import TYPE_CHECKING, Protocol, get_args

import msgspec

from inferpool.models.speed.names import SpeedReport
from inferpool.models.split.report import SplitReport
from inferpool.service.errors import GivenUpError, ServiceError, UnavailableError
from inferpool.service.queue.dispatcher import Dispatcher
from inferpool.service.queue.instance import Buffer, Instance, SlotOwner
from inferpool.service.queue.replacing import Replacing, Restart
from inferpool.service.queue.steps import InstanceSteps
from inferpool.service.telemetry.metrics import ModelMetrics, Reading
from inferpool.workers.config import WorkerConfig
from inferpool.workers.host.engine import Cause, Engine, RankVitals, WorkerHandle, WorkerId
from inferpool.workers.host.generation import FilesOfAll
from inferpool.workers.host.supervisor import RestartPolicy, State, WorkerSlot, WorkerSupervisor
from inferpool.workers.messages import UNREADABLE, ItemRef

if TYPE_CHECKING:
    from inferpool.models.spec import TensorSpec

logger = logging.getLogger(__name__)

_NUM_ENDINGS = 20
"""That are kept for people to look at."""
_MOMENT_S = 1.0
"""A model that loads within this is worth waiting for when all its workers are down."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PastLife:
    """How one life of a worker ended, or that it did not start."""

    id: WorkerId
    time: float
    """Seconds of the Unix epoch."""
    cause: Cause
    reason: str


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
        self.inputs: Sequence[TensorSpec] = ()
        """What the model takes; empty until a worker is ready."""
        self.example: object = None
        """An instance that the model takes, as JSON; None until a worker has shown one."""
        self.reads_own_form = False
        """What clients send is not what `inputs` say, so nobody can make an instance up."""
        self.endings: deque[PastLife] = deque(maxlen=_NUM_ENDINGS)
        """The latest, the newest last."""
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
        files = FilesOfAll[WorkerHandle](lambda worker: worker.ready.files, self._forget_found_out)
        self._supervisor = WorkerSupervisor(engine.start, self, policy, files)
        self._replacing = Replacing(name, self._supervisor, self._note_successor)

    @property
    def slots(self) -> Sequence[WorkerSlot]:
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

    def submit(
        self,
        ref: ItemRef,
        chunks: Sequence[Buffer],
        steps: InstanceSteps | None = None,
        owner: SlotOwner | None = None,
    ) -> Instance:
        """Admit one instance; see `Dispatcher.submit`.

        Raises:
            UnavailableError: No worker is ready, nor will be within a moment.
            GivenUpError: None ever will be.
        """
        dispatcher = self.dispatcher
        if not self._is_expecting and not dispatcher.num_ready and not dispatcher.is_draining:
            self._metrics.rejected["unavailable"] += 1
            raise self._nobody()
        return dispatcher.submit(ref, chunks, steps, owner)

    async def drain(self, grace_s: float) -> None:
        """Finish what was accepted."""
        await self.dispatcher.drain(grace_s)

    def cut_off(self, reason: str) -> None:
        """Answer all that is in flight now, and admit nothing more."""
        self.dispatcher.cut_off(reason)

    @property
    def restart(self) -> Restart:
        """How the last restart goes that was asked for."""
        return self._replacing.restart

    async def replace(
        self, slots: Sequence[WorkerSlot], grace_s: float, *, old_first: bool = False
    ) -> None:
        """Restart workers; see `Replacing.replace`."""
        await self._replacing.replace(slots, grace_s, old_first=old_first)

    async def change_over(self, slot: WorkerSlot, preset: str, grace_s: float) -> bool:
        """Serve with another preset; see `Replacing.change_over`."""
        return await self._replacing.change_over(slot, preset, grace_s)

    async def stop(self, grace_s: float) -> None:
        """See every worker out."""
        await self._supervisor.stop(grace_s)

    def on_progress(self, slot: WorkerSlot) -> None:
        """See `Watcher`."""
        self._started_at.setdefault(slot.id.worker, asyncio.get_running_loop().time())
        self._announcer.progress(slot.id.worker, slot.stage)

    def on_ready(self, slot: WorkerSlot) -> None:
        """See `Watcher`."""
        assert slot.handle is not None
        self.dispatcher.attach(slot.handle)
        ready = slot.handle.ready
        self.inputs = ready.inputs
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

    def on_down(self, slot: WorkerSlot) -> None:
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

    def _forget_found_out(self) -> None:
        """Other files may make another network, which is to be tried and split anew."""
        for slot in self.slots:
            slot.config = replace(slot.config, chosen=None, known_split=None)

    def _note_successor(self, predecessor: WorkerId) -> None:
        self._metrics.restarts["asked"] += 1
        self._note_ending(predecessor, "asked", "its successor took over")

    def _note_ending(self, id: WorkerId, cause: Cause, reason: str) -> None:
        self.endings.append(PastLife(id=id, time=time.time(), cause=cause, reason=reason))

    def _tell_speed(self, slot: WorkerSlot, speed: SpeedReport) -> None:
        """Log which preset it serves with, once per model for as long as that is the same."""
        told = (speed.preset, speed.decode)
        level = logging.DEBUG if told in self._told_speeds else logging.INFO
        self._told_speeds.add(told)
        logger.log(level, "%s speed: %s", self.name, speed.text())
        logger.debug("%s tried: %s", slot.id, speed.note)

    def _tell_split(self, slot: WorkerSlot, split: SplitReport) -> None:
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


def _part_text(rank: RankVitals) -> str:
    if rank.part is None:
        return f"rank {rank.rank} on {rank.device}"
    mib = rank.part.num_bytes / (1 << 20)
    return f"rank {rank.rank} on {rank.device} holds {mib:,.1f} MiB ({rank.part.text})"
