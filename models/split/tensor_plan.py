"""What is cut in a network for tensor parallelism. In worker processes only."""

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from torch import nn

How: TypeAlias = Literal["column", "row", "gather", "embedding", "attention"]
"""Of a Linear: "column" leaves its outputs in parts, "row" takes its inputs so, "gather" puts its
outputs together. An Embedding or an nn.MultiheadAttention yields what is whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """One layer that is cut."""

    name: str
    how: How
    units: int
    """Into how many it can be cut at most: its heads, or its features."""
    num_dims: int | None = None
    """Of what it must be given, where that was assumed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """A number that a module keeps and that must be this rank's share: of heads, or of features."""

    module: str
    attribute: str
    units: int
    per_unit: int = 1


@dataclass(slots=True, kw_only=True)
class TensorPlan:
    """All that is cut in a network; the rest is whole on every rank."""

    cuts: list[Cut] = field(default_factory=list)
    counts: list[Share] = field(default_factory=list)
    styles: dict[str, object] = field(default_factory=dict)
    """Left to DTensor, by the names of the modules."""
    notes: list[str] = field(default_factory=list)
    """What could not be cut that might be expected to be, for a person."""


def attention_complaint(module: nn.MultiheadAttention) -> str:
    """Why an attention cannot be split by its heads; empty if it can."""
    if module.bias_k is not None or module.bias_v is not None or module.add_zero_attn:
        return "it adds to its keys"
    if not module._qkv_same_embed_dim:
        return "its keys or values have other widths than its queries"
    return ""
