"""The arguments of a call as a message and tensors, as `Ranks` sends them. In workers only."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor


def pack(
    args: tuple[object, ...], kwargs: Mapping[str, object]
) -> tuple[dict[str, object], list[Tensor]]:
    """Take the tensors out of a call's arguments, however deep in lists and dicts.

    Raises:
        TypeError: There is something else in them than tensors and plain values.
    """
    tensors: list[Tensor] = []
    return {"args": _packed(list(args), tensors), "kwargs": _packed(kwargs, tensors)}, tensors


def unpack(
    message: object, tensors: Sequence[Tensor]
) -> tuple[tuple[object, ...], dict[str, object]]:
    """Undo `pack`."""
    assert isinstance(message, Mapping)
    args, kwargs = _unpacked(message["args"], tensors), _unpacked(message["kwargs"], tensors)
    return tuple(args), kwargs


def _packed(value: object, tensors: list[Tensor]) -> list[object]:
    if isinstance(value, Tensor):
        tensors.append(value)
        return ["tensor", len(tensors) - 1]
    if isinstance(value, tuple | list):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return [kind, [_packed(each, tensors) for each in value]]
    if isinstance(value, Mapping):
        return ["dict", {str(name): _packed(each, tensors) for name, each in value.items()}]
    if value is None or isinstance(value, bool | int | float | str):
        return ["value", value]
    raise TypeError(f"a network that is split cannot be given a {type(value).__name__}")


def _unpacked(packed: Any, tensors: Sequence[Tensor]) -> Any:
    kind, value = packed
    if kind == "tensor":
        return tensors[value]
    if kind == "dict":
        return {name: _unpacked(each, tensors) for name, each in value.items()}
    if kind in ("list", "tuple"):
        values = [_unpacked(each, tensors) for each in value]
        return tuple(values) if kind == "tuple" else values
    return value
