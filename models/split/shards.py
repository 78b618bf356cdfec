"""Layers of which each rank holds a part: the stand-ins for those of a network that is split.

A column layer has some rows of the stored matrix, i.e. some of the outputs, and leaves its result
in parts or gathers it; a row layer has the matrix's columns that go with a result in parts, and
sums what the ranks make of it. The words are those of Megatron-LM (Shoeybi et al., 2019).

Plain tensors and one collective each, since on CPUs DTensor costs more than a small layer does.

Shape suffixes: B batch, L queries, S keys, E features, H heads of this rank, D features of a head.
"""

# ruff: noqa: N803, N806 - tensors carry their axes in their names

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from inferpool.models.split.collectives import Collectives, bounds_of, widths_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Which part of a stored tensor a parameter holds: the ranges of one dimension, in order."""

    source: str
    """The tensor's name in the layer that the shard stands in for."""
    dim: int = 0
    ranges: tuple[tuple[int, int], ...] = ()
    """Empty: the whole."""


class Shard(nn.Module):
    """A layer's part. Built on the meta device, to be filled by its `pieces`."""

    def __init__(self, collectives: Collectives) -> None:
        super().__init__()
        self.collectives = collectives
        self.pieces: dict[str, Piece] = {}
        """Of each parameter, by its name here."""

    def _hold(self, name: str, whole: Tensor | None, piece: Piece | None) -> None:
        """Register what this rank holds of a parameter; None where it holds nothing."""
        if whole is None or piece is None:
            self.register_parameter(name, None)
            return
        shape = list(whole.shape)
        if piece.ranges:
            shape[piece.dim] = sum(end - begin for begin, end in piece.ranges)
        local = torch.empty(shape, dtype=whole.dtype, device="meta")
        self.register_parameter(name, nn.Parameter(local, requires_grad=False))
        self.pieces[name] = piece


