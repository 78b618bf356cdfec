"""`peers`: inferpool and other servers at the same work, closed loop, in alternating rounds."""

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TypeVar

from tests.bench.frame import Benchmark, Column, say
from tests.bench.server import (
    HOST,
    MALLOC,
    OUT,
    BenchError,
    BenchServer,
    Bodies,
    Probe,
    ServerCommand,
    ask,
    inferpool,
)
from tests.bench.servers.work import PeerSetting
from tests.bench.workloads import WORKLOADS, Workload

T = TypeVar("T")

OURS = "inferpool"
HELP = "inferpool and its peers side by side"
COLUMNS = (
    Column("requests_per_s", "requests/s (range)", 0, "range"),
    Column("p50_ms", "p50 ms", 2),
    Column("p90_ms", "p90 ms", 2),
    Column("p99_ms", "p99 ms", 2),
    Column("max_ms", "max ms", 1, "max"),
    Column("errors", "errors", 0, "sum"),
    Column("front_cpu_s_per_1000", "front CPU", 3),
    Column("cpu_s_per_1000", "CPU s/1000", 3),
    Column("pss_mib", "PSS MiB"),
    Column("generator_cores", "wrk cores", 2),
)
RATIO_COLUMNS = tuple(
    column
    for column in COLUMNS
    if column.figure in ("requests_per_s", "p50_ms", "cpu_s_per_1000", "pss_mib")
)
_SEARCH_S = 1800.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """Another server, in the setting that was its best on two cores."""

    distribution: str = ""
    """Package that its environment must have; "" where ours is enough."""
    arguments: Sequence[str]
    """Arguments of its interpreter, after `-m`."""
    num_workers: int = 1
    """Workers for work that costs nothing."""
    wait_ms: float = 0
    """Milliseconds that a batch may wait to fill; BentoML finds out by itself."""
    num_model_workers: int = os.cpu_count() or 1
    """Workers where there is a model: one for each core, with one thread each."""
    max_batch_size: int = 8
    path: str = ""
    """Path where it predicts, if it must choose that itself."""
    stop_signal: signal.Signals = signal.SIGTERM
    env: Mapping[str, str] = field(default_factory=dict)


_LITSERVE = Peer(
    distribution="litserve",
    arguments=["tests.bench.servers.litserve_server", "{port}"],
    wait_ms=2,
    stop_signal=signal.SIGINT,  # on SIGTERM it stays
)
_MOSEC = Peer(
    distribution="mosec",
    arguments=["tests.bench.servers.mosec_server", "--address", HOST, "--port", "{port}",
               "--log-level", "warning", "--timeout", "30000"],
    num_workers=2,
    wait_ms=1,
)  # fmt: skip
_RAY = Peer(
    distribution="ray",
    arguments=["tests.bench.servers.ray_server", "{port}"],
    wait_ms=2,
    env={
        "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
        "RAY_SERVE_ENABLE_DIRECT_INGRESS": "0",  # its own proxy listens, not HAProxy
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",  # else, under `uv run`, it copies the repository
        "RAY_memory_monitor_refresh_ms": "0",  # else it kills replicas where memory is short
    },
)
_BENTOML = Peer(
    distribution="bentoml",
    arguments=["bentoml", "serve", "tests.bench.servers.bentoml_server:FrontService",
               "--host", HOST, "--port", "{port}"],
    num_workers=2,
    env={"BENTOML_DO_NOT_TRACK": "True", "BENTOML_HOME": str(OUT / "bentoml")},
)  # fmt: skip
_TORCHSERVE = Peer(
    distribution="torchserve",
    arguments=["tests.bench.servers.torchserve_server", "{port}"],
    num_workers=2,
    wait_ms=1,
    path="/predictions/work",
)
_AS_RELEASED = {
    "litserve": _LITSERVE,
    "mosec": _MOSEC,
    "ray": _RAY,
    "bentoml": _BENTOML,
    "torchserve": _TORCHSERVE,
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
_SETTABLE = ("num_workers", "num_model_workers", "wait_ms", "max_batch_size")
OPTIONS = {
    "rounds": 5,
    "secs": 4,
    "warm": 2,
    "connections": (1, 16, 64),
    "serve-args": "",
    "peers": (
        "",
        f"comma-separated, of {', '.join(PEERS)}, or none; default: those of "
        f"{', '.join(_AS_RELEASED)} that are installed",
    ),
    "workloads": (",".join(WORKLOADS), "comma-separated"),
    "peer-python": ([], "PEER=PATH: the interpreter whose environment has this peer, if not ours"),
    "set": ([], f"PEER.FIELD=N: another setting of a peer: {', '.join(_SETTABLE)}"),
    "speeds": ("exact,auto", "of inferpool, where there is a model"),
    "ours": ([], 'NAME=ARGUMENTS: a setting of inferpool, as "p99=--objective-p99-ms 50"'),
}


def run(bench: Benchmark) -> None:
    """Measure all servers at each number of connections."""
    turns = {
        f"{name}, {command.name}": bench.closed_turn(name, bodies, command)
        for name, bodies, command in contenders(bench)
    }
    bench.take_turns(turns)


def report(bench: Benchmark) -> None:
    """Print and draw the figures, and the ratios of ours to the others."""
    bench.add_cells("Side by side, closed loop", "connections", COLUMNS)
    bench.add_ratios("connections", RATIO_COLUMNS, lambda name: not name.startswith(OURS))
    bench.add_charts(COLUMNS[0], "connections")
    bench.add_charts(COLUMNS[3], "connections", is_log=True)


def contenders(bench: Benchmark) -> Sequence[tuple[str, Bodies, ServerCommand]]:
    """Return what the options ask for: workload, requests and server of each.

    Raises:
        BenchError: Something is unknown, or not installed.
    """
    args = bench.args
    pythons = dict(_pair(each) for each in args.peer_python)
    settings = _settings(args.set)
    workloads = chosen(args.workloads, WORKLOADS, "workload")
    chosen(",".join(pythons), PEERS, "peer")
    peers = _usable_peers(args.peers, pythons)
    bench.content["peers"] = {name: asdict(settings[name]) for name in peers}
    found = []
    for name, workload in workloads.items():
        bodies = workload.bodies()
        found += [(name, bodies, ours) for ours in _ours(workload, args)]
        found += [
            (name, bodies, _command(peer, settings[peer], workload, peers[peer])) for peer in peers
        ]
    return found


def chosen(names: str, known: Mapping[str, T], kind: str) -> dict[str, T]:
    """Return the known ones of comma-separated names.

    Raises:
        BenchError: One is unknown.
    """
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    if unknown := [name for name in wanted if name not in known]:
        raise BenchError(f"there is no {kind} {unknown[0]!r}: there are {', '.join(known)}")
    return {name: known[name] for name in wanted}


def installed_version(python: str, distribution: str) -> str | None:
    """Return the version of a distribution as another interpreter sees it, or None.

    Raises:
        BenchError: There is no such interpreter.
    """
    code = f"from importlib.metadata import version; print(version({distribution!r}))"
    try:
        result = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=60)
    except OSError as error:
        raise BenchError(f"{python} is no interpreter: {error.strerror}") from error
    return result.stdout.strip() if result.returncode == 0 else None


