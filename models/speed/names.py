"""The names of the presets, and what a worker says of its choice. Without torch."""

from typing import Literal

import msgspec

COMPILED = ("compiled_bf16", "compiled")
"""Presets that take minutes to make, and no time once that is done; in the order to try them."""

GRAPHED = {"graphed": "folded", "graphed_fp16": "fp16"}
"""Presets that replay those of another as CUDA graphs."""

CHOICES = (
    *("auto", "exact", "channels_last", "folded", "bf16", "fp16"),
    *(*reversed(COMPILED), *GRAPHED),
)
"""What the setting `speed` may be.

`exact` serves the network as it is, in float32. `channels_last` lays images out with their colours
together; `folded` also folds batch normalisation into convolutions; `bf16` and `fp16` also keep
weights and activations in half the bits. `compiled` makes machine code of the folded network once,
which takes a C++ compiler and a minute, and keeps it; `compiled_bf16` of that in bf16. `graphed`
and `graphed_fp16` launch all kernels of `folded` or `fp16` at once, on a GPU. `auto` takes the
fastest of those that agree with `exact`; the graphed ones only when they are named, as no GPU has
run them.
"""

ANY_SIZE = ("exact", "channels_last", "folded", "bf16", "fp16", *GRAPHED)
"""Those that take a batch of any size as they come; the others are made for some sizes."""


DECODE_CHOICES = ("auto", "exact", "fast")
"""What the setting `decode` may be.

`exact` decodes and resizes pictures as the model's authors did. `fast` decodes large JPEGs scaled
down and resizes with other roundings. `auto` takes `fast` where it agrees with `exact`; beside
`speed = "exact"` it is `exact`.
"""


class SpeedReport(msgspec.Struct, frozen=True, kw_only=True):
    """Which preset a worker serves with, and what was found out about it."""

    preset: str = "exact"
    gain: float = 1.0
    """Throughput as a multiple of that of `exact`: the mean over single instances and full batches.
    """
    deviation: float = 0.0
    """The largest difference from `exact` on the sample inputs, as the model's tolerance has it."""
    note: str = ""
    """What the others came to, or why none was tried; for a person."""
    is_cut_short: bool = False
    """Time did not suffice to judge all of the presets."""
    decode: Literal["exact", "fast"] = "exact"
    """How inputs are decoded."""
    decode_gain: float = 1.0
    """How many times as fast `fast` prepares a sample input."""
    is_final: bool = True
    """Nothing is left to try: those that take minutes to make have been judged, or are no use."""
    key: str = ""
    """What the verdict is kept under; empty where nothing was tried."""
    measured_s: float = 0.0
    """What measuring took this worker, or waiting for the one that measured."""

    def text(self) -> str:
        """The report on one short line; `note` has the rest where a preset was taken."""
        if self.preset == "exact" and self.decode == "exact":
            return f"exact ({self.note})" if self.note else "exact"
        gain = "" if self.preset == "exact" else f", {self.gain:.2f} x exact"
        decode = f", decoding fast, {self.decode_gain:.2f} x" if self.decode == "fast" else ""
        return f"{self.preset}{gain}{decode}, largest deviation {self.deviation:.2g}"
