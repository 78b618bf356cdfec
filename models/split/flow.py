"""Follows results that lie in parts through a traced network, from Linears to another Linear.

What begins as the split outputs of column layers may pass elementwise functions, be viewed as heads
and attend, and end as the split inputs of a row layer. Anything that is not known to leave each
part to its rank ends the attempt: a network is split only where that is sure to be right.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.fx import Node
from torch.nn import functional

_ELEMENTWISE_MODULES = (
    nn.Identity, nn.Dropout, nn.AlphaDropout, nn.ReLU, nn.ReLU6, nn.GELU, nn.SiLU, nn.Mish, nn.Tanh,
    nn.Sigmoid, nn.ELU, nn.SELU, nn.CELU, nn.LeakyReLU, nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid,
    nn.Softplus, nn.LogSigmoid,
)  # fmt: skip
_ELEMENTWISE = {
    functional.relu, functional.relu6, functional.gelu, functional.silu, functional.mish,
    functional.elu, functional.selu, functional.leaky_relu, functional.hardtanh,
    functional.hardswish, functional.softplus, functional.dropout, functional.tanh,
    functional.sigmoid, torch.relu, torch.tanh, torch.sigmoid, torch.neg, torch.exp, operator.neg,
    "relu", "relu_", "tanh", "sigmoid", "neg", "exp", "contiguous", "float", "clone",
}  # fmt: skip
_PAIRWISE = {
    operator.add, operator.mul, operator.sub, operator.truediv, operator.iadd, operator.imul,
    operator.itruediv, torch.add, torch.mul, torch.div, "add", "add_", "mul", "mul_", "div", "div_",
}  # fmt: skip


class LostTrackError(Exception):
    """It is not known what an operation does to a value in parts."""


def is_elementwise(activation: object) -> bool:
    """Whether an activation, a function or a module, is known to leave each part to its rank."""
    return type(activation) in _ELEMENTWISE_MODULES or activation in _ELEMENTWISE


@dataclass(frozen=True, slots=True)
class Spread:
    """How a value lies in parts."""

    dim: int
    """The dimension that is divided, counted from the end: -1 is the last."""
    width: int
    """The whole size of that dimension."""
    heads: int | None = None
    """Into how many it was viewed, once it was."""
    num_dims: int | None = None
    """Of the value, where it is known."""

    def index_of(self, dim: object) -> int:
        """A dimension as counted from the end."""
        if not isinstance(dim, int):
            raise LostTrackError
        if dim < 0:
            return dim
        if self.num_dims is None:
            raise LostTrackError
        return dim - self.num_dims


class PartedValues:
    """The values of a traced network that lie in parts, if some Linears leave theirs in parts.

    Args:
        modules: Of the traced network, by their names.
        columns: The calls of the Linears.
        num_dims: Of what those yield, if that is known.
    """

    def __init__(
        self, modules: Mapping[str, nn.Module], columns: Sequence[Node], num_dims: int | None
    ) -> None:
        self._modules = modules
        self._spreads: dict[Node, Spread] = {}
        self.counts: dict[str, dict[int, int]] = {}
        """Constants that count all heads or all their features and must count this rank's: by the
        name of the call, the position in its shape, and the value."""
        for node in columns:
            linear = modules[str(node.target)]
            assert isinstance(linear, nn.Linear)
            self._spreads[node] = Spread(-1, linear.out_features, num_dims=num_dims)

    def follow(self, nodes: Sequence[Node]) -> None:
        """Go through operations in their order.

        Raises:
            LostTrackError: One is not known to leave each part to its rank.
        """
        for node in nodes:
            if node in self._spreads or not self._takes_parts(node):
                continue
            spread = self._after(node)
            if spread is not None:
                self._spreads[node] = spread

    def spread_of(self, value: object) -> Spread | None:
        """How a value lies in parts; None if it is whole."""
        return self._spreads.get(value) if isinstance(value, Node) else None

    def _takes_parts(self, node: Node) -> bool:
        return any(each in self._spreads for each in node.all_input_nodes)

    def _after(self, node: Node) -> Spread | None:
        if node.op == "call_module":
            if type(self._modules[str(node.target)]) not in _ELEMENTWISE_MODULES:
                raise LostTrackError
            return self._first(node)
        if node.op not in ("call_function", "call_method"):
            raise LostTrackError
        target = node.target
        if target in _ELEMENTWISE:
            return self._first(node)
        if target in _PAIRWISE:
            return self._pairwise(node)
        handler = _HANDLERS.get(target)
        if handler is None:
            raise LostTrackError
        return handler(self, node)

    def _first(self, node: Node) -> Spread:
        spread = self.spread_of(node.args[0])
        if spread is None or len(node.all_input_nodes) > 1:
            raise LostTrackError
        return spread

    def _pairwise(self, node: Node) -> Spread:
        """Two in the same parts; or one and a number, or a mask that is the same for all heads."""
        spreads = [self.spread_of(each) for each in node.args[:2]]
        known = [each for each in spreads if each is not None]
        if len(known) == 2:
            return self._same(*known)
        other = node.args[spreads.index(None)]
        if isinstance(other, Node) and not self._is_same_for_all(other, known[0]):
            raise LostTrackError
        return known[0]

    def _same(self, *spreads: Spread) -> Spread:
        first = spreads[0]
        if any(
            (each.dim, each.width, each.heads) != (first.dim, first.width, first.heads)
            for each in spreads
        ):
            raise LostTrackError
        return first

    def _is_same_for_all(self, node: Node, spread: Spread) -> bool:
        """Whether a whole value surely has size 1 in the dimension that is divided.

        Attention's heads are divided, and a mask that comes from outside is taken to be for all of
        them; weights, such as a bias for each head, are not.
        """
        return spread.dim <= -3 and _comes_from_inputs(node, set())

    def _viewed(self, node: Node) -> Spread:
        spread = self.spread_of(node.args[0])
        if spread is None:
            raise LostTrackError
        sizes, num_dims = _sizes(node, spread)
        if spread.dim == -1 and spread.heads is None and len(sizes) >= 2:  # into heads
            heads, features = sizes[-2:]
            if heads == -1 and isinstance(features, int):
                heads = spread.width // features
            elif features == -1 and isinstance(heads, int):
                features = spread.width // heads
                self._count(node, -2, heads)
            elif isinstance(heads, int) and isinstance(features, int):
                self._count(node, -2, heads)
            if (
                not isinstance(heads, int)
                or not isinstance(features, int)
                or heads * features != spread.width
            ):
                raise LostTrackError
            return Spread(-2, spread.width, heads, num_dims)
        if spread.dim == -2 and spread.heads is not None and sizes:  # of heads
            if sizes[-1] == spread.width:
                self._count(node, -1, spread.width)
            elif sizes[-1] != -1:
                raise LostTrackError
            if num_dims is None or spread.num_dims is None or num_dims != spread.num_dims - 1:
                raise LostTrackError  # the last may take more than the heads
            return Spread(-1, spread.width, spread.heads, num_dims)
        raise LostTrackError

    def _count(self, node: Node, position: int, value: int) -> None:
        shape = node.args[1] if len(node.args) == 2 else None
        holder = shape if isinstance(shape, Node) else node
        self.counts.setdefault(holder.name, {})[position] = value

    def _flattened(self, node: Node) -> Spread:
        spread = self.spread_of(node.args[0])
        begin = _argument(node, 1, "start_dim", 0)
        end = _argument(node, 2, "end_dim", -1)
        if spread is None or spread.dim != -2 or spread.heads is None:
            raise LostTrackError
        if spread.index_of(begin) != -2 or spread.index_of(end) != -1:
            raise LostTrackError
        num_dims = None if spread.num_dims is None else spread.num_dims - 1
        return replace(spread, dim=-1, num_dims=num_dims)

    def _unflattened(self, node: Node) -> Spread:
        spread = self.spread_of(node.args[0])
        sizes = _argument(node, 2, "sizes", None)
        if spread is None or spread.dim != -1 or _argument(node, 1, "dim", None) != -1:
            raise LostTrackError
        if not isinstance(sizes, list | tuple) or len(sizes) != 2:
            raise LostTrackError
        heads, features = sizes
        if heads == -1 and isinstance(features, int):
            heads = spread.width // features
        elif isinstance(heads, int):
            self._count(node, -2, heads)
        if not isinstance(heads, int) or features not in (-1, spread.width // heads):
            raise LostTrackError
        num_dims = None if spread.num_dims is None else spread.num_dims + 1
        return Spread(-2, spread.width, heads, num_dims)

    def _transposed(self, node: Node) -> Spread:
        spread = self.spread_of(node.args[0])
        if spread is None:
            raise LostTrackError
        one = spread.index_of(_argument(node, 1, "dim0", None))
        other = spread.index_of(_argument(node, 2, "dim1", None))
        return replace(spread, dim={one: other, other: one}.get(spread.dim, spread.dim))

    def _permuted(self, node: Node) -> Spread:
        spread = self.spread_of(node.args[0])
        order = _flat(node.args[1:])
        if spread is None or not order:
            raise LostTrackError
        spread = replace(spread, num_dims=len(order))
        places = [spread.index_of(each) for each in order]
        return replace(spread, dim=places.index(spread.dim) - len(order))

    def _softmaxed(self, node: Node) -> Spread:
        spread = self.spread_of(node.args[0])
        if spread is None or spread.index_of(_argument(node, 1, "dim", None)) == spread.dim:
            raise LostTrackError
        return spread

    def _multiplied(self, node: Node) -> Spread:
        spreads = [self.spread_of(each) for each in node.args[:2]]
        known = [each for each in spreads if each is not None]
        if len(known) != 2 or known[0].dim > -3:
            raise LostTrackError
        return self._same(*known)

    def _attended(self, node: Node) -> Spread:
        query, key, value = (
            self.spread_of(_argument(node, i, name, None))
            for i, name in enumerate(("query", "key", "value"))
        )
        mask = _argument(node, 3, "attn_mask", None)
        if query is None or key is None or value is None or query.dim > -3:
            raise LostTrackError
        if isinstance(mask, Node) and (
            self.spread_of(mask) or not self._is_same_for_all(mask, query)
        ):
            raise LostTrackError
        return self._same(query, key, value)

    def _masked(self, node: Node) -> Spread:
        spread, mask = self.spread_of(node.args[0]), _argument(node, 1, "mask", None)
        if spread is None or not isinstance(mask, Node) or self.spread_of(mask):
            raise LostTrackError
        if not self._is_same_for_all(mask, spread) or isinstance(node.args[-1], Node):
            raise LostTrackError
        return spread

    def _sized(self, node: Node) -> Spread | None:
        """Sizes are the same on all ranks, but for that of the dimension that is divided."""
        spread = self.spread_of(node.args[0])
        if spread is None or (node.target is getattr and node.args[1] not in ("shape", "dtype")):
            raise LostTrackError
        if node.target == "size" and len(node.args) > 1:
            if spread.index_of(node.args[1]) == spread.dim:
                raise LostTrackError
            return None
        if node.target is getattr and node.args[1] == "dtype":
            return None
        for user in node.users:
            if user.target is not operator.getitem or not _leaves_out(user.args[1], spread):
                raise LostTrackError
        return None


def _leaves_out(index: object, spread: Spread) -> bool:
    """Whether an index into a shape takes other dimensions than the one that is divided."""
    if isinstance(index, slice):
        stop = index.stop
        return index.start is None and index.step is None and _is_up_to(stop, spread.dim)
    try:
        return spread.index_of(index) != spread.dim
    except LostTrackError:
        return index == 0  # the batch


def _is_up_to(stop: object, dim: int) -> bool:
    return isinstance(stop, int) and stop < 0 and stop <= dim


def _comes_from_inputs(node: Node, seen: set[Node]) -> bool:
    """Whether a value is made of the network's inputs alone, without its weights."""
    if node in seen:
        return True
    seen.add(node)
    if node.op == "placeholder":
        return True
    if node.op in ("get_attr", "call_module"):
        return False
    return all(_comes_from_inputs(each, seen) for each in node.all_input_nodes)


