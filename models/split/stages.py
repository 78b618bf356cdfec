"""The forward pass of a network as a list of steps, and stages cut out of it. Worker processes."""

import inspect
import itertools
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any

import torch
from torch import Tensor, fx, nn

from inferpool.models.errors import ModelError

_TYPE_QUESTIONS = frozenset({"isinstance", "is_tensor", "type"})
_CONSTANTS = (bool, int, float, str, type(None))


class ForwardSteps:
    """The steps of a network's forward pass, in their order.

    A stage is a run of steps. It takes the values that were made before it and are used in it or
    after it, and returns those that are used after it: any number of values. Parameters do not
    travel: each stage that uses one has it.
    """

    def __init__(
        self, network: nn.Module, example: Sequence[object] | Mapping[str, object]
    ) -> None:
        """Trace the network.

        Raises:
            ModelError: It cannot be traced.
        """
        self.network = network
        self.graph, self.arguments = _trace(network, example)
        nodes = list(self.graph.nodes)
        self.inputs = [node for node in nodes if node.op == "placeholder"]
        self.output = nodes[-1]
        self.steps = [n for n in nodes if n.op not in ("placeholder", "get_attr", "output")]
        self.starts: dict[str, int] = {}
        """The step at which each submodule begins."""
        self.names: dict[int, str] = {}
        """The outermost submodule that begins at a step, if any."""
        self._last_uses: dict[fx.Node, int] = {}
        for position, step in enumerate([*self.steps, self.output]):
            self._last_uses.update(dict.fromkeys(step.all_input_nodes, position))
            for path, _ in step.meta.get("nn_module_stack", {}).values():
                if path and path not in self.starts:
                    self.starts[path] = position
                    self.names.setdefault(position, path)

    def positions(self, cuts: Sequence[str]) -> list[int]:
        """Find the steps that submodules begin with, as the limits of stages.

        Raises:
            ModelError: There is no such submodule, it is not reached, or two begin together.
        """
        name = type(self.network).__name__
        for cut in cuts:
            if cut not in self.starts:
                near = get_close_matches(cut, self.starts) or list(self.starts)[:5]
                raise ModelError(
                    f"{name} cannot be cut in front of {cut!r}: its forward has {', '.join(near)}"
                )
        positions = [self.starts[cut] for cut in cuts]
        if positions != sorted({*positions} - {0}):
            raise ModelError(
                f"{name} cannot be cut in front of {', '.join(cuts)}: there must be steps before "
                f"and between them, in this order"
            )
        return positions

    def stages(self, positions: Sequence[int]) -> list[tuple[int, int]]:
        """Return the first step of each stage, and the one after its last."""
        return list(itertools.pairwise([0, *positions, len(self.steps)]))

    def cut(self, begin: int, end: int) -> fx.GraphModule:
        """Return a stage of the network's own submodules and parameters.

        Args:
            begin: Its first step.
            end: The step after its last.

        Returns:
            A module that takes the values that cross to its first step, and returns those that
            cross to the step after its last; the last stage returns the network's output.
        """
        graph = fx.Graph()
        known = {node: graph.placeholder(node.name) for node in self.crossing(begin)}

        def copied(node: fx.Node) -> fx.Node:
            if node not in known:
                assert node.op == "get_attr", f"{node} is made in another stage"
                known[node] = graph.node_copy(node)
            return known[node]

        for node in self.steps[begin:end]:
            known[node] = graph.node_copy(node, copied)
        if end == len(self.steps):
            graph.output(fx.map_arg(self.output.args[0], copied))
        else:
            graph.output(tuple(known[node] for node in self.crossing(end)))
        graph.lint()
        return fx.GraphModule(self.network, graph)

    def crossing(self, position: int) -> list[fx.Node]:
        """Find the values that a stage takes if it begins at a step."""
        if position == 0:
            return self.inputs
        made = [*self.inputs, *self.steps[:position]]
        return [node for node in made if self._last_uses.get(node, -1) >= position]

    def describe(self, begin: int, end: int) -> str:
        """Return the name of a part of the network, given as steps."""
        last = max(position for position in [*self.names, 0] if position < max(end, 1))
        first, last_name = self.names.get(begin, "the start"), self.names.get(last, "the end")
        if end == len(self.steps):
            return f"{first} to the end"
        return first if first == last_name else f"{first} to {last_name}"


