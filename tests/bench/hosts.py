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
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import uvloop

from inferpool.workers.messages import BatchDone, ItemRef
from inferpool.workers.remote.joining import secured
from inferpool.workers.remote.link import HostLink
from inferpool.workers.remote.wire import BatchOutcomes, RunBatch, ToAgent, ToFrontEnd
from tests.bench.frame import Benchmark, Cell, Column, Turn
from tests.bench.server import HOST, ServerCommand, inferpool
from tests.bench.workloads import WORKLOADS, Workload
from tests.certificates import make_certificate

HELP = "workers under an agent beside the front end's own, and what a batch's way costs"
OPTIONS = {
    "rounds": 3,
    "secs": 5,
    "warm": 2,
    "connections": (16, 64),
    "serve-args": "",
    "workloads": ("echo-1k,jpeg-mobilenet", "comma-separated; see `peers`"),
    "batches": (1000, "batches of 8 x 100 KiB in each turn of the way alone"),
}
_KEY = "a-key-for-the-benchmark-alone"
_ITEMS, _ITEM_BYTES = 8, 100 << 10
_MAX_BODY_BYTES = 1 << 30
_SERVED = (
    Column("requests_per_s", "requests/s (range)", 0, "range"),
    Column("p50_ms", "p50 ms", 2),
    Column("p99_ms", "p99 ms", 1),
    Column("front_cpu_s_per_1000", "front CPU s/1000", 3),
    Column("errors", "errors", 0, "sum"),
)
_WAY = (
    Column("front_cpu_us", "front CPU us a batch (range)", 0, "range"),
    Column("wall_us", "wall us a batch (range)", 0, "range"),
)


def run(bench: Benchmark) -> None:
    """Let the front end alone, the one with an agent, and the ways take turns."""
    turns: dict[str, Turn] = {
        way: partial(_way, way, bench.args.batches) for way in ("clear", "tls")
    }
    for name in filter(None, bench.args.workloads.split(",")):
        work = WORKLOADS[name]
        commands = (_local(bench, work), _with_agent(bench, work))
        for command in commands:
            turns[f"{name}, {command.name}"] = bench.closed_turn(name, work.bodies(), command)
    bench.take_turns(turns)


def report(bench: Benchmark) -> None:
    """Print the rates, the ratio of agent to local, and the cost of a batch's way."""
    caption = f"A batch of {_ITEMS} x {_ITEM_BYTES >> 10} KiB to another process, and its answer."
    bench.add_cells("The way of a batch", "", _WAY, caption)
    bench.add_cells("Served", "connections", _SERVED)
    bench.add_ratios("connections", _SERVED[:2], lambda name: name in ("local", "clear"))


def _local(bench: Benchmark, work: Workload) -> ServerCommand:
    arguments = [*work.serve(), *shlex.split(bench.args.serve_args)]
    return inferpool(bench.args.inferpool, *arguments, name="local")


def _with_agent(bench: Benchmark, work: Workload) -> ServerCommand:
    port = bench.args.port + 1
    command = inferpool(
        bench.args.inferpool,
        *work.serve(),
        *shlex.split(bench.args.serve_args),
        *("--cluster-port", str(port)),
        name="agent",
    )
    agent = f"{bench.args.inferpool} agent --join {HOST}:{port} --name bench --log-format json"
    shell = f"{agent} & exec {shlex.join(command.argv)}"
    return ServerCommand(
        name=command.name,
        argv=["sh", "-c", shell],
        env={"INFERPOOL_CLUSTER_KEYS": _KEY},
        ready=command.ready,
    )


