"""Finds the networks that a user's model keeps, and what is odd about them. Worker processes."""

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from types import ModuleType

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from inferpool.models.base import Model

logger = logging.getLogger(__name__)

BF16_ROUNDING = 2**-4
"""Largest deviation of an output of bfloat16, as a part of its largest value: kernels for another
size of the batch add up in another order. It is eight times the epsilon."""
_ROUNDING_OF_BYTES = 2**-3
"""The same for formats of 8 bits and less. Their own epsilon is as large: what is computed in them
is added up in others."""
_TRAINED = (nn.modules.dropout._DropoutNd, nn.modules.batchnorm._BatchNorm, nn.RNNBase, nn.RReLU)
"""Modules that compute otherwise while they train."""
_DEPTH = 4
_MOST_OBJECTS = 2000


def networks_of(model: Model) -> Iterator[tuple[str, nn.Module]]:
    """Yield the networks that a model keeps, with their places: "net", "nets[0]", "pipe.model"."""
    waiting: deque[tuple[str, object, int]] = deque(_members("", model, 1))
    seen: set[int] = set()
    while waiting and len(seen) < _MOST_OBJECTS:
        place, value, depth = waiting.popleft()
        if id(value) in seen:
            continue
        seen.add(id(value))
        try:
            is_network = isinstance(value, nn.Module)
            inner = [] if is_network or depth == _DEPTH else [*_members(place, value, depth + 1)]
        except Exception:  # a proxy may raise anything
            logger.debug("%s cannot be looked into", place, exc_info=True)
            continue
        waiting.extend(inner)
        if is_network:
            assert isinstance(value, nn.Module)
            yield place, value


def _members(place: str, value: object, depth: int) -> Iterator[tuple[str, object, int]]:
    found: Iterable[tuple[str, object]] = ()
    if isinstance(value, dict):
        found = ((f"{place}[{key!r}]", each) for key, each in islice(value.items(), _MOST_OBJECTS))
    elif isinstance(value, list | tuple):
        found = ((f"{place}[{i}]", each) for i, each in enumerate(value[:_MOST_OBJECTS]))
    elif not isinstance(value, type | ModuleType | Tensor):
        own = getattr(value, "__dict__", {})
        found = ((f"{place}.{name}".lstrip("."), each) for name, each in own.items())
    for inner, each in found:
        if not isinstance(each, str | bytes | int | float | None):
            yield inner, each, depth


def training_text(model: Model) -> str:
    """Name the networks of a model that are in training mode, and compute otherwise for that."""
    for name, network in networks_of(model):
        trained = [(path, each) for path, each in network.named_modules() if each.training]
        if found := [(path, each) for path, each in trained if isinstance(each, _TRAINED)]:
            path, each = found[0]
            where = f"`{name}.{path}`" if path else f"`{name}`"
            return (
                f"; {where} ({type(each).__name__}) is in training mode: call `self.{name}.eval()` "
                "in `load`"
            )
    return ""


def non_finite_weight(model: Model) -> str:
    """Return the name of a weight with NaN or an infinity; empty if there is none.

    Masks may be parameters, too: they have minus infinity, and nothing else that is not finite.
    """
    for name, network in networks_of(model):
        buffers = [each for each in network.named_buffers() if "running_" in each[0]]
        for path, tensor in (*network.named_parameters(), *buffers):
            if tensor.is_floating_point() and _is_broken(tensor):
                return f"{name}.{path}"
    return ""


def _is_broken(tensor: Tensor) -> bool:
    try:
        return not bool((tensor.isfinite() | (tensor == -torch.inf)).all())
    except (RuntimeError, NotImplementedError):  # it has no values, or few operators know its dtype
        return False


def rounding_of(model: Model, outputs: Mapping[str, Tensor]) -> float:
    """Return how far rounding may change outputs, as a part of their largest value."""
    if model.decode == "device":  # it may decode one picture otherwise than several
        return BF16_ROUNDING
    tensors = [*outputs.values()]
    for _, network in networks_of(model):
        tensors += network.parameters()
    return rounding_in({tensor.dtype for tensor in tensors if tensor.is_floating_point()})


def rounding_in(formats: Iterable[torch.dtype]) -> float:
    """Return how far an output computed in formats may differ, as a part of its largest value."""
    roundings = (
        8 * torch.finfo(each).eps if each.itemsize > 1 else _ROUNDING_OF_BYTES for each in formats
    )
    return max(roundings, default=0.0)


class Formats(TorchDispatchMode):
    """Records the floating-point formats that are computed in, such as those of autocast."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no types here
        self.found: set[torch.dtype] = set()

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Compute an operation as ever, and record the formats of its results."""
        result = func(*args, **(kwargs or {}))
        tensors = [each for each in tree_leaves(result) if isinstance(each, Tensor)]
        self.found.update(each.dtype for each in tensors if each.is_floating_point())
        return result