class ColumnLinear(Shard):
    """Some of a Linear's outputs; `gathers` puts those of all ranks together.

    Args:
        whole: What this stands in for.
        collectives: Of this rank.
        units: Into how many parts the outputs may be cut at most: heads, or features.
        gathers: Whether the result is whole.
    """

    weight: Tensor
    bias: Tensor | None

    def __init__(
        self,
        whole: nn.Linear,
        collectives: Collectives,
        *,
        units: int,
        gathers: bool,
    ) -> None:
        super().__init__(collectives)
        self.in_features = whole.in_features
        self.widths = widths_of(units, collectives.size, whole.out_features // units)
        self.out_features = whole.out_features if gathers else self.widths[collectives.rank]
        self.gathers = gathers
        rows = (bounds_of(self.widths, collectives.rank),)
        self._hold("weight", whole.weight, Piece(source="weight", ranges=rows))
        self._hold("bias", whole.bias, Piece(source="bias", ranges=rows))

    def forward(self, x: Tensor) -> Tensor:
        """Compute this rank's outputs, or all."""
        part = functional.linear(x, self.weight, self.bias)
        return self.collectives.gather(part, self.widths) if self.gathers else part


class RowLinear(Shard):
    """What a Linear makes of some of its inputs, summed over the ranks; the first adds the bias."""

    weight: Tensor
    bias: Tensor | None

    def __init__(self, whole: nn.Linear, collectives: Collectives, *, units: int) -> None:
        super().__init__(collectives)
        widths = widths_of(units, collectives.size, whole.in_features // units)
        columns = (bounds_of(widths, collectives.rank),)
        self.in_features = widths[collectives.rank]
        self.out_features = whole.out_features
        self._hold("weight", whole.weight, Piece(source="weight", dim=1, ranges=columns))
        self._hold("bias", whole.bias, Piece(source="bias") if collectives.rank == 0 else None)

    def forward(self, x: Tensor) -> Tensor:
        """Compute all outputs from inputs in parts."""
        return self.collectives.sum(functional.linear(x, self.weight, self.bias))


class ColumnEmbedding(Shard):
    """Some of the features of every entry, gathered: so a wrong index is wrong on all ranks."""

    weight: Tensor

    def __init__(self, whole: nn.Embedding, collectives: Collectives) -> None:
        super().__init__(collectives)
        self.num_embeddings = whole.num_embeddings
        self.embedding_dim = whole.embedding_dim
        self.padding_idx = whole.padding_idx
        self.widths = widths_of(whole.embedding_dim, collectives.size)
        columns = (bounds_of(self.widths, collectives.rank),)
        self._hold("weight", whole.weight, Piece(source="weight", dim=1, ranges=columns))

    def forward(self, indices: Tensor) -> Tensor:
        """Look up whole entries."""
        return self.collectives.gather(functional.embedding(indices, self.weight), self.widths)


class SplitAttention(Shard):
    """Some of the heads of an `nn.MultiheadAttention`, called as that is."""

    _qkv_same_embed_dim = False  # read by nn.TransformerEncoderLayer: no fast path past this module
    in_proj_weight: Tensor
    in_proj_bias: Tensor | None
    out_weight: Tensor
    out_bias: Tensor | None

    def __init__(self, whole: nn.MultiheadAttention, collectives: Collectives) -> None:
        super().__init__(collectives)
        self.embed_dim = whole.embed_dim
        self.head_dim = whole.head_dim
        self.batch_first = whole.batch_first
        self.all_heads: int = whole.num_heads
        per_rank = widths_of(whole.num_heads, collectives.size)
        self.heads = bounds_of(per_rank, collectives.rank)
        self.num_heads = per_rank[collectives.rank]
        begin, end = (each * whole.head_dim for each in self.heads)
        rows = tuple((begin + i * self.embed_dim, end + i * self.embed_dim) for i in range(3))
        for name in ("in_proj_weight", "in_proj_bias"):
            self._hold(name, getattr(whole, name), Piece(source=name, ranges=rows))
        columns = Piece(source="out_proj.weight", dim=1, ranges=((begin, end),))
        self._hold("out_weight", whole.out_proj.weight, columns)
        bias = Piece(source="out_proj.bias") if collectives.rank == 0 else None
        self._hold("out_bias", whole.out_proj.bias, bias)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend with this rank's heads, and sum what the output projection makes of all."""
        del is_causal  # a hint that attn_mask is causal, and it comes with attn_mask
        is_batched = query.dim() == 3
        inputs = [query, key, value]
        if not is_batched:
            inputs = [each.unsqueeze(0) for each in inputs]
        elif not self.batch_first:
            inputs = [each.transpose(0, 1) for each in inputs]
        q_BHLD, k_BHSD, v_BHSD = self._project(inputs)
        mask = self._mask(attn_mask, key_padding_mask, q_BHLD)
        weights: Tensor | None = None
        if need_weights:
            scores_BHLS = q_BHLD @ k_BHSD.transpose(-2, -1) * self.head_dim**-0.5
            weights_BHLS = (scores_BHLS if mask is None else scores_BHLS + mask).softmax(-1)
            heads_BHLD = weights_BHLS @ v_BHSD
            weights = self._shown(weights_BHLS, average=average_attn_weights)
            weights = weights if is_batched else weights.squeeze(0)
        else:
            heads_BHLD = functional.scaled_dot_product_attention(
                q_BHLD, k_BHSD, v_BHSD, attn_mask=mask
            )
        joined = heads_BHLD.transpose(1, 2).flatten(-2)
        output = self.collectives.sum(functional.linear(joined, self.out_weight, self.out_bias))
        if not is_batched:
            return output.squeeze(0), weights
        return (output if self.batch_first else output.transpose(0, 1)), weights

    def _project(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        if inputs[0] is inputs[1] is inputs[2]:
            parts = functional.linear(inputs[0], self.in_proj_weight, self.in_proj_bias).chunk(
                3, dim=-1
            )
        else:
            weights, biases = self.in_proj_weight.chunk(3), self.in_proj_bias
            parts = tuple(
                functional.linear(x, weight, None if biases is None else biases.chunk(3)[i])
                for i, (x, weight) in enumerate(zip(inputs, weights, strict=True))
            )
        return [x.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2) for x in parts]

    def _mask(
        self, attn_mask: Tensor | None, key_padding_mask: Tensor | None, q_BHLD: Tensor
    ) -> Tensor | None:
        masks = []
        if attn_mask is not None:
            added = _added(attn_mask, q_BHLD.dtype)
            if added.dim() == 3:  # B·H of all ranks first
                added = added.unflatten(0, (-1, self.all_heads))[:, slice(*self.heads)]
            masks.append(added)
        if key_padding_mask is not None:
            added = _added(key_padding_mask, q_BHLD.dtype)
            masks.append(added.view(-1, 1, 1, added.shape[-1]))
        if not masks:
            return None
        return masks[0] if len(masks) == 1 else masks[0] + masks[1]

    def _shown(self, weights_BHLS: Tensor, *, average: bool) -> Tensor:
        """The attention weights as a caller of the whole layer gets them."""
        if average:
            summed: Tensor = self.collectives.sum(weights_BHLS.sum(1))
            return summed / self.all_heads
        per_rank = widths_of(self.all_heads, self.collectives.size)
        gathered = self.collectives.gather(weights_BHLS.movedim(1, -1), per_rank)
        weights: Tensor = gathered.movedim(-1, 1)
        return weights


def _added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask to add to the scores, of one that is such, or that is True at what not to see."""
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(mask, -torch.inf)