def _sizes(node: Node, spread: Spread) -> tuple[list[object], int | None]:
    """The sizes that a view gives to the last dimensions, and how many dimensions it makes."""
    if len(node.args) != 2 or not isinstance(node.args[1], Node):
        sizes = _flat(node.args[1:])
        return sizes, len(sizes)
    added = node.args[1]  # x.shape[:-1] + (heads, features)
    if added.target is not operator.add or not isinstance(added.args[1], tuple | list):
        raise LostTrackError
    kept = added.args[0]
    if not isinstance(kept, Node) or kept.target is not operator.getitem:
        raise LostTrackError
    num_kept = None
    if spread.num_dims is not None and isinstance(kept.args[1], slice):
        num_kept = len(range(spread.num_dims)[kept.args[1]])
    sizes = list(added.args[1])
    return sizes, None if num_kept is None else num_kept + len(sizes)


def _flat(arguments: Sequence[object]) -> list[object]:
    if len(arguments) == 1 and isinstance(arguments[0], tuple | list):
        return list(arguments[0])
    return list(arguments)


def _argument(node: Node, position: int, name: str, default: object) -> object:
    if len(node.args) > position:
        return node.args[position]
    return node.kwargs.get(name, default)


_HANDLERS: dict[object, Callable[[PartedValues, Node], Spread | None]] = {
    "view": PartedValues._viewed,
    "reshape": PartedValues._viewed,
    torch.reshape: PartedValues._viewed,
    "flatten": PartedValues._flattened,
    torch.flatten: PartedValues._flattened,
    "unflatten": PartedValues._unflattened,
    "transpose": PartedValues._transposed,
    torch.transpose: PartedValues._transposed,
    "permute": PartedValues._permuted,
    torch.permute: PartedValues._permuted,
    "softmax": PartedValues._softmaxed,
    torch.softmax: PartedValues._softmaxed,
    functional.softmax: PartedValues._softmaxed,
    torch.matmul: PartedValues._multiplied,
    operator.matmul: PartedValues._multiplied,
    "matmul": PartedValues._multiplied,
    functional.scaled_dot_product_attention: PartedValues._attended,
    "masked_fill": PartedValues._masked,
    "size": PartedValues._sized,
    getattr: PartedValues._sized,
}
