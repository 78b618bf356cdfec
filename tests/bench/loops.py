"""`presets` and `decoders`: what models and decoders do in a bare loop.

`presets` measures the speed presets of a classifier on one thread beside exact, and `decoders` a
worker whose device is played by a wait beside the same preparing alone.
"""

import asyncio
import math
import random
import time
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import cycle, islice
from multiprocessing.synchronize import Barrier
from statistics import median

import psutil
import torch
from PIL import Image, ImageOps
from skimage import data

from inferpool.models.item import Item
from inferpool.models.label_tolerance import LabelTolerance, expected_agreement
from inferpool.models.sources.registry import build
from inferpool.models.spec import Placement
from inferpool.models.speed.presets import prepare, presets_for
from inferpool.models.vision.classifier import Classifier
from inferpool.workers.host.engine import WorkerHandle, WorkerId
from inferpool.workers.host.local import LocalEngine, start_forkserver
from inferpool.workers.inside.own_process import pin
from inferpool.workers.shared.arena import Arena
from inferpool.workers.shared.config import ModelConfig, WorkerConfig
from inferpool.workers.shared.messages import ItemError, ItemRef
from tests.bench.frame import Benchmark, Cell, Turn, benchmark
from tests.bench.models import STAND_IN, StandIn
from tests.bench.server import BenchError
from tests.bench.together import run_together
from tests.bench.workloads import photograph
from tests.models.items import jpeg

_READY_S = 600.0
_BATCH = 8
_PHOTOGRAPHS = (
    "astronaut", "brick", "camera", "cell", "chelsea", "clock", "coffee", "coins", "grass",
    "gravel", "hubble_deep_field", "immunohistochemistry", "moon", "page", "retina", "rocket",
    "text", "stereo_motorcycle",
)  # fmt: skip
_SIZES = (1, 4, 8)
_TURN_S = 1.0
"""Seconds of load until the decoders that have not begun are looked for once more."""


@benchmark(
    "exact against each speed preset, in speed and in answers",
    rounds=5,
    sources=(
        "efficientnet_lite0,torchvision:resnet18,torchvision:mobilenet_v3_small",
        "comma-separated",
    ),
    pictures=(722, "how many to compare answers on"),
)
def presets(bench: Benchmark) -> None:
    """Time each preset of each model, and compare its answers with those of exact."""
    pin(Placement(devices=("cpu",)))
    views = _views(bench.args.pictures)
    answers: list[Sequence[str]] = []
    for source in bench.args.sources.split(","):
        torch.manual_seed(0)
        model = build(source, None if source.startswith("torchvision:") else "DEFAULT", {})
        if not isinstance(model, Classifier):
            raise BenchError(f"{source} is no classifier")
        model.load(Placement(devices=("cpu",)))
        timed = _TimedPresets(model, source, views)
        with torch.inference_mode():
            bench.take_turns({source: timed.take_turn})
            answers += timed.compare()
    bench.report("batch", "One thread.")
    bench.report_ratios("batch", ["images_per_s"], lambda name: name == "exact")
    wanted = LabelTolerance()
    caption = (
        f"Wanted: {wanted.min_agreement:.0%} and {wanted.max_deviation}. expected: the agreement "
        "that the model's tolerance estimates. torchvision's networks have random weights here: "
        "their answers say little about trained ones."
    )
    columns = ("model", "preset", "same label", "expected", "largest deviation")
    bench.add_table("Answers against exact", columns, answers, caption)


class _TimedPresets:
    """The networks of one classifier, by preset, and the pictures that they compute."""

    def __init__(self, model: Classifier, source: str, views: Sequence[Image.Image]) -> None:
        self._model, self._source = model, source
        self._pixels = torch.stack([model.transform_image(view) for view in views])
        exact = model.network
        assert isinstance(exact, torch.nn.Module)
        self._networks = {"exact": exact}
        for name in presets_for(exact, torch.device("cpu")):
            self._networks[name] = prepare(name, exact, self._call)

    def _call(self, network: torch.nn.Module) -> object:
        self._model.network = network
        return self._model.forward({"image": self._pixels[:1]})

    def take_turn(self, _: int) -> Iterator[Cell]:
        """Time each batch size by each preset: the median of three, after one that warms up."""
        for size in _SIZES:
            for name, network in self._networks.items():
                self._model.network = network
                taken = []
                for _ in range(4):
                    began = time.perf_counter()
                    self._model.forward({"image": self._pixels[:size]})
                    taken.append(time.perf_counter() - began)
                yield Cell(self._source, name, size, {"images_per_s": size / median(taken[1:])})

    def compare(self) -> Iterator[Sequence[str]]:
        """Compare the answers of each preset with those of exact."""
        exact = None
        for name, network in self._networks.items():
            self._model.network = network
            batches = [self._model.forward({"image": batch}) for batch in self._pixels.split(8)]
            own = torch.cat([self._model.postprocess(each)["probabilities"] for each in batches])
            exact = own if exact is None else exact
            agreement = (own.argmax(-1) == exact.argmax(-1)).float().mean().item()
            expected, deviation = expected_agreement(exact, own), (own - exact).abs().max().item()
            figures = (f"{agreement:.1%}", f"{expected:.1%}", f"{deviation:.1e}")
            yield self._source, name, *figures


