"""Finds what can be cut for tensor parallelism in a network that says nothing of it.

MLPs and attentions are found by tracing with torch.fx the largest submodules that it can trace;
their code stays as it is, and only their Linears are replaced. What torch ships
(MultiheadAttention, the layers of Transformer) is known without. In worker processes only.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from inspect import Parameter, isfunction, signature

import torch
from torch import fx, nn
from torch.fx import Node

from inferpool.models.split.flow import LostTrackError, PartedValues, Spread, is_elementwise
from inferpool.models.split.tensor_plan import Cut, Share, TensorPlan, attention_complaint

_LARGE_BYTES = 1 << 20
_LARGE_SHARE = 0.005
"""Of the network's bytes. What is neither large nor such a share costs more in messages than it
saves: one sum over two ranks by gloo takes 0.1 to 0.2 ms on this project's machine."""
_CONTAINERS = (
    nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.Transformer, nn.TransformerEncoder,
    nn.TransformerDecoder, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer,
)  # fmt: skip
_LAYERS = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
"""Not what inherits from them: that may compute otherwise."""
_ASSUMED_DIMS = 3
"""Of what attention is given, where its code says it by numbers alone: batch, tokens, features."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """Linears that leave their results in parts for one that takes them so."""

    columns: tuple[str, ...]
    row: str
    units: int
    num_dims: int | None
    has_heads: bool = False
    counts: tuple[Share, ...] = ()

    @property
    def names(self) -> set[str]:
        return {*self.columns, self.row}


def find_plan(network: nn.Module, size: int) -> TensorPlan:
    """Find what can be cut into as many parts as there are ranks.

    The plan is a matter of the network's code and shapes: all ranks find the same.
    """
    plan = TensorPlan()
    modules = dict(_known(network, ""))
    shared = _shared_parameters(network)
    enough = min(_LARGE_BYTES, _LARGE_SHARE * _num_bytes(network))
    taken: set[str] = set()

    def can_be_cut(names: Sequence[str], units: int) -> bool:
        if any(set(map(id, modules[name].parameters())) & shared for name in names):
            plan.notes.append(f"{names[-1]} is whole: it shares its matrix")
            return False
        if odd := [name for name in names if not _is_plain(modules[name])]:
            plan.notes.append(f"{odd[0]} is whole: it has hooks, or weights of its own kind")
            return False
        if sum(_num_bytes(modules[name]) for name in names) < enough:
            return False
        if units < size:
            plan.notes.append(f"{names[-1]} is not cut by heads: it has {units}")
            return False
        return True

    read_past: set[str] = set()
    for group in _groups(network, modules, read_past):
        if not group.names & taken and can_be_cut([*group.columns, group.row], group.units):
            taken |= group.names
            _add(plan, group)
    for name, module in modules.items():
        if name in taken:
            continue
        if name in read_past:
            plan.notes.append(f"{name} is whole: its matrix is read, not only called")
        elif type(module) is nn.MultiheadAttention:
            if complaint := attention_complaint(module):
                plan.notes.append(f"{name} is whole: {complaint}")
            elif can_be_cut([name], module.num_heads):
                plan.cuts.append(Cut(name=name, how="attention", units=module.num_heads))
        elif type(module) is nn.Linear and can_be_cut([name], module.out_features):
            plan.cuts.append(Cut(name=name, how="gather", units=module.out_features))
        elif (
            type(module) is nn.Embedding
            and module.max_norm is None
            and can_be_cut([name], module.embedding_dim)
        ):
            plan.cuts.append(Cut(name=name, how="embedding", units=module.embedding_dim))
    return plan


def find_attention(module: nn.Module, name: str) -> TensorPlan:
    """Find an attention whose heads a module shows; nothing is cut if there is none.

    Args:
        module: Which calls the Linears.
        name: Of the module, in its network.
    """
    plan = TensorPlan()
    for group in _traced_groups(module, f"{name}.", set()):
        if group.has_heads:
            _add(plan, group)
    return plan


def _add(plan: TensorPlan, group: _Group) -> None:
    plan.counts += group.counts
    plan.cuts += [
        Cut(name=name, how="column", units=group.units, num_dims=group.num_dims)
        for name in group.columns
    ]
    plan.cuts.append(Cut(name=group.row, how="row", units=group.units))


def _known(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """All submodules, but for the inner ones of torch's own layers, which use them in their way."""
    yield prefix, module
    if type(module).__module__.startswith("torch.nn") and not isinstance(module, _CONTAINERS):
        return
    for name, child in module.named_children():
        yield from _known(child, f"{prefix}.{name}" if prefix else name)


def _is_plain(module: nn.Module) -> bool:
    """Whether a layer is no more than its type: hooks, pruning and the like would be lost."""
    hooks = [
        each._forward_hooks or each._forward_pre_hooks or each._parameters.get("weight", 0) is None
        for each in module.modules()
    ]
    own = {*module._parameters} <= {"weight", "bias"} or type(module) is nn.MultiheadAttention
    return own and not any(hooks)


