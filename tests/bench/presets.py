"""The speed presets of a classifier: images/s against exact in alternating rounds, on one thread.

Answers are compared on crops and mirror images of scikit-image's photographs.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np
import torch
from PIL import Image
from skimage import data
from torch import nn

from inferpool.models.agreement import LabelTolerance, expected_agreement
from inferpool.models.sources.registry import build
from inferpool.models.spec import Placement
from inferpool.models.speed.choose import SpeedWish, choose
from inferpool.models.speed.presets import prepare, presets_for
from inferpool.models.vision.classifier import Classifier
from inferpool.workers.inside.own_process import pin
from tests.bench.processes import BenchError
from tests.bench.report import Spread, Steps, save, spread, table
from tests.bench.rounds import Plan

HELP = "exact against each speed preset, in speed and in answers"
_SOURCES = "efficientnet_lite0,torchvision:resnet18,torchvision:mobilenet_v3_small"
_PHOTOGRAPHS = (
    "astronaut", "brick", "camera", "cell", "chelsea", "clock", "coffee", "coins", "grass",
    "gravel", "hubble_deep_field", "immunohistochemistry", "moon", "page", "retina", "rocket",
    "text",
)  # fmt: skip
_BATCHES = (1, 4, 8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One preset of one model."""

    source: str
    preset: str
    images_per_s: Mapping[int, Spread]
    """By batch size."""
    ratios: Mapping[int, Spread]
    """To exact, of the same round."""
    agreement: float
    """Of the pictures, those with the same best label."""
    expected: float
    """What the model's tolerance would have made of these pictures."""
    deviation: float
    """The largest of any probability."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sources", default=_SOURCES, help="comma-separated (%(default)s)")
    parser.add_argument(
        "--pictures", type=int, default=722, help="how many to compare answers on (%(default)s)"
    )


def run(args: argparse.Namespace, plan: Plan) -> int:
    pin(Placement(devices=("cpu",)))
    sources = args.sources.split(",")
    rows: list[Row] = []
    chosen: dict[str, str] = {}
    with Steps(2 * len(sources)) as steps:
        for source in sources:
            steps.begin(f"{source}: presets")
            model = _load(source)
            rows += _compare(model, source, pictures()[: args.pictures], plan.rounds)
            steps.end()
            steps.begin(f"{source}: auto")
            wish = SpeedWish(speed="auto", max_batch_size=8, cache_dir=None)
            began = time.monotonic()
            report = choose(model, wish, lambda stage: None)
            chosen[source] = f"{report.text()}; chosen in {time.monotonic() - began:.1f} s"
            steps.end()
    _print(rows)
    for source, text in chosen.items():
        sys.stdout.write(f"auto, {source}: {text}\n")
    save("presets", args.out, {"rows": [asdict(row) for row in rows], "auto": chosen})
    return 0


def pictures() -> Sequence[Image.Image]:
    """Each photograph whole, nine crops of 85 % and of 60 % of its short edge, and all mirrored."""
    arrays = [getattr(data, name)() for name in _PHOTOGRAPHS]
    arrays += data.stereo_motorcycle()[:2]
    views = []
    for array in arrays:
        photo = Image.fromarray(array).convert("RGB")
        width, height = photo.size
        boxes = [(0, 0, width, height)]
        for part in (0.85, 0.6):
            edge = int(min(photo.size) * part)
            for x in (0, (width - edge) // 2, width - edge):
                boxes += [
                    (x, y, x + edge, y + edge) for y in (0, (height - edge) // 2, height - edge)
                ]
        for box in boxes:
            view = photo.crop(box)
            views += [view, view.transpose(Image.Transpose.FLIP_LEFT_RIGHT)]
    # In an order that has a bit of everything in front.
    return [views[i] for i in np.random.default_rng(0).permutation(len(views))]


def _load(source: str) -> Classifier:
    weights = None if source.startswith("torchvision:") else "DEFAULT"
    torch.manual_seed(0)
    model = build(source, weights, {})
    model.load(Placement(devices=("cpu",)))
    if not isinstance(model, Classifier):
        raise BenchError(f"{source} is no classifier")
    return model


def _compare(
    model: Classifier, source: str, views: Sequence[Image.Image], num_rounds: int
) -> list[Row]:
    with torch.inference_mode():
        pixels = torch.stack([model.transform_image(view) for view in views])
        sample = {"image": pixels[:1]}

        def call(network: nn.Module) -> object:
            model.network = network
            return model.forward(sample)

        exact = model.network
        networks = {"exact": exact}
        for name in presets_for(exact, torch.device("cpu")):
            networks[name] = prepare(name, exact, call)
        seconds = _time(model, networks, pixels, num_rounds)
        scores = {name: _scores(model, network, pixels) for name, network in networks.items()}
        model.network = exact
    rows = []
    for name, own in scores.items():
        per_s = {b: [b / s for s in seconds[name, b]] for b in _BATCHES}
        ratios = {
            b: [e / s for e, s in zip(seconds["exact", b], seconds[name, b], strict=True)]
            for b in _BATCHES
        }
        is_same = own.argmax(-1) == scores["exact"].argmax(-1)
        rows.append(
            Row(
                source=source,
                preset=name,
                images_per_s={b: spread(values) for b, values in per_s.items()},
                ratios={b: spread(values) for b, values in ratios.items()},
                agreement=is_same.float().mean().item(),
                expected=expected_agreement(scores["exact"], own),
                deviation=(own - scores["exact"]).abs().max().item(),
            )
        )
    return rows


def _time(
    model: Classifier,
    networks: Mapping[str, nn.Module],
    pixels: torch.Tensor,
    num_rounds: int,
) -> dict[tuple[str, int], list[float]]:
    """Seconds of a batch, by preset and batch size: for each round the median of three."""
    seconds: dict[tuple[str, int], list[float]] = {}
    for round_ in range(num_rounds + 1):
        for size in _BATCHES:
            for name, network in networks.items():
                model.network = network
                taken = []
                for _ in range(3):
                    began = time.perf_counter()
                    model.forward({"image": pixels[:size]})
                    taken.append(time.perf_counter() - began)
                if round_:  # the first one warms up
                    seconds.setdefault((name, size), []).append(statistics.median(taken))
    return seconds


def _scores(model: Classifier, network: nn.Module, pixels: torch.Tensor) -> torch.Tensor:
    model.network = network
    batches = [model.forward({"image": batch}) for batch in pixels.split(8)]
    return torch.cat([model.postprocess(each)["probabilities"] for each in batches])


def _print(rows: Sequence[Row]) -> None:
    columns = ["model", "preset"]
    columns += [f"{what}, {size}" for size in _BATCHES for what in ("images/s", "x exact")]
    columns += ["same label", "expected", "largest deviation"]
    cells = []
    for row in rows:
        speeds = [
            text
            for size in _BATCHES
            for text in (f"{row.images_per_s[size].median:,.0f}", row.ratios[size].text(2))
        ]
        answers = [f"{row.agreement:.1%}", f"{row.expected:.1%}", f"{row.deviation:.1e}"]
        cells.append([row.source.rpartition(":")[2], row.preset, *speeds, *answers])
    wanted = LabelTolerance()
    caption = (
        "Medians over the rounds, one thread; x exact: of the ratios within each round, with their "
        f"range. Asked for: {wanted.min_agreement:.0%} and {wanted.max_deviation}. torchvision's "
        "networks have random weights here: their answers say little about trained ones."
    )
    table("Speed presets", columns, cells, caption)
