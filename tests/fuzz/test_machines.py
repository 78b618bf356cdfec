"""What holds state, driven at random and compared with what is too simple to be wrong."""

import asyncio
import os
from dataclasses import dataclass, field
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    rule,
    run_state_machine_as_test,
)

from inferpool.service.queue.batcher import Batcher, Bucket
from inferpool.service.queue.instance import NO_TICK
from inferpool.service.queue.ledger import TICK_S, Deadlines
from inferpool.workers.arena import MIN_BLOCK_BYTES, Arena
from inferpool.workers.host.queues import FrameReader, PrivateQueue
from inferpool.workers.messages import UNREADABLE, BatchDone, FrameError, FromWorker, ItemRef
from tests.properties import untimed

NUM_BLOCKS = 96


class ArenaMachine(RuleBasedStateMachine):
    """Slots come and go; each holds what was put in it, and none lies over another."""

    slots = Bundle("slots")

    def __init__(self) -> None:
        super().__init__()
        self.arena = Arena(NUM_BLOCKS * MIN_BLOCK_BYTES)
        self.held: dict[int, bytes] = {}
        self.num_puts = 0

    @rule(target=slots, num_bytes=st.integers(0, 20_000), num_chunks=st.integers(1, 3))
    def put(self, num_bytes: int, num_chunks: int) -> int | None:
        self.num_puts += 1
        data = (self.num_puts.to_bytes(2, "big") * (num_bytes // 2 + 1))[:num_bytes]
        size = num_bytes // num_chunks
        offset = self.arena.put([data[:size], memoryview(data)[size:]], num_bytes)
        if offset is not None:
            assert offset not in self.held
            self.held[offset] = data
        return offset

    @rule(offset=consumes(slots))
    def free(self, offset: int | None) -> None:
        if offset is not None:
            del self.held[offset]
            self.arena.free(offset)

    @invariant()
    def nothing_overlaps(self) -> None:
        end = used = 0
        for offset, data in sorted(self.held.items()):
            size = MIN_BLOCK_BYTES
            while size < len(data):
                size *= 2
            assert offset >= end
            assert offset % MIN_BLOCK_BYTES == 0
            end = offset + size
            used += size
            assert self.arena.memory.map[offset : offset + len(data)] == data
        assert end <= self.arena.num_bytes
        assert self.arena.used_bytes == used

    def teardown(self) -> None:
        for offset in self.held:
            self.arena.free(offset)
        assert self.arena.used_bytes == 0
        half = 64 * MIN_BLOCK_BYTES  # the largest power of two that fits
        assert self.arena.put([bytes(half)], half) is not None
        self.arena.close()


def test_arena_keeps_every_slot_apart_and_is_whole_again_at_the_end():
    run_state_machine_as_test(
        ArenaMachine,
        settings=untimed(max_examples=40, stateful_step_count=40),
    )


def read_all(reader: FrameReader) -> list[bytes]:
    frames: list[bytes] = []
    while True:
        frames += reader.frames()
        if reader.is_dry:
            return frames


@untimed(max_examples=200)
@given(st.lists(st.binary(max_size=60), max_size=8))
def test_rubbish_from_a_worker_makes_frames_or_a_frame_error(pieces: list[bytes]):
    queue = PrivateQueue()
    reader = FrameReader(queue.reader)
    try:
        for piece in pieces:
            os.write(queue.writer.fileno(), piece)
            for frame in read_all(reader):
                assert frame in b"".join(pieces)
                assert_decodes_or_says_so(frame)
    except FrameError:
        pass
    finally:
        queue.close()


@untimed(max_examples=100)
@given(bodies=st.lists(st.binary(max_size=300), max_size=6), cuts=st.lists(st.integers(1, 90)))
def test_frames_survive_any_cutting(bodies: list[bytes], cuts: list[int]):
    queue = PrivateQueue()
    reader = FrameReader(queue.reader)
    stream = b"".join(
        len(body).to_bytes(4, "big") + body
        if len(body) % 3
        else b"\xff\xff\xff\xff" + len(body).to_bytes(8, "big") + body
        for body in bodies
    )
    found = []
    for cut in (*cuts, len(stream)):
        if stream[:cut]:
            os.write(queue.writer.fileno(), stream[:cut])
        stream = stream[cut:]
        found += read_all(reader)
    assert found == bodies
    queue.close()


DONE = msgspec.msgpack.encode(BatchDone(7, [b"[1]", []], 0.1, 0.2))
_decoder = msgspec.msgpack.Decoder(FromWorker)


def assert_decodes_or_says_so(frame: bytes) -> None:
    try:
        _decoder.decode(frame)
    except UNREADABLE:
        return


@untimed(max_examples=300)
@given(
    keep=st.integers(0, len(DONE)),
    edits=st.lists(st.tuples(st.integers(0, len(DONE) - 1), st.integers(0, 255)), max_size=6),
    more=st.binary(max_size=30),
)
def test_damaged_messages_are_messages_or_say_what_they_are_not(keep, edits, more):
    data = bytearray(DONE)
    for place, value in edits:
        data[place] = value
    assert_decodes_or_says_so(bytes(data[:keep]) + more)


@dataclass(eq=False, slots=True)
class Waiting:
    number: int
    priority: int
    deadline: float
    is_solo: bool
    bucket: Bucket | None = None
    ref: ItemRef = field(init=False)

    def __post_init__(self) -> None:
        self.ref = ItemRef("bytes", 0, 0, self.deadline, priority=self.priority)

    @property
    def rank(self) -> tuple[int, float, int]:
        return self.priority, self.deadline, self.number


@untimed(max_examples=200)
@given(
    waiting=st.lists(
        st.tuples(st.integers(1, 9), st.sampled_from((0.05, 0.5, 5.0, 50.0)), st.booleans()),
        max_size=25,
    ),
    removed=st.sets(st.integers(0, 24)),
    size=st.integers(1, 6),
)
def test_batches_hold_the_best_in_their_order_and_each_once(waiting, removed, size):
    batcher: Batcher[Waiting] = Batcher()
    requests = [Waiting(number, *each) for number, each in enumerate(waiting)]
    for request in requests:
        batcher.push(request, now=0.0)
    for request in requests:
        if request.number in removed:
            batcher.remove(request)
    expected = sorted((r for r in requests if r.number not in removed), key=lambda r: r.rank)
    taken: list[Waiting] = []
    while len(batcher):
        assert batcher.oldest() is expected[len(taken)]
        batch = batcher.next_batch(size)
        assert 0 < len(batch) <= size
        assert len(batch) == 1 or not any(request.is_solo for request in batch)
        taken += batch
    assert taken == expected
    assert batcher.next_batch(size) == []


@dataclass(eq=False)
class Thing:
    deadline: float
    tick: int = NO_TICK

    def __post_init__(self) -> None:
        self.ref = ItemRef("bytes", 0, 0, self.deadline)


@untimed(max_examples=15)
@given(after_ticks=st.lists(st.floats(-2, 6), max_size=30), discarded=st.sets(st.integers(0, 29)))
def test_each_deadline_falls_due_once_in_time_unless_discarded(after_ticks, discarded):
    async def go() -> None:
        loop = asyncio.get_running_loop()
        due: dict[Thing, float] = {}

        def on_due(thing: Thing) -> None:
            assert thing not in due
            due[thing] = loop.time()

        deadlines: Any = Deadlines(on_due, lambda: ())  # type: ignore[arg-type]
        now = loop.time()
        things = [Thing(now + ticks * TICK_S) for ticks in after_ticks]
        for thing in things:
            deadlines.add(thing, now)
        gone = {things[number] for number in discarded if number < len(things)}
        for thing in gone:
            deadlines.discard(thing)
        wanted = set(things) - gone
        until = loop.time() + 10
        while set(due) != wanted:
            assert loop.time() < until
            await asyncio.sleep(TICK_S)
        await asyncio.sleep(7 * TICK_S)
        assert set(due) == wanted
        for thing, at in due.items():
            assert at >= thing.deadline - 0.001

    asyncio.run(go())
