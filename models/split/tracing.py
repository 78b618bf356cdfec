"""From a network to the steps of its forward pass, in order. Worker processes only."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from inferpool.models.errors import ModelError

_TYPE_QUESTIONS = frozenset({"isinstance", "is_tensor", "type"})
_CONSTANTS = (bool, int, float, str, type(None))


def trace(
    network: nn.Module, example: Sequence[object] | Mapping[str, object]
) -> tuple[fx.Graph, list[str]]:
    """Trace a network by `torch.fx`, into submodules as deep as they can be traced.

    Shapes stay open. Submodules of `torch.nn` are steps as a whole, and so is what cannot be
    traced, such as one whose forward branches on numbers.

    Args:
        network: In evaluation mode. Its numbers are not needed.
        example: What it is called with: arguments that are not among them keep their defaults. If
            it is empty, those without a default are taken.

    Returns:
        The graph, and the names of the arguments that are its placeholders, in their order.

    Raises:
        ModelError: The network's own forward cannot be traced.
    """
    for module in network.modules():
        if type(module) is nn.TransformerEncoder:
            module.__class__ = EncoderByLayers
    signature = inspect.signature(network.forward)
    given = _given(network, signature, example)
    defaults = {
        name: parameter.default
        for name, parameter in signature.parameters.items()
        if name not in given and parameter.default is not parameter.empty
    }
    if odd := [name for name, value in defaults.items() if not isinstance(value, _CONSTANTS)]:
        raise ModelError(
            f"{type(network).__name__} cannot be cut: the default of its argument {odd[0]!r} is "
            f"no plain value"
        )
    opaque: set[str] = set()
    while True:
        tracer = _Tracer(opaque)
        try:
            graph = tracer.trace(network, defaults)
            break
        except Exception as error:  # what tracing meets with is the user's code
            if not tracer.failed:
                raise ModelError(
                    f"{type(network).__name__} cannot be cut into stages: torch.fx cannot trace "
                    f"its own forward ({type(error).__name__}: {error}); move what branches on "
                    f"tensors into submodules"
                ) from error
            opaque.add(tracer.failed)
    names = list(signature.parameters)
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    for name, node in zip(names, placeholders, strict=True):
        if name in defaults:
            _erase(graph, node)
    return graph, [name for name in names if name not in defaults]


class _Tracer(fx.Tracer):
    """Traces into what is not of `torch.nn`, but for what has been found not to be traceable."""

    def __init__(self, opaque: set[str]) -> None:
        super().__init__(param_shapes_constant=True)
        self._opaque = opaque
        self._inside: list[str] = []
        self.failed = ""
        """The innermost submodule whose forward raised."""

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
    """The same, without the shortcuts that look at its inputs, and so with layers to cut between.

    One of those computes without the positions that are masked, and leaves zeros there.
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


@fx.wrap
def blank_padding(x: Tensor, is_padding: Tensor) -> Tensor:
    """Put zeros where it is padding, as `nn.TransformerEncoder` does if that is at the ends."""
    if is_padding.dtype != torch.bool:
        is_padding = is_padding == -torch.inf
    if (is_padding[:, :-1] & ~is_padding[:, 1:]).any():
        return x
    return x.masked_fill(is_padding[..., None], 0)


def asks_for_types(module: nn.Module) -> bool:
    """Whether a forward asks what its input is: while it is traced that is no tensor."""
    code = getattr(type(module).forward, "__code__", None)
    return code is not None and not _TYPE_QUESTIONS.isdisjoint(code.co_names)


def _given(
    network: nn.Module,
    signature: inspect.Signature,
    example: Sequence[object] | Mapping[str, object],
) -> list[str]:
    parameters = signature.parameters
    if not example:
        return [name for name, each in parameters.items() if each.default is each.empty]
    try:
        bound = (
            signature.bind(**example) if isinstance(example, Mapping) else signature.bind(*example)
        )
    except TypeError as error:
        raise ModelError(f"{type(network).__name__}'s forward: {error}") from None
    return list(bound.arguments)


def _erase(graph: fx.Graph, node: fx.Node) -> None:
    """Take out a placeholder that stands for a constant, and what asserts that it is one."""
    for user in [*node.users]:
        _erase(graph, user)
    graph.erase_node(node)
