"""Outputs of a batch as lists, with a tensor for each instance. Worker processes only.

Models return them where instances have outputs of different shapes, such as the boxes of a
detector. `outputs_of` brings all that `forward` may return into one form: a dict of outputs, each a
tensor with the batch dimension first, or a `RaggedOutput`.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, SupportsIndex, TypeAlias, overload

import torch
from torch import Tensor

from inferpool.models.errors import BadReturnError
from inferpool.models.spec import TensorSpec

Output: TypeAlias = "Tensor | RaggedOutput"
"""One output of a batch."""
_ONLY = "output"
"""Name of the only output of a model that declares none."""


class RaggedOutput(list[Tensor]):
    """One output of a batch: a tensor for each instance, of any shapes.

    It does what is asked of any output: it can be copied, and rows of it can be chosen.
    """

    @overload
    def __getitem__(self, rows: SupportsIndex) -> Tensor: ...
    @overload
    def __getitem__(self, rows: slice | Sequence[int]) -> "RaggedOutput": ...
    def __getitem__(self, rows: SupportsIndex | slice | Sequence[int]) -> "Tensor | RaggedOutput":
        """Return the tensor of one instance, or those of several."""
        if isinstance(rows, Sequence):
            return RaggedOutput(map(super().__getitem__, rows))
        found = super().__getitem__(rows)
        return RaggedOutput(found) if isinstance(found, list) else found

    def cpu(self) -> "RaggedOutput":
        """Copy all tensors to the CPU."""
        return RaggedOutput(each.cpu() for each in self)

    def to(self, device: str, *, non_blocking: bool = False) -> "RaggedOutput":
        """Copy all tensors to a device."""
        return RaggedOutput(each.to(device, non_blocking=non_blocking) for each in self)

    def clone(self) -> "RaggedOutput":
        """Copy all tensors."""
        return RaggedOutput(each.clone() for each in self)


def outputs_of(returned: object, declared: Sequence[TensorSpec] = ()) -> dict[str, Any]:
    """Return the outputs of a batch by name, from any form in which `forward` may return them.

    The forms are a dict of tensors, or of lists with a tensor for each instance; a list of such
    dicts, one for each instance; and for a model with one output a tensor, or a list with one for
    each instance. Values of other kinds stay in the dict as they are.

    Args:
        returned: The return value.
        declared: Outputs that the model declares: they name an output that stands alone.

    Raises:
        BadReturnError: It has none of these forms; the message is what was found instead.
    """
    if isinstance(returned, Mapping):
        return {name: _listed(name, value) for name, value in returned.items()}
    if not isinstance(returned, Tensor | list):
        hint = "; a list has one element for each instance" if isinstance(returned, tuple) else ""
        raise BadReturnError(f"{type(returned).__name__}{hint}")
    if isinstance(returned, list) and not returned:
        raise BadReturnError("an empty list")
    if isinstance(returned, list) and any(isinstance(each, Mapping) for each in returned):
        return _by_name(returned)
    if len(declared) > 1:
        names = ", ".join(repr(spec.name) for spec in declared)
        what = "one tensor" if isinstance(returned, Tensor) else "a list of tensors"
        raise BadReturnError(f"{what} for the outputs {names}")
    name = declared[0].name if declared else _ONLY
    return {name: _listed(name, returned)}


def row_of(outputs: Mapping[str, Output], row: int) -> dict[str, Tensor]:
    """Return the outputs of one instance, without the batch dimension."""
    return {name: output[row] for name, output in outputs.items()}


def joined(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Join the outputs of several batches, which have the same names."""
    return {name: _joined([part[name] for part in parts]) for name in parts[0]}


def flat_pair(wanted: Iterable[Tensor], found: object) -> tuple[Tensor, Tensor | None]:
    """Return two outputs as rows of numbers, to be compared; None if their forms differ.

    Args:
        wanted: One output, of which at least one of both is a list.
        found: The other.
    """
    ones = list(wanted)
    others = list(found) if isinstance(found, list | Tensor) else []
    if [(each.shape, each.dtype) for each in ones] != [(each.shape, each.dtype) for each in others]:
        return torch.zeros(0), None
    if len({each.dtype for each in ones}) > 1:  # `cat` would find one that holds them all
        ones, others = [each.double() for each in ones], [each.double() for each in others]
    empty = torch.zeros(0, dtype=ones[0].dtype) if ones else torch.zeros(0)
    one, other = (torch.cat([empty, *(x.flatten() for x in each)]) for each in (ones, others))
    return one, other


def _listed(name: str, value: object) -> object:
    """Return a list of tensors as `RaggedOutput`, and any other value as it is."""
    if isinstance(value, RaggedOutput) or not isinstance(value, list | tuple):
        return value
    for number, each in enumerate(value):
        if not isinstance(each, Tensor):
            raise BadReturnError(f"{type(each).__name__} as element {number} of {name!r}")
    return RaggedOutput(value)


def _by_name(instances: Sequence[object]) -> dict[str, Any]:
    """Turn a list of dicts, one for each instance, into a dict of lists."""
    first = instances[0]
    for number, each in enumerate(instances):
        if not isinstance(each, Mapping) or not isinstance(first, Mapping):
            raise BadReturnError(f"a list with {type(each).__name__} as element {number}")
        if each.keys() != first.keys():
            names, others = (", ".join(map(repr, one)) or "nothing" for one in (each, first))
            raise BadReturnError(
                f"a list of dicts with other names: element {number} has {names}, element 0 "
                f"has {others}"
            )
    assert isinstance(first, Mapping)
    columns: dict[str, list[Any]] = {
        name: [each[name] for each in instances if isinstance(each, Mapping)] for name in first
    }
    return {name: _listed(name, column) for name, column in columns.items()}


def _joined(outputs: Sequence[Any]) -> Any:
    if any(isinstance(each, list) for each in outputs):
        return RaggedOutput(row for output in outputs for row in output)
    return torch.cat(list(outputs))
