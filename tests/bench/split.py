"""`split`: memory, throughput and restarts of each placement; a model too large for a process."""

import argparse
import contextlib
import json
import os
import signal
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from torch import Tensor

from inferpool.models.text.prose import PROSE
from inferpool.service.tools.trial.processes import LogReader
from tests.bench.frame import Benchmark, Cell, Column
from tests.bench.peers import COLUMNS, RATIO_COLUMNS, chosen
from tests.bench.server import (
    OUT,
    BenchError,
    BenchServer,
    Bodies,
    Probe,
    ServerCommand,
    ask,
    inferpool,
)
from tests.bench.stack import BLOCK_BYTES, WIDTH, compute_by_blocks, write_stack
from tests.bench.workloads import body_files, photos, tensors

HELP = "replicate, pipeline and tensor: memory, throughput and restarts of each"
STACK = "tests.bench.stack:StackModel"
PLACEMENTS: Mapping[str, Mapping[str, object]] = {
    "replicate 1": {"placement": "replicate", "replicas": 1},
    "replicate 2": {"placement": "replicate", "replicas": 2},
    "pipeline 2": {"placement": "pipeline", "replicas": 1, "devices_per_replica": 2},
    "tensor 2": {"placement": "tensor", "replicas": 1, "devices_per_replica": 2},
}
_LOAD_TIMEOUT_S = 600.0
_MIB = 1 << 20
_TOLERANCE = 1e-4
"""Allowed deviation, relative to the largest number of the reference."""
_LIMITS = {"memory": "memory.limit_in_bytes", "": "memory.max"}
"""File that limits a control group, by its controller in /proc/PID/cgroup: version 1, and 2."""
_PEAKS = ("memory.max_usage_in_bytes", "memory.peak")
_MEMORY_COLUMNS = (
    Column("part_mib", "parameters MiB"),
    Column("uss_mib", "USS MiB"),
    Column("pss_mib", "PSS MiB"),
    Column("peak_mib", "peak MiB"),
    Column("start_s", "start s", 1),
    Column("deviation", "deviation", 7),
)
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
    chosen(bench.args.workloads, WORKLOADS, "workload")
    for measure in chosen(bench.args.parts, _PARTS, "part").values():
        measure(bench)


def report(bench: Benchmark) -> None:
    """Print all parts."""
    _report_memory(bench)
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
        _await_next(server, -1)  # with two workers, another one may have been the first
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


def _measure_memory(bench: Benchmark) -> None:
    """Serve the large model by each placement, each process under the limit."""
    args = bench.args
    num_blocks = max(2, round(args.gib * 2**30 / BLOCK_BYTES))
    model_bytes = num_blocks * BLOCK_BYTES
    limit_bytes = int(args.limit_share * model_bytes)
    index = write_stack(OUT / "weights" / f"stack-{num_blocks}", num_blocks)
    rows = [np.fromfile(file, np.float32) for file in tensors(WIDTH).files]
    reference = compute_by_blocks(index, num_blocks, torch.from_numpy(np.stack(rows)))
    bench.content |= {"model_bytes": model_bytes, "limit_bytes": limit_bytes, "reasons": {}}

    def serve_large(placement: str, limit: int, _: int) -> Iterator[Cell]:
        name = f"{placement}{'' if limit else ', no limit'}"
        settings = {"weights": str(index), "load_timeout_s": _LOAD_TIMEOUT_S, "max_restarts": 1}
        is_too_large = placement == "replicate 1" and limit > 0
        with _control_groups(limit) as groups:
            options = {"num_blocks": num_blocks, "groups": str(groups)}
            command = serve(args, name, STACK, {**PLACEMENTS[placement], **settings}, options)
            try:
                yield from _serve_large(command, args.port, reference, groups, model_bytes)
            except BenchError:
                if not is_too_large:
                    raise
                log = LogReader()
                for line in (OUT / "logs" / f"{name}.log").read_bytes().splitlines():
                    log.take(line)
                bench.content["reasons"][name] = log.last_words()
            else:
                if is_too_large:
                    raise BenchError("it serves, though no process may hold the model")

    bench.take_turns(
        {
            f"large model, {placement}, limit {limit}": partial(serve_large, placement, limit)
            for placement, limit in (
                ("replicate 1", 0),
                ("replicate 1", limit_bytes),
                ("pipeline 2", limit_bytes),
                ("tensor 2", limit_bytes),
            )
        },
        rounds=1,
    )


