"""One version of a model: its workers, and the dispatcher that gives them work."""

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count, groupby
from math import ceil
from typing import TYPE_CHECKING

import msgspec

from inferpool.models.attached import attached
from inferpool.models.spec import UNKNOWN_INTERFACE, Interface
from inferpool.models.speed_names import SpeedReport
from inferpool.service.errors import GivenUpError, ServiceError, UnavailableError
from inferpool.service.queue.dispatcher import Dispatcher
from inferpool.service.queue.instance import (
    Buffer,
    Instance,
    InstanceSteps,
    SlotOwner,
    StreamReader,
)
from inferpool.workers.host.engine import Cause, RankHealth, WorkerHandle, WorkerId
from inferpool.workers.host.replica_files import ReplicaFiles
from inferpool.workers.host.restart_policy import RestartPolicy
from inferpool.workers.host.slots import WorkerSlot
from inferpool.workers.host.supervisor import WorkerSupervisor
from inferpool.workers.shared.config import REFUSED, WorkerConfig
from inferpool.workers.shared.messages import UNREADABLE, ItemRef

if TYPE_CHECKING:
    from inferpool.models.spec import SplitReport, TensorSpec
    from inferpool.service.queue.replacer import Replacer
    from inferpool.service.telemetry.console import Console
    from inferpool.workers.host.shared_check import SharedCheck

logger = logging.getLogger(__name__)

