"""`bodies`: large bodies through sockets into the arena, by the number of front ends.

The model reads nothing of its payload. The generator is one process with plain sockets, whose own
work on a call is one write and one read. It shares the cores with the service.
"""

import selectors
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import product
from multiprocessing.synchronize import Barrier
from statistics import quantiles
from types import SimpleNamespace

import psutil

from inferpool.service.tools.trial.connection import post_request
from tests.bench.frame import Benchmark, Cell, benchmark
from tests.bench.server import HOST, BenchError, BenchServer, Bodies, inferpool
from tests.bench.together import run_together
from tests.bench.workloads import echo_bodies

_ANSWER_BYTES = 64 * 1024
"""More than an answer has."""
_ANSWER_S = 20.0
_ENV = {"INFERPOOL_ARENA_BYTES": str(256 << 20)}
"""Room for parts of the arena on small machines, too."""


@benchmark(
    "large bodies through sockets into the arena, by the number of front ends",
    rounds=5,
    secs=4.0,
    warm=1.0,
    connections=(64,),
    serve_args="--replicas 1 --speed exact",
    bytes=((80_000, 602_112, 1024), "comma-separated: sizes of a body"),
    front_ends=((1, 2), "comma-separated: numbers of processes that take calls"),
    beside=("", "another inferpool command, which takes turns with the first"),
)
def bodies(bench: Benchmark) -> None:
    """Let services with each number of front ends take turns, each with all sizes.

    They are all there from the beginning: one that is not asked takes no time.
    """
    args = bench.args
    commands = {"": args.inferpool} | ({", beside": args.beside} if args.beside else {})
    with ExitStack() as stack:
        turns = {}
        for number, (num, name) in enumerate(product(args.front_ends, commands)):
            ours = SimpleNamespace(**{**vars(args), "inferpool": commands[name]})
            log = f"bodies-{num}{name[2:]}"
            command = inferpool(ours, "echo", "--front-ends", f"{num}", name=log, env=_ENV)
            server = stack.enter_context(BenchServer(command, args.port + number))
            contender = f"{num} front ends{name}"
            turns[contender] = partial(_take, bench, server, contender)
        bench.take_turns(turns)
    bench.report(
        "connections",
        "CPU microseconds per call: all of the service; its main process; the front ends beside "
        "that; the workers; the generator.",
    )
    figures = ("calls_per_s", "service_us", "main_us")
    bench.report_ratios("connections", figures, lambda name: name.endswith("beside"))
    bench.report_ratios("connections", figures, lambda name: name == "1 front ends")


def _take(bench: Benchmark, server: BenchServer, contender: str, _: int) -> Iterator[Cell]:
    args = bench.args
    for size, connections in product(args.bytes, args.connections):
        load = BodyLoad(
            port=server.port,
            bodies=echo_bodies(int(size)),
            connections=int(connections),
            warm_s=args.warm,
            secs=args.secs,
        )
        server.wait_ready(load.bodies)
        yield Cell(f"{size:g} bytes", contender, connections, load_by(server, load))


@dataclass(frozen=True, slots=True, kw_only=True)
class BodyLoad:
    """A closed loop: each connection sends its next call when it has its answer."""

    port: int
    bodies: Bodies
    connections: int
    warm_s: float
    secs: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sent:
    """The measurements of the generator."""

    num: int
    latencies_s: list[float]
    cpu_s: float
    server_cpu_s: Mapping[int, float]
    """By process."""


