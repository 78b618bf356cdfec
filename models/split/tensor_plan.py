"""Plans for tensor parallelism: which layers are cut, and how. Worker processes only.

A model or its network may bring a plan (`tensor_plan`). It maps names of submodules to words; "*"
stands for one part of a name, as in "layers.*.mlp.up":

    "column"     a Linear that leaves its outputs in parts, for elementwise steps and then a "row"
    "row"        a Linear that takes inputs in parts; its outputs are whole
    "gather"     a Linear with outputs that are computed in parts and put together
    "embedding"  an Embedding with features that are looked up in parts and put together
    "attention"  an nn.MultiheadAttention; or a module with one Linear for each of queries, keys,
                 values and outputs, and an attribute that counts its heads or their features

or to styles of `torch.distributed.tensor.parallel`, which mean what they mean there.

Without such a plan, one is found: `nn.MultiheadAttention` is cut by heads, two Linears with only
elementwise steps between them are "column" and "row", and every other large Linear or Embedding is
gathered, which needs as little memory. The search reads a network's code only in part, as the heads
of an attention that is written out are guessed from its attributes. So both are used only if the
split network is compared with the whole one on an example.
"""

import operator
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import Parameter, isfunction, signature
from typing import Literal, TypeAlias, cast

import torch
from torch import fx, nn
from torch.nn import functional

from inferpool.models.errors import ModelError
from inferpool.models.split.meta_network import joined

How: TypeAlias = Literal["column", "row", "gather", "embedding", "attention"]
OwnPlan: TypeAlias = Mapping[str, object]
"""A plan as a user writes it: words, or styles of torch's own, by name of the submodule."""

_WORDS = ("column", "row", "gather", "embedding", "attention")
_LARGE_BYTES = 1 << 20
_LARGE_SHARE = 0.005
"""Share of the network's bytes. A layer with fewer bytes than both costs more in messages than it
saves: one sum over two ranks by gloo takes 0.1 to 0.2 ms on this project's machine."""
_OUTPUT = re.compile(r"(^|[._])(out|output|o|wo|dense|proj)(_proj|_lin)?$")
"""Names of the Linear that makes an attention's outputs, after their module's."""
_WIDTH = re.compile(r"embe?d|dim|hidden|width|head|model|feature|channel|inner")
"""Attributes that hold a width. Others may hold the same number by chance, such as a length."""
_TORCH_LAYERS = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
_CONTAINERS = (
    nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.Transformer, nn.TransformerEncoder,
    nn.TransformerDecoder, *_TORCH_LAYERS,
)  # fmt: skip
_ELEMENTWISE = {
    nn.Identity, nn.Dropout, nn.ReLU, nn.ReLU6, nn.GELU, nn.SiLU, nn.Mish, nn.Tanh, nn.Sigmoid,
    nn.ELU, nn.SELU, nn.CELU, nn.LeakyReLU, nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid,
    nn.Softplus, nn.LogSigmoid,
    functional.relu, functional.relu6, functional.gelu, functional.silu, functional.mish,
    functional.elu, functional.selu, functional.leaky_relu, functional.hardtanh,
    functional.hardswish, functional.softplus, functional.dropout, functional.tanh,
    functional.sigmoid, torch.relu, torch.tanh, torch.sigmoid, torch.neg, torch.exp, operator.neg,
    "relu", "relu_", "tanh", "sigmoid", "neg", "exp", "contiguous", "float", "clone",
    operator.add, operator.mul, operator.sub, operator.truediv, operator.iadd, operator.imul,
    operator.itruediv, torch.add, torch.mul, torch.div, "add", "add_", "mul", "mul_", "div", "div_",
}  # fmt: skip
"""Module types, functions and methods of tensors that treat each feature by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """One layer that is cut."""

    name: str
    how: How
    units: int
    """Most parts it can be cut into: its heads, or its features."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """A number in a module that must become this rank's share: of heads, or of features."""

    module: str
    attribute: str
    units: int
    per_unit: int = 1


