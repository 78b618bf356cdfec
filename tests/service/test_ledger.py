"""The dispatcher's ledger under random schedules of everything that may happen to an instance.

The test moves the clock. Its fake workers echo the slots of their batches. After each step the
counters are compared with what was done.
"""

import asyncio
import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

from inferpool.service.errors import (
    DeadlineExceededError,
    InternalError,
    InvalidInputError,
    ModelFailedError,
    OverShareError,
    QuarantinedError,
    ServiceError,
    UnavailableError,
    WorkerCrashedError,
)
from inferpool.service.queue import dispatcher as dispatcher_module
from inferpool.service.queue.admission import Admission
from inferpool.service.queue.dispatcher import Dispatcher
from inferpool.service.queue.quarantine import Quarantine
from inferpool.service.telemetry.metrics import ModelMetrics
from inferpool.workers.shared.arena import MIN_BLOCK_BYTES, Arena
from inferpool.workers.shared.messages import BatchDone, ItemError, ItemRef
from tests.fakes import FakeWorker, ref_to

if TYPE_CHECKING:
    from inferpool.service.queue.instance import Instance

NUM_SCHEDULES = 60
NUM_STEPS = 150
MAX_BATCH_SIZE = 4
MAX_QUEUE_LENGTH = 12
ITEM_ERRORS = ("invalid_input", "model_error", "deadline_exceeded", "exhausted")
FAILURES = (
    InternalError,
    InvalidInputError,
    ModelFailedError,
    QuarantinedError,
    UnavailableError,
    WorkerCrashedError,
)
POISON = b"the same each time"
UNSENDABLE = b"cannot be encoded"
"""Payloads with this in them cannot be encoded for a worker."""
QUARANTINE_S = 5


class ManualClock:
    """Stands in for the module `time`."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


class ClockedLoop(asyncio.SelectorEventLoop):
    """An event loop on that clock."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__()
        self._clock = clock

    def time(self) -> float:
        return self._clock.now


class EchoWorker(FakeWorker):
    """Answers with the payloads, which must stay in their slots until then."""

    def __init__(self, arena: Arena, credit: int, chance: random.Random) -> None:
        super().__init__(credit=credit)
        self._arena = arena
        self._chance = chance
        self._given: dict[int, bytes] = {}

    def run(self, items: Sequence[ItemRef]) -> "asyncio.Future[BatchDone]":
        assert 1 <= len(items) <= MAX_BATCH_SIZE
        assert len(self.batches) < self.credit
        payloads = [self._arena.read(ref.offset, ref.num_bytes) for ref in items]
        if any(UNSENDABLE in payload for payload in payloads) or self._chance.random() < 0.02:
            raise OverflowError("can't serialize this")
        for ref, payload in zip(items, payloads, strict=True):
            assert ref.offset not in self._given, "a slot that a worker holds was given out again"
            self._given[ref.offset] = payload
        return super().run(items)

    def held(self) -> list[ItemRef]:
        return [ref for items, _ in self.batches for ref in items]

    def take(self, items: Sequence[ItemRef]) -> list[bytes]:
        """Give up a batch, and return the payloads that its slots hold now."""
        found = [self._arena.read(ref.offset, ref.num_bytes) for ref in items]
        assert found == [self._given.pop(ref.offset) for ref in items], "a slot was written over"
        return found

    def echo(self, chance: random.Random) -> bool:
        """Answer the oldest batch, some items with errors; return whether any succeeded."""
        outcomes: list[bytes | ItemError] = [*self.take(self.batches[0][0])]
        for place in range(len(outcomes)):
            if chance.random() < 0.2:
                outcomes[place] = ItemError(chance.choice(ITEM_ERRORS), "no")  # type: ignore[arg-type]
        self.answer(outcomes)
        return not all(isinstance(outcome, ItemError) for outcome in outcomes)

    def perish(self, *, started: bool) -> None:
        self.take(self.held())
        self.die(started=started)


