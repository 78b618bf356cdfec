"""A rank's part of a tensor-parallel network: cut to its shards, and filled with its slices.

Worker processes only.
"""

from collections.abc import Mapping
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor, nn

from inferpool.models.files.checkpoint import StoredWeights
from inferpool.models.split.collectives import Collectives, widths_of
from inferpool.models.split.rehearsal import Origin
from inferpool.models.split.shards import (
    ColumnEmbedding,
    ColumnLinear,
    Piece,
    RowLinear,
    Shard,
    SplitAttention,
)
from inferpool.models.split.sketch import Sketch
from inferpool.models.split.tensor_plan import Cut, TensorPlan
from inferpool.models.split.tracing import EncoderByLayers

_KEPT_SHARE = 0.25
"""Of a network's bytes: what is kept at a time of one that is built with its weights."""


class BuiltWeights:
    """The weights that a network is built with, to be read as those of a checkpoint are.

    They have numbers at the end of a build only. So that they never lie here all at once, the
    network is built several times, and some of them are kept each time.
    """

    def __init__(self, sketch: Sketch) -> None:
        self._sketch = sketch
        self._empty = dict(sketch.network.named_parameters(remove_duplicate=False))
        self._room_bytes = _KEPT_SHARE * sum(each.nbytes for each in sketch.network.parameters())
        self._kept: dict[str, Tensor] = {}

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each parameter, by name."""
        return {name: tuple(tensor.shape) for name, tensor in self._empty.items()}

    def read(self, name: str, *index: slice) -> Tensor:
        """Read like `StoredWeights.read`; quick if they are read in the order of the network."""
        if name not in self._kept:
            self._kept = {}
            self._kept = self._sketch.built(self._beginning_with(name))
        part: Tensor = self._kept[name][index or ...]
        return part.detach().clone(memory_format=torch.contiguous_format)

    def _beginning_with(self, name: str) -> dict[str, Tensor]:
        """Choose that one, and as many after it as are kept at a time."""
        names = list(self._empty)
        kept: dict[str, Tensor] = {name: self._empty[name]}
        num_bytes = self._empty[name].nbytes
        for each in names[names.index(name) + 1 :]:
            num_bytes += self._empty[each].nbytes
            if num_bytes > self._room_bytes:
                break
            kept[each] = self._empty[each]
        return kept


Weights: TypeAlias = StoredWeights | BuiltWeights
"""Where the numbers of a network come from."""


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
        elif type(module) is nn.TransformerEncoder:
            module.__class__ = EncoderByLayers  # it makes nested tensors for that fast path
    return network


def _shard_of(whole: nn.Module, cut: Cut, collectives: Collectives) -> Shard:
    if isinstance(whole, nn.MultiheadAttention):
        return SplitAttention(whole, collectives)
    if isinstance(whole, nn.Embedding):
        return ColumnEmbedding(whole, collectives)
    assert isinstance(whole, nn.Linear)
    if cut.how == "row":
        return RowLinear(whole, collectives, units=cut.units)
    return ColumnLinear(
        whole,
        collectives,
        units=cut.units,
        gathers=cut.how == "gather",
    )


def origins_of(network: nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> list[Origin]:
    """Say where each parameter of a network that is cut lies in the whole one."""
    origins: dict[int, Origin] = {}
    for prefix, module in network.named_modules():
        start = f"{prefix}." if prefix else ""
        pieces = module.pieces if isinstance(module, Shard) else {}
        for name, parameter in module._parameters.items():
            if parameter is None or id(parameter) in origins:
                continue
            piece = pieces.get(name, Piece(source=name))
            whole = start + piece.source
            origins[id(parameter)] = Origin(
                tensor=parameter,
                name=whole,
                shape=shapes[whole],
                dim=piece.dim,
                ranges=piece.ranges,
            )
    return list(origins.values())


def fill_part(network: nn.Module, stored: Weights, device: torch.device) -> None:
    """Read what this rank holds, tensor by tensor."""
    filled: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}  # with the empty ones, to be kept
    shapes = stored.shapes
    for prefix, module in network.named_modules():
        start = f"{prefix}." if prefix else ""
        pieces = module.pieces if isinstance(module, Shard) else {}
        for name, empty in module._parameters.items():  # also what was met before
            if empty is None:
                continue
            if id(empty) not in filled:
                piece = pieces.get(name, Piece(source=name))
                filled[id(empty)] = (
                    empty,
                    _read(stored, start + piece.source, piece, empty, device),
                )
            module._parameters[name] = filled[id(empty)][1]
        for name, buffer in module.named_buffers(recurse=False):
            if start + name in shapes:
                buffer.copy_(stored.read(start + name))


def _read(
    stored: Weights, name: str, piece: Piece, empty: nn.Parameter, device: torch.device
) -> nn.Parameter:
    if type(empty.data) is not Tensor:
        from inferpool.models.split.dtensors import read_local

        local = read_local(empty.data, partial(stored.read, name), device)
        return nn.Parameter(local, requires_grad=False)
    before = (slice(None),) * piece.dim
    parts = [stored.read(name, *before, slice(*each)) for each in piece.ranges]
    if len(parts) > 1:
        value = torch.cat(parts, piece.dim)
    else:  # to copy a single one would leave gaps in the heap as large as all that is loaded
        value = parts[0] if parts else stored.read(name)
    return nn.Parameter(value.to(device, empty.dtype), requires_grad=False)


def part_bytes(network: nn.Module) -> int:
    """Count the bytes that this rank holds."""
    tensors = [each.data for each in (*network.parameters(), *network.buffers())]
    if all(type(each) is Tensor for each in tensors):
        return sum(each.nbytes for each in tensors)
    from inferpool.models.split.dtensors import local_bytes

    return sum(map(local_bytes, tensors))