@dataclass(slots=True, kw_only=True)
class TensorPlan:
    """All layers that are cut in a network; the rest is whole on every rank."""

    cuts: list[Cut] = field(default_factory=list)
    counts: list[Share] = field(default_factory=list)
    styles: dict[str, object] = field(default_factory=dict)
    """Styles left to DTensor, by the names of the modules."""
    notes: list[str] = field(default_factory=list)
    """Reasons why layers stay whole that might be expected to be cut, for a person."""

    is_guess: bool = False
    """The plan may be wrong: it is used only if its result is compared with the whole network."""


def own_plan(network: nn.Module, wishes: OwnPlan, size: int) -> TensorPlan:
    """Apply a user's plan to a network.

    Raises:
        ModelError: The network lacks a module that the plan names, or it cannot be cut so.
    """
    plan = TensorPlan()
    modules = dict(network.named_modules())
    for pattern, wish in wishes.items():
        for name in _matching(modules, pattern):
            module = modules[name]
            word = _word(wish, module)
            if word is None:
                plan.styles[name] = wish
            elif word == "attention" and not isinstance(module, nn.MultiheadAttention):
                _cut_attention(plan, module, name, size)
            else:
                plan.cuts.append(_cut(name, module, word))
    for cut in plan.cuts:
        if cut.units < size:
            raise ModelError(f"tensor_plan: {cut.name} has {cut.units} parts for {size} ranks")
    return plan


def _matching(modules: Mapping[str, nn.Module], pattern: str) -> list[str]:
    expression = re.compile(re.escape(pattern).replace(r"\*", "[^.]*"))
    names = [name for name in modules if name and expression.fullmatch(name)]
    if not names:
        raise ModelError(f"tensor_plan: the network has no submodule {pattern!r}")
    return names


def _word(wish: object, module: nn.Module) -> How | None:
    """Return the word for a wish; None for a style that no word stands for."""
    word = wish
    if not isinstance(wish, str):  # a word is faster than a style that means the same
        from inferpool.models.split.dtensors import word_for

        word = word_for(wish, module)
        if word is None:
            return None
    if word not in _WORDS:
        raise ModelError(f"tensor_plan: {word!r} is none of {', '.join(_WORDS)}")
    return cast("How", word)


def _cut(name: str, module: nn.Module, how: How) -> Cut:
    wanted = {"attention": nn.MultiheadAttention, "embedding": nn.Embedding}.get(how, nn.Linear)
    if not isinstance(module, wanted):
        raise ModelError(
            f'tensor_plan: "{how}" is for {wanted.__name__}, and {name} is a '
            f"{type(module).__name__}"
        )
    if isinstance(module, nn.MultiheadAttention):
        if complaint := _attention_complaint(module):
            raise ModelError(f"tensor_plan: {name} cannot be split: {complaint}")
        return Cut(name=name, how=how, units=module.num_heads)
    if isinstance(module, nn.Embedding):
        return Cut(name=name, how=how, units=module.embedding_dim)
    assert isinstance(module, nn.Linear)
    width = module.in_features if how == "row" else module.out_features
    return Cut(name=name, how=how, units=width)