def _trace(
    network: nn.Module, example: Sequence[object] | Mapping[str, object]
) -> tuple[fx.Graph, list[str]]:
    """Trace a network by `torch.fx`, into submodules as deep as they can be traced.

    Shapes stay open. Submodules of `torch.nn` are steps as a whole, and so are those that cannot be
    traced, such as one with a forward that branches on numbers.

    Args:
        network: In evaluation mode. Its numbers are not needed.
        example: Its arguments: the others keep their defaults. If it is empty, those without a
            default are used.

    Returns:
        The graph, and the names of the arguments that are its placeholders, in their order.

    Raises:
        ModelError: The network's own forward cannot be traced.
    """
    run_encoders_by_layers(network)
    parameters = inspect.signature(network.forward).parameters
    given = _given(network, example)
    defaults = {
        name: each.default
        for name, each in parameters.items()
        if name not in given and each.default is not each.empty
    }
    if odd := [name for name, value in defaults.items() if not isinstance(value, _CONSTANTS)]:
        raise ModelError(
            f"{type(network).__name__} cannot be cut: the default of its argument {odd[0]!r} is "
            f"no plain value"
        )
    opaque: set[str] = set()
    graph: fx.Graph | None = None
    while graph is None:
        tracer = _Tracer(opaque)
        try:
            graph = tracer.trace(network, defaults)
        except Exception as error:  # the network is the user's: it may raise anything
            if not tracer.failed:
                raise ModelError(
                    f"{type(network).__name__} cannot be cut into stages: torch.fx cannot trace "
                    f"its own forward ({type(error).__name__}: {error}); move what branches on "
                    f"tensors into submodules"
                ) from error
            opaque.add(tracer.failed)
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    for name, node in zip(parameters, placeholders, strict=True):
        if name in defaults:
            _erase(graph, node)
    return graph, [name for name in parameters if name not in defaults]


class _Tracer(fx.Tracer):
    """Traces into modules that are not of `torch.nn`, but for those known not to be traceable."""

    def __init__(self, opaque: set[str]) -> None:
        super().__init__(param_shapes_constant=True)
        self._opaque = opaque
        self.failed = ""
        """The innermost submodule with a forward that raised."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if module_qualified_name in self._opaque or asks_for_types(m):
            return True
        return super().is_leaf_module(m, module_qualified_name)

    def call_module(
        self, m: nn.Module, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        name = self.path_of_module(m)
        try:
            return super().call_module(m, forward, args, kwargs)
        except Exception:
            self.failed = self.failed or name
            raise


class EncoderByLayers(nn.TransformerEncoder):
    """An `nn.TransformerEncoder` that calls its layers and takes no shortcuts by its inputs.

    One of those leaves out masked positions, makes nested tensors, and puts zeros there.
    """

    def forward(
        self,
        src: Tensor,
        mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool | None = None,
    ) -> Tensor:
        """Compute one layer after the other."""
        output = src
        for layer in self.layers:
            output = layer(
                output,
                src_mask=mask,
                is_causal=bool(is_causal),
                src_key_padding_mask=src_key_padding_mask,
            )
        if self.use_nested_tensor and mask is None and src_key_padding_mask is not None:
            output = blank_padding(output, src_key_padding_mask)
        return output if self.norm is None else self.norm(output)


def run_encoders_by_layers(network: nn.Module) -> None:
    """Replace each `nn.TransformerEncoder` in a network by an `EncoderByLayers`."""
    for module in network.modules():
        if type(module) is nn.TransformerEncoder:
            module.__class__ = EncoderByLayers


@fx.wrap
def blank_padding(x: Tensor, is_padding: Tensor) -> Tensor:
    """Put zeros where it is padding, as `nn.TransformerEncoder` does if that is at the ends."""
    if is_padding.dtype != torch.bool:
        is_padding = is_padding == -torch.inf
    if (is_padding[:, :-1] & ~is_padding[:, 1:]).any():
        return x
    return x.masked_fill(is_padding[..., None], 0)


def asks_for_types(module: nn.Module) -> bool:
    """Return whether a forward asks for the type of its input, which is no tensor while traced."""
    code = getattr(type(module).forward, "__code__", None)
    return code is not None and not _TYPE_QUESTIONS.isdisjoint(code.co_names)


def _given(network: nn.Module, example: Sequence[object] | Mapping[str, object]) -> list[str]:
    signature = inspect.signature(network.forward)
    if not example:
        return [name for name, each in signature.parameters.items() if each.default is each.empty]
    args, kwargs = ((), example) if isinstance(example, Mapping) else (example, {})
    try:
        return list(signature.bind(*args, **kwargs).arguments)
    except TypeError as error:
        raise ModelError(f"{type(network).__name__}'s forward: {error}") from None


def _erase(graph: fx.Graph, node: fx.Node) -> None:
    """Remove a placeholder that stands for a constant, and what asserts that it is one."""
    for user in [*node.users]:
        _erase(graph, user)
    graph.erase_node(node)
