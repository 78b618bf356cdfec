"""Configuration of a worker: frozen values that can be pickled."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from inferpool.models.spec import MAX_IMAGE_PIXELS, Placement, SplitReport
from inferpool.models.speed_names import SpeedReport

ErrorDetail = Literal["name", "text", "traceback"]
"""Detail of a model's exceptions in answers to clients: only the type, the text too, or all."""

CheckMode = Literal["on", "warn", "off"]
"""Effect of the check of a model at its start: it refuses the model, only warns, or is left out."""
REFUSED = 'set check = "warn" or "off" to serve it as it is'
"""End of a text that says why the check refuses a model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckReport:
    """Findings of the check that a version passed before its first worker was ready."""

    warnings: tuple[str, ...] = ()
    not_checked: tuple[str, ...] = ()
    """Parts that were left out, and why."""
    declared: tuple[str, ...] = ()
    """Parts that the model's class has turned off, as it writes them: `repeatable = False`."""
    media_types: tuple[str, ...] = ()
    """Media type of the `Content` that the sample is answered with, if it is one."""
    is_sample_finite: bool | None = None
    """The outputs for the canaries' sample were finite; None if that is unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Source of a model."""

    name: str
    source: str
    """Name for `models.sources.registry.build`: `efficientnet_lite0`, `torchvision:NAME`, ..."""
    weights: str | None = "DEFAULT"
    """"DEFAULT", a named weight, a .pth or .safetensors path, or None for random weights."""
    options: Mapping[str, object] = field(default_factory=dict)
    """Keyword arguments of a user's class, or of a built-in source."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """Configuration of one worker.

    A later incarnation gets the findings of an earlier one in `chosen`, `known_split` and
    `checked`.
    """

    model: ModelConfig
    placement: Placement
    host: str = ""
    """Name of the host of the cluster that runs it; "" is the host of the front end."""
    credit: int = 2
    """Batches that it may hold at once, besides those that `Ready` and its decoders add; it
    computes `Placement.num_at_once` of them."""
    max_batch_size: int = 8
    max_batch_tokens: int | None = None
    may_batches_grow: bool = False
    """On an accelerator, later batches may be larger than `max_batch_size`, as far as they pay."""
    prepare_threads: int = 1
    """Threads that run `preprocess`."""
    decoders: int = 0
    """Processes of its own that run `preprocess`, if the model allows it."""
    max_image_pixels: int = MAX_IMAGE_PIXELS
    """Most pixels of an encoded image; larger ones are refused after a look at the header."""
    load_timeout_s: float = 600.0
    speed: str = "exact"
    """One of `models.speed_names.CHOICES`."""
    decode: str = "exact"
    """One of `models.speed_names.DECODE_CHOICES`."""
    measures_speed: bool = True
    """Measure before it is ready what the cache has no verdict on, if `speed` is `auto`. Otherwise
    `exact` serves until a search has found something faster."""
    cache_dir: str | None = None
    """Folder for verdicts on speed presets; None stores none."""
    chosen: SpeedReport | None = None
    """Preset that an earlier incarnation chose; None makes it choose by `speed`."""
    known_split: SplitReport | None = None
    """Split that an earlier incarnation used; None makes it find one."""
    check: CheckMode = "on"
    checked: CheckReport | None = None
    """Findings of another worker, which this one need not check again; None makes it check."""
    error_detail: ErrorDetail = "name"
    batch_timeout_s: float | None = None
    """Seconds after which a batch counts as hung; None derives them from the warm-up."""
