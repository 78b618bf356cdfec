"""Names of speed presets, and a worker's report about its choice. No torch."""

import msgspec

from inferpool.models.spec import Decoding

COMPILED = ("compiled_bf16", "compiled_fp16", "compiled")
"""Presets that take minutes to make and then load at once, in the order to try them."""

GRAPHED = {
    "graphed": "folded",
    "graphed_tf32": "tf32",
    "graphed_bf16": "bf16",
    "graphed_fp16": "fp16",
}
"""Presets that replay another one as CUDA graphs."""

FOR_ACCELERATORS = ("tf32", "compiled_fp16", *GRAPHED)
"""Presets that are of no use on a CPU."""

CHOICES = (
    *("auto", "exact", "channels_last", "folded", "tf32", "bf16", "fp16"),
    *(*reversed(COMPILED), *GRAPHED),
)
"""Values of the setting `speed`.

`exact` serves the network as it is, in float32. `channels_last` keeps the colours of each pixel
together; `folded` also folds batch normalisation into convolutions. `tf32` has a GPU round what
`folded` multiplies to TF32; `bf16` and `fp16` keep weights and activations in 16 bits. `compiled`,
`compiled_bf16` and `compiled_fp16` compile the folded, bf16 or fp16 network for this device once,
which takes a C++ compiler and a minute; the last one is for GPUs. The `graphed` ones launch all
kernels of another preset at once, on a GPU. `auto` takes the fastest that agrees with `exact`.
"""

ANY_SIZE = ("exact", "channels_last", "folded", "tf32", "bf16", "fp16", *GRAPHED)
"""Presets that compute a batch of any size as it is; the others are made for certain sizes."""


MOST_GROWN = 256
"""Largest batch on an accelerator where the service finds out what pays. Memory and deadlines may
bound it sooner."""
LONG_S = 0.1
"""Batches on an accelerator that take longer are not made larger: many would wait for one."""

DECODE_CHOICES = ("auto", "exact", "fast")
"""Values of the setting `decode`.

`exact` decodes and resizes pictures as the model's authors did. `fast` decodes large JPEGs at a
smaller scale and resizes with other rounding, or decodes plain JPEGs on the device: whichever is
the faster one of those that agree with `exact`. `auto` does so too, but takes `exact` if none
agrees, and beside `speed = "exact"`.
"""


NO_NETWORK = "no float32 network to change"
"""The note of a report on a model without a network that presets could change."""


class TriedPreset(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The result of one preset in a search."""

    preset: str
    gain: float | None = None
    """Throughput as a multiple of `exact`'s; None if it was not timed."""
    deviation: float | None = None
    """Largest difference from `exact` on the samples; None if it was not compared."""
    lost: str = ""
    """Why it does not serve; empty for the one that was chosen."""


class SpeedReport(msgspec.Struct, frozen=True, kw_only=True):
    """The preset that a worker serves with, and how it compares with `exact`."""

    preset: str = "exact"
    gain: float = 1.0
    """Throughput as a multiple of `exact`'s, averaged over single instances and full batches."""
    deviation: float = 0.0
    """Largest difference from `exact` on the samples, as the model's tolerance measures it."""
    note: str = ""
    """Results of the other presets, or why none was tried, for a person to read."""
    tried: tuple[TriedPreset, ...] = ()
    """All presets that there are for this model and device, in the order of the search."""
    is_cut_short: bool = False
    """True if there was no time to judge all presets."""
    decode: Decoding = "exact"
    decode_gain: float = 1.0
    """Number of times as fast as `exact` that this way prepares sample inputs."""
    is_final: bool = True
    """True if the presets that take minutes to make have been judged, or are of no use here."""
    is_provisional: bool = False
    """True if there is no verdict yet: a search measures while this serves."""
    key: str = ""
    """Key of the kept verdict; empty if there is nothing to try."""
    measured_s: float = 0.0
    """Time that this worker measured, or waited for the one that did."""

    @property
    def way(self) -> tuple[str, str]:
        """How answers are computed: the preset and the decoder."""
        return self.preset, self.decode

    def text(self) -> str:
        """Return a short line about the choice."""
        if self.preset == "exact" and self.decode == "exact":
            return f"exact ({self.note})" if self.note else "exact"
        gain = "" if self.preset == "exact" else f", {self.gain:.2f} x exact"
        way = {"exact": "", "fast": "fast", "device": "on the device"}[self.decode]
        decode = f", decoding {way}, {self.decode_gain:.2f} x" if way else ""
        return f"{self.preset}{gain}{decode}, largest deviation {self.deviation:.2g}"

    def change_from(self, former: "SpeedReport") -> str:
        """Return words that follow "changed": what this choice does otherwise than a former one."""
        if self.preset != former.preset:
            return f"from {former.preset} to {self.text()}"
        figures = f"{self.decode_gain:.2f} x, largest deviation {self.deviation:.2g}"
        return f"its decoding from {former.decode} to {self.decode}, {figures}"