def _way(name: str, num: int, round_: int) -> Iterator[Cell]:
    """Send batches to a process that takes them and answers."""
    with tempfile.TemporaryDirectory() as folder:
        files = make_certificate(Path(folder)) if name == "tls" else ()
        listener = socket.create_server((HOST, 0))
        process = multiprocessing.get_context("spawn").Process(
            target=_take_batches, args=(listener.getsockname()[1], files), daemon=True
        )
        process.start()
        cpu_s, wall_s = uvloop.run(_send_batches(listener, files, num))
        process.join(10)
    figures = {"front_cpu_us": cpu_s / num * 1e6, "wall_us": wall_s / num * 1e6}
    yield Cell(workload="way", contender=name, round=round_, figures=figures)


def _context(files: Sequence[Path], *, is_server: bool) -> ssl.SSLContext | None:
    if not files:
        return None
    kind = ssl.PROTOCOL_TLS_SERVER if is_server else ssl.PROTOCOL_TLS_CLIENT
    context = ssl.SSLContext(kind)
    certificate, key = files
    context.load_cert_chain(certificate, key)
    context.load_verify_locations(certificate)
    context.verify_mode = ssl.CERT_REQUIRED
    return context


class _Sender:
    """The front end's side: sends the next batch when one is answered."""

    def __init__(self, num: int) -> None:
        self.link: HostLink[ToFrontEnd]
        self.over: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._left = num
        memory = memoryview(bytearray(range(256)) * (_ITEMS * _ITEM_BYTES // 256))
        places = range(0, len(memory), _ITEM_BYTES)
        self._body = [memory[place : place + _ITEM_BYTES] for place in places]
        self._places = places

    def send(self) -> None:
        now = time.monotonic()
        items = [
            ItemRef("image", place, _ITEM_BYTES, now, request_id="1") for place in self._places
        ]
        self.link.send(RunBatch(1, self._left, now, items), self._body)

    def room_for(self, message: ToFrontEnd, num_bytes: int) -> Sequence[memoryview]:
        return [memoryview(bytearray(num_bytes))]

    def on_message(self, message: ToFrontEnd, body: Sequence[memoryview]) -> None:
        self._left -= 1
        if self._left:
            self.send()
        else:
            self.link.close()

    def on_closed(self, reason: str) -> None:
        self.over.set_result(reason)


class _Taker:
    """The agent's side: takes batches where they are to lie, and answers."""

    def __init__(self) -> None:
        self.link: HostLink[ToAgent]
        self.over: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._memory = memoryview(bytearray(_ITEMS * _ITEM_BYTES))

    def room_for(self, message: ToAgent, num_bytes: int) -> Sequence[memoryview]:
        places = range(0, num_bytes, _ITEM_BYTES)
        return [self._memory[place : place + _ITEM_BYTES] for place in places]

    def on_message(self, message: ToAgent, body: Sequence[memoryview]) -> None:
        assert isinstance(message, RunBatch)
        done = BatchDone(message.id, [b'{"label": "cat"}'] * _ITEMS, 0.0, 0.0)
        self.link.send(BatchOutcomes(1, done))

    def on_closed(self, reason: str) -> None:
        self.over.set_result(reason)


async def _send_batches(
    listener: socket.socket, files: Sequence[Path], num: int
) -> tuple[float, float]:
    loop = asyncio.get_running_loop()
    listener.setblocking(False)
    sock, _ = await loop.sock_accept(listener)
    listener.close()
    sock = await secured(sock, _context(files, is_server=True), None)
    sender = _Sender(num)
    sender.link = HostLink(sock, ToFrontEnd, sender, max_body_bytes=_MAX_BODY_BYTES)
    began, cpu = time.perf_counter(), time.process_time()
    sender.send()
    await sender.over
    return time.process_time() - cpu, time.perf_counter() - began


def _take_batches(port: int, files: Sequence[Path]) -> None:
    async def take() -> None:
        sock = socket.create_connection((HOST, port))
        sock.setblocking(False)
        sock = await secured(sock, _context(files, is_server=False), HOST)
        taker = _Taker()
        taker.link = HostLink(sock, ToAgent, taker, max_body_bytes=_MAX_BODY_BYTES)
        await taker.over

    uvloop.run(take())