def _shared_parameters(network: nn.Module) -> set[int]:
    names: dict[int, int] = {}
    for _, parameter in network.named_parameters(remove_duplicate=False):
        names[id(parameter)] = names.get(id(parameter), 0) + 1
    return {key for key, count in names.items() if count > 1}


def _num_bytes(module: nn.Module) -> int:
    return sum(each.numel() * each.element_size() for each in module.parameters())


def _groups(
    network: nn.Module, modules: Mapping[str, nn.Module], read_past: set[str]
) -> Iterator[_Group]:
    """All groups; puts into `read_past` the layers whose parameters other code reads."""
    for name, module in modules.items():
        if type(module) in _LAYERS and is_elementwise(module.activation):
            assert isinstance(module.linear1, nn.Linear)
            yield _Group(
                columns=(f"{name}.linear1".lstrip("."),),
                row=f"{name}.linear2".lstrip("."),
                units=module.linear1.out_features,
                num_dims=None,
            )
    yield from _traced_groups(network, "", read_past)


def _traced_groups(module: nn.Module, prefix: str, read_past: set[str]) -> Iterator[_Group]:
    """Those in a module that can be traced; else those in its children."""
    if type(module).__module__.startswith("torch.nn") and not isinstance(module, nn.Sequential):
        traces = None  # a leaf to torch.fx
    else:
        traces = _traces(module)
    if traces is None:
        reads = _may_read_weights(module)
        for name, child in module.named_children():
            if reads:
                read_past.add(prefix + name)
            yield from _traced_groups(child, f"{prefix}{name}.", read_past)
        return
    for _, graph in traces:
        read_past |= {prefix + name for name in _read_in(graph)}
    found = [_groups_in(module, graph, variant) for variant, graph in traces]
    for group in found[0]:
        if all(group in others for others in found[1:]):
            yield replace(
                group,
                columns=tuple(prefix + name for name in group.columns),
                row=prefix + group.row,
                counts=tuple(
                    replace(count, module=(prefix + count.module).rstrip("."))
                    for count in group.counts
                ),
            )


def _read_in(graph: fx.Graph) -> set[str]:
    """The modules whose parameters a trace reads itself, as swin_t does those of its attention."""
    return {str(node.target).rpartition(".")[0] for node in graph.nodes if node.op == "get_attr"}


def _may_read_weights(module: nn.Module) -> bool:
    """Whether code that cannot be traced speaks of weights other than to initialise them."""
    if type(module).__module__.startswith("torch.nn"):
        return False
    functions = [
        function
        for cls in type(module).__mro__[: type(module).__mro__.index(nn.Module)]
        for name, function in vars(cls).items()
        if isfunction(function) and not name.startswith(("__init__", "_init", "init", "reset"))
    ]
    return any({"weight", "bias"} & {*each.__code__.co_names} for each in functions)


_Variant = Mapping[str, None]


def _traces(module: nn.Module) -> list[tuple[_Variant, fx.Graph]] | None:
    """What the module does with its optional arguments and without; None if that is not known."""
    optional = {
        name: None
        for name, parameter in signature(module.forward).parameters.items()
        if parameter.default is None and parameter.kind is not Parameter.VAR_KEYWORD
    }
    variants: list[_Variant] = [{}, optional] if optional else [{}]
    graphs = [(variant, _trace(module, variant)) for variant in variants]
    known = [(variant, graph) for variant, graph in graphs if graph is not None]
    return known if len(known) == len(graphs) else None


def _trace(module: nn.Module, variant: _Variant) -> fx.Graph | None:
    try:
        return fx.Tracer().trace(module, concrete_args=dict(variant) or None)
    except Exception:
        return None


def _groups_in(root: nn.Module, graph: fx.Graph, variant: _Variant) -> list[_Group]:
    modules = dict(root.named_modules())
    read = _read_in(graph)
    calls: dict[str, list[Node]] = {}
    for node in graph.nodes:
        if node.op == "call_module":
            calls.setdefault(str(node.target), []).append(node)
    linears = {
        nodes[0]
        for name, nodes in calls.items()
        if type(modules[name]) is nn.Linear and len(nodes) == 1 and name not in read
    }
    groups: list[_Group] = []
    taken: set[str] = set()
    for node in graph.nodes:
        if node in linears and str(node.target) not in taken:
            group = _group_of(root, graph, variant, modules, linears, node)
            if group is not None and not group.names & taken:
                groups.append(group)
                taken |= group.names
    return groups


