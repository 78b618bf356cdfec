"""The gate that the batches of all models pass where models share devices. In the event loop.

The dispatcher of each model still decides which instances form a batch. The gate decides which
model is next, once the devices have room for one more. They have room shortly before a batch
ends, so that a worker can prepare the next one meanwhile.

A model that has a device to itself meets no gate: its scheduler does not even know of one.
"""

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from itertools import count
from math import inf

from inferpool.models.spec import Placement
from inferpool.service.catalog.catalog import ModelVersion
from inferpool.service.parts.turns.accounts import SharedDevice, Turn
from inferpool.service.queue.instance import Instance
from inferpool.service.queue.scheduling.background import is_background
from inferpool.service.queue.scheduling.lanes import Lane
from inferpool.service.queue.scheduling.scheduler import EARLY_S, BatchScheduler, QueuePolicy
from inferpool.workers.shared.messages import BatchDone

_CPU = "cpu"
_LEAST_WAIT_S = 0.0005
"""The shortest timer. A shorter one may be over at once by rounding, again and again."""


class DeviceGate:
    """Schedules the batches of the models of one host on its devices.

    A batch that needs several devices waits for all of them at once and holds none meanwhile, so
    no two can wait for each other. While one is next in line, no other gets a place on its devices.
    """

    def __init__(self, num_cores: int) -> None:
        self._devices: dict[str, SharedDevice] = {_CPU: SharedDevice(num_cores)}
        self._members: list[GateMember] = []
        self._waiting: set[Claim] = set()
        """Claims of schedulers that may have a batch to send."""
        self._ahead: list[tuple[Lane, list[Instance], Turn]] = []
        """Turns of batches that have not begun, since their worker held another one."""
        self._order = count(1)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_due = False
        self._timer: asyncio.TimerHandle | None = None
        self._timer_due = inf

    def add(self, version: ModelVersion) -> None:
        """Have the workers of a version take turns, from its start until they have stopped."""
        pool = version.pool
        member = self.join(
            pool.dispatcher.scheduler,
            model=version.name,
            share=version.settings.weight,
            placements=[config.placement for config in pool.configs],
        )
        pool.on_stop.append(member.leave)

    def join(
        self,
        scheduler: BatchScheduler,
        *,
        model: str,
        share: float,
        placements: Sequence[Placement],
    ) -> "GateMember":
        """Have the workers of one pool take part, until it leaves.

        Args:
            scheduler: Sends the workers their batches.
            model: Pools of the same model have one share together.
            share: The model's weight, until this pool leaves or another one of the model joins.
            placements: The placement of each worker, by its slot.
        """
        self._loop = asyncio.get_running_loop()
        member = GateMember(self, scheduler, model, share)
        slots = defaultdict(list)
        for slot, placement in enumerate(placements):
            slots[tuple(sorted(self._widths_of(placement).items()))].append(slot)
        for names, those in slots.items():
            widths = {
                self._devices.setdefault(name, SharedDevice(1)): width for name, width in names
            }
            for device in widths:
                device.open(model, share)
            member.claims.append(Claim(scheduler, widths, frozenset(those), model))
        self._members.append(member)
        self._find_contested()
        return member

    def leave(self, member: "GateMember") -> None:
        """Remove a pool, with all that it holds or waits for."""
        if member not in self._members:
            return
        self._members.remove(member)
        self._release(member)
        for claim in member.claims:
            for device in claim.widths:
                device.close(member.model, member.share)
        self._find_contested()
        self.soon()

    def soon(self) -> None:
        """Serve the claims once this turn of the loop is over."""
        if not self._is_due and self._loop is not None:
            self._is_due = True
            self._loop.call_soon(self.give)

    def enter(self, claim: "Claim", now: float) -> None:
        """Add a claim to those that wait, if it is none of them."""
        if claim not in self._waiting:
            self._waiting.add(claim)
            claim.wait(now, next(self._order))

    def give(self) -> None:
        """Have claims send batches in turn, while there is room for one."""
        self._is_due = False
        for idle in [claim for claim in self._waiting if not claim.has_work]:
            self._withdraw(idle)
        while claim := self._next(time.monotonic()):
            if claim.send_one(are_others_waiting=len(self._waiting) > 1):
                claim.number = next(self._order)
            else:
                self._withdraw(claim)
        now = time.monotonic()
        self._note_begun(now)
        self._set_timer(now)

    def note_sent(self, lane: Lane, batch: list[Instance], turn: Turn) -> None:
        """Remember a turn with a batch that the worker may begin later."""
        self._ahead.append((lane, batch, turn))

    def count_others(self, took_s: float, now: float) -> None:
        """Count a turn of others for the work in the background that waits."""
        for claim in self._waiting:
            claim.count_others(took_s, now)

    def _withdraw(self, claim: "Claim") -> None:
        if claim in self._waiting:
            self._waiting.remove(claim)
            claim.wait_no_more()

    def _next(self, now: float) -> "Claim | None":
        """Return the claim that is next in line at each of its devices, if they have room."""
        first: list[Claim] = []
        passed: set[SharedDevice] = set()
        for claim in sorted(self._waiting, key=Claim.rank):
            is_usable = bool(claim.usable(now))
            if is_usable and passed.isdisjoint(claim.widths) and claim.has_room(now):
                first.append(claim)
            if is_usable or claim.about_to_end(now):
                passed.update(claim.widths)
        # A pool with workers on several devices gives work to one that is idle first.
        return min(first, key=lambda claim: not claim.has_idle, default=None)

    def _note_begun(self, now: float) -> None:
        """Assign the places that are left to batches that were sent ahead and have begun."""
        ahead, self._ahead = self._ahead, []
        for lane, batch, turn in ahead:
            if batch not in lane.batches:
                continue
            if lane.batches[0] is not batch:
                self._ahead.append((lane, batch, turn))
                continue
            turn.ends_at = lane.ends_at
            turn.is_counted = turn.is_counted or has_room(turn.widths, now, now)

    def _set_timer(self, now: float) -> None:
        """Try again when a worker or a device that a claim waits for should come free."""
        due = min((claim.able_at(now) for claim in self._waiting), default=inf)
        if self._timer is not None:
            if self._timer_due == due:
                return
            self._timer.cancel()
            self._timer = None
        if due < inf:
            assert self._loop is not None
            self._timer_due = due
            self._timer = self._loop.call_later(max(_LEAST_WAIT_S, due - now), self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self.give()

    def _find_contested(self) -> None:
        """Find the devices that are contested, and the schedulers that must ask for turns."""
        widths: dict[SharedDevice, int] = defaultdict(int)
        for member in self._members:
            for claim in member.claims:
                for device, width in claim.widths.items():
                    widths[device] += width * len(claim.slots)
        for device, width in widths.items():
            device.is_contested = len(device.accounts) > 1 and width > device.places
        for member in self._members:
            if not any(device.is_contested for c in member.claims for device in c.widths):
                self._release(member)
            elif member not in member.scheduler.policies:
                member.scheduler.policies.append(member)

    def _release(self, member: "GateMember") -> None:
        """Allow a pool to send batches at any time, and forget what it holds and waits for."""
        if member in member.scheduler.policies:
            member.scheduler.policies.remove(member)
            member.drop_all(time.monotonic())
            for claim in member.claims:
                self._withdraw(claim)
            member.scheduler.soon()

    def _widths_of(self, placement: Placement) -> Mapping[str, int]:
        """Return the places of each device that a batch takes: threads on CPUs, or a whole GPU."""
        return {
            name: min(num * placement.num_threads, self._devices[_CPU].places)
            if name == _CPU
            else 1
            for name, num in Counter(placement.names).items()
        }


class GateMember(QueuePolicy):
    """The turns of the workers of one pool.

    It is a policy of the pool's scheduler only while a device of the pool is contested.
    """

    def __init__(
        self, gate: DeviceGate, scheduler: BatchScheduler, model: str, share: float
    ) -> None:
        self.scheduler = scheduler
        self.model = model
        self.share = share
        self.claims: list[Claim] = []
        """A claim for each set of devices that workers lie on."""
        self._gate = gate
        self._held: dict[int, tuple[Claim, Turn, float]] = {}
        """Turns that its workers hold, and how long each waited for it, by their batch."""

    def takes_over(self) -> bool:
        """Send what can be sent, as soon as it is this pool's turn."""
        now = time.monotonic()
        for claim in self.claims:
            self._gate.enter(claim, now)
        self._gate.give()
        return True

    def begin(self, lane: Lane, batch: list[Instance], now: float) -> None:
        """Begin the turn of a batch that a worker was sent."""
        slot = lane.worker.id.slot
        claim = next(claim for claim in self.claims if slot in claim.slots)
        is_first = len(lane.batches) == 1
        waited_s = 0.0
        if is_first and lane.idle_since:
            waited_s = max(0.0, now - max(lane.idle_since, claim.waits_since))
        expected_s = lane.costs.time_s(len(batch), is_idle=is_first)
        turn = Turn(claim.widths, expected_s, lane.begins_at(now))
        others = [
            self._held[id(other)][1] for other in lane.batches[:-1] if id(other) in self._held
        ]
        by = now + claim.lead_s
        has_place = any(other.is_counted and other.ends_at > by for other in others)
        turn.is_counted = not has_place and has_room(claim.widths, now, by)
        claim.begin(turn)
        if not is_background(batch):
            self._gate.count_others(expected_s, now)
        self._held[id(batch)] = (claim, turn, waited_s)
        if not is_first:
            self._gate.note_sent(lane, batch, turn)

    def end(self, lane: Lane, batch: list[Instance], done: BatchDone | None, now: float) -> float:
        """End the turn of a batch that a worker has answered or is lost with.

        Args:
            lane: The worker, which still holds the batch.
            batch: The batch.
            done: Its answers; None if the worker is lost.
            now: CLOCK_MONOTONIC seconds.

        Returns:
            The seconds for which the worker was idle, waiting for this turn.
        """
        if len(lane.batches) == 1:
            lane.idle_since = now
        held = self._held.pop(id(batch), None)
        if held is None:  # it was sent before any model had to ask
            return 0.0
        claim, turn, waited_s = held
        took_s = now - lane.busy_since if lane.batches[0] is batch else 0.0
        if done is None:
            took_s = min(took_s, turn.longest_s)  # others have used the device since then
        elif lane.worker.ready.is_accelerated:
            took_s = done.compute_s  # it was prepared elsewhere
            if lane.worker.ready.interface.joins:
                took_s /= len(lane.batches)  # each step was for all of them
        self._gate.enter(claim, now)  # before its place is free for others
        claim.end(turn, took_s, now)
        self._gate.soon()
        return waited_s

    def leave(self) -> None:
        """End its part in the turns. The batches of its workers count no more."""
        self._gate.leave(self)

    def drop_all(self, now: float) -> None:
        """End all turns."""
        for claim, turn, _ in self._held.values():
            claim.end(turn, turn.expected_s, now)
        self._held.clear()


class Claim:
    """The claim of one pool to the devices that some of its workers lie on."""

    def __init__(
        self,
        scheduler: BatchScheduler,
        widths: Mapping[SharedDevice, int],
        slots: frozenset[int],
        model: str,
    ) -> None:
        self.widths = widths
        """The places of each device that a batch takes."""
        self.slots = slots
        """The workers."""
        self.waits_since = 0.0
        self.number = 0
        """The lowest goes first among claims of models that have had as much."""
        self._scheduler = scheduler
        self._accounts = [(device, device.accounts[model]) for device in widths]

    @property
    def lead_s(self) -> float:
        """How long before its turn a batch is sent, so that it can be prepared."""
        return self._scheduler.prepare_s + EARLY_S

    @property
    def lanes(self) -> list[Lane]:
        """Its workers that accept batches."""
        return [lane for lane in self._scheduler.lanes.open if lane.worker.id.slot in self.slots]

    @property
    def has_work(self) -> bool:
        """There is something to send, and a worker to compute it."""
        return bool(self._scheduler.num_waiting and self.lanes)

    @property
    def has_idle(self) -> bool:
        """One of its workers is idle."""
        return any(not lane.batches for lane in self.lanes)

    def rank(self) -> tuple[bool, float, int]:
        """Return its place in line; the lowest goes first.

        Work in the background comes after all other work of all models. Of several devices,
        the one counts where its model has had the least, compared with others. Otherwise it might
        wait forever for one device while no model is served on another, which it keeps from others
        because it is first there.
        """
        lag_s = min(device.lag_s(account) for device, account in self._accounts)
        is_patient = is_in_background(self._scheduler) and not self._scheduler.background.is_owed
        return is_patient, lag_s, self.number

    def wait(self, now: float, number: int) -> None:
        """Begin to wait."""
        self.waits_since, self.number = now, number
        for device, account in self._accounts:
            device.wait(account)

    def wait_no_more(self) -> None:
        """Leave the line."""
        for _, account in self._accounts:
            account.num_waiting -= 1

    def count_others(self, took_s: float, now: float) -> None:
        """Count a turn of others, if only work in the background waits here."""
        if is_in_background(self._scheduler):
            self._scheduler.background.others_at = now
            self._scheduler.background.count_others(took_s)

    def begin(self, turn: Turn) -> None:
        """Begin a turn."""
        for device, account in self._accounts:
            device.begin(account, turn)

    def end(self, turn: Turn, took_s: float, now: float) -> None:
        """End a turn."""
        for device, account in self._accounts:
            device.end(account, turn, took_s, now)

    def is_alone(self, now: float) -> bool:
        """Return whether no other model has a use for its devices."""
        return all(device.is_free_for(account, now) for device, account in self._accounts)

    def usable(self, now: float) -> list[Lane]:
        """Return its workers that could be sent a batch if there were room.

        While other models use its devices, a worker is sent none ahead before its time: it would
        compute that one out of turn.
        """
        lanes = [lane for lane in self.lanes if lane.has_credit]
        if self.is_alone(now):
            return lanes
        by = now + self.lead_s
        return [lane for lane in lanes if not lane.batches or lane.begins_at(now) <= by]

    def has_room(self, now: float) -> bool:
        """Return whether its devices have room for one of its batches, or will in a moment."""
        return self.is_alone(now) or has_room(self.widths, now, now + self.lead_s)

    def about_to_end(self, now: float) -> list[Lane]:
        """Return its workers that can be sent nothing now, and should come free in a moment.

        Their places are theirs to keep, if it is this claim's turn.
        """
        by = now + self.lead_s
        return [
            lane
            for lane in self.lanes
            if not lane.has_credit and lane.begins_at(now) <= by and now < lane.late_at
        ]

    def able_at(self, now: float) -> float:
        """Return when it might be able to send a batch; infinite if that is unknown."""
        if self.usable(now):
            return min(device.has_room_at(now, now + self.lead_s) for device in self.widths)
        # A late worker has no known end: wait for its answer.
        begins = [
            lane.begins_at(now) - self.lead_s
            for lane in self.lanes
            if lane.has_credit and now < lane.ends_at
        ]
        ends = [lane.late_at for lane in self.about_to_end(now)]
        return min(begins + ends, default=inf)

    def send_one(self, *, are_others_waiting: bool) -> bool:
        """Have the scheduler send a batch, and return whether it did."""
        if not self._scheduler.num_waiting:
            return False
        now, lanes = time.monotonic(), self._scheduler.lanes
        usable = self.usable(now)
        num = len(usable)
        if not self.is_alone(now):
            by = now + self.lead_s
            rooms = [each.num_free(now, by) // width for each, width in self.widths.items()]
            num = 1 if are_others_waiting else max(1, min(rooms))
        return self._scheduler.send_next(
            [lane for lane in lanes.leading if lane in usable],
            [lane for lane in lanes.lagging if lane in usable],
            num,
        )


def has_room(widths: Mapping[SharedDevice, int], now: float, by: float) -> bool:
    """Return whether each device will have its number of places free at a moment."""
    return all(device.num_free(now, by) >= width for device, width in widths.items())


def is_in_background(scheduler: BatchScheduler) -> bool:
    """Return whether nothing waits but work in the background."""
    return scheduler.num_waiting == scheduler.background.queue.num_waiting
