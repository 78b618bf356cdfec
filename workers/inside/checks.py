"""Checks a model's outputs against its declaration: rows, shapes, finite numbers. In workers."""

import math

import torch
from torch import Tensor

from inferpool.models.attached import attached
from inferpool.models.base import Model
from inferpool.models.item import Outputs
from inferpool.models.spec import matches


class BrokenPromiseError(RuntimeError):
    """The outputs of a batch are not what the model declares."""


class OutputChecks:
    """Checks of one model's outputs."""

    def __init__(self, model: Model) -> None:
        self._specs = {spec.name: spec for spec in model.outputs}
        self._known: dict[str, torch.Size] = {}
        """Last shape of one instance of each output that was correct."""
        self._is_finite_promised = model.finite_outputs

    def non_finite_rows(self, outputs: Outputs, num_rows: int) -> list[int]:
        """Check all outputs; return the rows with NaN or an infinity, if none may have them.

        Raises:
            BrokenPromiseError: A shape or the number of rows is wrong, or an output is missing.
        """
        self._check_shapes(outputs, num_rows)
        if not self._is_finite_promised:
            return []
        rows: set[int] = set()
        for output in outputs.values():
            if isinstance(output, list):
                rows.update(row for row, one in enumerate(output) if _non_finite_in(one[None]))
            elif found := _non_finite_in(output):
                rows.update(found)
        return sorted(rows)

    def _check_shapes(self, outputs: Outputs, num_rows: int) -> None:
        for name, output in outputs.items():
            if isinstance(output, list):
                attached("check of a list")(name, output, num_rows, self._specs.get(name))
                continue
            shape = output.shape
            if not shape or shape[0] != num_rows:
                raise BrokenPromiseError(
                    f"the model returned {len(output) if shape else 'no'} rows of {name!r} "
                    f"for a batch of {num_rows}"
                )
            if shape[1:] != self._known.get(name):
                self._check_instance(name, shape[1:])
        if not self._specs.keys() <= outputs.keys():
            missing = ", ".join(sorted(self._specs.keys() - outputs.keys()))
            raise BrokenPromiseError(f"the model declares {missing}, and did not return it")

    def _check_instance(self, name: str, shape: torch.Size) -> None:
        if "." in str(name):
            raise BrokenPromiseError(f"the model returned {name!r}: name it without a dot")
        spec = self._specs.get(name)
        if spec is not None and spec.shape and not matches(shape, spec.instance_shape):
            raise BrokenPromiseError(
                f"the model returned {name!r} of shape {list(shape)} for each instance, "
                f"where it declares {list(spec.instance_shape)}"
            )
        self._known[name] = shape


def _non_finite_in(output: Tensor) -> list[int]:
    """Return the rows of an output with NaN or an infinity.

    A sum takes a fifth of the time of `isfinite`. Only if it is not finite, maybe by an overflow,
    the rows are checked one by one.
    """
    if output.layout is not torch.strided:
        output = output.to_dense()
    if output.is_complex():
        output = torch.view_as_real(output.resolve_conj())
    if not output.is_floating_point():
        return []
    # A sum in 16 bits would often overflow.
    total = output.sum(dtype=torch.float32) if output.itemsize < 4 else output.sum()
    if math.isfinite(total):
        return []
    is_finite = output.isfinite().reshape(len(output), -1).all(1)
    rows: list[int] = is_finite.logical_not().nonzero().flatten().tolist()
    return rows
