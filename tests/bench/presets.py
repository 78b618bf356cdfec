"""`presets`: the speed presets of a classifier against exact, on one thread, and their answers.

Answers are compared on crops and mirror images of scikit-image's photographs.
"""

import random
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import torch
from PIL import Image, ImageOps
from skimage import data
from torch import nn

from inferpool.models.agreement import LabelTolerance, expected_agreement
from inferpool.models.sources.registry import build
from inferpool.models.spec import Placement
from inferpool.models.speed.presets import prepare, presets_for
from inferpool.models.vision.classifier import Classifier
from inferpool.workers.inside.own_process import pin
from tests.bench.frame import Benchmark, Cell, Column
from tests.bench.server import BenchError

HELP = "exact against each speed preset, in speed and in answers"
OPTIONS = {
    "rounds": 5,
    "sources": (
        "efficientnet_lite0,torchvision:resnet18,torchvision:mobilenet_v3_small",
        "comma-separated",
    ),
    "pictures": (722, "how many to compare answers on"),
}
_PHOTOGRAPHS = (
    "astronaut", "brick", "camera", "cell", "chelsea", "clock", "coffee", "coins", "grass",
    "gravel", "hubble_deep_field", "immunohistochemistry", "moon", "page", "retina", "rocket",
    "text",
)  # fmt: skip
_BATCHES = (1, 4, 8)
_COLUMN = Column("images_per_s", "images/s", 0, "range")


def run(bench: Benchmark) -> None:
    """Time each preset of each model, and compare its answers with those of exact."""
    pin(Placement(devices=("cpu",)))
    views = pictures(bench.args.pictures)
    answers: list[Mapping[str, object]] = []
    bench.content["answers_to_pictures"] = answers
    for source in bench.args.sources.split(","):
        model = _load(source)
        with torch.inference_mode():
            pixels = torch.stack([model.transform_image(view) for view in views])
            exact = model.network
            networks = _prepared(model, pixels)
            bench.take_turns({source: partial(_time, model, source, networks, pixels)})
            answers += _compare(model, source, networks, pixels)
            model.network = exact


def report(bench: Benchmark) -> None:
    """Print speeds, ratios to exact, and the agreement of answers."""
    bench.add_cells("Speed presets, one thread", "batch", [_COLUMN])
    bench.add_ratios("batch", [_COLUMN], lambda name: name == "exact")
    rows = [
        (str(each["source"]), str(each["preset"]), f"{each['agreement']:.1%}",
         f"{each['expected']:.1%}", f"{each['deviation']:.1e}")
        for each in bench.content["answers_to_pictures"]
    ]  # fmt: skip
    wanted = LabelTolerance()
    caption = (
        f"Wanted: {wanted.min_agreement:.0%} and {wanted.max_deviation}. expected: the agreement "
        "that the model's tolerance estimates. torchvision's networks have random weights here: "
        "their answers say little about trained ones."
    )
    columns = ("model", "preset", "same label", "expected", "largest deviation")
    bench.add_table("Answers against exact", columns, rows, caption)


def pictures(num: int) -> Sequence[Image.Image]:
    """Return crops of scikit-image's photographs in turn, half of them mirrored."""
    photos = [Image.fromarray(getattr(data, name)()).convert("RGB") for name in _PHOTOGRAPHS]
    photos += [Image.fromarray(array).convert("RGB") for array in data.stereo_motorcycle()[:2]]
    chance = random.Random(0)
    views = []
    for number in range(num):
        photo = photos[number % len(photos)]
        edge = int(min(photo.size) * chance.uniform(0.6, 1))
        x, y = (chance.randint(0, side - edge) for side in photo.size)
        view = photo.crop((x, y, x + edge, y + edge))
        views.append(ImageOps.mirror(view) if chance.random() < 0.5 else view)
    return views


def _load(source: str) -> Classifier:
    weights = None if source.startswith("torchvision:") else "DEFAULT"
    torch.manual_seed(0)
    model = build(source, weights, {})
    model.load(Placement(devices=("cpu",)))
    if not isinstance(model, Classifier):
        raise BenchError(f"{source} is no classifier")
    return model


def _prepared(model: Classifier, pixels: torch.Tensor) -> Mapping[str, nn.Module]:
    def call(network: nn.Module) -> object:
        model.network = network
        return model.forward({"image": pixels[:1]})

    exact = model.network
    assert isinstance(exact, nn.Module)
    names = presets_for(exact, torch.device("cpu"))
    return {"exact": exact, **{name: prepare(name, exact, call) for name in names}}


def _time(
    model: Classifier,
    source: str,
    networks: Mapping[str, nn.Module],
    pixels: torch.Tensor,
    round_: int,
) -> Iterator[Cell]:
    """Time each batch size by each preset: the median of three, after one that warms up."""
    for size in _BATCHES:
        for name, network in networks.items():
            model.network = network
            taken = []
            for _ in range(4):
                began = time.perf_counter()
                model.forward({"image": pixels[:size]})
                taken.append(time.perf_counter() - began)
            figures = {"images_per_s": size / statistics.median(taken[1:])}
            yield Cell(workload=source, contender=name, load=size, round=round_, figures=figures)


def _compare(
    model: Classifier, source: str, networks: Mapping[str, nn.Module], pixels: torch.Tensor
) -> Iterator[Mapping[str, object]]:
    scores = {}
    for name, network in networks.items():
        model.network = network
        batches = [model.forward({"image": batch}) for batch in pixels.split(8)]
        scores[name] = torch.cat([model.postprocess(each)["probabilities"] for each in batches])
        exact, own = scores["exact"], scores[name]
        yield {
            "source": source,
            "preset": name,
            "agreement": (own.argmax(-1) == exact.argmax(-1)).float().mean().item(),
            "expected": expected_agreement(exact, own),
            "deviation": (own - exact).abs().max().item(),
        }
