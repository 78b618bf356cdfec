"""Both sides of a front in one process: real pipes, and a real dispatcher behind them."""

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import AsyncIterator, Sequence

import msgspec
import pytest

from inferpool.models.spec import USUAL_INTERFACE, TensorSpec
from inferpool.service.api.wire.budgets import EdgeUse
from inferpool.service.errors import (
    DeadlineExceededError,
    InternalError,
    InvalidInputError,
    OverloadedError,
    OverShareError,
    UnavailableError,
)
from inferpool.service.parts.fronts import link
from inferpool.service.parts.fronts.main_side import ArenaPart
from inferpool.service.parts.fronts.messages import (
    Answers,
    FrontCounts,
    Listening,
    ModelTable,
    Submissions,
    TableTaken,
)
from inferpool.service.queue.instance import (
    Buffer,
    CanaryShare,
    Instance,
    InstanceSteps,
    SlotOwner,
    StreamReader,
)
from inferpool.service.telemetry.metrics import ModelMetrics
from inferpool.workers.shared.arena import Arena
from inferpool.workers.shared.messages import ItemError, ItemRef, TensorBlob
from inferpool.workers.shared.queues import FrameError
from tests.fakes import FakeWorker, ref_to
from tests.service.api.fakes import both_sides
from tests.service.api.server import until
from tests.service.pools import make_dispatcher

pytestmark = pytest.mark.usefixtures("virtual_time")


class DispatchedModel:
    """A model with a dispatcher of its own, like a pool."""

    name = "m"
    version = 1
    is_serving = True
    canary: CanaryShare | None = None
    interface = USUAL_INTERFACE

    def __init__(self, arena: Arena, key_share: float) -> None:
        self.metrics = ModelMetrics("m")
        self.inputs: tuple[TensorSpec, ...] = ()
        self.outputs: tuple[TensorSpec, ...] = ()
        self.dispatcher = make_dispatcher(
            arena, self.metrics, max_queue_length=3, max_batch_size=2, key_share=key_share
        )

    def submit(
        self,
        ref: ItemRef,
        chunks: Sequence[Buffer],
        steps: InstanceSteps | None = None,
        owner: SlotOwner | None = None,
        reader: StreamReader | None = None,
    ) -> Instance:
        return self.dispatcher.submit(ref, chunks, steps, owner, reader=reader)


class Sides:
    """A front's side and the main process's, and the dispatcher behind that."""

    def __init__(self, key_share: float) -> None:
        self.key_share = key_share
        self.arena = Arena(64 * 1024)
        (where,) = self.arena.give_away(1)
        self.part = ArenaPart(self.arena.memory.map, where)
        self.model = DispatchedModel(self.arena, key_share)
        self.worker = FakeWorker(credit=1)
        self.model.dispatcher.attach(self.worker)
        self.open_front()

    def open_front(self) -> None:
        """Begin a new process of the front, which knows what an earlier one has left."""
        self.main_side, self.front_side, self.slots = both_sides(
            self.part, self.arena.memory.map, self.model, key_share=self.key_share
        )
        self.front = self.front_side.models["m"]
        self.ended: list[str] = []
        """Why the main process listens no more."""
        self.main_side.link._on_end = self.ended.append

    def ask(self, data: bytes = b"x", timeout_s: float = 30.0, caller: int = 0) -> asyncio.Future:
        return self.front.submit(ref_to(data, timeout_s, id="id", caller=caller), [data])


@contextlib.asynccontextmanager
async def open_sides(key_share: float = 1.0) -> AsyncIterator[Sides]:
    sides = Sides(key_share)
    yield sides
    sides.part.close()
    sides.arena.close()


async def test_instances_of_one_turn_are_one_batch_and_each_gets_its_own_answer():
    async with open_sides() as b:
        futures = [b.ask(b"one"), b.ask(b"two")]
        await until(lambda: b.worker.batches)
        items, _ = b.worker.batches[0]
        assert [b.arena.read(item.offset, item.num_bytes) for item in items] == [b"one", b"two"]
        assert [item.request_id for item in items] == ["id", "id"]
        tensors = [TensorBlob("y", "uint8", (1,), b"z")]
        b.worker.answer([b"1", tensors])
        assert (await futures[0]).value == b"1"
        assert (await futures[1]).value == tensors
        assert (await futures[0]).timing.compute_s == 0.002
        await until(lambda: not b.slots.used_bytes)
        assert not b.part.held
        assert b.model.metrics.succeeded == 2


