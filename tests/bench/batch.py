"""`batch`: photographs a second by `inferpool batch`, beside plain processes.

The plain processes, one for each core, decode, batch and compute in a loop, with the same model and
the settings of our allocator. Both read the same JPEGs: parts of photographs of scikit-image.
Neither's start counts.
"""

import multiprocessing
import re
import subprocess
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import psutil
import skimage.data
from PIL import Image

from inferpool.models.item import Item
from inferpool.models.spec import Placement
from inferpool.models.vision.efficientnet import EfficientNetLite0
from inferpool.workers.inside.allocator import keep_large_buffers
from tests.bench.frame import Benchmark, Cell, Column
from tests.bench.server import BenchError

HELP = "photographs a second of inferpool batch, and of plain processes"
OPTIONS = {
    "rounds": 5,
    "photos": (2000, "photographs of a turn"),
    "size": (8, "batch size of the plain processes"),
    "args": ("", "further arguments of inferpool batch"),
}
_PHOTOS = ("chelsea", "astronaut", "coffee", "rocket")
_COLUMNS = (Column("per_s", "photographs/s (range)", 1, "range"),)
_RATE = re.compile(r"([\d.,]+)/s")


def run(bench: Benchmark) -> None:
    """Let both take turns."""
    num = psutil.cpu_count() or 1
    with tempfile.TemporaryDirectory() as folder:
        paths = _make_photos(Path(folder), bench.args.photos)
        bench.take_turns(
            {
                "plain processes": partial(_plain, paths, num, bench.args.size),
                "inferpool batch": partial(_batch, folder, bench.args),
            }
        )


def report(bench: Benchmark) -> None:
    """Print the rates, and their ratios to the plain processes."""
    bench.add_cells("Batch", "processes", _COLUMNS, "efficientnet_lite0 on the CPU.")
    bench.add_ratios("processes", _COLUMNS, lambda name: name == "plain processes")


def _make_photos(folder: Path, num: int) -> Sequence[Path]:
    random = np.random.default_rng(0)
    images = [Image.fromarray(getattr(skimage.data, name)()) for name in _PHOTOS]
    paths = []
    for number in range(num):
        image = images[number % len(images)]
        width, height = image.size
        x, y = random.integers(0, width // 4), random.integers(0, height // 4)
        paths.append(folder / f"{number:05}.jpg")
        part = image.crop((x, y, x + width * 3 // 4, y + height * 3 // 4))
        part.save(paths[-1], "JPEG", quality=90)
    return paths


def _cell(name: str, round_: int, per_s: float) -> Cell:
    num = psutil.cpu_count() or 1
    figures = {"per_s": per_s}
    return Cell(workload="photographs", contender=name, load=num, round=round_, figures=figures)


def _batch(folder: str, args: Namespace, round_: int) -> Iterator[Cell]:
    options = vars(args)
    command = [options["inferpool"], "batch", folder, "--output", f"{folder}.jsonl", "--overwrite"]
    done = subprocess.run(
        [*command, *options["args"].split()], capture_output=True, text=True, timeout=1800
    )
    Path(f"{folder}.jsonl").unlink(missing_ok=True)
    rates = _RATE.findall(done.stderr)
    if done.returncode or not rates:
        raise BenchError(f"inferpool batch ended with {done.returncode}: {done.stderr[-2000:]}")
    yield _cell("inferpool batch", round_, float(rates[-1].replace(",", "")))


def _plain(paths: Sequence[Path], num: int, size: int, round_: int) -> Iterator[Cell]:
    spawn = multiprocessing.get_context("spawn")
    pipes = [spawn.Pipe() for _ in range(num)]
    processes = [
        spawn.Process(target=_compute, args=(theirs, paths[rank::num], size), daemon=True)
        for rank, (_, theirs) in enumerate(pipes)
    ]
    for process in processes:
        process.start()
    for ours, _ in pipes:
        ours.recv()  # it is warm
    began = time.monotonic()
    for ours, _ in pipes:
        ours.send(None)
    for ours, _ in pipes:
        ours.recv()
    yield _cell("plain processes", round_, len(paths) / (time.monotonic() - began))
    for process in processes:
        process.join(10)


def _compute(pipe: Connection, paths: Sequence[Path], size: int) -> None:
    import torch

    keep_large_buffers()
    torch.set_num_threads(1)
    model = EfficientNetLite0()
    model.load(Placement(devices=("cpu",)))
    with torch.inference_mode():
        _predict(model, paths[:size])
        pipe.send(None)
        pipe.recv()
        for first in range(0, len(paths), size):
            _predict(model, paths[first : first + size])
    pipe.send(None)


def _predict(model: EfficientNetLite0, paths: Sequence[Path]) -> None:
    items = [Item(kind="image", payload=memoryview(path.read_bytes())) for path in paths]
    batch = model.collate([model.preprocess(item) for item in items])
    model.render_batch(model.postprocess(model.forward(batch)), [{} for _ in items])
