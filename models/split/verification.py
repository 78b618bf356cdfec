"""Compares a split network with the whole one, before either has its numbers. Worker processes.

Tracing may go wrong without notice: code that asks for shapes, types or values may branch otherwise
for what stands for a tensor, and what it computes of a shape may become a constant. So both
networks are computed once with numbers that are made up from the names of the parameters. They are
made for each operation as it is called, so that one layer at a time has memory; and they vary, so
that a parameter in another's place shows.
"""

import logging
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from inferpool.models.accelerator.device import is_accelerator
from inferpool.models.runtime import Example
from inferpool.models.split.packing import num_rows

logger = logging.getLogger(__name__)

NetworkCall: TypeAlias = tuple[tuple[object, ...], dict[str, object]]

EXACT = 1e-5
"""A tolerance for the same operations on the same numbers."""
_BATCH_SIZES = (1, 3)
"""Two, since a shape can have become a constant."""
_TABLE_LENGTH = 65_521
"""Made-up numbers before they come again: a prime, so that the rows of a matrix differ."""
_GAIN = 1.5
"""Factor that keeps values from growing or vanishing too fast on their way through layers."""
_DEVIATION = 0.1
"""Standard deviation of biases, and of factors around 1."""
_PLAIN_QUESTIONS = frozenset(
    {"size", "dim", "ndimension", "numel", "nelement", "stride", "__len__", "element_size"}
    | {"is_floating_point", "is_complex", "is_contiguous", "requires_grad_", "__set__"}
)
_PLAIN_ATTRIBUTES = tuple(
    getattr(torch.Tensor, name).__get__
    for name in ("shape", "dtype", "ndim", "requires_grad", "is_leaf", "layout", "grad_fn")
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Place of an empty parameter in the whole network; its made-up numbers follow from that."""

    tensor: Tensor
    """The empty parameter."""
    name: str
    """Name of the whole parameter, in the whole network."""
    shape: tuple[int, ...]
    """Shape of the whole parameter."""
    dim: int = 0
    ranges: tuple[tuple[int, int], ...] = ()
    """The parts of the whole along `dim` that the empty one has; empty: all."""


def has_all_shapes(example: Example) -> bool:
    """Return whether an example says all shapes, so that the network can be called with it."""
    values = example.values() if isinstance(example, Mapping) else example
    return bool(example) and all(value is not None for value in values)


class Verification:
    """Answers of the whole network to a few calls, with made-up numbers.

    Args:
        network: The whole one; its parameters may be on the meta device.
        example: Its arguments.
        device: Where to compute.
    """

    def __init__(self, network: nn.Module, example: Example, device: torch.device) -> None:
        self._device = device
        self._network_name = type(network).__name__
        self.origins = [
            Origin(tensor=parameter, name=name, shape=tuple(parameter.shape))
            for name, parameter in network.named_parameters()
        ]
        self.complaint = ""
        """Why there are no answers to compare with, for a person."""
        self._calls: list[NetworkCall] = []
        self._answers: list[object] = []
        if not has_all_shapes(example):
            self.complaint = (
                "the shapes of its inputs are not known (`example` of `load_network` says them, "
                "or of a plain network the option `inputs`)"
            )
            return
        try:
            for args, kwargs in _varied_calls(example, device):
                with made_up(self.origins, device), torch.inference_mode():
                    answer = copied(network(*copied(args), **copied(kwargs)))
                self._calls.append((args, kwargs))
                self._answers.append(answer)
        except torch.AcceleratorError:
            raise
        except Exception as error:  # the network is the user's: it may raise anything
            text = "the network cannot be tried before it has its numbers: %s: %s"
            logger.warning(text, type(error).__name__, error)
            self.complaint = f"it failed on its example with {type(error).__name__}"

    def difference(
        self, compute: Callable[..., object], origins: Iterable[Origin], tolerance: float
    ) -> str:
        """Compare a split network with the whole.

        Args:
            compute: The split network, called like the whole.
            origins: Origins of its empty parameters.
            tolerance: The largest deviation allowed, relative to the largest number of an output.

        Returns:
            How its answers differ, for a person; empty if they do not.

        Raises:
            EOFError: A rank is gone.
            torch.AcceleratorError: The device's context is lost.
        """
        origins = list(origins)
        for (args, kwargs), expected in zip(self._calls, self._answers, strict=True):
            try:
                with made_up(origins, self._device):
                    got = copied(compute(*copied(args), **copied(kwargs)))
            except (torch.AcceleratorError, EOFError):
                raise
            except Exception as error:  # as above
                return f"split, {self._network_name} fails: {type(error).__name__}: {error}"
            if problem := deviation(got, expected, tolerance):
                return (
                    f"split, {self._network_name} answers a batch of {num_rows([args, kwargs])} "
                    f"otherwise than whole: {problem}"
                )
        return ""


@contextmanager
def made_up(origins: Iterable[Origin], device: torch.device) -> Iterator[None]:
    """Have operations on empty parameters compute with made-up numbers."""
    devices = [device] if is_accelerator(device) else []
    kind = {"device_type": device.type} if devices else {}
    with torch.random.fork_rng(devices, **kind):  # what this process draws later is its own
        torch.manual_seed(0)
        with _MadeUpNumbers(origins, device):
            yield


class _MadeUpNumbers(TorchFunctionMode):
    """Puts numbers in the place of empty parameters, in each operation on them."""

    def __init__(self, origins: Iterable[Origin], device: torch.device) -> None:
        super().__init__()
        self._origins = {id(each.tensor): each for each in origins}
        self._device = device
        generator = torch.Generator().manual_seed(0)
        self._table = torch.randn(_TABLE_LENGTH, generator=generator).clamp(-3, 3).to(device)

    def __torch_function__(
        self,
        func: Any,
        types: Collection[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        if func == torch.Tensor.device.__get__ and id(args[0]) in self._origins:
            return self._device
        if func in _PLAIN_ATTRIBUTES or getattr(func, "__name__", "") in _PLAIN_QUESTIONS:
            return func(*args, **kwargs)
        args, kwargs = pytree.tree_map_only(Tensor, self._with_numbers, (args, dict(kwargs)))
        return func(*args, **kwargs)

    def _with_numbers(self, tensor: Tensor) -> Tensor:
        origin = self._origins.get(id(tensor))
        if origin is None:
            return tensor
        whole = self._numbers(origin).to(tensor.dtype)
        if not origin.ranges:
            return whole
        parts = [whole.narrow(origin.dim, begin, end - begin) for begin, end in origin.ranges]
        return torch.cat(parts, origin.dim)

    def _numbers(self, origin: Origin) -> Tensor:
        count = math.prod(origin.shape)
        table = self._table.roll(crc32(origin.name.encode()) % _TABLE_LENGTH)
        if len(origin.shape) > 1:
            table *= _GAIN * max(1, count // max(1, origin.shape[0])) ** -0.5
        else:
            table = table * _DEVIATION + float(origin.name.endswith("weight"))
        return table.repeat(-(-count // _TABLE_LENGTH))[:count].view(origin.shape)


def _varied_calls(example: Example, device: torch.device) -> list[NetworkCall]:
    """Return calls like the example, of several batch sizes where all its tensors have rows."""
    names = list(example) if isinstance(example, Mapping) else None
    values = example.values() if isinstance(example, Mapping) else example
    tensors = [each for each in values if each is not None]
    calls: list[NetworkCall] = []
    for size in _BATCH_SIZES if num_rows(tensors) else (None,):
        varied = [_varied(x, size).to(device) for x in tensors]
        calls.append(((), dict(zip(names, varied, strict=True))) if names else (tuple(varied), {}))
    return calls


def _varied(x: Tensor, num_rows: int | None) -> Tensor:
    """Return a tensor of some rows, which differ as far as their meaning allows.

    Whole numbers may be indices, so they change places only. In all rows of booleans but
    the first the end changes, as in masks of texts of several lengths.
    """
    if num_rows is not None:
        x = x[torch.arange(num_rows, device=x.device) % len(x)]
    x = x.clone()
    if x.is_floating_point():
        generator = torch.Generator().manual_seed(x.numel())
        return x + torch.randn(x.shape, generator=generator).to(x)
    if x.dim() > 1 and x.dtype == torch.bool:
        x[1:, ..., -1:] = ~x[1:, ..., -1:]
    elif x.dim() > 1:
        x[1::2] = x[1::2].flip(-1)
    return x


def deviation(got: object, expected: object, tolerance: float) -> str:
    """Return how an answer differs from another, for a person; empty if it does not.

    Args:
        got: Tensors and other values, in containers.
        expected: The same, with the numbers that are right.
        tolerance: How far numbers may be apart, relative to the largest of their tensor; and the
            share of whole numbers that may differ, as indices may where two values tie.
    """
    mine, my_form = pytree.tree_flatten(got)
    theirs, their_form = pytree.tree_flatten(expected)
    if [type(each) for each in mine] != [type(each) for each in theirs]:
        return f"{my_form} for {their_form}"
    for x, y in zip(mine, theirs, strict=True):
        if not isinstance(x, Tensor):
            if x != y:
                return f"{x!r} for {y!r}"
            continue
        if x.shape != y.shape or x.dtype != y.dtype:
            return f"{x.dtype} {list(x.shape)} for {y.dtype} {list(y.shape)}"
        if not x.is_floating_point() and not x.is_complex():
            if x.numel() and (x.long() != y.long()).double().mean() > tolerance:
                return "other whole numbers"
            continue
        if x.itemsize < torch.float32.itemsize:
            x, y = x.float(), y.float()  # numbers of 8 bits have no arithmetic
        largest = y.abs().nan_to_num(0, 0, 0).max().item() if y.numel() else 0.0
        if not torch.allclose(x, y, rtol=0, atol=tolerance * largest, equal_nan=True):
            largest_off = (x - y).abs().nan_to_num(math.inf).max().item() / (largest or 1.0)
            return f"off by {largest_off:.2g} of the largest output"
    return ""


def copied(value: Any) -> Any:
    """Copy all tensors in a value, as when it is sent to another rank."""
    return pytree.tree_map_only(Tensor, torch.clone, value)
