"""`peers` and `sweep`: inferpool and other servers at the same work, closed and open loop."""

import argparse
import os
import shlex
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from importlib.metadata import distributions

from inferpool.service.tools.trial.tally import LatencyHistogram
from tests.bench.frame import Benchmark, Cell, benchmark, chosen, say
from tests.bench.server import (
    HOST,
    MALLOC,
    OUT,
    BenchError,
    BenchServer,
    Bodies,
    CpuMeter,
    ServerCommand,
    inferpool,
    load_closed,
    plan_for,
    require_wrk,
)
from tests.bench.servers.work import PeerSetting
from tests.bench.workloads import WORKLOADS, Workload
from tests.load.generators import LoadRun, run_load

OURS = "inferpool"
RATIOS = ("requests_per_s", "p50_ms", "cpu_s_per_1000", "pss_mib")
_SHARES = (0.1, 0.25, 0.4, 0.55, 0.7, 0.8, 0.9, 1.0, 1.2, 1.5)
"""Rates of `sweep`, as shares of what the same server answers in a closed loop."""
_TIMEOUT_S = 5.0
"""A request without an answer counts with this time: so nothing is left out of the latencies."""
_COLLAPSED = 0.8
"""Higher rates show nothing new where twice less than this share was answered in time."""
_SEARCH_S = 1800.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """Another server, in the setting that was its best on two cores."""

    arguments: Sequence[str]
    """Arguments of the interpreter, after `-m`."""
    distribution: str = ""
    """Package that must be installed; "" for none."""
    num_workers: int = 1
    """Workers for work that costs nothing."""
    wait_ms: float = 0
    """Milliseconds that a batch may wait to fill."""
    num_model_workers: int = os.cpu_count() or 1
    """Workers where there is a model: one for each core, with one thread each."""
    max_batch_size: int = 8
    stop_signal: signal.Signals = signal.SIGTERM
    env: Mapping[str, str] = field(default_factory=dict)


_MOSEC_FLAGS = f"--address {HOST} --port {{port}} --log-level warning --timeout 30000"
_AS_RELEASED = {
    "litserve": Peer(
        distribution="litserve",
        arguments=["tests.bench.servers.litserve_server", "{port}"],
        wait_ms=2,
        stop_signal=signal.SIGINT,  # on SIGTERM it stays
    ),
    "mosec": Peer(
        distribution="mosec",
        arguments=["tests.bench.servers.mosec_server", *_MOSEC_FLAGS.split()],
        num_workers=2,
        wait_ms=1,
    ),
}
_SKETCH = ["tests.bench.servers.sketch_server", "{port}"]
PEERS: Mapping[str, Peer] = {
    **_AS_RELEASED,
    # Without batching none waits for others to join: the best at one connection.
    **{f"{name}-unbatched": replace(peer, max_batch_size=1) for name, peer in _AS_RELEASED.items()},
    # As released they return large buffers to the kernel after each batch; our workers do not.
    **{f"{name}+malloc": replace(peer, env={**peer.env, **MALLOC})
       for name, peer in _AS_RELEASED.items()},
    # Sketches of our own service, which only echo.
    "asgi": Peer(arguments=_SKETCH),
    "asgi+queue": Peer(arguments=[*_SKETCH, "--queue"]),
    "fastapi+queue": Peer(arguments=[*_SKETCH, "--queue", "--fastapi"]),
}  # fmt: skip
OPTIONS: Mapping[str, object] = {
    "rounds": 5,
    "warm": 2,
    "serve_args": "",
    "peers": (
        "",
        f"comma-separated, of {', '.join(PEERS)}, or none; default: those of "
        f"{', '.join(_AS_RELEASED)} that are installed",
    ),
    "workloads": (",".join(WORKLOADS), "comma-separated"),
    "speeds": ("exact,auto", "of inferpool, where there is a model"),
    "ours": ([], 'NAME=ARGUMENTS: a setting of inferpool, as "p99=--objective-p99-ms 50"'),
}


@benchmark("inferpool and its peers side by side", **OPTIONS, secs=4, connections=(1, 16, 64))
def peers(bench: Benchmark) -> None:
    """Measure all servers at each number of connections."""
    bench.take_turns({
        f"{name}, {command.name}": bench.closed_turn(name, bodies, command)
        for name, bodies, command in contenders(bench)
    })  # fmt: skip
    bench.report("connections")
    bench.report_ratios("connections", RATIOS, lambda name: not name.startswith(OURS))
    bench.draw("requests_per_s", "connections")
    bench.draw("p99_ms", "connections", is_log=True)


@benchmark(
    "latency against the arrival rate, open loop, up to collapse",
    **OPTIONS,
    secs=5,
    connections=(64,),
    rates=((), "requests per second for all; default: shares of the closed loop's"),
    max_connections=(512, "of the open loop"),
    p99_ms=(0.0, "an objective, to be drawn"),
)
def sweep(bench: Benchmark) -> None:
    """Ask each server at one rate after another."""
    require_wrk()
    rates = bench.content["rates"] = {}
    bench.take_turns({
        f"{name}, {command.name}": partial(_climb, bench, name, bodies, command, rates)
        for name, bodies, command in contenders(bench)
    })  # fmt: skip
    caption = (
        f"Latency counts from when a request was due, {_TIMEOUT_S:g} s where there was no answer. "
        "late: p99 of the delay before it was sent."
    )
    bench.report("due/s", caption)
    bench.draw("p99_ms", "requests due per second", is_log=True, limit=bench.args.p99_ms)
    bench.draw("good_per_s", "requests due per second", is_log=True)


