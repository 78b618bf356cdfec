"""`decoders`: pictures a second by the number of decoders, beside the bare loop that decodes.

A worker whose device is played by a wait of 0.1 ms a picture gets batches of eight JPEGs from this
process. The bare loop runs the same `preprocess` in as many processes, and does nothing else.
"""

import asyncio
import math
import multiprocessing
import time
from collections.abc import Iterator
from functools import partial
from multiprocessing.connection import Connection

import psutil

from inferpool.models.item import Item
from inferpool.models.spec import Placement
from inferpool.workers.arena import Arena
from inferpool.workers.config import ModelConfig, WorkerConfig
from inferpool.workers.host.engine import WorkerHandle, WorkerId
from inferpool.workers.host.local import LocalEngine, start_forkserver
from inferpool.workers.messages import ItemError, ItemRef
from tests.bench.frame import Benchmark, Cell, Column
from tests.bench.server import BenchError
from tests.bench.stand_in import StandIn
from tests.models.items import jpeg

HELP = "pictures a second by the number of decoders, and the bare loop that decodes"
OPTIONS = {"rounds": 5, "secs": 4.0}
_BATCH = 8
_WARM_S = 1.0
_START_S = 60.0
_PHOTO = "coffee"
_SOURCE = "tests.bench.stand_in:StandIn"
_COLUMNS = (
    Column("per_s", "pictures/s (range)", 0, "range"),
    Column("worker_us", "worker's CPU us a picture (range)", 0, "range"),
)


def run(bench: Benchmark) -> None:
    """Let the bare loop and the worker take turns."""
    start_forkserver()
    turns = {}
    for num in (1, 2, 3):
        turns[f"bare loop in {num}"] = partial(_bare, num, bench.args.secs)
    with asyncio.Runner() as runner:  # the forkserver lives in one event loop
        for num in (0, 1, 2, 3):
            turns[f"worker with {num}"] = partial(_served, runner, num, bench.args.secs)
        bench.take_turns(turns)


def report(bench: Benchmark) -> None:
    """Print the rates, and their ratios to the bare loop."""
    caption = f"JPEG {_PHOTO} (600 x 400), batches of {_BATCH}, a device of 0.1 ms a picture."
    bench.add_cells("Decoders", "processes", _COLUMNS, caption)
    bench.add_ratios("processes", _COLUMNS[:1], lambda name: name == "bare loop")


def _cell(name: str, num: int, round_: int, per_s: float, worker_us: float) -> Cell:
    figures = {"per_s": per_s, "worker_us": worker_us}
    return Cell(workload="jpeg", contender=name, load=num, round=round_, figures=figures)


def _bare(num: int, secs: float, round_: int) -> Iterator[Cell]:
    spawn = multiprocessing.get_context("spawn")
    pipes = [spawn.Pipe(duplex=True) for _ in range(num)]
    processes = [
        spawn.Process(target=_decode_for, args=(theirs, secs), daemon=True) for _, theirs in pipes
    ]
    for process in processes:
        process.start()
    for ours, _ in pipes:
        ours.recv()  # it is warm
    for ours, _ in pipes:
        ours.send(None)
    yield _cell("bare loop", num, round_, sum(ours.recv() for ours, _ in pipes), 0.0)
    for process in processes:
        process.join(10)


def _decode_for(pipe: Connection, secs: float) -> None:
    import torch

    torch.set_num_threads(1)
    model, item = StandIn(), Item(kind="image", payload=memoryview(jpeg(_PHOTO)))
    with torch.inference_mode():
        for _ in range(100):
            model.preprocess(item)
        pipe.send(None)
        pipe.recv()
        num, began = 0, time.perf_counter()
        while (took := time.perf_counter() - began) < secs:
            model.preprocess(item)
            num += 1
    pipe.send(num / took)


def _served(runner: asyncio.Runner, num: int, secs: float, round_: int) -> Iterator[Cell]:
    per_s, worker_us = runner.run(_serve(num, secs))
    yield _cell("worker" if num else "worker's thread", num, round_, per_s, worker_us)


async def _serve(num: int, secs: float) -> tuple[float, float]:
    """Return the pictures a second, and the worker's CPU microseconds a picture."""
    arena = Arena(1 << 22)
    data = jpeg(_PHOTO)
    offset = arena.put([data], len(data))
    assert offset is not None
    engine = LocalEngine(arena)
    config = WorkerConfig(
        model=ModelConfig(name="m", source=_SOURCE),
        placement=Placement(devices=("cpu",)),
        decoders=num,
    )
    worker = await engine.start(WorkerId(model="m", slot=0), config, lambda _: None)
    try:
        batch = [ItemRef("image", offset, len(data), math.inf)] * _BATCH
        await _load(worker, batch, _WARM_S)
        until = time.perf_counter() + _START_S
        while sum(each.num_done > 0 for each in worker.vitals().decoders) < num:
            if time.perf_counter() > until:
                raise BenchError(f"not all of {num} decoders have begun within {_START_S:g} s")
            await _load(worker, batch, _WARM_S)
        process = psutil.Process(worker.vitals().pid)
        before, began = process.cpu_times(), time.perf_counter()
        num_done = await _load(worker, batch, secs)
        took, after = time.perf_counter() - began, process.cpu_times()
        cpu = after.user + after.system - before.user - before.system
        return num_done / took, cpu / num_done * 1e6
    finally:
        await worker.stop(5)
        await engine.close()
        arena.close()


async def _load(worker: WorkerHandle, batch: list[ItemRef], secs: float) -> int:
    """Keep the worker full for a while; return the number of pictures that it has answered."""
    until, num = time.perf_counter() + secs, 0

    async def ask() -> None:
        nonlocal num
        while time.perf_counter() < until:
            done = await worker.run(batch)
            if any(isinstance(outcome, ItemError) for outcome in done.outcomes):
                raise BenchError(f"an error: {done.outcomes}")
            num += len(done.outcomes)

    await asyncio.gather(*(ask() for _ in range(worker.credit)))
    return num