def _ours(workload: Workload, args: argparse.Namespace) -> Iterator[ServerCommand]:
    """Yield the service in each setting asked for, and for each speed where there is a model."""
    ways = {OURS: ""}
    if args.ours:
        ways = {f"{OURS}-{name}": more for name, more in map(_pair, args.ours)}
    for name, more in ways.items():
        arguments = [*workload.serve(), *shlex.split(args.serve_args), *shlex.split(more)]
        if not workload.network:
            yield inferpool(args.inferpool, *arguments, name=name)
            continue
        for speed in args.speeds.split(","):
            ours = inferpool(args.inferpool, *arguments, "--speed", speed, name=f"{name}-{speed}")
            yield _searched(ours, args.port) if speed == "auto" else ours


def _searched(ours: ServerCommand, port: int) -> ServerCommand:
    """Let the service search for a faster preset, and measure it without a search beside it.

    Raises:
        BenchError: The search did not come to an end.
    """
    say(f"{ours.name}: searching for the fastest preset")
    health = Probe(path="/health")
    with BenchServer(ours, port, OUT / "logs" / f"{ours.name}-search.log") as server:
        server.wait_ready(health)
        until = time.monotonic() + _SEARCH_S
        while True:
            server.require_running()
            (model,) = json.loads(ask(port, health)[1])["models"]
            search = model["speed_search"]
            if search["state"] in ("off", "done", "failed"):
                break
            if time.monotonic() > until:
                raise BenchError(f"{ours.name} still searches for speed: {search['text']}")
            time.sleep(1.0)
    say(f"  {search['text'] or 'nothing to search for'}")
    return replace(ours, env={**ours.env, "INFERPOOL_SPEED_SEARCH": "false"})


def _usable_peers(names: str, pythons: Mapping[str, str]) -> dict[str, str]:
    """Return each peer to run, with its interpreter. One asked for by name must be there.

    Raises:
        BenchError: A peer is unknown, or not installed.
    """
    usable: dict[str, str] = {}
    if names == "none":
        return usable
    for name, peer in chosen(names or ",".join(_AS_RELEASED), PEERS, "peer").items():
        python = pythons.get(name) or pythons.get(peer.distribution) or sys.executable
        if not peer.distribution or installed_version(python, peer.distribution):
            usable[name] = python
            continue
        how = (
            f"{python} has no {peer.distribution}: see tests/bench/README.md, "
            f"then --peer-python {peer.distribution}=PATH"
        )
        if names:
            raise BenchError(how)
        say(f"Without {name}: {how}")
    return usable


def _command(name: str, peer: Peer, workload: Workload, python: str) -> ServerCommand:
    weights = workload.weights()
    setting = PeerSetting(
        work=workload.work,
        num_workers=peer.num_model_workers if weights else peer.num_workers,
        max_batch_size=peer.max_batch_size,
        wait_ms=peer.wait_ms,
        network=workload.network,
        weights=str(weights or ""),
    )
    return ServerCommand(
        name=name,
        argv=[python, "-m", *peer.arguments],
        # One thread each, as ours: more of them than cores is slower for everybody.
        env={**peer.env, **setting.environment(), "OMP_NUM_THREADS": "1"},
        path=peer.path,
        stop_signal=peer.stop_signal,
    )


def _settings(changes: Sequence[str]) -> Mapping[str, Peer]:
    settings = dict(PEERS)
    for change in changes:
        key, value = _pair(change)
        name, _, setting = key.partition(".")
        if name not in settings or setting not in _SETTABLE:
            raise BenchError(f"--set {change}: say PEER.FIELD=N, FIELD of {', '.join(_SETTABLE)}")
        number = float(value) if setting == "wait_ms" else int(value)
        settings[name] = replace(
            settings[name],
            **{setting: number},  # type: ignore[arg-type]  # each of _SETTABLE is a number
        )
    return settings


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals and value):
        raise BenchError(f"{text!r}: say NAME=VALUE")
    return name, value
