"""`connections`: calls with a connection each, and the first answers on many new ones at once."""

import select
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

from inferpool.service.tools.trial.tally import LatencyHistogram
from tests.bench.frame import Benchmark, Cell, Turn, benchmark
from tests.bench.peers import OPTIONS, OURS, contenders
from tests.bench.server import (
    HOST,
    OUT,
    BenchError,
    BenchServer,
    Bodies,
    ServerCommand,
    inferpool,
    load_closed,
    require_wrk,
    run_wrk,
)
from tests.bench.workloads import WORKLOADS
from tests.certificates import make_certificate

_RATIOS = ("requests_per_s", "p50_ms", "cpu_s_per_1000")
_BUSY_S = 6
"""Seconds of load by the busy connections; the new ones come after a third of them."""
_END_S = 60.0
_WORKLOAD = "echo-1k"


@benchmark(
    "calls with a connection each, and the first answers on many new connections",
    **OPTIONS
    | {
        "workloads": (_WORKLOAD, "comma-separated; see `peers`"),
        "ours": (
            ["one-front=--front-ends 1", "two-fronts=--front-ends 2"],
            "NAME=ARGUMENTS: a further setting of inferpool",
        ),
    },
    secs=3,
    connections=(16, 64),
    newcomers=(256, "new connections, opened at once; 0: none"),
    busy=(64, "connections that are busy beside them"),
    calls=(10, "on each new connection, one after another"),
)
def connections(bench: Benchmark) -> None:
    """Let the servers take turns: calls with a connection each, then the newcomers."""
    require_wrk()
    turns: dict[str, Turn] = {
        f"{name}, {command.name}": partial(_take_turn, bench, name, bodies, command)
        for name, bodies, command in contenders(bench)
    }
    command = _with_tls(bench)
    turns[f"{_WORKLOAD}, {command.name}"] = partial(
        _take_turn, bench, _WORKLOAD, WORKLOADS[_WORKLOAD].bodies(), command
    )
    bench.take_turns(turns)
    caption = (
        "Each call has a connection of its own, or: first and later answers on new connections. "
        "Over TLS there are only the former."
    )
    bench.report("connections", caption)
    bench.report_ratios("connections", _RATIOS, lambda name: not name.startswith(OURS))


def _with_tls(bench: Benchmark) -> ServerCommand:
    folder = OUT / "tls"
    folder.mkdir(parents=True, exist_ok=True)
    certificate, key = make_certificate(folder)
    flags = ("--tls-certificate", str(certificate), "--tls-key", str(key))
    command = inferpool(bench.args, "echo", *flags, name=f"{OURS}-tls")
    return replace(command, scheme="https")


def _take_turn(
    bench: Benchmark, workload: str, bodies: Bodies, command: ServerCommand, _: int
) -> Iterator[Cell]:
    args = bench.args
    with bench.warm_server(workload, bodies, command) as (server, asked):
        closing = replace(asked, connection="close")
        for num in args.connections:
            figures = load_closed(server, closing, num, args.secs)
            yield Cell(workload, command.name, num, figures)
        if args.newcomers and command.scheme == "http":
            with ThreadPoolExecutor(1) as pool:
                busy = pool.submit(run_wrk, server, asked, args.busy, _BUSY_S)
                time.sleep(_BUSY_S / 3)
                newcomers = _Newcomers(server, asked.requests()[0], args.newcomers, args.calls)
                newcomers.run()
                is_beside = not busy.done()
                busy.result()
            if not is_beside:
                raise BenchError(f"{_BUSY_S} s of load were over before: lower --calls")
            yield Cell(workload, command.name, args.newcomers, newcomers.figures())


class _Newcomers:
    """Clients that connect all at once; each sends its next call when it has its answer."""

    def __init__(self, server: BenchServer, request: bytes, num: int, num_calls: int) -> None:
        self._address = (HOST, server.port)
        self._request = request
        self._num = num
        self._num_calls = num_calls
        self._first, self._later = LatencyHistogram(), LatencyHistogram()

    def run(self) -> None:
        """Connect, and ask until each has all its answers.

        Raises:
            BenchError: An answer is wrong, or does not come.
        """
        poll = select.epoll()
        clients = [socket.socket() for _ in range(self._num)]
        asked_at: dict[int, float] = {}
        num_left = dict.fromkeys((each.fileno() for each in clients), self._num_calls)
        by_number = {each.fileno(): each for each in clients}
        try:
            for number, client in by_number.items():
                asked_at[number] = time.perf_counter()  # the first answer's time counts from here
                client.connect(self._address)  # the kernel accepts, whatever the server does
                client.setblocking(False)
                client.sendall(self._request)
                poll.register(number, select.EPOLLIN)
            until = time.perf_counter() + _END_S
            while num_left:
                if time.perf_counter() > until:
                    raise BenchError(f"{len(num_left)} new connections are not answered")
                for number, _ in poll.poll(1.0):
                    answer = by_number[number].recv(65536)
                    now = time.perf_counter()
                    if b" 200 " not in answer[:16]:
                        raise BenchError(f"a new connection is answered with {answer[:300]!r}")
                    is_first = num_left[number] == self._num_calls
                    (self._first if is_first else self._later).record(now - asked_at[number])
                    num_left[number] -= 1
                    if num_left[number]:
                        asked_at[number] = time.perf_counter()
                        by_number[number].sendall(self._request)
                    else:
                        del num_left[number]
        finally:
            poll.close()
            for client in clients:
                client.close()

    def figures(self) -> dict[str, float]:
        """Return the times of first and later answers."""
        found = {}
        for name, latency in (("first", self._first), ("later", self._later)):
            for each in (50, 99):
                found[f"{name}_p{each}_ms"] = 1e3 * latency.percentile_s(each)
            found[f"{name}_max_ms"] = 1e3 * latency.max_s
        found["first_to_later"] = self._first.percentile_s(50) / self._later.percentile_s(50)
        return found
