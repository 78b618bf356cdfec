"""Checks a model's outputs against its declaration: rows, shapes, finite numbers. In workers."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from inferpool.models.base import Model
from inferpool.models.item import Features
from inferpool.models.spec import matches


class BrokenPromiseError(RuntimeError):
    """The outputs of a batch are not what the model declares."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """The result of one pass of instances that no client sent, as far as the first of them goes."""

    outputs: Features
    """Outputs of the first instance, after `postprocess`, with the batch dimension."""
    is_finite: bool
    """They are finite, or need not be."""
    took_s: float


class OutputChecks:
    """Checks of one model's outputs."""

    def __init__(self, model: Model) -> None:
        self._shapes = {spec.name: spec.instance_shape for spec in model.outputs if spec.shape}
        self._known: dict[str, torch.Size] = {}
        """Last shape of one instance of each output that was correct."""
        self._names = {spec.name for spec in model.outputs}
        self._is_finite_promised = model.finite_outputs

    def check_shapes(self, outputs: Mapping[str, Tensor], num_rows: int) -> None:
        """Check the shape of each output.

        Raises:
            BrokenPromiseError: A shape or the number of rows is wrong, or an output is missing.
        """
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

    def judged(self, outputs: Features, num_rows: int, took_s: float) -> Pass:
        """Check the outputs of a pass, and return it.

        Raises:
            BrokenPromiseError: See `check_shapes`.
        """
        self.check_shapes(outputs, num_rows)
        is_finite = 0 not in self.non_finite_rows(outputs)
        first = {name: _first_of(output) for name, output in outputs.items()}
        return Pass(outputs=first, is_finite=is_finite, took_s=took_s)

    def non_finite_rows(self, outputs: Mapping[str, Tensor]) -> list[int]:
        """Return the rows with NaN or an infinity, if the model promises that there are none.

        A sum takes a fifth of the time of `isfinite`. Only if it is not finite, for which it may
        also have overflowed, the rows are checked one by one.
        """
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

    def _check_instance(self, name: str, shape: torch.Size) -> None:
        pattern = self._shapes.get(name)
        if pattern is not None and not matches(shape, pattern):
            raise BrokenPromiseError(
                f"the model returned {name!r} of shape {list(shape)} for each instance, "
                f"where it declares {list(pattern)}"
            )
        self._known[name] = shape


def _first_of(output: Any) -> Any:
    """Copy the first row, since the model may reuse the memory."""
    if not isinstance(output, Tensor):  # its own `render` reads anything that has a shape
        return output[:1]
    return (output if output.layout is torch.strided else output.to_dense())[:1].clone()