def _group_of(
    root: nn.Module,
    graph: fx.Graph,
    variant: _Variant,
    modules: Mapping[str, nn.Module],
    linears: set[Node],
    row: Node,
) -> _Group | None:
    """The group that ends in a Linear, if there is one."""
    between, columns = _before(row, linears)
    if not columns:
        return None
    order = [node for node in graph.nodes if node in between]
    for num_dims in (None, _ASSUMED_DIMS):
        flow = PartedValues(modules, columns, num_dims)
        try:
            flow.follow(order)
        except LostTrackError:
            continue
        spread = flow.spread_of(row.args[0])
        if spread is None or not _ends_in(flow, between, columns, row):
            return None
        linear = modules[str(row.target)]
        if spread.dim != -1 or spread.width != linear.in_features:
            return None
        counts = _counts(root, graph, variant, flow, spread, columns, row)
        if counts is None:
            return None
        return _Group(
            columns=tuple(str(each.target) for each in columns),
            row=str(row.target),
            units=spread.heads or spread.width,
            num_dims=num_dims,
            has_heads=spread.heads is not None,
            counts=counts,
        )
    return None


def _before(row: Node, linears: set[Node]) -> tuple[set[Node], list[Node]]:
    """What lies between a Linear and those before it, and those."""
    between: set[Node] = set()
    columns: list[Node] = []
    waiting = list(row.all_input_nodes)
    while waiting:
        node = waiting.pop()
        if node in linears:
            if node not in columns:
                columns.append(node)
        elif node not in between:
            between.add(node)
            waiting += node.all_input_nodes
    return between, sorted(columns)


def _ends_in(flow: PartedValues, between: set[Node], columns: Sequence[Node], row: Node) -> bool:
    """Whether nothing else reads a value that lies in parts."""
    spread = [*columns, *(node for node in between if flow.spread_of(node) is not None)]
    allowed = {*between, row}
    return all(user in allowed for node in spread for user in node.users)


def _counts(
    root: nn.Module,
    graph: fx.Graph,
    variant: _Variant,
    flow: PartedValues,
    spread: Spread,
    columns: Sequence[Node],
    row: Node,
) -> tuple[Share, ...] | None:
    """The numbers that the code must find changed, so that it counts this rank's heads only.

    Tried out: with the numbers of a rank the code must trace to the same operations, with nothing
    but those counts changed. None if they are not to be had so.
    """
    if spread.heads is None or not flow.counts:
        return ()
    heads, per_head = spread.heads, spread.width // spread.heads
    owner = _common_parent([str(each.target) for each in (*columns, row)])
    module = root.get_submodule(owner)
    numbers = {name: n for name, n in vars(module).items() if type(n) is int}
    by_heads = [
        Share(module=owner, attribute=n, units=heads) for n in numbers if numbers[n] == heads
    ]
    by_width = [
        Share(module=owner, attribute=n, units=heads, per_unit=per_head)
        for n in numbers
        if numbers[n] == spread.width and per_head > 1
    ]
    share = max(1, heads // 2) if heads > 1 else 0
    expected = {heads: share, spread.width: share * per_head}
    for counts in (by_heads, by_heads + by_width, by_width):
        if not counts or share == 0:
            continue
        try:
            for count in counts:
                setattr(module, count.attribute, share * count.per_unit)
            again = _trace(root, variant)
        finally:
            for count in counts:
                setattr(module, count.attribute, numbers[count.attribute])
        if again is not None and _differ_only_in(graph, again, flow.counts, expected):
            return tuple(counts)
    return None


def _common_parent(names: Sequence[str]) -> str:
    parents = [name.split(".")[:-1] for name in names]
    common = []
    for parts in zip(*parents, strict=False):
        if len(set(parts)) > 1:
            break
        common.append(parts[0])
    return ".".join(common)


def _differ_only_in(
    graph: fx.Graph,
    again: fx.Graph,
    counts: Mapping[str, Mapping[int, int]],
    expected: Mapping[int, int],
) -> bool:
    """Whether the second graph is the first but for the counts, and has them as expected."""
    if len(graph.nodes) != len(again.nodes):
        return False
    for one, other in zip(graph.nodes, again.nodes, strict=True):
        if (one.op, one.name, str(one.target)) != (other.op, other.name, str(other.target)):
            return False
        mine, theirs = _constants(one), _constants(other)
        for position, value in counts.get(one.name, {}).items():
            index = _index_of_size(one, position)
            if index is None or mine[index] != repr(value):
                return False
            mine[index] = repr(expected[value])
        if mine != theirs:
            return False
    return True


def _constants(node: Node) -> list[str]:
    """The leaves of a node's arguments, in their order."""
    leaves = torch.utils._pytree.tree_leaves((node.args, node.kwargs))
    return [repr(leaf) for leaf in leaves]


def _index_of_size(node: Node, position: int) -> int | None:
    """Where in `_constants` a size stands that is counted from the end of a shape."""
    return len(_constants(node)) + position if not node.kwargs else None