def _report_memory(bench: Benchmark) -> None:
    """Print the memory of each rank, and why a placement did not serve."""
    if "reasons" not in bench.content:
        return
    sizes = [bench.content[name] / 2**30 for name in ("model_bytes", "limit_bytes")]
    title = f"A model of {sizes[0]:.2f} GiB; {sizes[1]:.2f} GiB for a process"
    caption = (
        "peak: charged to its control group; deviation from the reference computed block by block."
    )
    bench.add_cells(title, "rank", _MEMORY_COLUMNS, caption)
    for name, reason in bench.content["reasons"].items():
        bench.add_note(f"{name}: does not load: {reason}")


def serve(
    args: argparse.Namespace,
    name: str,
    source: str,
    settings: Mapping[str, object],
    options: Mapping[str, object],
) -> ServerCommand:
    """Return the command line of our service with one model, and a settings file of its own."""
    lines = ["[models.model]", f'source = "{source}"', 'speed = "exact"']
    lines += [f"{key} = {json.dumps(value)}" for key, value in settings.items()]
    lines.append("[models.model.options]")
    lines += [f"{key} = {json.dumps(value)}" for key, value in options.items()]
    text = "\n".join(lines) + "\n"
    file = OUT / "settings" / f"split-{zlib.crc32(text.encode()):08x}.toml"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return inferpool(args.inferpool, "--config", str(file), name=name)


def _serve_large(
    command: ServerCommand,
    port: int,
    reference: Tensor,
    groups: Path,
    model_bytes: int,
) -> Iterator[Cell]:
    bodies = tensors(WIDTH)
    with BenchServer(command, port) as server:
        began = time.monotonic()
        server.wait_ready(bodies.probe(), _LOAD_TIMEOUT_S)
        start_s = time.monotonic() - began
        deviation = _deviation(server, bodies, reference)
        if deviation > _TOLERANCE:
            raise BenchError(f"its deviation from the reference is {deviation}")
        _, body = ask(server.port, Probe(path="/health"))
        worker: Mapping[str, Any] = json.loads(body)["models"][0]["workers"][0]
        whole = {"rank": 0, "pid": worker["pid"], "part_bytes": model_bytes}
        for rank in worker["ranks"] or [whole]:
            info = psutil.Process(rank["pid"]).memory_full_info()
            figures = {
                "part_mib": rank["part_bytes"] / _MIB,
                "uss_mib": info.uss / _MIB,
                "pss_mib": info.pss / _MIB,
                "peak_mib": _peak_mib(groups / str(rank["rank"])),
                "start_s": start_s,
                "deviation": deviation,
            }
            yield Cell(
                workload="large", contender=command.name, load=rank["rank"], round=0,
                figures=figures,
            )  # fmt: skip


def _deviation(server: BenchServer, bodies: Bodies, reference: Tensor) -> float:
    """Return the largest deviation of an answer, relative to the reference's largest number."""
    rows = []
    for file in bodies.files:
        probe = Probe(path=bodies.path, body=file.read_bytes(), content_type=bodies.content_type)
        status, body = ask(server.port, probe, _LOAD_TIMEOUT_S)
        if status != 200:
            raise BenchError(f"{status}: {body[:200]!r}")
        rows += json.loads(body)["predictions"]
    return ((torch.tensor(rows) - reference).abs().max() / reference.abs().max()).item()


def _peak_mib(group: Path) -> float:
    """Return the most memory that a control group was charged with; 0 if the kernel has no file."""
    files = [group / name for name in _PEAKS]
    return next((int(file.read_text()) / _MIB for file in files if file.exists()), 0.0)


@contextlib.contextmanager
def _control_groups(limit_bytes: int) -> Iterator[Path]:
    """Make a folder with a control group for each of two ranks, and remove it.

    Args:
        limit_bytes: Memory of each; 0: no limit.

    Raises:
        BenchError: This process may not make any.
    """
    found = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    controller, path = next((each[1:] for each in found if each[1] in _LIMITS), ("", "/"))
    folder = Path("/sys/fs/cgroup", controller, path.lstrip("/"), f"bench-{os.getpid()}")
    groups = [folder / str(rank) for rank in range(2)]
    try:
        try:
            for group in groups:
                group.mkdir(parents=True)
                if limit_bytes:
                    (group / _LIMITS[controller]).write_text(str(limit_bytes))
        except OSError as error:
            message = f"no control group with a limit of memory can be made here: {error}"
            raise BenchError(message) from error
        yield folder
    finally:
        for group in (*groups, folder):
            with contextlib.suppress(OSError):
                group.rmdir()


_PARTS: Mapping[str, Callable[[Benchmark], None]] = {
    "memory": _measure_memory,
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