class RandomSchedule:
    """A dispatcher, the steps taken with it, and the state that these must lead to."""

    def __init__(self, seed: int, clock: ManualClock) -> None:
        self.chance = random.Random(seed)
        self.clock = clock
        self.loop = ClockedLoop(clock)
        self.arena = Arena(32 * 1024)
        self.metrics = ModelMetrics("m")
        self.payloads: dict[Instance, bytes] = {}
        self.settled: Counter[Instance] = Counter()
        self.is_sick = self.chance.random() < 0.2
        """Workers die of any input."""
        self.num_refused = 0
        self.key_share = self.chance.choice([1.0, 0.8, 0.5])
        self.seen: Counter[str] = Counter()
        self.suspects: dict[bytes, float] = {}
        """Payloads with which a worker has died lately, by when that is forgotten."""
        self.num_deaths_alone: Counter[bytes] = Counter()
        self.recent: set[bytes] = set()
        """Payloads that killed a worker alone since the last success."""
        self.workers: list[EchoWorker] = []
        self.numbers = itertools.count()
        self.drain: asyncio.Future[None] | None = None
        self.do(self.make())

    def do(self, coroutine: Coroutine[Any, Any, None]) -> None:
        self.loop.run_until_complete(coroutine)

    async def make(self) -> None:
        self.dispatcher = Dispatcher(
            name="m",
            arena=self.arena,
            admission=Admission(
                max_queue_length=MAX_QUEUE_LENGTH,
                max_batch_size=MAX_BATCH_SIZE,
                rejected=self.metrics.rejected,
                key_share=self.key_share,
            ),
            quarantine=Quarantine(name="m", duration_s=QUARANTINE_S, max_inputs=2),
            metrics=self.metrics,
            max_batch_size=MAX_BATCH_SIZE,
            batch_wait_ms=self.chance.choice([0.0, 2.0]),
        )

    def run(self) -> None:
        for step in range(NUM_STEPS):
            steps = self.SICK_STEPS if self.is_sick else self.STEPS
            weights = list(steps.values())
            (act,) = self.chance.choices(list(self.STEPS), weights)
            self.do(act(self))
            if self.chance.random() < 0.7:
                self.do(turn())
                self.check_slots()
            self.check_outcomes()
            if step > NUM_STEPS * 0.9 and self.drain is None:
                self.do(self.begin_drain())
        self.finish()

    async def submit(self) -> None:
        for _ in range(self.chance.randint(1, 6)):
            is_poison = self.chance.random() < 0.2
            size = self.chance.choice([0, 900, 3000])
            payload = POISON if is_poison else b"%d " % next(self.numbers) + bytes(size)
            if self.chance.random() < 0.03:
                payload += UNSENDABLE
            timeout_s = self.chance.choice([60.0, 60.0, 2.0, 0.05, 0.004, -0.01])
            caller = self.chance.choice([1, 1, 1, 2, 3]) if self.key_share < 1 else 0
            ref = ref_to(payload, timeout_s, self.chance.choice([1, 5, 9]), caller=caller)
            before = self.metrics.accepted
            num_own, own_bytes = self.own(caller)
            try:
                instance = self.dispatcher.submit(ref, [payload])
            except ServiceError as error:
                if isinstance(error, QuarantinedError):
                    assert self.num_deaths_alone[payload] >= 2
                self.num_refused += 1
                assert self.metrics.accepted == before
                if isinstance(error, OverShareError):
                    assert num_own or own_bytes
                continue
            self.check_share(caller, num_own, own_bytes)
            is_suspect = self.suspects.get(payload, 0) > self.clock.now
            assert instance.is_solo is is_suspect
            self.seen["suspect"] += is_suspect
            self.payloads[instance] = payload
            instance.add_done_callback(lambda done: self.settled.update([done]))

    def own(self, caller: int) -> tuple[int, int]:
        """Return how many instances of a caller wait, and the bytes of the arena that it has."""
        queued = [each.ref for each in self.dispatcher._queue]
        held = [ref for worker in self.workers for ref in worker.held()]
        num_own = sum(ref.caller == caller for ref in queued)
        return num_own, sum(
            slot_bytes(ref.num_bytes) for ref in (*queued, *held) if ref.caller == caller
        )

    def check_share(self, caller: int, num_own: int, own_bytes: int) -> None:
        """Check that a caller that had this much was given no more than its share leaves it."""
        if not caller:
            return
        if num_own:
            left = MAX_QUEUE_LENGTH - self.dispatcher.num_queued + num_own + 1
            assert num_own + 1 <= self.key_share * left
        if own_bytes:
            _, now_bytes = self.own(caller)
            left = self.arena.num_bytes - self.arena.used_bytes + now_bytes
            assert now_bytes <= self.key_share * left

    async def attach(self) -> None:
        if len(self.workers) < 3:
            self.workers.append(EchoWorker(self.arena, self.chance.randint(1, 3), self.chance))
            self.dispatcher.attach(self.workers[-1])

    async def detach(self) -> None:
        if self.workers:
            self.dispatcher.detach(self.chance.choice(self.workers))

    async def answer(self) -> None:
        busy = [worker for worker in self.workers if worker.batches]
        if busy:
            worker = self.chance.choice(busy)
            refs = worker.batches[0][0]
            if worker.echo(self.chance):
                self.loop.call_soon(self.recent.clear)
                self.loop.call_soon(self.acquit, refs)

    def acquit(self, refs: Sequence[ItemRef]) -> None:
        """Clear an input that has succeeded alone."""
        for instance in self.payloads:
            if instance.is_solo and any(instance.ref is ref for ref in refs):
                found = self.suspects.pop(self.payloads[instance], None)
                self.seen["acquitted"] += found is not None

    async def lose(self) -> None:
        """Let a worker die: one that holds the poison, or now and then another."""
        if not self.workers:
            return
        worker = self.chance.choice(self.workers)
        has_poison = any(
            self.arena.read(ref.offset, ref.num_bytes) == POISON for ref in worker.held()
        )
        if not has_poison and not self.is_sick and self.chance.random() < 0.5:
            return
        self.workers.remove(worker)
        was_idle = not worker.batches
        started = has_poison or self.is_sick or self.chance.random() < 0.5
        refs = worker.batches[0][0] if worker.batches and started else []
        lost = [instance for instance in self.payloads if any(instance.ref is ref for ref in refs)]
        was_alone = any(instance.is_solo for instance in lost)
        worker.perish(started=started)
        self.loop.call_soon(self.record_death, lost, was_alone)  # when the dispatcher hears of it
        if was_idle:
            self.dispatcher.detach(worker)  # as the pool does

    def record_death(self, lost: "Sequence[Instance]", was_alone: bool) -> None:
        """Remember the inputs that were in the batch when its worker died."""
        self.seen["nobody waited"] += was_alone and lost[0].cancelled()
        if was_alone:
            (payload,) = [self.payloads[instance] for instance in lost]
            self.num_deaths_alone[payload] += 1
            if len(self.recent) < 3:
                self.recent.add(payload)
                if len(self.recent) == 3:
                    self.suspects.clear()
                    self.seen["doubt"] += 1
        if len(self.recent) < 3:
            until = self.clock.now + QUARANTINE_S
            self.suspects.update((self.payloads[instance], until) for instance in lost)

    async def cancel(self) -> None:
        waiting = [instance for instance in self.payloads if not instance.done()]
        if waiting:
            instance = self.chance.choice(waiting)
            assert instance.cancel()
            assert not instance.cancel()

    async def let_time_pass(self) -> None:
        self.clock.now += self.chance.choice([0.001, 0.001, 0.006, 0.06, 3.0])

    async def abandon(self) -> None:
        self.dispatcher.abandon(lambda: UnavailableError("over"))

    async def begin_drain(self) -> None:
        self.drain = asyncio.ensure_future(self.dispatcher.drain(self.chance.choice([0.01, 1.0])))

    STEPS: ClassVar[dict[Callable[["RandomSchedule"], Coroutine[Any, Any, None]], int]] = {
        submit: 30,
        attach: 20,
        answer: 30,
        lose: 15,
        cancel: 8,
        let_time_pass: 10,
        detach: 3,
        abandon: 1,
    }

    SICK_STEPS: ClassVar = STEPS | {answer: 1, lose: 45}

    def check_outcomes(self) -> None:
        """Check that each outcome is counted once, and is the right one."""
        found: Counter[str] = Counter()
        for instance, payload in self.payloads.items():
            if not instance.done():
                found["in_flight"] += 1
            elif instance.cancelled():
                found["cancelled"] += 1
            elif (error := instance.exception()) is None:
                found["succeeded"] += 1
                assert UNSENDABLE not in payload
                assert instance.result().value == payload
            elif isinstance(error, DeadlineExceededError):
                found["expired"] += 1
            else:
                found["failed"] += 1
                assert isinstance(error, FAILURES)
                self.seen["kept back"] += isinstance(error, InternalError)
                if isinstance(error, (QuarantinedError, WorkerCrashedError)):
                    assert self.num_deaths_alone[payload] >= 2
        metrics = self.metrics
        assert metrics.accepted == len(self.payloads)
        for name in ("succeeded", "failed", "expired", "cancelled", "in_flight"):
            assert getattr(metrics, name) == found[name], name
        assert self.dispatcher.num_unsettled == found["in_flight"]
        assert sum(metrics.rejected.values()) == self.num_refused
        assert set(self.settled.values()) <= {1}

    def check_slots(self) -> None:
        """Check that waiting instances and those in batches have slots, and nothing else has."""
        queued = {instance.ref.offset: instance.ref for instance in self.dispatcher._queue}
        held = {ref.offset: ref for worker in self.workers for ref in worker.held()}
        assert not queued.keys() & held.keys()
        slots = [*queued.values(), *held.values()]
        assert self.arena.used_bytes == sum(slot_bytes(ref.num_bytes) for ref in slots)
        assert self.dispatcher.num_queued == len(queued)
        for caller in (1, 2, 3):
            num_own, own_bytes = self.own(caller)
            assert self.dispatcher._queue.position(5, math.inf, 0.0, caller).num_own == num_own
            assert self.arena.used_by[caller] == own_bytes
        assert self.dispatcher.queued_bytes == sum(ref.num_bytes for ref in queued.values())
        waiting = [instance for instance in self.payloads if not instance.done()]
        assert {each.ref.offset for each in waiting} <= queued.keys() | held.keys()

    def finish(self) -> None:
        """Check that deadlines settle all that is left, and that dead workers' slots come back."""
        assert self.drain is not None
        self.do(turn())
        for _ in range(self.chance.choice([0, 100])):
            self.do(self.answer())
            self.do(turn())
        if not self.metrics.in_flight:
            assert self.drain.done(), "the drain goes on with nothing in flight"
        self.clock.now += 2
        self.do(turn())
        assert self.drain.done()
        self.drain.result()
        assert self.metrics.in_flight == 0
        for worker in self.workers:
            worker.perish(started=False)
        self.do(turn())
        assert self.arena.used_bytes == 0
        assert not any(self.arena.used_by.values())
        self.check_outcomes()
        self.loop.close()
        self.arena.close()


async def turn() -> None:
    """Let the loop do what it has been asked to."""
    for _ in range(8):
        await asyncio.sleep(0)


def slot_bytes(num_bytes: int) -> int:
    """Return the bytes that a payload takes in the arena."""
    size = MIN_BLOCK_BYTES
    while size < num_bytes:
        size *= 2
    return size


def test_ledger_and_slots_stay_right_in_every_schedule(monkeypatch: pytest.MonkeyPatch):
    clock = ManualClock()
    monkeypatch.setattr(dispatcher_module, "time", clock)
    seen: Counter[str] = Counter()
    for seed in range(NUM_SCHEDULES):
        schedule = RandomSchedule(seed, clock)
        try:
            schedule.run()
        except BaseException as error:
            error.add_note(f"in the schedule of seed {seed}")
            raise
        metrics = schedule.metrics
        for name in ("accepted", "succeeded", "failed", "expired", "cancelled", "retried"):
            seen[name] += getattr(metrics, name)
        seen.update(metrics.rejected)
        seen.update(schedule.seen)
    never = {name for name in (*seen, "quarantined", "doubt") if not seen[name]}
    # "unavailable" comes from the pool, and "objective" from an objective.
    assert never == {"unavailable", "objective"}, seen
