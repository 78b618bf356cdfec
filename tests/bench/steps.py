"""`front` and `outputs`: the steps of a call in the front end, and the way of a large output.

`front` gives connections the bytes of a call each, as from sockets; a fake worker answers each
batch at once; answers are thrown away. So only Python (and uvloop's callbacks) is timed. Each step
is taken for 64 calls together, as it is under load. `outputs` sends outputs by the pipe and by
shared memory in turn, between two processes that do nothing else.
"""

import asyncio
import gc
import multiprocessing
import os
import select
import time
from collections.abc import Iterator
from functools import partial
from mmap import mmap
from multiprocessing.connection import Connection
from statistics import median, quantiles
from typing import Any

import msgspec
import uvicorn
import uvloop
from uvicorn.server import ServerState

from inferpool.models.spec import USUAL_INTERFACE
from inferpool.service.api.exchange import Predict
from inferpool.service.api.wire.protocol import PredictProtocol
from inferpool.service.telemetry.metrics import Metrics, recorder
from inferpool.workers.host.engine import WorkerId
from inferpool.workers.host.local_worker import PrivateQueue
from inferpool.workers.shared.arena import Arena
from inferpool.workers.shared.messages import BatchDone, FromWorker, Stored, TensorBlob
from inferpool.workers.shared.outputs import OutputRegion, OutputStore
from inferpool.workers.shared.queues import FrameReader
from inferpool.workers.shared.worker_queue import WorkerQueue
from tests.bench.frame import Benchmark, Cell, benchmark
from tests.fakes import FakeWorker
from tests.service.pools import make_dispatcher

STEPS = (
    "bytes to instance: head, body, admission, arena, queue",
    "instances to batches",
    "batches to results: the ledger",
    "results to bytes: headers, body, metrics",
)
_NUM_CONNECTIONS = 64
_NUM_WORKERS = 2
_NUM_WARM = 200
_BLOCK_BYTES = 64 << 20
"""Outputs per way, size and round, in bytes; at least 10 of them, at most 300."""


@benchmark(
    "the front end's own work on a call, step by step, without sockets",
    rounds=5,
    bytes=(1024, "of a body"),
    batch=(64, "the largest batch"),
    turns=(1000, "of 64 calls each, in a round"),
)
def front(bench: Benchmark) -> None:
    """Time the steps in each round."""
    args = bench.args

    def take(_: int) -> Iterator[Cell]:
        turns = uvloop.run(_measure(args.bytes, args.batch, args.turns))
        columns = [*zip(*turns, strict=True), [sum(turn) for turn in turns]]
        for step, values in zip((*STEPS, "all"), columns, strict=True):
            figures = {"least_us": quantiles(values, n=50)[0], "median_us": median(values)}
            yield Cell("call", step, 0, figures)

    bench.take_turns({"all steps": take})
    caption = "least: the second percentile, which a step takes where nothing else has the core."
    bench.report(caption=f"CPU of the front end per call. {caption}")


class _Nowhere(asyncio.Transport):
    """A socket that takes everything and sends nothing."""

    def write(self, data: object) -> None: ...

    def is_closing(self) -> bool:
        return False

    def get_extra_info(self, name: str, default: object = None) -> object:
        ends = {"peername": ("127.0.0.1", 1), "sockname": ("127.0.0.1", 2)}
        return ends.get(name, default)

    def get_write_buffer_size(self) -> int:
        return 0

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None: ...


class _Version:
    """A version of a model that is its dispatcher, and nothing more."""

    name, version, is_serving, canary = "m", 1, True, None
    inputs = ()
    outputs = ()
    interface = USUAL_INTERFACE

    def __init__(self, submit: Any) -> None:
        self.submit = submit


async def _measure(num_bytes: int, max_batch_size: int, num_turns: int) -> list[list[float]]:
    """Return the microseconds of each step per call, for each turn."""
    metrics = Metrics(["m"], {})
    dispatcher = make_dispatcher(
        Arena(64 << 20), metrics.model("m"), max_queue_length=1024, max_batch_size=max_batch_size
    )
    version: Any = _Version(dispatcher.submit)
    predict = Predict({"m": version}, default="m", on_done=recorder(metrics.model))
    workers = [FakeWorker(WorkerId(model="m", slot=slot)) for slot in range(_NUM_WORKERS)]
    for worker in workers:
        dispatcher.attach(worker)
    protocols = _connections(predict)
    call = (
        b"POST /predict HTTP/1.1\r\nHost: 127.0.0.1:8000\r\n"
        b"Content-Type: application/octet-stream\r\nContent-Length: %d\r\n\r\n" % num_bytes
    ) + b"x" * num_bytes

    async def turn() -> list[float]:
        spent = [0.0] * len(STEPS)
        began = time.thread_time()
        for protocol in protocols:
            protocol.data_received(call)
        spent[0] = time.thread_time() - began
        while dispatcher.num_unsettled:
            for step in (1, 2, 3):
                began = time.thread_time()
                await asyncio.sleep(0)
                spent[step] += time.thread_time() - began
                for worker in workers if step == 1 else ():
                    while worker.batches:
                        worker.answer([b'{"num_bytes":1024}'] * len(worker.batches[0][0]))
        return [seconds * 1e6 / len(protocols) for seconds in spent]

    for _ in range(_NUM_WARM):
        await turn()
    gc.freeze()  # as the service does
    turns = [await turn() for _ in range(num_turns)]
    gc.unfreeze()
    return turns


def _connections(predict: Predict) -> list[PredictProtocol]:
    no_app: Any = None  # no call comes by ASGI
    config = uvicorn.Config(
        no_app, http=PredictProtocol.bound_to(predict), ws="none", lifespan="off",
        log_config=None, access_log=False, interface="asgi3",
    )  # fmt: skip
    make: Any = config.http
    state = ServerState()
    state.default_headers = [(b"date", b"Sat, 21 Nov 2026 14:00:00 GMT")]
    protocols = [
        make(config=config, server_state=state, app_state={}) for _ in range(_NUM_CONNECTIONS)
    ]
    for protocol in protocols:
        protocol.connection_made(_Nowhere())
    return protocols


@benchmark(
    "large outputs by the pipe and by shared memory",
    rounds=5,
    kib=((16, 64, 256, 4096), "comma-separated: sizes of an output"),
)
def outputs(bench: Benchmark) -> None:
    """Send outputs of each size by both ways."""
    bench.take_turns({f"{kib} KiB": partial(_send_outputs, kib) for kib in bench.args.kib})
    caption = "One output at a time, from the worker's tensor to the answer's body."
    bench.report("KiB", caption)
    bench.report_ratios("KiB", ["wall_us", "front_cpu_us"], lambda name: name == "pipe")


def _send_outputs(kib: int, _: int) -> Iterator[Cell]:
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
    for turn, way in enumerate(("pipe", "memory", "pipe", "memory")):
        began, cpu_s = time.perf_counter(), time.thread_time()
        for _ in range(num):
            fetch(way)
        wall_s, cpu_s = time.perf_counter() - began, time.thread_time() - cpu_s
        if turn >= 2:  # it is warm
            figures = {"wall_us": wall_s / num * 1e6, "front_cpu_us": cpu_s / num * 1e6}
            yield Cell("output", way, kib, figures)
    orders.close()
    process.join(10)
    answers.close()
    region.close()


def _body_of(frame: bytes, region: OutputRegion) -> bytes:
    """Do what the front end does with a batch's message, as far as the body of an answer."""
    done = msgspec.msgpack.decode(frame, type=FromWorker)
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
