"""Checks a model's outputs against its declaration: rows, shapes, finite numbers. In workers."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from inferpool.models.base import Model
from inferpool.models.spec import matches


class BrokenPromiseError(RuntimeError):
    """The outputs of a batch are not what the model declares."""


class OutputChecks:
    """Checks of one model's outputs."""

    def __init__(self, model: Model) -> None:
        self._shapes = {spec.name: spec.instance_shape for spec in model.outputs if spec.shape}
        self._known: dict[str, torch.Size] = {}
        """Last shape of one instance of each output that was correct."""
        self._names = {spec.name for spec in model.outputs}
        self._is_finite_promised = model.finite_outputs

    def non_finite_rows(self, outputs: Mapping[str, Tensor], num_rows: int) -> list[int]:
        """Check all outputs; return the rows with NaN or an infinity, if none may have them.

        A sum takes a fifth of the time of `isfinite`. Only if it is not finite, maybe by
        an overflow, the rows are checked one by one.

        Raises:
            BrokenPromiseError: A shape or the number of rows is wrong, or an output is missing.
        """
        self._check_shapes(outputs, num_rows)
        if not self._is_finite_promised:
            return []
        rows: set[int] = set()
        for output in outputs.values():
            if output.layout is not torch.strided:
                output = output.to_dense()
            if output.is_complex():
                output = torch.view_as_real(output.resolve_conj())
            if not output.is_floating_point():
                continue
            # A sum in 16 bits would often overflow.
            total = output.sum(dtype=torch.float32) if output.itemsize < 4 else output.sum()
            if not math.isfinite(total):
                is_finite = output.isfinite().reshape(len(output), -1).all(1)
                rows.update(is_finite.logical_not().nonzero().flatten().tolist())
        return sorted(rows)

    def _check_shapes(self, outputs: Mapping[str, Tensor], num_rows: int) -> None:
        for name, output in outputs.items():
            shape = output.shape
            if not shape or shape[0] != num_rows:
                raise BrokenPromiseError(
                    f"the model returned {len(output) if shape else 'no'} rows of {name!r} "
                    f"for a batch of {num_rows}"
                )
            if shape[1:] != self._known.get(name):
                self._check_instance(name, shape[1:])
        if not self._names <= outputs.keys():
            missing = ", ".join(sorted(self._names - outputs.keys()))
            raise BrokenPromiseError(f"the model declares {missing}, and did not return it")

    def _check_instance(self, name: str, shape: torch.Size) -> None:
        pattern = self._shapes.get(name)
        if pattern is not None and not matches(shape, pattern):
            raise BrokenPromiseError(
                f"the model returned {name!r} of shape {list(shape)} for each instance, "
                f"where it declares {list(pattern)}"
            )
        self._known[name] = shape
