"""A classifier of drawn shapes, with weights of our own: `train.py` writes them."""

import random
from pathlib import Path

from PIL import Image, ImageDraw
from torch import nn

from inferpool.models.vision.classifier import Classifier
from inferpool.models.vision.transforms import ImageTransform

LABELS = ["circle", "square", "triangle"]
EDGE = 32
WEIGHTS = Path(__file__).with_name("shapes.safetensors")


class Shapes(Classifier):
    """Says which shape is in a picture. JPEGs, PNGs, pixels and `top_k` come with `Classifier`."""

    checkpoint = WEIGHTS

    def __init__(self) -> None:
        super().__init__(transform=ImageTransform(resize=EDGE, crop=EDGE), labels=LABELS)

    def build_network(self) -> nn.Module:
        """Build the network that `train.py` trained: float32 [B, 3, 32, 32] to [B, 3] logits."""
        return network()


def network() -> nn.Module:
    """Build a small convolutional network without its weights."""
    layers: list[nn.Module] = []
    for channels_in, channels_out in ((3, 16), (16, 32), (32, 64)):
        layers += [
            nn.Conv2d(channels_in, channels_out, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels_out),
            nn.ReLU(),
            nn.MaxPool2d(2),
        ]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(256, 3))


def draw(label: str, chance: random.Random) -> Image.Image:
    """Draw a shape of a random size and colour at a random place."""
    image = Image.new("RGB", (EDGE, EDGE), _colour(chance, 160, 255))
    x, y, radius = chance.uniform(12, 20), chance.uniform(12, 20), chance.uniform(6, 10)
    sides = {"square": 4, "triangle": 3}.get(label)
    fill = _colour(chance, 0, 110)
    if sides is None:
        ImageDraw.Draw(image).ellipse((x - radius, y - radius, x + radius, y + radius), fill=fill)
    else:
        ImageDraw.Draw(image).regular_polygon((x, y, radius), sides, fill=fill)
    return image


def _colour(chance: random.Random, least: int, most: int) -> tuple[int, int, int]:
    red, green, blue = (chance.randint(least, most) for _ in range(3))
    return red, green, blue
