"""`outputs`: an output's way from a worker to a body in the front end, by the pipe and by memory.

Both ways are taken in turns, message by message in blocks, between two processes that do no more.
"""

import argparse
import multiprocessing
import os
import select
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from mmap import mmap
from multiprocessing.connection import Connection

import msgspec

from inferpool.workers.host.queues import FrameReader, PrivateQueue
from inferpool.workers.inside.worker_queue import WorkerQueue
from inferpool.workers.messages import BatchDone, FromWorker, Stored, TensorBlob
from inferpool.workers.outputs import OutputRegion, OutputStore
from tests.bench.report import Spread, Steps, paired, save, spread, table
from tests.bench.rounds import Plan

HELP = "large outputs by the pipe and by shared memory"
_SIZES = (16 << 10, 64 << 10, 256 << 10, 4 << 20)
_WAYS = ("pipe", "memory")
_BLOCK_BYTES = 64 << 20
"""Of outputs per way, size and round; at least 10 of them, at most 300."""
_decode = msgspec.msgpack.Decoder(FromWorker).decode


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One size of output."""

    num_bytes: int
    wall_us: Mapping[str, Spread]
    """By way: from the worker's output to the answer's body, one at a time."""
    front_cpu_us: Mapping[str, Spread]
    """Of the event loop's process alone."""
    ratio: Spread | None
    """Memory to pipe, wall, of the same round."""


def add_arguments(_parser: argparse.ArgumentParser) -> None:
    """There are none of its own."""


def run(args: argparse.Namespace, plan: Plan) -> int:
    """Measure, print and save; returns the exit status."""
    rows = []
    with Steps(len(_SIZES)) as steps:
        for num_bytes in _SIZES:
            steps.begin(f"{num_bytes >> 10} KiB")
            rows.append(_measure(num_bytes, plan.rounds))
            steps.end()
    cells = [
        (
            f"{row.num_bytes >> 10} KiB",
            *(row.wall_us[way].text(0) for way in _WAYS),
            row.ratio.text(2) if row.ratio else "",
            *(row.front_cpu_us[way].text(0) for way in _WAYS),
        )
        for row in rows
    ]
    columns = ("output", "pipe, us", "memory, us", "ratio", "pipe, front CPU us", "memory, same")
    table("An output's way", columns, cells, "One output at a time; median (range) over rounds.")
    save("outputs", args.out, {"plan": asdict(plan), "results": [asdict(row) for row in rows]})
    return 0


def _measure(num_bytes: int, rounds: int) -> Row:
    context = multiprocessing.get_context("spawn")
    orders, answers = PrivateQueue(), PrivateQueue()
    region = OutputRegion()
    process = context.Process(
        target=_produce, args=(orders.reader, answers, region.memory, num_bytes), daemon=True
    )
    process.start()
    orders.reader.close()
    answers.writer.close()
    reader = FrameReader(answers.reader)
    poller = select.poll()
    poller.register(reader.fd, select.POLLIN)
    num = min(300, max(10, _BLOCK_BYTES // num_bytes))

    def fetch(way: str) -> tuple[float, float]:
        began, cpu = time.perf_counter(), time.thread_time()
        for _ in range(num):
            os.write(orders.writer.fileno(), way[:1].encode())
            body = b""
            while not body:
                poller.poll()
                for frame in reader.frames():
                    body = _body_of(frame, region)
            assert len(body) > num_bytes
        wall_s, cpu_s = time.perf_counter() - began, time.thread_time() - cpu
        return wall_s / num * 1e6, cpu_s / num * 1e6

    taken = [{way: fetch(way) for way in _WAYS} for _ in range(rounds + 1)][1:]  # one to warm up
    orders.close()
    process.join(10)
    answers.close()
    region.close()
    wall = {way: {n: each[way][0] for n, each in enumerate(taken)} for way in _WAYS}
    return Row(
        num_bytes=num_bytes,
        wall_us={way: spread(wall[way].values()) for way in _WAYS},
        front_cpu_us={way: spread(each[way][1] for each in taken) for way in _WAYS},
        ratio=paired(wall["memory"], wall["pipe"]),
    )


def _body_of(frame: bytes, region: OutputRegion) -> bytes:
    """What the front end does with a batch's message, as far as the body of an answer."""
    done = _decode(frame)
    assert isinstance(done, BatchDone)
    (outcome,) = region.find(done).outcomes if done.num_stored else done.outcomes
    assert isinstance(outcome, list)
    return b"".join([b"head", outcome[0].buffer])


def _produce(orders: Connection, outbox: WorkerQueue, region: mmap, num_bytes: int) -> None:
    """The worker: for each order one output, kept as bytes or in the region."""
    output = memoryview(bytearray(os.urandom(num_bytes)))
    ways: Mapping[bytes, Callable[[memoryview], bytes | Stored]] = {
        b"p": bytes,
        b"m": OutputStore(region, min_stored_bytes=0).keep,
    }
    outbox.send_only()
    while way := os.read(orders.fileno(), 1):
        data = ways[way](output)
        blob = TensorBlob("y", "uint8", (num_bytes,), data)
        outbox.put(BatchDone(1, [[blob]], 0.0, 0.0, int(isinstance(data, Stored))))
