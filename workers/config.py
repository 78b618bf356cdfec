"""What a worker is told before it starts: frozen, picklable values."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from inferpool.models.spec import MAX_IMAGE_PIXELS, Placement
from inferpool.models.speed.names import SpeedReport
from inferpool.models.split.report import SplitReport

ErrorDetail = Literal["name", "text", "traceback"]
"""How much of an exception of a model's clients are told: its type alone, its text, or all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Where a model comes from."""

    name: str
    source: str
    """`efficientnet_lite0`, `torchvision:NAME` and so on, as
    `models.sources.registry.build` takes it."""
    weights: str | None = "DEFAULT"
    """"DEFAULT", a named weight, a .pth or .safetensors path, or None for random weights."""
    options: Mapping[str, object] = field(default_factory=dict)
    """Keyword arguments of a user's class, or of a built-in source."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """All that one worker needs to know, in each of its incarnations.

    A later one is told what an earlier one found out: `chosen` and `known_split`.
    """

    model: ModelConfig
    placement: Placement
    credit: int = 2
    """Batches that it may hold at once, `Placement.num_at_once` of which it computes."""
    max_batch_size: int = 8
    prepare_threads: int = 1
    """Threads that run `preprocess`."""
    max_image_pixels: int = MAX_IMAGE_PIXELS
    """Encoded images with more are refused by their header."""
    load_timeout_s: float = 600.0
    speed: str = "exact"
    """One of `models.speed.names.CHOICES`."""
    decode: str = "exact"
    """One of `models.speed.names.DECODE_CHOICES`."""
    cache_dir: str | None = None
    """Where what was found out about speed is kept; None keeps it nowhere."""
    chosen: SpeedReport | None = None
    """What an earlier incarnation chose by `speed`, to be applied as it is; None has it chosen."""
    known_split: SplitReport | None = None
    """How an earlier incarnation was split; None has it found out."""
    error_detail: ErrorDetail = "name"
    batch_timeout_s: float | None = None
    """A batch that has run for longer means a hang; None: long beside those of the warm-up."""