async def test_refusals_of_models_that_are_gone_are_told_once_and_forgotten():
    async with open_sides() as b:
        b.front_side.rejected["m"]["arena_full"] += 2
        assert b.front_side.take_rejected() == [("m", "arena_full", 2)]
        b.front_side.rejected["m"]["key_share"] += 1
        b.front_side.take_models([])
        assert b.front_side.take_rejected() == [("m", "key_share", 1)]
        assert not b.front_side.rejected


async def test_refusals_and_failures_come_back_as_what_they_are():
    async with open_sides() as b:
        misfit = b.ask()
        b.ask()
        await until(lambda: b.worker.batches)
        late = b.ask(timeout_s=0.05)
        waiting = [b.ask(), b.ask()]
        with pytest.raises(OverloadedError, match="queue is full") as refused:
            await b.ask()
        assert refused.value.retry_after_s == 1
        with pytest.raises(OverloadedError, match="arena"):  # which the front knows at once
            b.ask(bytes(60_000))
        assert b.front_side.rejected == {"m": {"arena_full": 1}}
        with pytest.raises(DeadlineExceededError):
            await late
        b.worker.answer([ItemError("invalid_input", "no such thing"), b"1"])
        with pytest.raises(InvalidInputError, match="no such thing"):
            await misfit
        b.model.dispatcher.cut_off("enough")
        for each in waiting:
            with pytest.raises(UnavailableError, match="enough"):
                await each


async def test_an_instance_for_a_version_that_has_gone_is_refused():
    async with open_sides() as b:
        b.main_side._models.loaded.clear()
        with pytest.raises(UnavailableError, match="version of the model has gone"):
            await b.ask()
        await until(lambda: not b.slots.used_bytes)


async def test_a_front_hears_of_changes_once_it_has_asked_for_the_models():
    async with open_sides() as b:
        b.main_side.tell_models()
        assert b.main_side.until_known().done()
        del b.main_side._models.entries["m"]
        b.front_side.link.send(Listening())
        await b.main_side.is_up
        assert not b.front_side.models
        b.main_side._models.entries["again"] = b.model
        b.main_side.tell_models()
        await b.main_side.until_known()
        assert list(b.front_side.models) == ["again"]
        b.main_side.tell_models()
        assert b.main_side.until_known().done()  # nothing has changed
        known = []
        for canary in (0.25, 0.5):
            b.model.canary = CanaryShare("m/versions/2", canary)
            b.main_side.tell_models()
            known.append(b.main_side.until_known())
        b.main_side._note_taken(b.main_side._table.id - 1)
        assert [each.done() for each in known] == [True, False]


async def test_a_front_that_writes_what_is_no_message_is_not_listened_to():
    async with open_sides() as b:
        b.front_side.link._writer.write(b"\xc1")
        await until(lambda: b.ended)
        assert b.ended[0].startswith("it wrote what is no message")


async def test_what_was_submitted_by_an_older_table_comes_before_the_newer_one_is_known():
    async with open_sides() as b:
        heard: list[object] = []
        b.main_side.link._on_message = heard.append
        b.ask()
        b.front_side._take(ModelTable(7, []))
        assert not b.front.is_serving
        await until(lambda: len(heard) >= 2)
        assert isinstance(heard[0], Submissions)
        assert len(heard[0].submissions) == 1
        assert heard[1] == TableTaken(7)


async def test_what_a_front_said_before_its_end_is_heard_and_nobody_waits_for_more():
    async with open_sides() as b:
        counted: list[FrontCounts] = []
        b.main_side._on_counts = counted.append
        b.front_side.link.send(Listening())
        await b.main_side.is_up
        b.model.canary = CanaryShare("m/versions/2", 0.5)
        b.main_side.tell_models()
        waits = [b.main_side.until_known(), b.main_side.count()]
        last = FrontCounts(0, [], [], [], [], 7, 0, EdgeUse(), (0, 0))
        b.front_side.link.send(last)
        b.main_side.close()
        assert counted == [last]
        assert all(each.done() for each in waits)


