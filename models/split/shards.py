"""Layers that each rank holds a part of, to replace those of a network that is split.

A column layer has some rows of the stored matrix, i.e. some of the outputs, and leaves its result
in parts or gathers it; a row layer has the matrix's columns that go with a result in parts, and
sums the results of all ranks. The words are those of Megatron-LM (Shoeybi et al., 2019).

They use plain tensors and one collective each, since on CPUs DTensor costs more than a small layer.

Shape suffixes: B batch, L queries, S keys, E features, H heads of this rank, D features of a head.
"""

# ruff: noqa: N803, N806 - tensors carry their axes in their names

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from inferpool.models.accelerator.device import is_accelerator


class Collectives:
    """Sums and gatherings over the ranks, in the default group.

    All ranks must call the same methods in the same order, with tensors of the same shapes.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self.num_done = 0
        """Calls that have returned, for telling whether ranks stand at the same step."""

    def sum(self, part: Tensor) -> Tensor:
        """Add up the parts of all ranks. The result may be `part` itself, overwritten."""
        near = self._near(part).contiguous()
        dist.all_reduce(near)
        self.num_done += 1
        return near.to(part.device)

    def gather(self, part: Tensor, widths: Sequence[int]) -> Tensor:
        """Put the parts of all ranks side by side, along the last dimension.

        Args:
            part: This rank's; all its dimensions but the last are as in the others'.
            widths: The size of the last dimension in each rank's part.
        """
        sent = functional.pad(part, (0, max(widths) - part.shape[-1])).contiguous()
        home = sent.device
        sent = self._near(sent)
        parts = sent.new_empty((self.size, *sent.shape))
        dist.all_gather_into_tensor(parts.view(-1), sent.view(-1))  # gloo knows no other shapes
        self.num_done += 1
        pairs = zip(parts.to(home), widths, strict=True)
        return torch.cat([each[..., :width] for each, width in pairs], dim=-1)

    def _near(self, part: Tensor) -> Tensor:
        """Copy a tensor to a device that the backend supports: gloo gathers on the CPU only."""
        if is_accelerator(part.device) and dist.get_backend() == "gloo":
            return part.cpu()
        return part


def widths_of(units: int, size: int, per_unit: int = 1) -> list[int]:
    """Return how wide each rank's part is, where units of `per_unit` must stay whole.

    The first ranks have one unit more where they do not divide.
    """
    each, rest = divmod(units, size)
    return [(each + (rank < rest)) * per_unit for rank in range(size)]


def _bounds_of(widths: Sequence[int], rank: int) -> tuple[int, int]:
    begin = sum(widths[:rank])
    return begin, begin + widths[rank]


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """The part of a stored tensor that a parameter holds: ranges of one dimension, in order."""

    source: str
    """The tensor's name in the layer that the shard stands in for."""
    dim: int = 0
    ranges: tuple[tuple[int, int], ...] = ()
    """Empty: the whole."""


class Shard(nn.Module):
    """One rank's part of a layer. Built on the meta device, to be filled by its `pieces`."""

    def __init__(self, collectives: Collectives) -> None:
        super().__init__()
        self.collectives = collectives
        self.pieces: dict[str, Piece] = {}
        """The piece that each parameter holds, by its name here."""

    def _hold(
        self, name: str, whole: Tensor | None, source: str, *ranges: tuple[int, int], dim: int = 0
    ) -> None:
        """Register what this rank holds of a parameter: some ranges of a dimension, or all."""
        if whole is None:
            self.register_parameter(name, None)
            return
        shape = list(whole.shape)
        if ranges:
            shape[dim] = sum(end - begin for begin, end in ranges)
        local = torch.empty(shape, dtype=whole.dtype, device="meta")
        self.register_parameter(name, nn.Parameter(local, requires_grad=False))
        self.pieces[name] = Piece(source=source, dim=dim, ranges=ranges)


class ColumnLinear(Shard):
    """Some of a Linear's outputs; `gathers` puts those of all ranks together.

    Args:
        whole: The layer that this stands in for.
        collectives: Those of this rank.
        units: Most parts that the outputs may be cut into: heads, or features.
        gathers: Whether the result is whole.
    """

    weight: Tensor
    bias: Tensor | None

    def __init__(
        self, whole: nn.Linear, collectives: Collectives, *, units: int, gathers: bool
    ) -> None:
        super().__init__(collectives)
        self.in_features = whole.in_features
        self.widths = widths_of(units, collectives.size, whole.out_features // units)
        self.out_features = whole.out_features if gathers else self.widths[collectives.rank]
        self.gathers = gathers
        rows = _bounds_of(self.widths, collectives.rank)
        self._hold("weight", whole.weight, "weight", rows)
        self._hold("bias", whole.bias, "bias", rows)

    def forward(self, x: Tensor) -> Tensor:
        """Compute this rank's outputs, or all."""
        part = functional.linear(x, self.weight, self.bias)
        return self.collectives.gather(part, self.widths) if self.gathers else part


class RowLinear(Shard):
    """A Linear applied to some of its inputs, and summed over the ranks; rank 0 adds the bias."""

    weight: Tensor
    bias: Tensor | None

    def __init__(self, whole: nn.Linear, collectives: Collectives, *, units: int) -> None:
        super().__init__(collectives)
        widths = widths_of(units, collectives.size, whole.in_features // units)
        self.in_features = widths[collectives.rank]
        self.out_features = whole.out_features
        columns = _bounds_of(widths, collectives.rank)
        self._hold("weight", whole.weight, "weight", columns, dim=1)
        self._hold("bias", None if collectives.rank else whole.bias, "bias")

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
        columns = _bounds_of(self.widths, collectives.rank)
        self._hold("weight", whole.weight, "weight", columns, dim=1)

    def forward(self, indices: Tensor) -> Tensor:
        """Return whole entries by their indices."""
        return self.collectives.gather(functional.embedding(indices, self.weight), self.widths)


class SplitAttention(Shard):
    """Some of the heads of an `nn.MultiheadAttention`, called in the same way."""

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
        self.per_rank = widths_of(whole.num_heads, collectives.size)
        self.heads = _bounds_of(self.per_rank, collectives.rank)
        self.num_heads = self.per_rank[collectives.rank]
        begin, end = (each * whole.head_dim for each in self.heads)
        rows = tuple((begin + i * self.embed_dim, end + i * self.embed_dim) for i in range(3))
        self._hold("in_proj_weight", whole.in_proj_weight, "in_proj_weight", *rows)
        self._hold("in_proj_bias", whole.in_proj_bias, "in_proj_bias", *rows)
        self._hold("out_weight", whole.out_proj.weight, "out_proj.weight", (begin, end), dim=1)
        bias = None if collectives.rank else whole.out_proj.bias
        self._hold("out_bias", bias, "out_proj.bias")

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
        """Attend with this rank's heads, and sum the output projections of all ranks."""
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
        """Return the attention weights that the whole layer returns."""
        if average:
            summed: Tensor = self.collectives.sum(weights_BHLS.sum(1))
            return summed / self.all_heads
        gathered = self.collectives.gather(weights_BHLS.movedim(1, -1), self.per_rank)
        weights: Tensor = gathered.movedim(-1, 1)
        return weights


def _added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a mask to add to the scores, from one of that kind or one of booleans."""
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(mask, -torch.inf)