_NUM_ENDINGS = 20
"""Endings of workers that are kept for people to look at."""
_NUM_ABSENT = 64
"""Hosts that are gone, and get their workers' numbers again if they come back."""
_MOMENT_S = 1.0
"""A model that loads within this time is worth waiting for when all its workers are down."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedIncarnation:
    """The end of one incarnation of a worker, or its failure to start."""

    id: WorkerId
    time: float
    """Seconds of the Unix epoch."""
    cause: Cause
    reason: str


class Pool:
    """The supervisor and the dispatcher of one version of a model, connected to each other."""

    interface = UNKNOWN_INTERFACE
    """How clients speak to the model; as far as settings say until a worker is ready."""
    interface_over: Callable[[Interface], Interface] = staticmethod(lambda interface: interface)
    """Returns the interface, given what the model's class says of it: settings win."""

    def __init__(
        self,
        *,
        source: str,
        configs: Sequence[WorkerConfig],
        check: "SharedCheck",
        dispatcher: Dispatcher,
        policy: RestartPolicy,
        announcer: "Console",
        on_change: Callable[[], None],
        version: int = 1,
    ) -> None:
        """Start nothing yet.

        Args:
            source: The source of the model, as the settings name it.
            configs: The configuration of each worker. In a cluster, more may come and go.
            check: Starts the workers; one of them checks the version.
            dispatcher: Sends them batches; has the name of the model and its counters.
            policy: Bounds how often they are restarted.
            announcer: Shows people what comes and goes.
            on_change: Called when a worker has come or gone.
            version: The number of the version.
        """
        self.name = dispatcher.name
        self.source = source
        self.version = version
        self.configs = configs
        """The configuration of each worker at the start, by its slot."""
        self.dispatcher = dispatcher
        self.works_for = dispatcher
        """The dispatcher that the workers compute for; see `attach`."""
        self.on_stop: list[Callable[[], None]] = []
        """Called once the workers have been stopped."""
        self.inputs: Sequence[TensorSpec] = ()
        self.outputs: Sequence[TensorSpec] = ()
        """The inputs and outputs of the model; empty until a worker is ready."""
        self.example: object = None
        """An example input, as JSON; None until a worker has shown one."""
        self.reads_own_form = False
        """Clients send something else than `inputs` say, so no example can be made up from them."""
        self.endings: deque[EndedIncarnation] = deque(maxlen=_NUM_ENDINGS)
        """The latest endings of workers, the newest last."""
        self._gatekeepers: tuple[Callable[[ItemRef, Sequence[Buffer]], None], ...] = ()
        self._numbers = SlotNumbers()
        self._announcer = announcer
        self._on_change = on_change
        self._started_at: dict[str, float] = {}
        """The time at which each starting worker first showed progress, on the loop's clock."""
        self._told_speeds: set[tuple[str, str]] = set()
        self._told_parts: Sequence[str] = ()
        self._load_s = 0.0
        """The time that the last incarnation took to load."""
        self._is_expecting = False
        """A worker will be back within a moment, so instances may wait for it."""
        files = ReplicaFiles[WorkerHandle](
            lambda worker: worker.ready.files, self._forget_found_out
        )
        self.check = check
        self._supervisor = WorkerSupervisor(self.check.start, self, policy, files)

    @cached_property
    def replacer(self) -> "Replacer":
        """Replaces the workers, one after another."""
        make = attached("replacer")
        replacer: Replacer = make(
            self.name, self._supervisor, self._record_successor, self.check.forget
        )
        return replacer

    @property
    def slots(self) -> Sequence[WorkerSlot]:
        """The workers of the model."""
        return self._supervisor.slots

    @property
    def is_draining(self) -> bool:
        """The pool admits nothing more."""
        return self.dispatcher.is_draining

    @property
    def is_ready(self) -> bool:
        """A worker that shows signs of life takes batches, and new work is admitted."""
        return self.dispatcher.num_responsive > 0 and not self.is_draining

    @property
    def is_lost(self) -> bool:
        """Every worker is given up, so this model will never be served again."""
        return bool(self.slots) and all(slot.state == "failed" for slot in self.slots)

    @property
    def is_refused(self) -> bool:
        """The model is lost since its answers are wrong, which an operator may look into."""
        return self.is_lost and all(slot.reason.endswith(REFUSED) for slot in self.slots)

    @property
    def has_served(self) -> bool:
        """A worker has been ready at least once."""
        return any(slot.was_ever_ready for slot in self.slots)

    @property
    def reason(self) -> str:
        """Why the pool is not ready, for a person; empty if it is."""
        if self.is_draining:
            return "draining"
        if self.is_ready:
            return ""
        if self.dispatcher.num_ready:
            return "stalled: no worker shows a sign of life"
        if self._is_lent:
            return "calls wait until it is known to be good enough"
        if not self.slots:
            return "no host is connected that can run it"
        slot = min(self.slots, key=lambda slot: slot.state in ("failed", "stopped"))
        about = slot.stage if slot.state == "starting" else slot.reason
        return f"{slot.state}: {about}" if about else slot.state

    def start(self, *, paused: bool = False) -> None:
        """Begin to start the workers; if `paused`, each at its `resume`."""
        self._add(self.configs, paused=paused)

    def extend(self, configs: Sequence[WorkerConfig]) -> Sequence[WorkerSlot]:
        """Begin to start workers on a host that has joined, unless all others are paused.

        Returns:
            The workers.
        """
        before = len(self.slots)
        self._add(configs, paused=bool(before) and all(slot.is_paused for slot in self.slots))
        self._on_change()
        return self.slots[before:]

    def withdraw(self, host: str, reason: str) -> None:
        """Remove the workers of a host that was lost; `reason` is for people."""
        gone = [slot for slot in self.slots if slot.config.host == host]
        for slot in gone:
            self._supervisor.remove(slot, reason)
        self._numbers.leave(host)
        self._announcer.left([slot.id.worker for slot in gone])
        self._expect()
        if self.is_lost:
            self.dispatcher.abandon(self._nobody)
        self._on_change()

    async def pause(self, slot: WorkerSlot, grace_s: float, reason: str) -> None:
        """End a worker once it has finished its work, until `resume`; `reason` is for people."""
        logger.info("%s leaves: %s", slot.id, reason, extra=slot.id.log_fields)
        await self._supervisor.pause(slot, grace_s)
        slot.reason = reason
        self._expect()
        self._on_change()

    def resume(self, slot: WorkerSlot) -> None:
        """Begin to start a worker that was paused."""
        self._supervisor.resume(slot)
        self._on_change()

    def attach(self, dispatcher: Dispatcher) -> None:
        """Have the workers compute for a dispatcher from now on, and for none else.

        While that is not the pool's own, what is submitted to the pool waits.
        """
        former, self.works_for = self.works_for, dispatcher
        for slot in self.slots:
            if slot.handle is not None:
                former.detach(slot.handle)
                dispatcher.attach(slot.handle)
        self._expect()

    def guard(self, gatekeeper: Callable[[ItemRef, Sequence[Buffer]], None]) -> Callable[[], None]:
        """Call a gatekeeper with each instance before it is admitted.

        It may refuse the instance with a `ServiceError`.

        Returns:
            A function that ends it.
        """
        self._gatekeepers += (gatekeeper,)

        def remove() -> None:
            self._gatekeepers = tuple(each for each in self._gatekeepers if each is not gatekeeper)

        return remove

    def submit(
        self,
        ref: ItemRef,
        chunks: Sequence[Buffer],
        steps: InstanceSteps | None = None,
        owner: SlotOwner | None = None,
        reader: StreamReader | None = None,
    ) -> Instance:
        """Admit one instance; see `Dispatcher.submit`.

        Raises:
            UnavailableError: No worker is ready or will be within a moment.
            GivenUpError: No worker will ever be ready.
        """
        dispatcher = self.dispatcher
        if not self._is_expecting and not dispatcher.num_ready and not dispatcher.is_draining:
            self.dispatcher.metrics.rejected["unavailable"] += 1
            raise self._nobody()
        for gatekeeper in self._gatekeepers:
            gatekeeper(ref, chunks)
        return dispatcher.submit(ref, chunks, steps, owner, reader=reader)

    async def stop(self, grace_s: float) -> None:
        """Stop every worker; each may take `grace_s` to finish."""
        try:
            await self._supervisor.stop(grace_s)
        finally:
            for callback in self.on_stop:
                callback()

    def on_progress(self, slot: WorkerSlot) -> None:
        """Show a new step of a start."""
        self._started_at.setdefault(slot.id.worker, asyncio.get_running_loop().time())
        self._announcer.progress(slot.id.worker, slot.stage)

    def on_ready(self, slot: WorkerSlot) -> None:
        """Attach a ready worker, and learn what it says of the model."""
        assert slot.handle is not None
        self.works_for.attach(slot.handle)
        self.dispatcher.expect_streams(slot.handle)
        ready = slot.handle.ready
        self.inputs, self.outputs = ready.inputs, ready.outputs
        self.interface = self.interface_over(ready.interface)
        self._load_s = ready.load_s
        self._expect()
        now = asyncio.get_running_loop().time()
        began = self._started_at.pop(slot.id.worker, now - self._load_s)
        self._announcer.ready(slot.id.worker, now - began)
        if slot.config.speed != "exact" or slot.config.decode == "fast":
            self._tell_speed(slot, ready.speed)
            slot.config = replace(slot.config, chosen=ready.speed)  # for its next incarnation
        self.reads_own_form = ready.reads_own_form
        if ready.example:
            with contextlib.suppress(*UNREADABLE):
                self.example = msgspec.json.decode(ready.example)
        if ready.split is not None:
            self._tell_split(slot, ready.split)
            slot.config = replace(slot.config, known_split=ready.split)
        self._on_change()

    def on_gone(self, handle: WorkerHandle) -> None:
        """Detach a worker that gets no more batches."""
        self.works_for.detach(handle)
        self._expect()

    def on_down(self, slot: WorkerSlot) -> None:
        """Record an end or a failed start."""
        self._started_at.pop(slot.id.worker, None)
        self._record_ending(slot.id, slot.cause, slot.reason)
        self._expect()
        if slot.state == "failed":
            self._announcer.failed(slot.id.worker, slot.reason)
        else:
            self.dispatcher.metrics.restarts[slot.cause] += 1
        if self.is_lost:
            self.dispatcher.abandon(self._nobody)
        self._on_change()

    def _add(self, configs: Sequence[WorkerConfig], *, paused: bool) -> None:
        for host, grouped in groupby(configs, lambda config: config.host):
            own = list(grouped)
            num_present = sum(slot.config.host == host for slot in self.slots)
            numbers = self._numbers.take(host, num_present + len(own))[num_present:]
            self._supervisor.start(
                self.name, own, self.version, numbers=numbers, host=host, paused=paused
            )

    def _forget_found_out(self) -> None:
        """Drop the presets and splits that were found: other files may define another network."""
        self.check.forget()
        for slot in self.slots:
            slot.config = replace(slot.config, chosen=None, known_split=None)

    def _record_successor(self, predecessor: WorkerId) -> None:
        self.dispatcher.metrics.restarts["asked"] += 1
        self._record_ending(predecessor, "asked", "its successor took over")

    def _record_ending(self, id: WorkerId, cause: Cause, reason: str) -> None:
        self.endings.append(EndedIncarnation(id=id, time=time.time(), cause=cause, reason=reason))

    def _tell_speed(self, slot: WorkerSlot, speed: SpeedReport) -> None:
        """Log the speed preset, once per model as long as it stays the same."""
        told = (speed.preset, speed.decode)
        level = logging.DEBUG if told in self._told_speeds else logging.INFO
        self._told_speeds.add(told)
        logger.log(level, "%s speed: %s", self.name, speed.text())
        logger.debug("%s tried: %s", slot.id, speed.note, extra=slot.id.log_fields)

    def _tell_split(self, slot: WorkerSlot, split: "SplitReport") -> None:
        """Log which rank holds which part, once per model as long as that stays the same."""
        assert slot.handle is not None
        ranks = slot.handle.vitals().ranks
        parts = [_part_text(rank) for rank in ranks]
        level = logging.DEBUG if parts == self._told_parts else logging.INFO
        self._told_parts = parts
        note = split.note
        for text in {rank.part for rank in ranks if rank.part}:
            note = note.removeprefix(text).removeprefix("; ")
        why = f"; {note}" if note else ""
        how = slot.config.placement.split
        logger.log(level, "%s %s: %s%s", self.name, how, ", ".join(parts), why)

    @property
    def _is_lent(self) -> bool:
        return self.works_for is not self.dispatcher

    def _expect(self) -> None:
        """Decide whether a worker will be back within a moment, so that callers may wait for it.

        A worker that has failed repeatedly, or takes long to load, does not count.
        """
        self._is_expecting = self._is_lent or (
            self._load_s <= _MOMENT_S
            and any(
                slot.was_ever_ready and slot.num_failures <= 1 and slot.state != "failed"
                for slot in self.slots
                if not slot.is_paused
            )
        )

    def _nobody(self) -> ServiceError:
        """Return the error that says why no worker is ready, and when one may be."""
        if self.is_lost and not self._is_lent:  # or the former version comes back
            return GivenUpError(f"no worker of {self.name} can be started ({self.reason})")
        if not self.slots:
            return UnavailableError(self.reason, retry_after_s=1)
        now = asyncio.get_running_loop().time()
        pauses_s = [max(0.0, slot.due - now) for slot in self.slots if slot.state != "failed"]
        return UnavailableError(
            f"no worker is ready ({self.reason})",
            retry_after_s=max(1, ceil(min(pauses_s, default=0.0) + self._load_s)),
        )