async def test_instances_that_have_ended_may_be_given_up_and_traces_of_others_get_their_steps():
    async with open_sides() as b:
        steps = InstanceSteps()
        data = b"traced"
        traced = b.front.submit(ref_to(data), [data], steps)
        await until(lambda: b.worker.batches)
        b.front_side.link.add_id(99)  # its answer and this have crossed
        traced.cancel()
        await until(lambda: b.model.metrics.cancelled == 1)
        await until(lambda: steps.arrived)
        b.worker.answer()
        await until(lambda: not b.slots.used_bytes)


async def test_a_key_has_its_share_of_the_queue_and_of_the_arena_behind_a_front():
    async with open_sides(key_share=0.75) as b:
        sent = [b.ask(caller=2), b.ask(caller=2)]
        await until(lambda: b.worker.batches)
        waiting = [b.ask(caller=1), b.ask(caller=1)]
        with pytest.raises(OverShareError, match="2 requests of this key"):
            await b.ask(caller=1)
        waiting.append(b.ask(caller=2))
        await until(lambda: b.model.dispatcher.num_queued == 3)
        assert b.model.metrics.rejected["key_share"] == 1
        with pytest.raises(OverShareError, match="payloads of this key"):  # which the front knows
            b.ask(bytes(60_000), caller=2)
        assert b.front_side.rejected == {"m": {"key_share": 1}}
        waiting[0].cancel()
        for _ in range(4):
            await asyncio.sleep(0.01)
            if b.worker.batches:
                b.worker.answer()
        await asyncio.wait([*sent, *waiting])
        await until(lambda: not b.slots.used_bytes)
        assert not any(b.slots.used_by.values())


async def test_the_slots_of_a_front_that_died_are_used_again_only_when_workers_are_done_with_them():
    async with open_sides() as b:
        b.ask(b"a" * 5000)
        b.ask(b"b" * 5000)
        await until(lambda: b.worker.batches)
        b.ask(b"waits")
        await until(lambda: b.model.dispatcher.num_queued == 1)
        b.main_side.close()
        assert b.model.metrics.cancelled == 3
        assert sorted(b.part.held.values()) == [5000, 5000]
        b.open_front()
        assert b.slots.used_bytes == 16 * 1024
        futures = [b.ask(b"c" * 5000), b.ask(b"d")]
        await until(lambda: b.model.dispatcher.num_queued == 2)
        items, _ = b.worker.batches[0]
        assert [b.arena.read(item.offset, 1) for item in items] == [b"a", b"b"]
        b.worker.answer()
        await until(lambda: b.worker.batches)
        b.worker.answer([b"1", b"2"])
        assert [(await each).value for each in futures] == [b"1", b"2"]
        await until(lambda: not b.slots.used_bytes)


async def test_the_front_learns_what_a_model_takes_when_that_is_known():
    async with open_sides() as b:
        b.front_side.link.send(Listening())
        spec = TensorSpec(name="x", dtype="float32", shape=(-1, 3))
        b.model.inputs = (spec,)
        await b.main_side.is_up
        b.main_side.tell_models()
        await until(lambda: b.front.inputs)
        known = b.front.inputs
        assert list(known) == [spec]
        b.model.inputs = (spec,)
        b.main_side.tell_models()
        future = b.ask()
        await until(lambda: b.worker.batches)
        b.worker.answer()
        await future
        assert b.front.inputs is known


async def test_the_front_learns_that_a_canary_gets_a_share_of_the_calls_and_that_it_ended():
    async with open_sides() as b:
        b.front_side.link.send(Listening())
        await b.main_side.is_up
        assert (b.front.is_serving, b.front.canary) == (True, None)
        b.model.is_serving, b.model.canary = False, CanaryShare("m/versions/2", 0.5)
        b.main_side.tell_models()
        await until(lambda: not b.front.is_serving)
        assert b.front.canary == b.model.canary
        b.model.is_serving, b.model.canary = True, None
        b.main_side.tell_models()
        await until(lambda: b.front.is_serving)
        assert b.front.canary is None


