"""Values that go from rank to rank: a message that msgpack can say, and tensors. Workers only."""

from collections import namedtuple
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


def pack(value: object, device: torch.device) -> tuple[object, list[Tensor]]:
    """Say a value as a message and the tensors in it.

    Args:
        value: Tensors, numbers, strings, None, dtypes and devices, in tuples, lists, mappings and
            named tuples.
        device: This rank's, which becomes the receiver's own.

    Raises:
        TypeError: There is something else in it, or a tensor that is not dense.
    """
    tensors: list[Tensor] = []

    def say(value: Any) -> object:
        if isinstance(value, Tensor):
            if value.layout != torch.strided or value.is_nested or value.is_quantized:
                raise TypeError("only dense tensors can go from one rank to another")
            tensors.append(value.resolve_conj().resolve_neg())  # what travels is their memory
            return ["tensor", len(tensors) - 1]
        if value is None or isinstance(value, bool | int | float | str):
            return ["plain", value]
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return ["named", list(value._fields), [say(each) for each in value]]
        if isinstance(value, tuple | list):
            return ["list" if isinstance(value, list) else "tuple", [say(each) for each in value]]
        if isinstance(value, Mapping):
            return ["dict", [[say(name), say(each)] for name, each in value.items()]]
        if isinstance(value, slice):
            return ["slice", [say(value.start), say(value.stop), say(value.step)]]
        if isinstance(value, torch.dtype):
            return ["dtype", str(value).removeprefix("torch.")]
        if isinstance(value, torch.device):
            return ["here"] if value == device else ["device", str(value)]
        raise TypeError(f"a {type(value).__name__} cannot go from one rank to another")

    return say(value), tensors


def unpack(message: Any, tensors: Sequence[Tensor], device: torch.device) -> Any:
    """Make of a message and its tensors what was packed."""

    def make(said: Any) -> Any:
        match said:
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
        raise AssertionError(f"no such message: {said!r}")

    return make(message)


def num_rows(value: object) -> int | None:
    """The length of the first dimension of all tensors in a value; None if they differ in it."""
    tensors = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
    lengths = {x.shape[0] if x.dim() else None for x in tensors}
    return lengths.pop() if len(lengths) == 1 else None


def have_different_rows(value: object) -> bool:
    """Whether a row differs from the first in some tensor of a value that has rows."""
    tensors = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
    return any(not torch.equal(x, x[:1].expand_as(x)) for x in tensors)


def split_rows(value: object, num_parts: int) -> list[Any]:
    """Cut all tensors in a value along their first dimension, into parts as even as can be."""
    leaves, spec = pytree.tree_flatten(value)
    pieces = [
        torch.tensor_split(x, num_parts) if isinstance(x, Tensor) else [x] * num_parts
        for x in leaves
    ]
    return [pytree.tree_unflatten(list(each), spec) for each in zip(*pieces, strict=True)]


def join_rows(parts: Sequence[Any], rows: int) -> Any:
    """Put together what was made of what `split_rows` has cut.

    Raises:
        ValueError: It does not have so many rows in all, or the parts are not alike.
        RuntimeError: Likewise, for the shapes of their rows.
    """
    found = sum(num_rows(part) or 0 for part in parts)
    if found != rows:
        raise ValueError(f"pieces of {rows} rows in all give {found}")
    flat = [pytree.tree_flatten(part)[0] for part in parts]
    joined = [
        torch.cat(each) if isinstance(each[0], Tensor) else each[0]
        for each in zip(*flat, strict=True)
    ]
    return pytree.tree_unflatten(joined, pytree.tree_flatten(parts[0])[1])


@lru_cache
def _outputs_type(fields: tuple[str, ...]) -> Any:
    return namedtuple("Outputs", fields)
