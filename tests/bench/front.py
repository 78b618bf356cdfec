"""`front`: the front end's own work on a call, step by step: no sockets, and no worker.

Each connection is handed the bytes of a call, as a socket would; a worker that is none answers each
batch at once; what is written goes nowhere. So what is timed is Python (and uvloop's callbacks),
and all steps of 64 calls are taken together, as they are under load.
"""

import argparse
import asyncio
import gc
import time
from collections.abc import Iterable
from statistics import median
from typing import Any

import uvicorn
import uvloop
from uvicorn.server import ServerState

from inferpool.service.api.predict import Predict
from inferpool.service.api.wire.protocol import PredictProtocol
from inferpool.service.queue.admission import Admission
from inferpool.service.queue.dispatcher import Dispatcher
from inferpool.service.queue.quarantine import Quarantine
from inferpool.service.telemetry.metrics import Metrics, recorder
from inferpool.workers.arena import Arena
from inferpool.workers.host.engine import WorkerId
from tests.bench import rounds
from tests.bench.report import save, table
from tests.fakes import FakeWorker

HELP = "the front end's own work on a call, step by step, without sockets"
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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--bytes", type=int, default=1024, help="of a body (%(default)s)")
    parser.add_argument("--batch", type=int, default=64, help="the largest (%(default)s)")


def run(args: argparse.Namespace, plan: rounds.Plan) -> int:
    """Measure, print and save; returns the exit status."""
    turns: list[list[float]] = []
    for _ in range(plan.rounds):
        turns += uvloop.run(_measure(args.bytes, args.batch))
    columns = [*zip(*turns, strict=True), [sum(turn) for turn in turns]]
    table(
        f"CPU of the front end per call, in µs: {args.bytes} bytes, batches of {args.batch}",
        ["step", "least", "median"],
        [
            (name, f"{_least(column):.2f}", f"{median(column):.2f}")
            for name, column in zip((*STEPS, "all"), columns, strict=True)
        ],
        "Least is the second percentile: what it takes where nothing else has the core.",
    )
    save(
        "front",
        args.out,
        {
            "bytes": args.bytes,
            "batch": args.batch,
            "least_us": dict(zip((*STEPS, "all"), map(_least, columns), strict=True)),
            "median_us": dict(zip((*STEPS, "all"), map(median, columns), strict=True)),
        },
    )
    return 0


def _least(values: Iterable[float]) -> float:
    """The second percentile: what it takes where nothing else has the core, without luck."""
    ordered = sorted(values)
    return ordered[len(ordered) // 50]


class _Nowhere(asyncio.Transport):
    """A socket that takes everything."""

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


async def _measure(num_bytes: int, max_batch_size: int) -> list[list[float]]:
    """Microseconds of each step per call, of each turn."""
    metrics = Metrics(["echo"], {})
    model = metrics.model("echo")
    dispatcher = Dispatcher(
        name="echo",
        arena=Arena(_ARENA_BYTES),
        admission=Admission(
            max_queue_length=_MAX_QUEUED, max_batch_size=max_batch_size, rejected=model.rejected
        ),
        quarantine=Quarantine(name="echo", duration_s=300),
        metrics=model,
        max_batch_size=max_batch_size,
    )

    predict = Predict({"echo": dispatcher}, default="echo", on_done=recorder(metrics.model))
    workers = [FakeWorker(WorkerId(model="echo", slot=slot)) for slot in range(_NUM_WORKERS)]
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
    """No call comes by ASGI."""


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
