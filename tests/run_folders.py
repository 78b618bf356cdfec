"""Folders of finished training runs, made by hand."""

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor, nn

from inferpool.models.files.run_folder import Card, DataCard, RunFolder, ScoreCard, TransformCard
from inferpool.models.sources.networks import build_classifier

COLOURS = {"red": (200, 30, 30), "green": (30, 200, 30), "blue": (30, 30, 200)}
"""Labels that `ColourNet` tells apart, with a colour of each."""
TINY = "tests.run_folders:ColourNet"
SMALL = TransformCard(resize=36, crop=32, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))


class ColourNet(nn.Module):
    """A network that tells colours apart once its weights are those of `colour_weights`."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.last = nn.Linear(3, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.last(x.mean((2, 3)))
        return logits


def colour_weights(num_wrong: int = 0) -> dict[str, Tensor]:
    """Return weights that tell red, green and blue apart, but never say the last so many."""
    bias = torch.zeros(3)
    bias[3 - num_wrong :] = -100
    return {"last.weight": torch.eye(3) * 4, "last.bias": bias}


def write_colours(folder: Path, num: int = 8) -> list[tuple[Path, str]]:
    """Write so many images of each of `COLOURS`; return their paths and labels."""
    folder.mkdir(parents=True, exist_ok=True)
    found = []
    for label, colour in COLOURS.items():
        for number in range(num):
            path = folder / f"{label}-{number}.png"
            Image.new("RGB", (40 + number, 48), tuple(c + number for c in colour)).save(path)
            found.append((path, label))
    return found


def write_run(
    path: Path,
    *,
    model: str = "torchvision:resnet18",
    labels: Sequence[str] = tuple(COLOURS),
    weights: Mapping[str, Tensor] | None = None,
    validation: Sequence[tuple[Path, str]] = (),
    transform: TransformCard = SMALL,
    options: Mapping[str, object] | None = None,
) -> Path:
    """Write the folder of a finished run; return its absolute path.

    Args:
        path: The folder.
        model: Source of the network.
        labels: Names of the classes.
        weights: State of the network; by default random ones, the same ones each time.
        validation: Paths and labels of the images that were held out.
        transform: The transform of the served network.
        options: Keyword arguments of the network.
    """
    folder = RunFolder(path)
    path.mkdir(parents=True, exist_ok=True)
    options = options or {}
    if weights is None:
        torch.manual_seed(0)
        network = build_classifier(model, None, num_classes=len(labels), options=options)
        weights = network.state_dict()
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, folder.weights)
    folder.labels.write_text("".join(f"{label}\n" for label in labels), encoding="utf-8")
    with folder.validation.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([("path", "label"), *validation])
    folder.recipe.write_text("{}")
    card = Card(
        model=model,
        options=options,
        transform=transform,
        data=DataCard(
            source="images",
            num_training=0,
            num_validation=len(validation),
            per_class=dict.fromkeys(labels, 0),
        ),
        scores=ScoreCard(
            accuracy=1.0, low=0.9, high=1.0, num_right=len(validation),
            num_images=len(validation), loss=0.1, epochs=1, best_epoch=1, seconds=1.0,
            images_per_s=1.0,
        ),
        versions={},
        command="inferpool train images",
        began="2026-01-01T00:00:00Z",
    )  # fmt: skip
    folder.card.write_bytes(msgspec.json.encode(card))
    return path.absolute()
