"""`split`: memory, throughput and restarts of each placement; a model too large for a process."""

import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import numpy as np
import psutil
import torch
from torch import Tensor

from inferpool.service.tools.trial.processes import LogReader
from tests.bench.frame import Benchmark, Cell, benchmark, chosen
from tests.bench.models import BLOCK_BYTES, STACK, WIDTH, compute_by_blocks, write_stack
from tests.bench.peers import RATIOS
from tests.bench.server import OUT, BenchError, BenchServer, Bodies, ServerCommand, inferpool
from tests.bench.workloads import photos, tensors, texts

PLACEMENTS: Mapping[str, Mapping[str, object]] = {
    "replicate 1": {"placement": "replicate", "replicas": 1},
    "replicate 2": {"placement": "replicate", "replicas": 2},
    "pipeline 2": {"placement": "pipeline", "replicas": 1, "devices_per_replica": 2},
    "tensor 2": {"placement": "tensor", "replicas": 1, "devices_per_replica": 2},
}
WORKLOADS: Mapping[str, tuple[str, Callable[[], Bodies]]] = {
    "efficientnet": ("efficientnet_lite0", photos),
    "minilm": ("minilm_l6", texts),
    "mlp": (STACK, partial(tensors, WIDTH)),
}
"""Source and bodies of each model."""
_PATIENCE_S = 600.0
_MIB = 1 << 20
_TOLERANCE = 1e-4
"""Allowed deviation, relative to the largest number of the reference."""
_LIMITS = {"memory": "memory.limit_in_bytes", "": "memory.max"}
"""File that limits a control group, by its controller in /proc/PID/cgroup: version 1, and 2."""
_PEAKS = ("memory.max_usage_in_bytes", "memory.peak")
_PARTS = ("memory", "placements", "restart")


@benchmark(
    "replicate, pipeline and tensor: memory, throughput and restarts of each",
    rounds=5,
    secs=6,
    warm=2,
    connections=(1, 16),
    parts=(",".join(_PARTS), "comma-separated"),
    workloads=(",".join(WORKLOADS), "comma-separated"),
    placements=(",".join(PLACEMENTS), "comma-separated; of the parts placements and restart"),
    gib=(3.0, "of parameters of the large model"),
    limit_share=(0.7, "of that, for each process"),
    blocks=(4, "of 128 MiB, of the MLP under load"),
    kills=(10, "of a rank, for each placement"),
)
def split(bench: Benchmark) -> None:
    """Measure each part that was asked for."""
    chosen(bench.args.workloads, WORKLOADS, "workload")
    parts = (_measure_memory, _measure_placements, _measure_restarts)
    for measure in chosen(bench.args.parts, dict(zip(_PARTS, parts, strict=True)), "part").values():
        if bench.is_complete:
            measure(bench)
    caption = (
        "Memory: peak is charged to its control group; deviation is that from the reference. "
        "Restarts: from SIGKILL of one process, as seen over /health every 5 ms."
    )
    bench.report("connections or rank", caption)
    bench.report_ratios("connections", RATIOS, lambda name: name == "replicate 1")


def _measure_placements(bench: Benchmark) -> None:
    """Load each model by each placement, in alternating rounds."""
    bench.take_turns({
        f"{name}, {command.name}": bench.closed_turn(name, WORKLOADS[name][1](), command)
        for name, command in _commands(bench)
    })  # fmt: skip


def _measure_restarts(bench: Benchmark) -> None:
    """Kill a process of each placement, each rank in turn, and time what follows."""
    turns = {
        f"{name}, {command.name}: {bench.args.kills} kills": partial(_restart, bench, name, command)
        for name, command in _commands(bench)
    }
    bench.take_turns(turns, rounds=1)


def _commands(bench: Benchmark) -> Iterator[tuple[str, ServerCommand]]:
    for name in chosen(bench.args.workloads, WORKLOADS, "workload"):
        options = {"num_blocks": bench.args.blocks} if name == "mlp" else {}
        for placement, settings in chosen(bench.args.placements, PLACEMENTS, "placement").items():
            yield name, _serve(bench, placement, WORKLOADS[name][0], settings, **options)


def _restart(bench: Benchmark, workload: str, command: ServerCommand, _: int) -> Iterator[Cell]:
    bodies = WORKLOADS[workload][1]()
    with BenchServer(command, bench.args.port) as server:
        server.wait_ready(bodies)
        for turn in range(bench.args.kills):
            server.post(bodies)  # a worker that has done work is restarted at once
            worker = server.model()["workers"][0]
            pids = [rank["pid"] for rank in worker["ranks"]] or [worker["pid"]]
            began = time.perf_counter()
            os.kill(pids[turn % len(pids)], signal.SIGKILL)
            for __ in server.turns(time.monotonic() + _PATIENCE_S, pause_s=0.005):
                now = server.model()["workers"][0]
                if now["incarnation"] > worker["incarnation"] and now["state"] == "ready":
                    break
            else:
                server.fail("not ready again")
            figures = {"restart_ms": 1000 * (time.perf_counter() - began)}
            yield Cell(f"{workload}, restarts", command.name, 0, figures)


