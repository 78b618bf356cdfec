"""The worker's end of a private queue, held against the front end's."""

import threading
from collections.abc import Iterator

import msgspec
import pytest

from inferpool.workers.host.local_worker import PrivateQueue
from inferpool.workers.shared.messages import Batch, FromWorker, ItemRef, LogLine
from inferpool.workers.shared.queues import FrameReader, FrameWriter
from inferpool.workers.shared.worker_queue import WorkerQueue

encode = msgspec.msgpack.encode
decode = msgspec.msgpack.Decoder(FromWorker).decode


@pytest.fixture
def queue() -> Iterator[PrivateQueue]:
    queue = PrivateQueue()
    yield queue
    queue.close()


async def test_batches_that_arrive_together_are_got_one_by_one(queue: PrivateQueue):
    inbox = WorkerQueue(queue.reader, queue.writer)
    writer = FrameWriter(queue.writer)
    batches = [Batch(id, [ItemRef("bytes", 0, id, 1.0)] * 1000) for id in range(9)]
    for batch in batches:
        assert writer.write(encode(batch))
    assert writer.write(encode(None))
    got = [inbox.get() for _ in batches]
    assert got == batches
    assert inbox.receive_only().wait(60)
    assert inbox.get() is None


async def test_messages_before_the_end_of_file_are_read_first(queue: PrivateQueue):
    inbox = WorkerQueue(queue.reader, queue.writer)
    writer = FrameWriter(queue.writer)
    assert writer.write(encode(Batch(1, [])))
    writer.close()
    assert inbox.get() == Batch(1, [])
    with pytest.raises(EOFError):
        inbox.get()


def test_messages_of_all_lengths_arrive_whole(queue: PrivateQueue):
    outbox = WorkerQueue(queue.reader, queue.writer)
    reader = FrameReader(queue.reader)
    sent: list[FromWorker] = [LogLine(1, "", "x" * length) for length in (0, 3 << 20, 1, 100_000)]

    def send() -> None:
        for message in sent:
            outbox.put(message)

    sender = threading.Thread(target=send)
    sender.start()
    got: list[FromWorker] = []
    while len(got) < len(sent):
        got += [decode(frame) for frame in reader.frames()]
    sender.join()
    assert got == sent
