"""One rank's part of a tensor-parallel network: cut to its shards, and filled. Worker processes."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor, nn

from inferpool.models.files.checkpoint import StoredWeights
from inferpool.models.split.meta_network import MetaNetwork, fill, joined
from inferpool.models.split.shards import (
    Collectives,
    ColumnEmbedding,
    ColumnLinear,
    Piece,
    RowLinear,
    Shard,
    SplitAttention,
    widths_of,
)
from inferpool.models.split.stages import run_encoders_by_layers
from inferpool.models.split.tensor_plan import Cut, TensorPlan
from inferpool.models.split.verification import Origin

_KEPT_SHARE = 0.25
"""Share of a network's bytes that is kept at a time where it is built with its weights."""


class BuiltWeights:
    """The weights that a network is built with, read like those of a checkpoint.

    They have numbers only at the end of a build. The network is built several times, and some
    weights are kept each time, so that they are never all in memory at once.
    """

    def __init__(self, meta: MetaNetwork) -> None:
        self._meta = meta
        self._empty = dict(meta.network.named_parameters(remove_duplicate=False))
        self._room_bytes = _KEPT_SHARE * sum(each.nbytes for each in meta.network.parameters())
        self._kept: dict[str, Tensor] = {}

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each parameter, by name."""
        return {name: tuple(tensor.shape) for name, tensor in self._empty.items()}

    def read(self, name: str, *index: slice) -> Tensor:
        """Read like `StoredWeights.read`; quick if they are read in the order of the network."""
        if name not in self._kept:
            self._kept = {}
            self._kept = self._meta.built(self._beginning_with(name))
        part: Tensor = self._kept[name][index or ...]
        return part.detach().clone(memory_format=torch.contiguous_format)

    def _beginning_with(self, name: str) -> dict[str, Tensor]:
        names = list(self._empty)
        kept: dict[str, Tensor] = {}
        num_bytes = 0
        for each in names[names.index(name) :]:
            num_bytes += self._empty[each].nbytes
            if kept and num_bytes > self._room_bytes:
                break
            kept[each] = self._empty[each]
        return kept


Weights: TypeAlias = StoredWeights | BuiltWeights


def cut_layers(network: nn.Module, plan: TensorPlan, collectives: Collectives) -> nn.Module:
    """Put shards in the place of the layers that are cut."""
    for each in plan.cuts:
        shard = _shard_of(network.get_submodule(each.name), each, collectives)
        if not each.name:
            return shard
        network.set_submodule(each.name, shard)
    for count in plan.counts:
        share = widths_of(count.units, collectives.size, count.per_unit)[collectives.rank]
        setattr(network.get_submodule(count.module), count.attribute, share)
    for module in network.modules():
        if isinstance(module, nn.TransformerEncoderLayer):
            module.activation_relu_or_gelu = 0  # its fast path reads weights past the modules
    run_encoders_by_layers(network)  # nn.TransformerEncoder makes nested tensors for that path
    return network


def _shard_of(whole: nn.Module, cut: Cut, collectives: Collectives) -> Shard:
    if isinstance(whole, nn.MultiheadAttention):
        return SplitAttention(whole, collectives)
    if isinstance(whole, nn.Embedding):
        return ColumnEmbedding(whole, collectives)
    assert isinstance(whole, nn.Linear)
    if cut.how == "row":
        return RowLinear(whole, collectives, units=cut.units)
    return ColumnLinear(whole, collectives, units=cut.units, gathers=cut.how == "gather")


def _pieces(network: nn.Module) -> Iterator[tuple[str, nn.Parameter, Piece]]:
    """Yield each parameter of a cut network by name, with its piece of the whole network's."""
    for prefix, module in network.named_modules():
        pieces = module.pieces if isinstance(module, Shard) else {}
        for name, parameter in module._parameters.items():
            if parameter is not None:
                piece = pieces.get(name, Piece(source=name))
                source = joined(prefix, piece.source)
                yield joined(prefix, name), parameter, replace(piece, source=source)


def origins_of(network: nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> list[Origin]:
    """Find where each parameter of a network that is cut lies in the whole one."""
    origins: dict[int, Origin] = {}
    for _, tensor, piece in _pieces(network):
        shape = shapes[piece.source]
        origin = Origin(
            tensor=tensor, name=piece.source, shape=shape, dim=piece.dim, ranges=piece.ranges
        )
        origins.setdefault(id(tensor), origin)
    return list(origins.values())


def fill_part(network: nn.Module, stored: Weights, device: torch.device) -> None:
    """Read what this rank holds, tensor by tensor."""
    empty = {name: (parameter, piece) for name, parameter, piece in _pieces(network)}
    shapes = stored.shapes

    def read(name: str) -> Tensor | None:
        if name in empty:
            return _read(stored, *empty[name], device)
        return stored.read(name) if name in shapes else None  # a buffer

    fill(network, read, device)


def _read(stored: Weights, empty: nn.Parameter, piece: Piece, device: torch.device) -> Tensor:
    if type(empty.data) is not Tensor:
        from inferpool.models.split.dtensors import read_local

        return read_local(empty.data, partial(stored.read, piece.source), device)
    before = (slice(None),) * piece.dim
    parts = [stored.read(piece.source, *before, slice(*each)) for each in piece.ranges]
    if len(parts) > 1:
        return torch.cat(parts, piece.dim)
    # To copy a single one would leave gaps in the heap as large as all that is loaded.
    return parts[0] if parts else stored.read(piece.source)


def part_bytes(network: nn.Module) -> int:
    """Count the bytes that this rank holds."""
    tensors = [each.data for each in (*network.parameters(), *network.buffers())]
    if all(type(each) is Tensor for each in tensors):
        return sum(each.nbytes for each in tensors)
    from inferpool.models.split.dtensors import local_bytes

    return sum(map(local_bytes, tensors))
