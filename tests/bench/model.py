"""`model`: images per second of the service, against plain processes that do the same in a loop."""

import argparse
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import cycle, islice
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnContext
from pathlib import Path
from unittest import mock

import torch

from inferpool.models.item import Item
from inferpool.models.sources.registry import build
from inferpool.models.spec import Placement
from inferpool.workers.host.devices import find_host
from inferpool.workers.host.placing import PlacementRequest, place
from tests.bench.frame import Benchmark, Cell, Turn
from tests.bench.peers import COLUMNS, RATIO_COLUMNS
from tests.bench.server import (
    MALLOC,
    BenchError,
    BenchServer,
    Probe,
    ServerCommand,
    ask,
    inferpool,
    machine_cpu_s,
)
from tests.bench.workloads import photos

HELP = "the model under load, against plain processes that do the same with no service"
OPTIONS = {
    "rounds": 5,
    "secs": 8,
    "warm": 2,
    "connections": (16, 64),
    "source": ("efficientnet_lite0", "the model"),
    "weights": ("DEFAULT", "its weights"),
    "batch": (8, "the largest batch"),
    "processes": (0, "replicas; 0: as many as the service chooses"),
    "threads": (0, "of each; 0: as many as the service chooses"),
}
_LOAD_TIMEOUT_S = 180
_PLAIN: Mapping[str, Mapping[str, str]] = {"plain": {}, "plain+malloc": MALLOC}
"""Variables of the plain processes, by name."""


def run(bench: Benchmark) -> None:
    """Measure the plain processes, and the service with as many workers."""
    request = PlacementRequest(
        replicas=bench.args.processes or None, threads=bench.args.threads or None
    )
    environ = os.environ
    host = find_host(environ.get("CUDA_VISIBLE_DEVICES"), environ.get("CUDA_DEVICE_ORDER", ""))
    placements = place(host, request)
    turns: dict[str, Turn] = {
        name: partial(_take_plain_turn, bench, placements, name) for name in _PLAIN
    }
    service = _service(bench.args, placements)
    await_all = partial(_await_workers, num_expected=len(placements))
    turns["the service"] = bench.closed_turn(bench.args.source, photos(), service, await_all)
    bench.take_turns(turns)


def report(bench: Benchmark) -> None:
    """Print both, and the ratios; the plain processes stand at each number of connections."""
    columns = [each for each in COLUMNS if each.figure in ("requests_per_s", "cpu_s_per_1000")]
    bench.add_cells("The service and plain processes, in images", "connections", columns)
    bench.add_ratios("connections", RATIO_COLUMNS, lambda name: name in _PLAIN)


def _take_plain_turn(
    bench: Benchmark, placements: Sequence[Placement], name: str, round_: int
) -> Iterator[Cell]:
    files = photos().files
    context = SpawnContext()
    links, processes = [], []
    try:
        for number, placement in enumerate(placements):
            # Each begins with another photograph, as the service's workers would.
            start = number * len(files) // len(placements)
            link, far = context.Pipe()
            arguments = (far, bench.args, placement, [*files[start:], *files[:start]])
            process = context.Process(target=_be_plain, args=arguments, daemon=True)
            gpus = {"CUDA_VISIBLE_DEVICES": ",".join(placement.visible)}
            with mock.patch.dict(
                os.environ, {**_PLAIN[name], **(gpus if placement.visible else {})}
            ):
                process.start()
            far.close()
            links.append(link)
            processes.append(process)
        for link in links:
            _receive(link)
        before, began = machine_cpu_s(), time.monotonic()
        for link in links:
            link.send(bench.args.secs)
        results = [_receive(link) for link in links]
        after, wall_s = machine_cpu_s(), time.monotonic() - began
    finally:
        for process in processes:
            process.kill()
            process.join()
    cpu_s = sum(each["cpu_s"] for each in results)
    figures = {
        "requests_per_s": sum(each["num_images"] / each["duration_s"] for each in results),
        "cpu_s_per_1000": cpu_s / sum(each["num_images"] for each in results) * 1000,
        "noise": max(0.0, after - before - cpu_s) / wall_s,
    }
    for connections in bench.args.connections:
        yield Cell(
            workload=bench.args.source, contender=name, load=connections, round=round_,
            figures=figures,
        )  # fmt: skip


def _receive(link: Connection) -> dict[str, float]:
    try:
        if link.poll(_LOAD_TIMEOUT_S):
            result: dict[str, float] = link.recv()
            return result
    except EOFError:
        pass
    raise BenchError("a plain process ended (see above), or took too long")


def _be_plain(
    link: Connection, args: argparse.Namespace, placement: Placement, files: Sequence[Path]
) -> None:
    """Decode, batch and compute in a loop, in a process of its own."""
    if placement.cpus:
        os.sched_setaffinity(0, placement.cpus)
    torch.set_num_threads(placement.num_threads)
    model = build(args.source, None if args.weights == "none" else args.weights, {})
    model.load(placement)
    payloads = cycle([file.read_bytes() for file in files])

    def compute_batch() -> None:
        items = [
            Item(kind="image", payload=memoryview(payload))
            for payload in islice(payloads, args.batch)
        ]
        with torch.inference_mode():
            outputs = model.forward(model.collate([model.preprocess(item) for item in items]))
            # On a GPU nothing has been computed before the outputs are here.
            for output in outputs.values():
                output.cpu()

    for _ in range(3):
        compute_batch()
    link.send({})
    secs = link.recv()
    began, cpu_began, num_images = time.perf_counter(), time.process_time(), 0
    while (duration_s := time.perf_counter() - began) < secs:
        compute_batch()
        num_images += args.batch
    cpu_s = time.process_time() - cpu_began
    link.send({"num_images": num_images, "duration_s": duration_s, "cpu_s": cpu_s})


def _service(args: argparse.Namespace, placements: Sequence[Placement]) -> ServerCommand:
    name = args.source.rpartition(":")[2].upper().replace("-", "_").replace(".", "_")
    threads = {f"INFERPOOL_MODELS__{name}__THREADS_PER_REPLICA": str(placements[0].num_threads)}
    flags = ["--weights", args.weights, "--speed", "exact", "--max-batch-size", str(args.batch)]
    flags += ["--replicas", str(len(placements))]
    return inferpool(args.inferpool, args.source, *flags, env=threads)


def _await_workers(server: BenchServer, num_expected: int) -> None:
    """Wait until the service has as many workers as there are plain processes.

    Raises:
        BenchError: It does not come to have that many.
    """
    until = time.monotonic() + _LOAD_TIMEOUT_S
    while True:
        _, health = ask(server.port, Probe(path="/health"))
        workers = json.loads(health)["models"][0]["workers"]
        num_ready = sum(worker["state"] == "ready" for worker in workers)
        if num_ready == num_expected == len(workers):
            return
        if len(workers) != num_expected or time.monotonic() > until:
            found = f"{num_ready} ready workers of {len(workers)}"
            raise BenchError(f"the service has {found}; {num_expected} are to be compared")
        time.sleep(0.05)
