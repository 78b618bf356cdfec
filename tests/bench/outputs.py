"""`outputs`: the way of an output from a worker into an answer, by the pipe and by shared memory.

Both ways take turns, in blocks of messages, between two processes that do nothing else.
"""

import multiprocessing
import os
import select
import time
from collections.abc import Iterator
from functools import partial
from mmap import mmap
from multiprocessing.connection import Connection

import msgspec

from inferpool.workers.host.queues import FrameReader, PrivateQueue
from inferpool.workers.inside.worker_queue import WorkerQueue
from inferpool.workers.messages import BatchDone, FromWorker, Stored, TensorBlob
from inferpool.workers.outputs import OutputRegion, OutputStore
from tests.bench.frame import Benchmark, Cell, Column

HELP = "large outputs by the pipe and by shared memory"
OPTIONS = {"rounds": 5}
_KIB = (16, 64, 256, 4096)
_BLOCK_BYTES = 64 << 20
"""Outputs per way, size and round, in bytes; at least 10 of them, at most 300."""
_COLUMNS = (
    Column("wall_us", "wall us (range)", 0, "range"),
    Column("front_cpu_us", "front CPU us (range)", 0, "range"),
)
_decode = msgspec.msgpack.Decoder(FromWorker).decode


def run(bench: Benchmark) -> None:
    """Send outputs of each size by both ways."""
    bench.take_turns({f"{kib} KiB": partial(_measure, kib) for kib in _KIB})


def report(bench: Benchmark) -> None:
    """Print the times of both ways, and the ratio of memory to pipe."""
    caption = "One output at a time, from the worker's tensor to the answer's body."
    bench.add_cells("An output's way", "KiB", _COLUMNS, caption)
    bench.add_ratios("KiB", _COLUMNS, lambda name: name == "pipe")


def _measure(kib: int, round_: int) -> Iterator[Cell]:
    num_bytes = kib << 10
    orders, answers, region = PrivateQueue(), PrivateQueue(), OutputRegion()
    process = multiprocessing.get_context("spawn").Process(
        target=_produce, args=(orders.reader, answers, region.memory, num_bytes), daemon=True
    )
    process.start()
    orders.reader.close()
    answers.writer.close()
    reader = FrameReader(answers.reader)
    poller = select.poll()
    poller.register(reader.fd, select.POLLIN)

    def fetch(way: str) -> None:
        os.write(orders.writer.fileno(), way[:1].encode())
        body = b""
        while not body:
            poller.poll()
            for frame in reader.frames():
                body = _body_of(frame, region)
        assert len(body) > num_bytes

    num = min(300, max(10, _BLOCK_BYTES // num_bytes))
    for way, is_warm in (("pipe", False), ("memory", False), ("pipe", True), ("memory", True)):
        began, cpu = time.perf_counter(), time.thread_time()
        for _ in range(num):
            fetch(way)
        if not is_warm:
            continue
        figures = {
            "wall_us": (time.perf_counter() - began) / num * 1e6,
            "front_cpu_us": (time.thread_time() - cpu) / num * 1e6,
        }
        yield Cell(workload="output", contender=way, load=kib, round=round_, figures=figures)
    orders.close()
    process.join(10)
    answers.close()
    region.close()


def _body_of(frame: bytes, region: OutputRegion) -> bytes:
    """Do what the front end does with a batch's message, as far as the body of an answer."""
    done = _decode(frame)
    assert isinstance(done, BatchDone)
    (outcome,) = region.find(done).outcomes if done.num_stored else done.outcomes
    assert isinstance(outcome, list)
    return b"".join([b"head", outcome[0].buffer])


def _produce(orders: Connection, outbox: WorkerQueue, region: mmap, num_bytes: int) -> None:
    """Run the worker: for each order it sends one output, as bytes or in the region."""
    output = memoryview(bytearray(os.urandom(num_bytes)))
    store = OutputStore(region, min_stored_bytes=0)
    outbox.send_only()
    while way := os.read(orders.fileno(), 1):
        data = bytes(output) if way == b"p" else store.keep(output)
        blob = TensorBlob("y", "uint8", (num_bytes,), data)
        outbox.put(BatchDone(1, [[blob]], 0.0, 0.0, int(isinstance(data, Stored))))
