"""`bodies`: large bodies through sockets into the arena, by the number of front ends.

The model reads nothing of its payload. The generator is one process with plain sockets, whose own
work on a call is one write and one read. It shares the cores with the service.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from itertools import product
from multiprocessing.synchronize import Barrier
from statistics import quantiles
from types import SimpleNamespace

from tests.bench.frame import Benchmark, Cell, benchmark
from tests.bench.senders import BodyLoad, Sent, send_bodies
from tests.bench.server import BenchServer, inferpool
from tests.bench.together import run_together
from tests.bench.workloads import echo_bodies

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
        works = echo_bodies(int(size))
        (request,) = works.requests()
        load = BodyLoad(
            port=server.port,
            request=request,
            connections=int(connections),
            warm_s=args.warm,
            secs=args.secs,
        )
        server.wait_ready(works)
        yield Cell(f"{size:g} bytes", contender, connections, load_by(server, load))


def load_by(
    server: BenchServer,
    load: BodyLoad,
    send: Callable[[Barrier, tuple[BodyLoad, list[int]]], Sent] = send_bodies,
) -> dict[str, float]:
    """Load a server, and return the figures; CPU is in microseconds per call."""
    health = server.http.get("/health").json()
    workers = {each["pid"] for model in health["models"] for each in model["workers"]}
    fronts = {each["pid"] for each in health["fronts"]} - {server.pid}
    pids = [server.pid, *fronts, *workers]
    (sent,) = run_together(send, [(load, pids)])
    cuts = quantiles(sent.latencies_s, n=100)

    def us_of(pids: set[int]) -> float:
        return sum(sent.server_cpu_s.get(pid, 0.0) for pid in pids) / sent.num * 1e6

    return {
        "calls_per_s": sent.num / load.secs,
        "mb_per_s": sent.num / load.secs * len(load.request) / 1e6,
        "p50_ms": cuts[49] * 1e3,
        "p99_ms": cuts[98] * 1e3,
        "service_us": us_of(set(pids)),
        "main_us": us_of({server.pid}),
        "fronts_us": us_of(fronts),
        "workers_us": us_of(workers),
        "generator_us": sent.cpu_s / sent.num * 1e6,
    }
