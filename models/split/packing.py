"""Values that go from rank to rank: a message for msgpack, and tensors. Worker processes only."""

from collections import namedtuple
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


def pack(value: object, device: torch.device) -> tuple[object, list[Tensor]]:
    """Turn a value into a message that msgpack can encode, and the tensors in it.

    Args:
        value: Tensors, numbers, strings, None, dtypes and devices, in tuples, lists, mappings and
            named tuples.
        device: This rank's device, which the receiver replaces by its own.

    Raises:
        TypeError: The value has something else in it, or a tensor that is not dense.
    """
    tensors: list[Tensor] = []

    def encoded(value: Any) -> object:
        if isinstance(value, Tensor):
            if value.layout != torch.strided or value.is_nested or value.is_quantized:
                raise TypeError("only dense tensors can go from one rank to another")
            tensors.append(value.resolve_conj().resolve_neg())  # what travels is their memory
            return ["tensor", len(tensors) - 1]
        if value is None or isinstance(value, bool | int | float | str):
            return ["plain", value]
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return ["named", list(value._fields), [encoded(each) for each in value]]
        if isinstance(value, tuple | list):
            return [
                "list" if isinstance(value, list) else "tuple",
                [encoded(each) for each in value],
            ]
        if isinstance(value, Mapping):
            return ["dict", [[encoded(name), encoded(each)] for name, each in value.items()]]
        if isinstance(value, slice):
            return ["slice", [encoded(each) for each in (value.start, value.stop, value.step)]]
        if isinstance(value, torch.dtype):
            return ["dtype", str(value).removeprefix("torch.")]
        if isinstance(value, torch.device):
            return ["here"] if value == device else ["device", str(value)]
        raise TypeError(f"a {type(value).__name__} cannot go from one rank to another")

    return encoded(value), tensors


def unpack(message: Any, tensors: Sequence[Tensor], device: torch.device) -> Any:
    """Return the value that was packed."""

    def make(encoded: Any) -> Any:
        match encoded:
            case ["tensor", index]:
                return tensors[index]
            case ["plain", value]:
                return value
            case ["named", fields, values]:
                return _outputs_type(tuple(fields))(*map(make, values))
            case ["list", values]:
                return [make(each) for each in values]
            case ["tuple", values]:
                return tuple(make(each) for each in values)
            case ["dict", pairs]:
                return {make(name): make(each) for name, each in pairs}
            case ["slice", values]:
                return slice(*map(make, values))
            case ["dtype", name]:
                return getattr(torch, name)
            case ["here"]:
                return device
            case ["device", name]:
                return torch.device(name)
        raise AssertionError(f"no such message: {encoded!r}")

    return make(message)


def num_rows(value: object) -> int | None:
    """Return the length of the first dimension of all tensors in a value; None if it differs."""
    lengths = {x.shape[0] if x.dim() else None for x in _tensors_in(value)}
    return lengths.pop() if len(lengths) == 1 else None


def have_different_rows(value: object) -> bool:
    """Return whether a row differs from the first in some tensor of a value that has rows."""
    return any(not torch.equal(x, x[:1].expand_as(x)) for x in _tensors_in(value))


def split_rows(value: object, num_parts: int) -> list[Any]:
    """Cut all tensors in a value along their first dimension, into parts as even as possible."""
    leaves, spec = pytree.tree_flatten(value)
    pieces = [
        torch.tensor_split(x, num_parts) if isinstance(x, Tensor) else [x] * num_parts
        for x in leaves
    ]
    return [pytree.tree_unflatten(list(each), spec) for each in zip(*pieces, strict=True)]


def join_rows(parts: Sequence[Any], rows: int) -> Any:
    """Put together the outputs for the parts of a value that `split_rows` has cut.

    Raises:
        ValueError: They do not have `num_rows` rows in all, or the parts are not alike.
        RuntimeError: The shapes of their rows differ.
    """
    found = sum(num_rows(part) or 0 for part in parts)
    if found != rows:
        raise ValueError(f"pieces of {rows} rows in all give {found}")
    return pytree.tree_map(lambda *x: torch.cat(x) if isinstance(x[0], Tensor) else x[0], *parts)


def _tensors_in(value: object) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


@lru_cache
def _outputs_type(fields: tuple[str, ...]) -> Any:
    return namedtuple("Outputs", fields)
