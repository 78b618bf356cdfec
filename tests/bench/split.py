"""`split`: memory, throughput and restarts of each placement; a model too large for a process."""

import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from inferpool.models.text.prose import PROSE
from tests.bench import split_memory
from tests.bench.frame import Benchmark, Cell, Column
from tests.bench.load import require_wrk
from tests.bench.peers import COLUMNS, RATIO_COLUMNS, chosen
from tests.bench.server import BenchError, BenchServer, Bodies, Probe, ServerCommand, ask
from tests.bench.split_memory import PLACEMENTS, STACK, serve
from tests.bench.stack import WIDTH
from tests.bench.workloads import body_files, photos, tensors

HELP = "replicate, pipeline and tensor: memory, throughput and restarts of each"
_REFERENCES = ("replicate 1", "one stage")
_TIMEOUT_S = 180.0
_POLL_S = 0.005
_HEALTH = Probe(path="/health")


def texts() -> Bodies:
    """Return JSON calls with a text of 24 words each."""
    words = PROSE.split()
    texts = [" ".join(words[start : start + 24]) for start in range(0, 192, 24)]
    contents = [json.dumps({"instances": [text]}).encode() for text in texts]
    return Bodies(files=body_files("-text.json", contents), content_type="application/json")


WORKLOADS: Mapping[str, tuple[str, Callable[[], Bodies]]] = {
    "efficientnet": ("efficientnet_lite0", photos),
    "minilm": ("minilm_l6", texts),
    "mlp": (STACK, partial(tensors, WIDTH)),
}
"""Source and bodies of each model."""


def run(bench: Benchmark) -> None:
    """Measure each part that was asked for."""
    require_wrk()
    chosen(bench.args.workloads, WORKLOADS, "workload")
    for measure in chosen(bench.args.parts, _PARTS, "part").values():
        measure(bench)


def report(bench: Benchmark) -> None:
    """Print all parts."""
    split_memory.report(bench)
    bench.add_cells("Under load", "connections", COLUMNS)
    bench.add_ratios("connections", RATIO_COLUMNS, lambda name: name in _REFERENCES)
    columns = [Column("restart_ms", "ms until ready (range)", 0, "range")]
    caption = "From SIGKILL of one process; as seen over /health every 5 ms."
    bench.add_cells("Restarts", "", columns, caption)


def _measure_placements(bench: Benchmark) -> None:
    """Load each model by each placement, in alternating rounds."""
    turns = {
        f"{name}, {place}": bench.closed_turn(name, bodies(), command)
        for name, (_, bodies) in chosen(bench.args.workloads, WORKLOADS, "workload").items()
        for place, command in _commands(bench, name).items()
    }
    bench.take_turns(turns)


def _measure_stage(bench: Benchmark) -> None:
    """Load a pipeline of two equal stages, and a process that computes only one of them.

    The stack's halves are alike, so either is the heavier one: a pipeline would reach its figures
    if it cost nothing and its stages were always busy.
    """
    half = bench.args.blocks // 2
    stage = {"replicas": 1, "threads_per_replica": 1}
    commands = [
        serve(bench.args, name, STACK, settings, {"num_blocks": num_blocks})
        for name, settings, num_blocks in (
            ("pipeline 2", PLACEMENTS["pipeline 2"], 2 * half),
            ("one stage", stage, half),
        )
    ]
    bench.take_turns({
        command.name: bench.closed_turn("mlp, stages", tensors(WIDTH), command)
        for command in commands
    })  # fmt: skip


def _measure_restarts(bench: Benchmark) -> None:
    """Kill a process of each placement, each rank in turn, and time what follows."""
    turns = {
        f"{name}, {place}: {bench.args.kills} kills": partial(_restart, bench, name, command)
        for name in chosen(bench.args.workloads, WORKLOADS, "workload")
        for place, command in _commands(bench, name).items()
    }
    bench.take_turns(turns, rounds=1)


def _commands(bench: Benchmark, workload: str) -> dict[str, ServerCommand]:
    options = {"num_blocks": bench.args.blocks} if workload == "mlp" else {}
    return {
        name: serve(bench.args, name, WORKLOADS[workload][0], settings, options)
        for name, settings in PLACEMENTS.items()
    }


def _restart(bench: Benchmark, workload: str, command: ServerCommand, _: int) -> Iterator[Cell]:
    probe = WORKLOADS[workload][1]().probe()
    with BenchServer(command, bench.args.port) as server:
        server.wait_ready(probe)
        for turn in range(bench.args.kills):
            ask(server.port, probe)  # a worker that has done work is restarted at once
            worker = _workers(server)[0]
            pids = [rank["pid"] for rank in worker["ranks"]] or [worker["pid"]]
            began = time.perf_counter()
            os.kill(pids[turn % len(pids)], signal.SIGKILL)
            _await_next(server, worker["incarnation"])
            figures = {"restart_ms": 1000 * (time.perf_counter() - began)}
            name = f"{workload}, restarts"
            yield Cell(workload=name, contender=command.name, round=turn, figures=figures)


def _await_next(server: BenchServer, incarnation: int) -> None:
    until = time.monotonic() + _TIMEOUT_S
    while time.monotonic() < until:
        server.require_running()
        worker = _workers(server)[0]
        if worker["incarnation"] > incarnation and worker["state"] == "ready":
            return
        time.sleep(_POLL_S)
    raise BenchError(f"not ready again in {_TIMEOUT_S:g} s; see {server.log}")


def _workers(server: BenchServer) -> Sequence[Mapping[str, Any]]:
    _, body = ask(server.port, _HEALTH)
    workers: Sequence[Mapping[str, Any]] = json.loads(body)["models"][0]["workers"]
    return workers


_PARTS: Mapping[str, Callable[[Benchmark], None]] = {
    "memory": split_memory.measure,
    "placements": _measure_placements,
    "stage": _measure_stage,
    "restart": _measure_restarts,
}
OPTIONS = {
    "rounds": 5,
    "secs": 6,
    "warm": 2,
    "connections": (1, 16),
    "parts": (",".join(_PARTS), "comma-separated"),
    "workloads": (",".join(WORKLOADS), "comma-separated"),
    "gib": (3.0, "of parameters of the large model"),
    "limit-share": (0.7, "of that, for each process"),
    "blocks": (4, "of 128 MiB, of the MLP under load"),
    "kills": (10, "of a rank, for each placement"),
}