def _views(num: int) -> Sequence[Image.Image]:
    """Return crops of scikit-image's photographs in turn, half of them mirrored."""
    photographs = [photograph(name) for name in _PHOTOGRAPHS]
    photographs.append(Image.fromarray(data.stereo_motorcycle()[1]).convert("RGB"))
    chance = random.Random(0)
    views = []
    for photo in islice(cycle(photographs), num):
        edge = int(min(photo.size) * chance.uniform(0.6, 1))
        x, y = (chance.randint(0, side - edge) for side in photo.size)
        view = photo.crop((x, y, x + edge, y + edge))
        views.append(ImageOps.mirror(view) if chance.random() < 0.5 else view)
    return views


@benchmark(
    "pictures a second by the number of decoders, and the bare loop that decodes",
    rounds=5,
    secs=4.0,
    warm=1.0,
    numbers=((1, 2, 3), "comma-separated: of decoders, and of processes with the bare loop"),
)
def decoders(bench: Benchmark) -> None:
    """Let the bare loop and the worker take turns."""
    start_forkserver()
    numbers, secs, warm_s = bench.args.numbers, bench.args.secs, bench.args.warm
    turns: dict[str, Turn] = {f"bare loop in {num}": partial(_bare, num, secs) for num in numbers}
    with asyncio.Runner() as runner:  # the forkserver lives in one event loop
        for num in (0, *numbers):
            turns[f"worker with {num}"] = partial(_served, runner, num, secs, warm_s)
        bench.take_turns(turns)
    caption = f"JPEG coffee (600 x 400), batches of {_BATCH}, a device of 0.1 ms a picture."
    bench.report("processes", caption)
    bench.report_ratios("processes", ["per_s"], lambda name: name == "bare loop")


def _bare(num: int, secs: float, _: int) -> Iterator[Cell]:
    rates = run_together(_decode_for, [secs] * num)
    yield Cell("jpeg", "bare loop", num, {"per_s": sum(rates)})


def _decode_for(barrier: Barrier, secs: float) -> float:
    torch.set_num_threads(1)
    model, item = StandIn(), Item(kind="image", payload=memoryview(jpeg("coffee")))
    with torch.inference_mode():
        for _ in range(100):
            model.preprocess(item)
        barrier.wait(_READY_S)
        num, began = 0, time.perf_counter()
        while (took_s := time.perf_counter() - began) < secs:
            model.preprocess(item)
            num += 1
    return num / took_s


def _served(runner: asyncio.Runner, num: int, secs: float, warm_s: float, _: int) -> Iterator[Cell]:
    figures = runner.run(_serve(num, secs, warm_s))
    yield Cell("jpeg", "worker" if num else "worker's thread", num, figures)


async def _serve(num: int, secs: float, warm_s: float) -> dict[str, float]:
    """Return the pictures a second, and the worker's CPU microseconds a picture."""
    arena, photo = Arena(1 << 22), jpeg("coffee")
    offset = arena.put([photo], len(photo))
    assert offset is not None
    engine = LocalEngine(arena)
    config = WorkerConfig(
        model=ModelConfig(name="m", source=STAND_IN),
        placement=Placement(devices=("cpu",)),
        decoders=num,
    )
    worker = await engine.start(WorkerId(model="m", slot=0), config, lambda _: None)
    try:
        batch = [ItemRef("image", offset, len(photo), math.inf)] * _BATCH
        await _load(worker, batch, warm_s)
        until = time.perf_counter() + _READY_S
        while sum(each.num_decoded > 0 for each in worker.vitals().decoders) < num:
            if time.perf_counter() > until:
                raise BenchError(f"not all of {num} decoders have begun within {_READY_S:g} s")
            await _load(worker, batch, _TURN_S)
        process = psutil.Process(worker.vitals().pid)
        cpu_s, began = sum(process.cpu_times()[:2]), time.perf_counter()
        num_done = await _load(worker, batch, secs)
        took_s = time.perf_counter() - began
        cpu_s = sum(process.cpu_times()[:2]) - cpu_s
        return {"per_s": num_done / took_s, "worker_us": cpu_s / num_done * 1e6}
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
