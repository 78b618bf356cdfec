"""Chooses the numbers that a training run's settings leave open. No torch.

The constants are starting points that do well on small sets of images; none is optimal.
"""

import math
import re
from collections.abc import Callable, Sequence

from inferpool.models.training.samples import ImageFacts

USUAL_EDGE = 224
"""The edge that most networks were trained with, in pixels."""
_EDGES = (32, 48, 64, 96, 128, 160, 192, 224)
_STEP = 32
"""Most networks halve their input five times."""
_LEAST_EDGE = 32
_LEAST_LOADED_EDGE = 64
"""Below it, features of published weights are useless: their last layer is 1 x 1."""

_SHOWN = 40_000
"""Images shown from random weights, repeated ones included. resnet18 on 1,437 digits had 98 % right
after 5 epochs and 99 % after 20; this makes 28, in under two minutes on two cores."""
_SHOWN_LOADED = 10_000
"""The same for weights that only need tuning."""
_EPOCHS = (10, 60)
_EPOCHS_LOADED = (3, 30)

_BATCHES = ((20_000, 256), (2000, 64), (320, 32), (80, 16), (0, 8))
"""Least images for a size of batches. Small sets need small ones, for some steps an epoch."""

_RATE, _MOST_RATE = 1e-3, 3e-3
"""Rates of AdamW from random weights, for a batch of 32; it grows with the batch's root."""
_RATE_LOADED = 3e-4
_RATE_BATCH = 32

_AVERAGED_SHARE = 0.05
"""Part of the run that the average of weights spans: the last steps, which have a low rate."""
_AVERAGED_EPOCHS = (0.2, 2.0)
_LEAST_AVERAGED_STEPS = 100
"""In fewer steps the first weights would still dominate the average."""

_DIGITS = re.compile(r"\d{1,2}")
_NUMERALS = frozenset(
    (*("zero", "one", "two", "three", "four", "five"), *("six", "seven", "eight", "nine", "ten"))
)
_SIDES = frozenset(("left", "right", "leftward", "rightward", "east", "west"))

_FEW_IMAGES, _SMALL_EDGE = 20_000, 64
"""Up to this number of images and this edge, reading takes less than a tenth of a step on a CPU."""
_MOST_READERS = 8


def kind_of(labels: Sequence[str]) -> str:
    """Return the kind of labels that mirroring an image would change; empty if it would not.

    Returns:
        "digits", "letters", "directions" or "".
    """
    lower = [label.strip().lower() for label in labels]
    if all(_DIGITS.fullmatch(label) or label in _NUMERALS for label in lower):
        return "digits"
    if all(len(label) == 1 for label in lower):
        return "letters"
    if any(_SIDES.intersection(re.split(r"[\W_]+", label)) for label in lower):
        return "directions"
    return ""


def edge_for(
    short_edge: int, native: int, *, has_weights: bool, fits: Callable[[int], bool]
) -> int | None:
    """Return the edge of a network's input, in pixels; None if it accepts none of those tried.

    Args:
        short_edge: Median of the images' shorter edges; 0 if it is unknown.
        native: The edge that the network was published with, or the usual one.
        has_weights: True if the network begins with weights.
        fits: Returns whether the network accepts an edge.
    """
    is_small = short_edge * 2 <= native
    if not short_edge or (has_weights and not is_small):
        wanted = native
    else:
        least = _LEAST_LOADED_EDGE if has_weights else _LEAST_EDGE
        wanted = min(native, max(least, math.ceil(short_edge / _STEP) * _STEP))
    larger = sorted(edge for edge in {*_EDGES, native} if edge > wanted)
    return next((edge for edge in (wanted, *larger) if fits(edge)), None)


def epochs_for(num_images: int, *, has_weights: bool) -> int:
    """Return how many times to show each image."""
    shown, (least, most) = (_SHOWN_LOADED, _EPOCHS_LOADED) if has_weights else (_SHOWN, _EPOCHS)
    return min(most, max(least, round(shown / num_images)))


def batch_for(num_images: int, multiple: int) -> int:
    """Return the images of a step: a number that ranks and passes divide evenly."""
    size = next(size for least, size in _BATCHES if num_images >= least)
    size = min(size, num_images)
    return max(2 * multiple, size // multiple * multiple)  # batch norms need two images a pass


def rate_for(batch_size: int, *, has_weights: bool) -> float:
    """Return the highest learning rate, with two digits."""
    rate = (_RATE_LOADED if has_weights else _RATE) * math.sqrt(batch_size / _RATE_BATCH)
    return float(f"{min(rate, _MOST_RATE):.1e}")


def decay_for(num_steps: int, steps_per_epoch: int) -> float:
    """Return the decay of the average of the weights; 0 for a run of few steps."""
    if num_steps < _LEAST_AVERAGED_STEPS:
        return 0.0
    least, most = (share * steps_per_epoch for share in _AVERAGED_EPOCHS)
    span = min(most, max(least, _AVERAGED_SHARE * num_steps))
    return round(1 - 1 / max(2.0, span), 4)


def balanced(num_per_class: Sequence[int]) -> list[float]:
    """Return weights of classes in inverse proportion to their images, 1 on average over images."""
    total, num = sum(num_per_class), len(num_per_class)
    return [round(total / (num * count), 6) if count else 0.0 for count in num_per_class]


def readers_for(num_images: int, facts: ImageFacts | None, num_cores: int, *, on_cpu: bool) -> int:
    """Return the number of processes that read ahead for a rank.

    Args:
        num_images: Images to train on.
        facts: Facts about them, if any are known.
        num_cores: Cores of the rank.
        on_cpu: True if the rank itself computes on these cores.
    """
    if not on_cpu:
        return max(1, min(_MOST_READERS, num_cores))
    is_small = facts is not None and 0 < facts.short_edge <= _SMALL_EDGE
    return 0 if is_small and num_images <= _FEW_IMAGES else 1