@pytest.mark.parametrize("what", ["outside", "in use"])
async def test_a_front_that_names_a_slot_which_cannot_be_is_not_listened_to(what: str):
    async with open_sides() as b:
        b.ask()
        await until(lambda: b.worker.batches)
        (offset,) = b.part.held
        b.ask(b"y")
        b.front_side.link._items[0].ref.offset = offset if what == "in use" else 1 << 40
        await until(lambda: b.ended)
        assert "slot" in b.ended[0]
        assert b.model.metrics.accepted == 1
        assert list(b.part.held) == [offset]


async def test_a_front_whose_counts_nobody_has_asked_for_is_not_listened_to():
    async with open_sides() as b:
        counts = FrontCounts(0, [], [], [], [], 0, 0, EdgeUse(), (0, 0))  # the last ones
        b.front_side.link.send(counts)
        b.front_side.link.send(msgspec.structs.replace(counts, id=1))
        await until(lambda: b.ended)
        assert "counts 1, which nobody asked for" in b.ended[0]


def test_slots_of_a_front_lie_within_its_part_of_the_arena():
    arena = Arena(64 * 1024)
    _, where = arena.give_away(2)
    part = ArenaPart(arena.memory.map, where)
    assert part.take(where.stop - 10, 10).nbytes == 10
    assert part.take(where.start, 10).nbytes == 10
    for offset in (where.start - 1, where.stop - 9, where.start):
        with pytest.raises(FrameError, match="cannot be"):
            part.take(offset, 10)
    part.free(where.start)
    assert part.take(where.start, len(where) - 64).nbytes == len(where) - 64
    part.close()
    arena.close()


def answer(b: Sides) -> None:
    items, _ = b.worker.batches[0]
    heads = [b.arena.read(item.offset, 10) for item in items]
    b.worker.answer([b"bad" if head == b"bad answer" else b"1" for head in heads])


@pytest.mark.parametrize("seed", range(20))
async def test_a_message_that_cannot_be_encoded_fails_alone_and_the_others_are_answered_once(
    monkeypatch: pytest.MonkeyPatch, seed: int
):
    encode = link._encode

    def failing(message: object) -> bytes:
        if isinstance(message, Submissions) and any(
            ask.ref.request_id == "bad" for ask in message.submissions
        ):
            raise OverflowError("can't serialize this")
        if isinstance(message, Answers) and any(each.value == b"bad" for each in message.answers):
            raise OverflowError("can't serialize this")
        return encode(message)

    async with open_sides() as b:
        monkeypatch.setattr(link, "_encode", failing)
        chance = random.Random(seed)
        asked: list[tuple[asyncio.Future, str]] = []
        num_done: Counter[asyncio.Future] = Counter()
        metrics = b.model.metrics
        for _ in range(60):
            if chance.random() < 0.6:
                kind = chance.choice(["good", "good", "bad ask", "bad answer"])
                timeout_s = chance.choice([30.0, 0.02])
                data = kind.encode() + bytes(chance.choice([0, 3000]))
                id = "bad" if kind == "bad ask" else "id"
                with contextlib.suppress(OverloadedError):
                    future = b.front.submit(ref_to(data, timeout_s, id=id), [data])
                    future.add_done_callback(lambda done: num_done.update([done]))
                    asked.append((future, kind))
            elif chance.random() < 0.3 and asked:
                chance.choice(asked)[0].cancel()
            elif b.worker.batches:
                answer(b)
            if chance.random() < 0.5:
                await asyncio.sleep(chance.choice([0, 0, 0.001, 0.05]))
            assert metrics.accepted == metrics.in_flight + sum(
                getattr(metrics, name) for name in ("succeeded", "failed", "expired", "cancelled")
            )
        async with asyncio.timeout(60):
            while not all(future.done() for future, _ in asked):
                await asyncio.sleep(0.001)
                if b.worker.batches:
                    answer(b)
        await until(lambda: not b.slots.used_bytes)
        assert not b.worker.batches
        assert not b.part.held
        assert metrics.in_flight == 0
        assert not b.front_side._open
        for future, kind in asked:
            assert num_done[future] == 1
            if future.cancelled():
                continue
            error = future.exception()
            if error is None:
                assert kind == "good"
            elif isinstance(error, InternalError):
                assert kind != "good"
            else:
                assert isinstance(error, DeadlineExceededError | OverloadedError)
        assert b.front_side.link._is_open
