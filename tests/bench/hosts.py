"""`hosts`: workers under an agent beside workers of the front end, and what a batch's way costs.

The agent runs on the same cores, so the loopback interface stands for the network. The way of a
batch alone is measured between two processes that do nothing else, in clear text and over TLS.
"""

import asyncio
import multiprocessing
import shlex
import socket
import ssl
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import uvloop

from inferpool.workers.messages import BatchDone, ItemRef
from inferpool.workers.remote.joining import secured
from inferpool.workers.remote.link import HostLink
from inferpool.workers.remote.wire import BatchOutcomes, RunBatch, ToAgent, ToFrontEnd
from tests.bench.frame import Benchmark, Cell, Turn, benchmark, chosen
from tests.bench.peers import RATIOS
from tests.bench.server import HOST, ServerCommand, inferpool
from tests.bench.workloads import WORKLOADS, Workload
from tests.certificates import make_certificate

_ITEMS, _ITEM_BYTES = 8, 100 << 10
_PLACES = range(0, _ITEMS * _ITEM_BYTES, _ITEM_BYTES)


@benchmark(
    "workers under an agent beside the front end's own, and what a batch's way costs",
    rounds=3,
    secs=5,
    warm=2,
    connections=(16, 64),
    serve_args="",
    workloads=("echo-1k,jpeg-mobilenet", "comma-separated; see `peers`"),
    batches=(1000, "batches of 8 x 100 KiB in each turn of the way alone"),
)
def hosts(bench: Benchmark) -> None:
    """Let the front end alone, the one with an agent, and the ways take turns."""
    turns: dict[str, Turn] = {
        way: partial(_go_the_way, way, bench.args.batches) for way in ("clear", "tls")
    }
    for name, work in chosen(bench.args.workloads, WORKLOADS, "workload").items():
        local = inferpool(bench.args, *work.serve(), name="local")
        for command in (local, _with_agent(bench, work)):
            turns[f"{name}, {command.name}"] = bench.closed_turn(name, work.bodies(), command)
    bench.take_turns(turns)
    way = f"The way: a batch of {_ITEMS} x {_ITEM_BYTES >> 10} KiB to a process and its answer."
    bench.report("connections", way)
    bench.report_ratios("connections", RATIOS, lambda name: name == "local")


def _with_agent(bench: Benchmark, work: Workload) -> ServerCommand:
    port = f"{bench.args.port + 1}"
    key = {"INFERPOOL_CLUSTER_KEYS": "a-key-for-the-benchmark-alone"}
    command = inferpool(bench.args, *work.serve(), "--cluster-port", port, name="agent", env=key)
    agent = f"{bench.args.inferpool} agent --join {HOST}:{port} --name bench --log-format json"
    return replace(command, argv=["sh", "-c", f"{agent} & exec {shlex.join(command.argv)}"])


def _go_the_way(name: str, num: int, _: int) -> Iterator[Cell]:
    """Send batches to a process that takes them and answers."""
    with tempfile.TemporaryDirectory() as folder, socket.create_server((HOST, 0)) as listener:
        files = make_certificate(Path(folder)) if name == "tls" else ()
        process = multiprocessing.get_context("spawn").Process(
            target=_take_batches, args=(listener.getsockname()[1], files), daemon=True
        )
        process.start()
        cpu_s, wall_s = uvloop.run(_send_batches(listener, files, num))
        process.join(10)
    figures = {"front_cpu_us": cpu_s / num * 1e6, "wall_us": wall_s / num * 1e6}
    yield Cell("way", name, 0, figures)


class _End:
    """One end of the way: its memory has room for a batch."""

    def __init__(self, on_message: Callable[["_End"], None]) -> None:
        self.link: Any = None
        self.over: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        memory = memoryview(bytearray(range(256)) * (_ITEMS * _ITEM_BYTES // 256))
        self.parts = [memory[place : place + _ITEM_BYTES] for place in _PLACES]
        self._on_message = on_message

    def room_for(self, _: object, num_bytes: int) -> Sequence[memoryview]:
        return self.parts[: -(-num_bytes // _ITEM_BYTES)]

    def on_message(self, *_: object) -> None:
        self._on_message(self)

    def on_closed(self, reason: str) -> None:
        self.over.set_result(reason)

    async def open(
        self, sock: socket.socket, messages: Any, files: Sequence[Path], host: str
    ) -> None:
        """Open it on a socket; `host` is the name of the front end, for an agent."""
        context = None
        if files:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT if host else ssl.PROTOCOL_TLS_SERVER)
            certificate, key = files
            context.load_cert_chain(certificate, key)
            context.load_verify_locations(certificate)
            context.verify_mode = ssl.CERT_REQUIRED
        sock = await secured(sock, context, host or None)
        self.link = HostLink(sock, messages, self, max_body_bytes=1 << 30)


async def _send_batches(
    listener: socket.socket, files: Sequence[Path], num: int
) -> tuple[float, float]:
    """Be the front end; return the CPU seconds of this process, and the seconds that passed."""
    numbers = iter(range(num))

    def send_next(end: _End) -> None:
        if (number := next(numbers, None)) is None:
            end.link.close()
            return
        now = time.monotonic()
        items = [ItemRef("image", place, _ITEM_BYTES, now, request_id="1") for place in _PLACES]
        end.link.send(RunBatch(1, number, now, items), end.parts)

    listener.setblocking(False)
    sock, _ = await asyncio.get_running_loop().sock_accept(listener)
    end = _End(send_next)
    await end.open(sock, ToFrontEnd, files, "")
    began, cpu_s = time.perf_counter(), time.process_time()
    send_next(end)
    await end.over
    return time.process_time() - cpu_s, time.perf_counter() - began


def _take_batches(port: int, files: Sequence[Path]) -> None:
    """Be the agent."""

    def answer(end: _End) -> None:
        done = BatchDone(1, [b'{"label": "cat"}'] * _ITEMS, 0.0, 0.0)
        end.link.send(BatchOutcomes(1, done))

    async def take() -> None:
        sock = socket.create_connection((HOST, port))
        sock.setblocking(False)
        end = _End(answer)
        await end.open(sock, ToAgent, files, HOST)
        await end.over

    uvloop.run(take())