def _climb(
    bench: Benchmark,
    workload: str,
    bodies: Bodies,
    command: ServerCommand,
    rates: dict[str, Sequence[float]],
    round_: int,
) -> Iterator[Cell]:
    args = bench.args
    with bench.warm_server(workload, bodies, command) as server:
        # Settings of our server are all asked at the rates that suit the first of them.
        name = OURS if command.name.startswith(OURS) else command.name
        key = f"{workload}, {name}"
        if key not in rates:
            rates[key] = args.rates or [
                round(share * peak, 1)
                for peak in [load_closed(server, bodies, max(args.connections), args.secs)[
                    "requests_per_s"]]
                for share in _SHARES
            ]  # fmt: skip
        num_collapsed = 0
        for rate in rates[key]:
            figures = load_open(server, bodies, rate, args, seed=round_)
            yield Cell(workload, command.name, rate, figures)
            num_collapsed += figures["good_per_s"] < _COLLAPSED * rate
            if num_collapsed == 2:
                return


def load_open(
    server: BenchServer, bodies: Bodies, rate: float, args: argparse.Namespace, seed: int
) -> dict[str, float]:
    """Ask a server at a rate, whatever becomes of the requests before."""
    plan = plan_for(
        server.port, bodies.requests(), rate, connections=args.max_connections,
        duration_s=args.secs, warmup_s=min(1.0, args.warm), timeout_s=_TIMEOUT_S, seed=seed,
    )  # fmt: skip
    meter, began = CpuMeter(server), time.monotonic()
    done = run_load(LoadRun(plan))
    wall_s, cpu, tally = time.monotonic() - began, meter.figures(), done.tally
    latency = LatencyHistogram()
    latency.add(tally.latency)
    latency.add(tally.given_up)
    return {
        "good_per_s": tally.num_in_time / args.secs,
        **{f"p{each}_ms": 1e3 * latency.percentile_s(each) for each in (50, 90, 99)},
        "max_ms": 1e3 * latency.max_s,
        "refused": tally.refusal.num,
        "unanswered": tally.given_up.num,
        "late_p99_ms": 1e3 * tally.lateness.percentile_s(99),
        # It was idle while the generator's process started.
        "server_cores": cpu["server_cores"] * wall_s / (plan.warmup_s + done.wall_s),
        "generator_cores": done.generator_cores,
        "noise": cpu["noise"],
    }


def contenders(bench: Benchmark) -> Sequence[tuple[str, Bodies, ServerCommand]]:
    """Return what the options ask for: workload, requests and server of each."""
    args = bench.args
    usable = _usable_peers(args.peers)
    bench.content["peers"] = {name: asdict(PEERS[name]) for name in usable}
    found = []
    for name, workload in chosen(args.workloads, WORKLOADS, "workload").items():
        commands = [*_ours(workload, args)]
        commands += [_command(peer, PEERS[peer], workload) for peer in usable]
        found += [(name, workload.bodies(), command) for command in commands]
    return found


def is_installed(distribution: str) -> bool:
    """Return whether a distribution is there."""
    return any(distributions(name=distribution))


def _ours(workload: Workload, args: argparse.Namespace) -> Iterator[ServerCommand]:
    """Yield the service in each setting asked for, and for each speed where there is a model."""
    ways = {f"{OURS}-{name}": more for name, more in map(_pair, args.ours)} or {OURS: ""}
    for name, more in ways.items():
        ours = partial(inferpool, args, *workload.serve(), *shlex.split(more))
        if not workload.network:
            yield ours(name=name)
            continue
        for speed in args.speeds.split(","):
            command = ours("--speed", speed, name=f"{name}-{speed}")
            yield _searched(command, args.port) if speed == "auto" else command


def _searched(ours: ServerCommand, port: int) -> ServerCommand:
    """Let the service search for a faster preset, and measure it without a search beside it."""
    say(f"{ours.name}: searching for the fastest preset")
    with BenchServer(ours, port, OUT / "logs" / f"{ours.name}-search.log") as server:
        server.wait_ready()
        for _ in server.turns(time.monotonic() + _SEARCH_S, pause_s=1.0):
            search = server.model()["speed_search"]
            if search["state"] in ("off", "done", "failed"):
                break
        else:
            server.fail(f"it still searches for speed: {search['text']}")
    say(f"  {search['text'] or 'nothing to search for'}")
    return replace(ours, env={**ours.env, "INFERPOOL_SPEED_SEARCH": "false"})


def _usable_peers(names: str) -> Sequence[str]:
    """Return the peers to run. One asked for by name must be there."""
    usable = []
    wanted = "" if names == "none" else names or ",".join(_AS_RELEASED)
    for name, peer in chosen(wanted, PEERS, "peer").items():
        if not peer.distribution or is_installed(peer.distribution):
            usable.append(name)
            continue
        how = f"{peer.distribution} is not installed: uv sync --group bench"
        if names:
            raise BenchError(how)
        say(f"Without {name}: {how}")
    return usable


def _command(name: str, peer: Peer, workload: Workload) -> ServerCommand:
    setting = PeerSetting(
        work=workload.work,
        num_workers=peer.num_model_workers if workload.network else peer.num_workers,
        max_batch_size=peer.max_batch_size,
        wait_ms=peer.wait_ms,
        network=workload.network,
        weights=workload.weights(),
    )
    return ServerCommand(
        name=name,
        argv=[sys.executable, "-m", *peer.arguments],
        # One thread each, as ours: more of them than cores is slower for everybody.
        env={**peer.env, **setting.environment(), "OMP_NUM_THREADS": "1"},
        stop_signal=peer.stop_signal,
    )


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals and value):
        raise BenchError(f"{text!r}: say NAME=VALUE")
    return name, value
