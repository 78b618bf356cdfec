"""Queues and messages under random input, compared with what is too simple to be wrong."""

import asyncio
import os
from dataclasses import dataclass
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from inferpool.service.queue.batcher import Batcher, Bucket
from inferpool.service.queue.instance import NO_TICK
from inferpool.service.queue.ledger import TICK_S, Deadlines
from inferpool.workers.host.local_worker import PrivateQueue
from inferpool.workers.shared.messages import UNREADABLE, BatchDone, FromWorker, ItemRef
from inferpool.workers.shared.queues import FrameError, FrameReader
from tests.virtual_time import run_in_virtual_time


@dataclass(eq=False)
class QueuedItem:
    """A request, as far as queues look at one."""

    number: int
    deadline: float
    priority: int = 5
    is_solo: bool = False
    bucket: Bucket | None = None
    tick: int = NO_TICK

    def __post_init__(self) -> None:
        self.ref = ItemRef("bytes", 0, 0, self.deadline, priority=self.priority)

    @property
    def rank(self) -> tuple[int, float, int]:
        return self.priority, self.deadline, self.number


def read_all(reader: FrameReader) -> list[bytes]:
    frames: list[bytes] = []
    while True:
        frames += reader.frames()
        if reader.is_dry:
            return frames


@settings(max_examples=200)
@given(st.lists(st.binary(max_size=60), max_size=8))
def test_any_bytes_from_a_worker_make_frames_or_a_frame_error(pieces: list[bytes]):
    queue = PrivateQueue()
    reader = FrameReader(queue.reader)
    try:
        for piece in pieces:
            os.write(queue.writer.fileno(), piece)
            for frame in read_all(reader):
                assert frame in b"".join(pieces)
                assert_decoded_or_refused(frame)
    except FrameError:
        pass
    finally:
        queue.close()


@settings(max_examples=100)
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


def assert_decoded_or_refused(frame: bytes) -> None:
    try:
        _decoder.decode(frame)
    except UNREADABLE:
        return


@settings(max_examples=300)
@given(
    keep=st.integers(0, len(DONE)),
    edits=st.lists(st.tuples(st.integers(0, len(DONE) - 1), st.integers(0, 255)), max_size=6),
    more=st.binary(max_size=30),
)
def test_damaged_messages_are_messages_or_refused(keep, edits, more):
    data = bytearray(DONE)
    for place, value in edits:
        data[place] = value
    assert_decoded_or_refused(bytes(data[:keep]) + more)


@settings(max_examples=200)
@given(
    waiting=st.lists(
        st.tuples(st.sampled_from((0.05, 0.5, 5.0, 50.0)), st.integers(1, 9), st.booleans()),
        max_size=25,
    ),
    removed=st.sets(st.integers(0, 24)),
    size=st.integers(1, 6),
)
def test_batches_hold_the_best_in_their_order_and_each_once(waiting, removed, size):
    batcher: Batcher[QueuedItem] = Batcher()
    requests = [QueuedItem(number, *each) for number, each in enumerate(waiting)]
    for request in requests:
        batcher.push(request, now=0.0)
    for request in requests:
        if request.number in removed:
            batcher.remove(request)
    expected = sorted((r for r in requests if r.number not in removed), key=lambda r: r.rank)
    taken: list[QueuedItem] = []
    while len(batcher):
        assert batcher.oldest() is expected[len(taken)]
        batch = batcher.next_batch(size)
        assert 0 < len(batch) <= size
        assert len(batch) == 1 or not any(request.is_solo for request in batch)
        taken += batch
    assert taken == expected
    assert batcher.next_batch(size) == []


@settings(max_examples=50)
@given(after_ticks=st.lists(st.floats(-2, 6), max_size=30), discarded=st.sets(st.integers(0, 29)))
def test_each_deadline_falls_due_once_in_time_unless_discarded(after_ticks, discarded):
    async def go() -> None:
        loop = asyncio.get_running_loop()
        due: dict[QueuedItem, float] = {}

        def on_due(item: QueuedItem) -> None:
            assert item not in due
            due[item] = loop.time()

        deadlines: Any = Deadlines(on_due, lambda: ())  # type: ignore[arg-type]
        now = loop.time()
        items = [QueuedItem(n, now + ticks * TICK_S) for n, ticks in enumerate(after_ticks)]
        for item in items:
            deadlines.add(item, now)
        gone = {items[number] for number in discarded if number < len(items)}
        for item in gone:
            deadlines.discard(item)
        await asyncio.sleep(9 * TICK_S)
        assert set(due) == set(items) - gone
        for item, at in due.items():
            assert item.deadline - 0.001 <= at

    run_in_virtual_time(go())
