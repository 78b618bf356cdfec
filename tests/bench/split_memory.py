"""Serves a model that no process may hold: whole it cannot load, and split it serves."""

import argparse
import contextlib
import json
import os
import time
import zlib
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from torch import Tensor

from inferpool.service.tools.trial.processes import LogReader
from tests.bench.frame import Benchmark, Cell, Column
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
from tests.bench.workloads import tensors

STACK = "tests.bench.stack:StackModel"
PLACEMENTS: Mapping[str, Mapping[str, object]] = {
    "replicate 1": {"placement": "replicate", "replicas": 1},
    "replicate 2": {"placement": "replicate", "replicas": 2},
    "pipeline 2": {"placement": "pipeline", "replicas": 1, "devices_per_replica": 2},
    "tensor 2": {"placement": "tensor", "replicas": 1, "devices_per_replica": 2},
}
_TIMEOUT_S = 600.0
_MIB = 1 << 20
_TOLERANCE = 1e-4
"""Allowed deviation, relative to the largest number of the reference."""
_LIMITS = {"memory": "memory.limit_in_bytes", "": "memory.max"}
"""File that limits a control group, by its controller in /proc/PID/cgroup: version 1, and 2."""
_PEAKS = ("memory.max_usage_in_bytes", "memory.peak")
_COLUMNS = (
    Column("part_mib", "parameters MiB"),
    Column("uss_mib", "USS MiB"),
    Column("pss_mib", "PSS MiB"),
    Column("peak_mib", "peak MiB"),
    Column("start_s", "start s", 1),
    Column("deviation", "deviation", 7),
)


def measure(bench: Benchmark) -> None:
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
        settings = {"weights": str(index), "load_timeout_s": _TIMEOUT_S, "max_restarts": 1}
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


def report(bench: Benchmark) -> None:
    """Print the memory of each rank, and why a placement did not serve."""
    if "reasons" not in bench.content:
        return
    sizes = [bench.content[name] / 2**30 for name in ("model_bytes", "limit_bytes")]
    title = f"A model of {sizes[0]:.2f} GiB; {sizes[1]:.2f} GiB for a process"
    caption = (
        "peak: charged to its control group; deviation from the reference computed block by block."
    )
    bench.add_cells(title, "rank", _COLUMNS, caption)
    for name, reason in bench.content["reasons"].items():
        bench.add_note(f"{name}: does not load: {reason}")


def serve(
    args: argparse.Namespace,
    name: str,
    source: str,
    settings: Mapping[str, object],
    options: Mapping[str, object],
) -> ServerCommand:
    """Return our service with one model, by a settings file of its own."""
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
        server.wait_ready(bodies.probe(), _TIMEOUT_S)
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
        status, body = ask(server.port, probe, _TIMEOUT_S)
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
