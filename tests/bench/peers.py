"""`peers`: inferpool and other servers at the same work, in alternating rounds."""

import argparse
import os
import shlex
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TypeVar

from tests.bench import plots, rounds
from tests.bench.load import Cell, require_wrk
from tests.bench.processes import HOST, MALLOC, OUT, BenchError, Contender, inferpool
from tests.bench.report import console, installed_version, save
from tests.bench.servers.work import Setting
from tests.bench.settling import settled
from tests.bench.workloads import WORKLOADS, Workload

T = TypeVar("T")

OURS = "inferpool"
HELP = "inferpool and its peers side by side"


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """Another server, in the setting that was its best on two cores."""

    distribution: str
    """What its environment must have."""
    arguments: Sequence[str]
    """Of its interpreter, after `-m`."""
    num_workers: int
    """For work that costs nothing."""
    wait_ms: float
    """How long a batch may wait to fill; BentoML finds out by itself."""
    num_model_workers: int = os.cpu_count() or 1
    """Where there is a model: one for each core, with one thread each."""
    max_batch_size: int = 8
    path: str = ""
    """Where it predicts, if it must be its own choice."""
    stop_signal: signal.Signals = signal.SIGTERM
    env: Mapping[str, str] = field(default_factory=dict)


_LITSERVE = Peer(
    distribution="litserve",
    arguments=["tests.bench.servers.litserve_server", "{port}"],
    num_workers=1,
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
    num_workers=1,
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
    arguments=["bentoml", "serve", "tests.bench.servers.bentoml_server:Front",
               "--host", HOST, "--port", "{port}"],
    num_workers=2,
    wait_ms=0,
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
PEERS: Mapping[str, Peer] = {
    **_AS_RELEASED,
    # Without batching none waits for others to join: the best at one connection.
    **{f"{name}-unbatched": replace(peer, max_batch_size=1) for name, peer in _AS_RELEASED.items()},
    # As released they return large buffers to the kernel after each batch; our workers do not.
    **{f"{name}+malloc": replace(peer, env={**peer.env, **MALLOC})
       for name, peer in _AS_RELEASED.items()},
}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--peers",
        default="",
        help=f"comma-separated, of {', '.join(PEERS)}, or none "
        f"(default: those of {', '.join(_AS_RELEASED)} that are installed)",
    )
    parser.add_argument("--workloads", default=",".join(WORKLOADS), help="default: %(default)s")
    parser.add_argument(
        "--peer-python",
        action="append",
        default=[],
        metavar="NAME=PATH",
        help="the interpreter whose environment has this peer (default: this one)",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="PEER.FIELD=N",
        help="another setting of a peer: num_workers, num_model_workers, wait_ms or max_batch_size",
    )
    parser.add_argument(
        "--speeds", default="exact,auto", help="of inferpool, where there is a model (%(default)s)"
    )
    parser.add_argument(
        "--ours",
        action="append",
        default=[],
        metavar="NAME=ARGUMENTS",
        help='a setting of inferpool, to be held against others of it: "p99=--objective-p99-ms 50"',
    )
    parser.add_argument(
        "--serve-args", default="", help='further arguments of inferpool, as "--replicas 1"'
    )


def run(args: argparse.Namespace, plan: rounds.Plan) -> int:
    """Measure, print and save; returns the exit status."""
    require_wrk()
    matches, settings = make_matches(args)
    results = rounds.run(matches, plan)
    if results.cells:
        found = _ratios(results.cells)
        rounds.print_cells("Side by side, closed loop", results.cells)
        rounds.print_ratios(found)
        content = {
            "peers": {name: asdict(peer) for name, peer in settings.items()},
            "plan": asdict(plan),
            "results": asdict(results),
            "ratios": [asdict(each) for each in found],
        }
        saved = save("peers", args.out, content)
        plots.write(
            saved, "Side by side, closed loop", plots.of_cells(results.cells), str(args.workloads)
        )
    return conclude(results)


def _ratios(cells: Sequence[Cell]) -> list[rounds.Ratio]:
    """Each of ours against each of the others."""
    names = dict.fromkeys(cell.contender for cell in cells)
    ours = [name for name in names if name.startswith(OURS)]
    return [
        ratio
        for name in ours
        for ratio in rounds.ratios(
            [cell for cell in cells if cell.contender == name or cell.contender not in ours], name
        )
        if ratio.requests_per_s
    ]


