"""`streams`: many streams at once, beside a reader that reads nothing, and clients that hang up.

The model waits 10 ms in each step, and streams join it while others run: the most parts a second is
the number of streams times 100.
"""

import asyncio
import json
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from statistics import quantiles

import uvloop

from tests.bench.frame import Benchmark, Cell, benchmark
from tests.bench.models import TOKENS
from tests.bench.server import HOST, BenchError, BenchServer, inferpool

_STEP_S = 0.01
_SMALL_BYTES, _LARGE_BYTES = 5, 32 << 10
"""Texts of a part, and those of the reader that reads nothing: its buffers are soon full."""
_RCVBUF_BYTES = 4096
_PART = b"event: part"
_BEGIN_S = 30.0
_SETTLE_S = 2.0
"""Time until what a client has left behind is gone."""


@benchmark(
    "64 streams at once, the same beside a reader that reads nothing, and clients that hang up",
    rounds=10,
    secs=3,
    serve_args="",
    streams=(64, "at once"),
    hangups=(1000, "streams that are left after their first part"),
)
def streams(bench: Benchmark) -> None:
    """Measure in alternating rounds: all read, and all but one read; then the hang-ups."""
    args = bench.args
    settings = {
        "models.tokens.source": TOKENS,
        "models.tokens.replicas": 1,
        "models.tokens.max_batch_size": args.streams,
    }
    with BenchServer(inferpool(args, name="streams", settings=settings), args.port) as server:
        server.wait_ready()
        turns = {name: partial(_many, bench, server, name) for name in ("all read", "one does not")}
        bench.take_turns(turns)
        bench.take_turns({"hang-ups": partial(_hang_ups, bench, server)}, rounds=1)
    bench.report(caption=f"parts_per_s: of the {args.streams - 1} readers that read.")
    bench.report_ratios("", ("parts_per_s",), lambda name: name == "all read")


@dataclass
class _Count:
    """Parts of all streams that are counted."""

    num_parts: int = 0
    num_begun: int = 0


class _StreamClient(asyncio.Protocol):
    """A client of one stream on a connection of its own."""

    def __init__(self, count: _Count, *, num_parts: int, num_bytes: int) -> None:
        self._count = count
        body = json.dumps({"instances": [{"parts": num_parts, "bytes": num_bytes}]})
        self._call = (
            f"POST /predict HTTP/1.1\r\nhost: h\r\naccept: text/event-stream\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n{body}"
        ).encode()
        self._sent = 0.0
        self.first_s = 0.0
        """Seconds until the first part."""
        self.begun = asyncio.get_running_loop().create_future()
        self.transport: asyncio.Transport

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport = transport
        self._sent = time.perf_counter()
        transport.write(self._call)

    def data_received(self, data: bytes) -> None:
        num = data.count(_PART)
        self._count.num_parts += num
        if num and not self.begun.done():
            self.first_s = time.perf_counter() - self._sent
            self.begun.set_result(None)

    def connection_lost(self, _: Exception | None) -> None:
        if not self.begun.done():
            self.begun.set_exception(BenchError("a connection was lost before the first part"))


async def _open(count: _Count, port: int, *, num_parts: int, num_bytes: int) -> _StreamClient:
    sock = socket.socket()
    if num_bytes == _LARGE_BYTES:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RCVBUF_BYTES)
    sock.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(sock, (HOST, port))
    make = partial(_StreamClient, count, num_parts=num_parts, num_bytes=num_bytes)
    _, client = await loop.create_connection(make, sock=sock)
    return client


def _many(bench: Benchmark, server: BenchServer, name: str, _: int) -> Iterator[Cell]:
    args = bench.args
    rate, first = uvloop.run(_read_many(server.port, args, reads=name == "all read"))
    p99 = quantiles(first, n=100)[-1]
    figures = {"parts_per_s": rate, "of_most": rate * _STEP_S / (args.streams - 1)}
    yield Cell("64 at once", name, 0, {**figures, "first_part_p99_ms": p99 * 1e3})
    time.sleep(_SETTLE_S)


async def _read_many(port: int, args: object, *, reads: bool) -> tuple[float, list[float]]:
    """Return parts a second of all streams but the first, and their seconds to the first part."""
    secs: float = args.secs  # type: ignore[attr-defined]  # a namespace
    num: int = args.streams  # type: ignore[attr-defined]  # as above
    num_parts = int((secs + _BEGIN_S) / _STEP_S)
    count, apart = _Count(), _Count()
    odd = await _open(apart, port, num_parts=num_parts, num_bytes=_LARGE_BYTES)
    await odd.begun
    if not reads:
        odd.transport.pause_reading()
    opening = [
        _open(count, port, num_parts=num_parts, num_bytes=_SMALL_BYTES) for _ in range(num - 1)
    ]
    clients = await asyncio.gather(*opening)
    await asyncio.wait_for(asyncio.gather(*(each.begun for each in clients)), _BEGIN_S)
    before, began = count.num_parts, time.perf_counter()
    await asyncio.sleep(secs)
    rate = (count.num_parts - before) / (time.perf_counter() - began)
    for each in (*clients, odd):
        each.transport.abort()
    return rate, [each.first_s for each in clients]


def _hang_ups(bench: Benchmark, server: BenchServer, _: int) -> Iterator[Cell]:
    """Leave streams after their first part, and look for what is left."""
    args = bench.args
    uvloop.run(_leave_many(server.port, args.streams, args.streams))  # memory that is kept
    time.sleep(_SETTLE_S)
    before = _left(server)
    began = time.perf_counter()
    uvloop.run(_leave_many(server.port, args.hangups, args.streams))
    took_s = time.perf_counter() - began
    deadline = time.monotonic() + _BEGIN_S
    while (
        any((left := _left(server))[each] for each in ("in_flight", "arena_bytes"))
        and time.monotonic() < deadline
    ):
        time.sleep(0.05)
    grown = {name: left[name] - before[name] for name in left}
    yield Cell("hang-ups", f"{args.hangups}", 0, {"per_s": args.hangups / took_s, **grown})


async def _leave_many(port: int, num: int, at_once: int) -> None:
    free = asyncio.Semaphore(at_once)

    async def leave() -> None:
        async with free:
            client = await _open(_Count(), port, num_parts=100_000, num_bytes=_SMALL_BYTES)
            await asyncio.wait_for(client.begun, _BEGIN_S)
            client.transport.abort()

    await asyncio.gather(*(leave() for _ in range(num)))


def _left(server: BenchServer) -> dict[str, float]:
    """Return what the service holds now."""
    metrics = server.http.get("/metrics").text
    found = {"in_flight": 0.0, "arena_bytes": 0.0}
    names = {
        "inferpool_instances_in_flight": "in_flight",
        "inferpool_arena_used_bytes": "arena_bytes",
    }
    for line in metrics.splitlines():
        name, _, value = line.partition(" ")
        if short := names.get(name.partition("{")[0]):
            found[short] += float(value)
    processes = server.processes()
    found["descriptors"] = sum(each.num_fds() for each in processes)
    found["memory_mib"] = sum(each.memory_info().rss for each in processes) / 2**20
    return found