def load_by(server: BenchServer, load: BodyLoad) -> dict[str, float]:
    """Load a server, and return the figures; CPU is in microseconds per call."""
    health = server.http.get("/health").json()
    workers = {each["pid"] for model in health["models"] for each in model["workers"]}
    fronts = {each["pid"] for each in health["fronts"]} - {server.pid}
    pids = [server.pid, *fronts, *workers]
    (sent,) = run_together(_send, [(load, pids)])
    cuts = quantiles(sent.latencies_s, n=100)

    def us_of(pids: set[int]) -> float:
        return sum(sent.server_cpu_s.get(pid, 0.0) for pid in pids) / sent.num * 1e6

    return {
        "calls_per_s": sent.num / load.secs,
        "mb_per_s": sent.num / load.secs * load.bodies.files[0].stat().st_size / 1e6,
        "p50_ms": cuts[49] * 1e3,
        "p99_ms": cuts[98] * 1e3,
        "service_us": us_of(set(pids)),
        "main_us": us_of({server.pid}),
        "fronts_us": us_of(fronts),
        "workers_us": us_of(workers),
        "generator_us": sent.cpu_s / sent.num * 1e6,
    }


def _send(begin: Barrier, argument: tuple[BodyLoad, list[int]]) -> _Sent:
    """Load a server from this process."""
    load, pids = argument
    generator = _Generator(load)
    begin.wait()
    generator.run(load.warm_s)
    processes = [psutil.Process(pid) for pid in pids]
    before = {each.pid: sum(each.cpu_times()[:2]) for each in processes}
    own_s = time.process_time()
    latencies_s = generator.run(load.secs)
    own_s = time.process_time() - own_s
    after = {each.pid: sum(each.cpu_times()[:2]) for each in processes}
    generator.close()
    return _Sent(
        num=len(latencies_s),
        latencies_s=latencies_s,
        cpu_s=own_s,
        server_cpu_s={pid: after[pid] - before[pid] for pid in pids},
    )


class _Generator:
    """Connections that each have one call under way."""

    def __init__(self, load: BodyLoad) -> None:
        body = load.bodies.files[0].read_bytes()
        self._request = post_request(load.bodies.path, body, load.bodies.content_type)
        self._selector = selectors.DefaultSelector()
        self._unsent: dict[socket.socket, memoryview] = {}
        self._began: dict[socket.socket, float] = {}
        for _ in range(load.connections):
            connection = socket.create_connection((HOST, load.port))
            connection.setblocking(False)
            self._selector.register(connection, selectors.EVENT_READ, connection)

    def run(self, secs: float) -> list[float]:
        """Send calls for some seconds, wait for the last answers; return seconds of those in time.

        Raises:
            BenchError: A call was not answered with 200.
        """
        latencies_s: list[float] = []
        for key in list(self._selector.get_map().values()):
            self._begin(key.data)
        until = time.perf_counter() + secs
        while self._began:
            ready = self._selector.select(_ANSWER_S)
            if not ready:
                raise BenchError(f"a call has had no answer for {_ANSWER_S:g} s")
            for key, events in ready:
                if events & selectors.EVENT_WRITE:
                    self._write(key.data, self._unsent.pop(key.data))
                if events & selectors.EVENT_READ:
                    now = self._finish(key.data, latencies_s, until)
                    if now < until:
                        self._begin(key.data)
        return latencies_s

    def close(self) -> None:
        """Close all connections."""
        for key in list(self._selector.get_map().values()):
            key.data.close()
        self._selector.close()

    def _begin(self, connection: socket.socket) -> None:
        self._began[connection] = time.perf_counter()
        self._write(connection, memoryview(self._request))

    def _write(self, connection: socket.socket, rest: memoryview) -> None:
        was_unsent = len(rest) < len(self._request)
        num_sent = connection.send(rest)
        if num_sent < len(rest):
            self._unsent[connection] = rest[num_sent:]
            if not was_unsent:
                both = selectors.EVENT_READ | selectors.EVENT_WRITE
                self._selector.modify(connection, both, connection)
        elif was_unsent:
            self._selector.modify(connection, selectors.EVENT_READ, connection)

    def _finish(self, connection: socket.socket, latencies_s: list[float], until: float) -> float:
        answer = connection.recv(_ANSWER_BYTES)
        if not (answer.startswith(b"HTTP/1.1 200") and answer.endswith(b"]}")):
            raise BenchError(f"a call was answered with {answer[:300]!r}")
        now = time.perf_counter()
        began = self._began.pop(connection)
        if now < until:
            latencies_s.append(now - began)
        return now