def _measure_memory(bench: Benchmark) -> None:
    """Serve the large model by each placement, each process under the limit."""
    num_blocks = max(2, round(bench.args.gib * 2**30 / BLOCK_BYTES))
    model_bytes = num_blocks * BLOCK_BYTES
    limit_bytes = int(bench.args.limit_share * model_bytes)
    index = write_stack(OUT / "weights" / f"stack-{num_blocks}", num_blocks)
    rows = [np.fromfile(file, np.float32) for file in tensors(WIDTH).files]
    reference = compute_by_blocks(index, num_blocks, torch.from_numpy(np.stack(rows)))
    reasons: list[tuple[str, str]] = []
    settings = {"weights": str(index), "load_timeout_s": _PATIENCE_S, "max_restarts": 1}

    def serve_large(placement: str, limit: int, _: int) -> Iterator[Cell]:
        name = f"{placement}{'' if limit else ', no limit'}"
        is_too_large = placement == "replicate 1" and limit > 0
        with _control_groups(limit) as groups:
            table = {**PLACEMENTS[placement], **settings}
            options = {"num_blocks": num_blocks, "groups": str(groups)}
            server = BenchServer(_serve(bench, name, STACK, table, **options), bench.args.port)
            try:
                with server:
                    yield from _cells_of_large(server, reference, groups, model_bytes)
            except BenchError:
                if not is_too_large:
                    raise
                log = LogReader()
                for line in server.log.read_bytes().splitlines():
                    log.take(line)
                reasons.append((name, log.last_words()))
            else:
                if is_too_large:
                    raise BenchError("it serves, though no process may hold the model")

    limits = [("replicate 1", 0), *((name, limit_bytes) for name in PLACEMENTS)]
    turns = {
        f"large model, {placement}, limit {limit}": partial(serve_large, placement, limit)
        for placement, limit in limits
        if placement != "replicate 2"
    }
    bench.take_turns(turns, rounds=1)
    title = f"Not within {limit_bytes / 2**30:.2f} of {model_bytes / 2**30:.2f} GiB"
    bench.add_table(title, ("placement", "reason"), reasons)


def _serve(
    bench: Benchmark, name: str, source: str, settings: Mapping[str, object], **options: object
) -> ServerCommand:
    """Return the command line of our service with one model."""
    table = {"source": source, "speed": "exact", **settings}
    table |= {f"options.{key}": value for key, value in options.items()}
    rows = {f"models.model.{key}": value for key, value in table.items()}
    return inferpool(bench.args, name=name, settings=rows)


def _cells_of_large(
    server: BenchServer, reference: Tensor, groups: Path, model_bytes: int
) -> Iterator[Cell]:
    """Compare its answers with a reference, and yield the memory of each rank."""
    bodies, began = tensors(WIDTH), time.monotonic()
    server.wait_ready(bodies, timeout_s=_PATIENCE_S)
    start_s = time.monotonic() - began
    answers = [server.post(bodies, number) for number in range(len(bodies.files))]
    rows = [row for each in answers for row in each.raise_for_status().json()["predictions"]]
    deviation = ((torch.tensor(rows) - reference).abs().max() / reference.abs().max()).item()
    if deviation > _TOLERANCE:
        raise BenchError(f"its deviation from the reference is {deviation}")
    worker = server.model()["workers"][0]
    whole = {"rank": 0, "pid": worker["pid"], "part_bytes": model_bytes}
    for rank in worker["ranks"] or [whole]:
        info = psutil.Process(rank["pid"]).memory_full_info()
        peaks = [groups / str(rank["rank"]) / name for name in _PEAKS]
        yield Cell("large", server.command.name, rank["rank"], {
            "part_mib": rank["part_bytes"] / _MIB,
            "uss_mib": info.uss / _MIB,
            "pss_mib": info.pss / _MIB,
            "peak_mib": max((int(each.read_text()) / _MIB for each in peaks if each.exists()),
                            default=0.0),  # the kernel may have no such file
            "start_s": start_s,
            "deviation": deviation,
        })  # fmt: skip


@contextmanager
def _control_groups(limit_bytes: int) -> Iterator[Path]:
    """Make a folder with a control group for each of two ranks, and remove it.

    Args:
        limit_bytes: Memory of each; 0: no limit.
    """
    found = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    controller, path = next((each[1:] for each in found if each[1] in _LIMITS), ("", "/"))
    folder = Path("/sys/fs/cgroup", controller, path.lstrip("/"), f"bench-{os.getpid()}")
    groups = [folder / str(rank) for rank in range(2)]
    try:
        for group in groups:
            group.mkdir(parents=True)
            if limit_bytes:
                (group / _LIMITS[controller]).write_text(str(limit_bytes))
    except OSError as error:
        _remove(groups)
        raise BenchError(f"no control group with a limit can be made here: {error}") from error
    try:
        yield folder
    finally:
        _remove(groups)


def _remove(groups: Sequence[Path]) -> None:
    for group in (*groups, groups[0].parent):
        with suppress(OSError):
            group.rmdir()
