"""`front`: the front end's own work on a call, step by step: no sockets, and no worker process.

Each connection gets the bytes of a call, as from a socket; a fake worker answers each batch at
once; answers are thrown away. So only Python (and uvloop's callbacks) is timed. Each step is taken
for 64 calls together, as it is under load.
"""

import asyncio
import gc
import time
from collections.abc import Iterator
from statistics import median, quantiles
from typing import Any

import uvicorn
import uvloop
from uvicorn.server import ServerState

from inferpool.service.api.predict import Predict
from inferpool.service.api.wire.protocol import PredictProtocol
from inferpool.service.queue.dispatcher import Dispatcher
from inferpool.service.telemetry.metrics import Metrics, recorder
from inferpool.workers.arena import Arena
from inferpool.workers.host.engine import WorkerId
from tests.bench.frame import Benchmark, Cell, Column
from tests.fakes import FakeWorker
from tests.service.pools import make_dispatcher

HELP = "the front end's own work on a call, step by step, without sockets"
OPTIONS = {"rounds": 5, "bytes": (1024, "of a body"), "batch": (64, "the largest batch")}
_NUM_CONNECTIONS = 64
_NUM_WORKERS = 2
_NUM_WARM = 200
_NUM_TURNS = 1000
_MAX_QUEUED = 1024
_ARENA_BYTES = 64 * 2**20
STEPS = (
    "bytes to instance: head, body, admission, arena, queue",
    "instances to batches",
    "batches to results: the ledger",
    "results to bytes: headers, body, metrics",
)


def run(bench: Benchmark) -> None:
    """Time the steps in each round."""

    def take(round_: int) -> Iterator[Cell]:
        turns = uvloop.run(_measure(bench.args.bytes, bench.args.batch))
        columns = [*zip(*turns, strict=True), [sum(turn) for turn in turns]]
        for step, values in zip((*STEPS, "all"), columns, strict=True):
            figures = {"least_us": quantiles(values, n=50)[0], "median_us": median(values)}
            yield Cell(workload="call", contender=step, round=round_, figures=figures)

    bench.take_turns({"all steps": take})


def report(bench: Benchmark) -> None:
    """Print the CPU time of each step."""
    columns = [Column("least_us", "least us", 2), Column("median_us", "median us", 2)]
    caption = "least: the second percentile, which a step takes where nothing else has the core."
    bench.add_cells("CPU of the front end per call", "", columns, caption)


class _Nowhere(asyncio.Transport):
    """A socket that takes everything and sends nothing."""

    def write(self, data: object) -> None:
        return

    def is_closing(self) -> bool:
        return False

    def get_extra_info(self, name: str, default: object = None) -> object:
        ends = {"peername": ("127.0.0.1", 1), "sockname": ("127.0.0.1", 2)}
        return ends.get(name, default)

    def get_write_buffer_size(self) -> int:
        return 0

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        return


class _Version:
    """A version of a model that is its dispatcher, and nothing more."""

    name, version, is_serving, canary = "m", 1, True, None
    inputs = ()

    def __init__(self, dispatcher: Dispatcher) -> None:
        self.submit = dispatcher.submit


async def _measure(num_bytes: int, max_batch_size: int) -> list[list[float]]:
    """Return the microseconds of each step per call, for each turn."""
    metrics = Metrics(["m"], {})
    dispatcher = make_dispatcher(
        Arena(_ARENA_BYTES),
        metrics.model("m"),
        max_queue_length=_MAX_QUEUED,
        max_batch_size=max_batch_size,
    )
    predict = Predict({"m": _Version(dispatcher)}, default="m", on_done=recorder(metrics.model))
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
            began = time.thread_time()
            await asyncio.sleep(0)
            spent[1] += time.thread_time() - began
            for worker in workers:
                while worker.batches:
                    worker.answer([b'{"num_bytes":1024}'] * len(worker.batches[0][0]))
            for step in (2, 3):
                began = time.thread_time()
                await asyncio.sleep(0)
                spent[step] += time.thread_time() - began
        return [seconds * 1e6 / len(protocols) for seconds in spent]

    for _ in range(_NUM_WARM):
        await turn()
    gc.freeze()  # as the service does
    turns = [await turn() for _ in range(_NUM_TURNS)]
    gc.unfreeze()
    return turns


async def _no_app(scope: Any, receive: Any, send: Any) -> None:
    """Serve nothing: no call comes by ASGI."""


def _connections(predict: Predict) -> list[PredictProtocol]:
    config = uvicorn.Config(
        _no_app,
        http=PredictProtocol.bound_to(predict),
        ws="none",
        log_config=None,
        access_log=False,
        lifespan="off",
    )
    config.load()
    state = ServerState()
    state.default_headers = [(b"date", b"Sat, 21 Nov 2026 14:00:00 GMT")]
    make: Any = config.http_protocol_class
    protocols = []
    for _ in range(_NUM_CONNECTIONS):
        protocol = make(config=config, server_state=state, app_state={})
        protocol.connection_made(_Nowhere())
        protocols.append(protocol)
    return protocols