class SlotNumbers:
    """The numbers of the workers on each host. A host that comes back gets its own again."""

    def __init__(self) -> None:
        self._numbers: dict[str, list[int]] = {}
        self._absent: dict[str, None] = {}
        """Hosts that are gone, the one that has been away the longest first."""

    def take(self, host: str, num: int) -> list[int]:
        """Return the numbers of `num` workers on a host: its own, then the lowest free ones."""
        self._absent.pop(host, None)
        own = self._numbers.setdefault(host, [])
        taken = {number for numbers in self._numbers.values() for number in numbers}
        free = (number for number in count() if number not in taken)
        own += [next(free) for _ in range(num - len(own))]
        return own[:num]

    def leave(self, host: str) -> None:
        """Reserve the numbers of a host that is gone, as long as few others go after it."""
        if host not in self._numbers:
            return
        self._absent.pop(host, None)
        self._absent[host] = None
        if len(self._absent) > _NUM_ABSENT:
            oldest = next(iter(self._absent))
            del self._absent[oldest], self._numbers[oldest]


def _part_text(rank: RankHealth) -> str:
    if not rank.part:
        return f"rank {rank.rank} on {rank.device}"
    mib = rank.part_bytes / (1 << 20)
    return f"rank {rank.rank} on {rank.device} holds {mib:,.1f} MiB ({rank.part})"