def _cut_attention(plan: TensorPlan, module: nn.Module, name: str, size: int) -> None:
    """Cut an attention that is written out; by its Linears' outputs if it has too few heads."""
    names = [f"{name}.{n}" for n, each in module.named_modules() if type(each) is nn.Linear]
    linears = [each for each in module.modules() if type(each) is nn.Linear]
    width = linears[-1].in_features if linears else 0
    numbers = {
        (f"{name}.{path}".rstrip("."), attribute): value
        for path, each in module.named_modules()
        if not type(each).__module__.startswith("torch.nn")
        for attribute, value in vars(each).items()
        if type(value) is int and value > 0
    }
    counts = {key: n for key, n in numbers.items() if re.search(r"heads|n(um)?_?head$", key[1])}
    widths = [n for (_, attribute), n in numbers.items() if "head" in attribute]
    heads = next(iter(counts.values()), width // widths[0] if widths else 0)
    outs = [each for each in names if _OUTPUT.search(each)]
    out = outs[0] if len(outs) == 1 else names[-1] if names else ""
    others = [each for each, n in zip(linears, names, strict=True) if n != out]
    is_plain = len(linears) == 4 and all(each.out_features == width for each in others)
    if not is_plain or heads == 0 or width % heads or {*counts.values()} - {heads}:
        raise ModelError(
            f"tensor_plan: the heads of {name} are not to be told from its Linears and attributes; "
            'its Linears can be named "gather"'
        )
    if heads < size:
        plan.cuts += [_cut(*each, "gather") for each in zip(names, linears, strict=True)]
        return
    plan.is_guess = True
    plan.cuts += [Cut(name=each, how="column", units=heads) for each in names if each != out]
    plan.cuts.append(Cut(name=out, how="row", units=heads))
    plan.counts += [Share(module=m, attribute=a, units=heads) for m, a in counts]
    plan.counts += [
        Share(module=m, attribute=a, units=heads, per_unit=width // heads)
        for (m, a), number in numbers.items()
        if number == width and _WIDTH.search(a) and (m, a) not in counts and width != width // heads
    ]


def find_plan(network: nn.Module, size: int) -> TensorPlan:
    """Find what can be cut into as many parts as there are ranks.

    The plan depends on the network's code and shapes alone, so that all ranks find the same.
    """
    plan = TensorPlan(is_guess=True)
    modules = dict(_searched(network, ""))
    shared = _shared_parameters(network)
    enough = min(_LARGE_BYTES, _LARGE_SHARE * _num_bytes(network))
    read: set[str] = set()
    for name, module in modules.items():
        read |= {each for each in _read_by(module, name) if each in modules}

    def can_be_cut(names: Sequence[str], units: int) -> bool:
        if any(set(map(id, modules[name].parameters())) & shared for name in names):
            plan.notes.append(f"{names[-1]} is whole: it shares its matrix")
        elif odd := [name for name in names if not _is_plain(modules[name])]:
            plan.notes.append(f"{odd[0]} is whole: it has hooks, or weights of its own kind")
        elif odd := [name for name in names if name in read]:
            plan.notes.append(f"{odd[0]} is whole: its matrix is read, not only called")
        elif sum(_num_bytes(modules[name]) for name in names) >= enough:
            if units >= size:
                return True
            text = f"{names[-1]} is not cut: it has {units} heads or features for {size} ranks"
            plan.notes.append(text)
        return False

    taken: set[str] = set()
    for name, module in modules.items():
        for columns, row in _pairs_in(module, name):
            names, units = [*columns, row], cast("nn.Linear", modules[row]).in_features
            if {*names} <= modules.keys() - taken and can_be_cut(names, units):
                taken |= {*names}
                plan.cuts += [Cut(name=each, how="column", units=units) for each in columns]
                plan.cuts.append(Cut(name=row, how="row", units=units))
    for name, module in modules.items():
        if name in taken:
            continue
        if type(module) is nn.MultiheadAttention:
            if complaint := _attention_complaint(module):
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


def _searched(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield all submodules but those inside torch's own layers."""
    yield prefix, module
    if type(module).__module__.startswith("torch.nn") and not isinstance(module, _CONTAINERS):
        return
    for name, child in module.named_children():
        yield from _searched(child, joined(prefix, name))


def _is_plain(module: nn.Module) -> bool:
    """Return whether a layer has no hooks, pruning or the like, which a shard would lose."""
    hooks = [
        each._forward_hooks or each._forward_pre_hooks or each._parameters.get("weight", 0) is None
        for each in module.modules()
    ]
    own = {*module._parameters} <= {"weight", "bias"} or type(module) is nn.MultiheadAttention
    return own and not any(hooks)


def _attention_complaint(module: nn.MultiheadAttention) -> str:
    if module.bias_k is not None or module.bias_v is not None or module.add_zero_attn:
        return "it adds to its keys"
    if not module._qkv_same_embed_dim:
        return "its keys or values have other widths than its queries"
    return ""


def _shared_parameters(network: nn.Module) -> set[int]:
    names: dict[int, int] = {}
    for _, parameter in network.named_parameters(remove_duplicate=False):
        names[id(parameter)] = names.get(id(parameter), 0) + 1
    return {key for key, count in names.items() if count > 1}


def _num_bytes(module: nn.Module) -> int:
    return sum(each.nbytes for each in module.parameters())


def _read_by(module: nn.Module, prefix: str) -> set[str]:
    """Find the layers below a module that its own code may read weights of, past their forward."""
    if type(module).__module__.startswith("torch.nn"):
        return set()
    names: dict[str, set[str]] = {}
    for cls in type(module).__mro__[: type(module).__mro__.index(nn.Module)]:
        for name, function in vars(cls).items():
            if isfunction(function):
                names.setdefault(name, set()).update(function.__code__.co_names)
    words: set[str] = set()
    waiting = ["forward"]
    while waiting:
        used = names.pop(waiting.pop(), set())
        words |= used if used & {"weight", "bias"} else set()
        waiting += used
    if not words:
        return set()
    return {
        joined(prefix, name)
        for name, _ in module.named_modules()
        if name and all(part in words or part.isdigit() for part in name.split("."))
    }


def _pairs_in(module: nn.Module, prefix: str) -> Iterator[tuple[list[str], str]]:
    """Yield the Linears that a module calls before, and with, one that takes their parts."""
    if type(module) in _TORCH_LAYERS:  # a class that inherits from one may compute otherwise
        if {module.activation, type(module.activation)} & _ELEMENTWISE:
            yield [joined(prefix, "linear1")], joined(prefix, "linear2")
        return
    if type(module).__module__.startswith("torch.nn") and not isinstance(module, nn.Sequential):
        return
    children = dict(module.named_modules())
    if sum(type(each) is nn.Linear for each in children.values()) < 2:
        return
    graphs = _traces(module)
    found = [[*_pairs_of(graph, children)] for graph in graphs]
    for columns, row in found[0] if found else ():
        if all((columns, row) in others for others in found[1:]):
            yield [joined(prefix, each) for each in columns], joined(prefix, row)


class _ShallowTracer(fx.Tracer):
    """Traces one module's own code; those that it calls are steps."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True


def _traces(module: nn.Module) -> list[fx.Graph]:
    """Trace a module with its optional arguments and without; nothing if one cannot be traced."""
    optional = {
        name: None
        for name, parameter in signature(module.forward).parameters.items()
        if parameter.default is None and parameter.kind is not Parameter.VAR_KEYWORD
    }
    variants = [None, optional] if optional else [None]
    try:
        return [_ShallowTracer().trace(module, each) for each in variants]
    except Exception:  # what tracing meets with is the user's code
        return []


def _pairs_of(graph: fx.Graph, modules: Mapping[str, nn.Module]) -> Iterator[tuple[list[str], str]]:
    calls = [str(node.target) for node in graph.nodes if node.op == "call_module"]
    linears = {
        node: cast("nn.Linear", modules[str(node.target)])
        for node in graph.nodes
        if node.op == "call_module"
        and type(modules[str(node.target)]) is nn.Linear
        and calls.count(str(node.target)) == 1
    }
    for row, linear in linears.items():
        columns = _columns_before(row, linears, modules)
        if columns and all(linears[each].out_features == linear.in_features for each in columns):
            yield [str(each.target) for each in columns], str(row.target)


def _columns_before(
    row: fx.Node, linears: Mapping[fx.Node, nn.Linear], modules: Mapping[str, nn.Module]
) -> list[fx.Node]:
    """Find the Linears that feed a Linear through elementwise steps alone.

    Returns:
        Nothing if something else reads their outputs, or what is made of those.
    """
    between: set[fx.Node] = set()
    waiting = [*row.all_input_nodes]
    while waiting:
        node = waiting.pop()
        if node in between:
            continue
        between.add(node)
        if node in linears:
            continue
        kind = type(modules[str(node.target)]) if node.op == "call_module" else node.target
        if node.op in ("placeholder", "get_attr") or kind not in _ELEMENTWISE:
            return []
        waiting += node.all_input_nodes
    if any(user is not row and user not in between for node in between for user in node.users):
        return []
    return sorted(node for node in between if node in linears)