def make_matches(args: argparse.Namespace) -> tuple[list[rounds.Match], Mapping[str, Peer]]:
    """What the arguments of `add_arguments` ask for, and how each peer is set.

    Raises:
        BenchError: Something is unknown, or not installed.
    """
    pythons = dict(_pair(each) for each in args.peer_python)
    settings = _settings(args.set)
    workloads = _chosen(args.workloads, WORKLOADS, "workload")
    _chosen(",".join(pythons), PEERS, "peer")
    peers = _usable_peers([name for name in args.peers.split(",") if name], pythons)
    matches = [
        rounds.Match(
            workload=name,
            bodies=workload.bodies(),
            contenders=[
                *_ours(workload, args),
                *(_contender(peer, settings[peer], workload, python) for peer, python in peers),
            ],
        )
        for name, workload in workloads.items()
    ]
    return matches, {name: settings[name] for name, _ in peers}


def _ours(workload: Workload, args: argparse.Namespace) -> list[Contender]:
    """The service in each setting asked for, and for each `speed` where there is a model."""
    arguments = [*workload.serve(), *shlex.split(args.serve_args)]
    ways = {OURS: arguments}
    if args.ours:
        pairs = map(_pair, args.ours)
        ways = {f"{OURS}-{name}": [*arguments, *shlex.split(more)] for name, more in pairs}
    if not workload.network:
        return [inferpool(args.inferpool, *way, name=name) for name, way in ways.items()]
    found = []
    for name, way in ways.items():
        for speed in args.speeds.split(","):
            ours = inferpool(args.inferpool, *way, "--speed", speed, name=f"{name}-{speed}")
            found.append(settled(ours, args.port) if speed == "auto" else ours)
    return found


def conclude(results: rounds.Results) -> int:
    """Say what went wrong; returns the exit status."""
    for failure in results.failures:
        console.print(f"Failed: {failure}", markup=False, highlight=False)
    if not results.is_complete:
        console.print("Interrupted: the rounds are not complete.")
        return 130
    return 1 if results.failures else 0


def _usable_peers(wanted: Sequence[str], pythons: Mapping[str, str]) -> list[tuple[str, str]]:
    """Each peer to run, with its interpreter. One asked for by name must be there.

    Raises:
        BenchError: A peer is unknown, or not installed.
    """
    if list(wanted) == ["none"]:
        return []
    usable = []
    for name, peer in _chosen(",".join(wanted or _AS_RELEASED), PEERS, "peer").items():
        python = pythons.get(name) or pythons.get(peer.distribution) or sys.executable
        if version := installed_version(python, peer.distribution):
            console.print(f"{name}: {peer.distribution} {version}", highlight=False)
            usable.append((name, python))
            continue
        how = (
            f"{python} has no {peer.distribution}: see tests/bench/README.md, "
            f"then --peer-python {peer.distribution}=PATH"
        )
        if wanted:
            raise BenchError(how)
        console.print(f"Without {name}: {how}", highlight=False)
    return usable


def _contender(name: str, peer: Peer, workload: Workload, python: str) -> Contender:
    weights = workload.weights()
    setting = Setting(
        work=workload.work,
        num_workers=peer.num_model_workers if weights else peer.num_workers,
        max_batch_size=peer.max_batch_size,
        wait_ms=peer.wait_ms,
        network=workload.network,
        weights=str(weights or ""),
    )
    # One thread each, as ours: more of them than cores is slower for everybody.
    env = {**peer.env, **setting.environment(), "OMP_NUM_THREADS": "1"}
    return Contender(
        name=name,
        argv=[python, "-m", *peer.arguments],
        env=env,
        path=peer.path,
        stop_signal=peer.stop_signal,
    )


def _settings(changes: Sequence[str]) -> Mapping[str, Peer]:
    settings = dict(PEERS)
    for change in changes:
        key, value = _pair(change)
        name, _, field = key.partition(".")
        peer = settings.get(name)
        if peer and field == "num_workers":
            settings[name] = replace(peer, num_workers=int(value))
        elif peer and field == "num_model_workers":
            settings[name] = replace(peer, num_model_workers=int(value))
        elif peer and field == "max_batch_size":
            settings[name] = replace(peer, max_batch_size=int(value))
        elif peer and field == "wait_ms":
            settings[name] = replace(peer, wait_ms=float(value))
        else:
            raise BenchError(f"--set {change}: say PEER.num_workers=2, .wait_ms or .max_batch_size")
    return settings


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals and value):
        raise BenchError(f"{text!r}: say NAME=VALUE")
    return name, value


def _chosen(names: str, known: Mapping[str, T], kind: str) -> dict[str, T]:
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    if unknown := [name for name in wanted if name not in known]:
        raise BenchError(f"there is no {kind} {unknown[0]!r}: there are {', '.join(known)}")
    return {name: known[name] for name in wanted}
