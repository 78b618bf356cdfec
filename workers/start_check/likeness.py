"""Compares the outputs of two passes of one instance, but for rounding. Worker processes only."""

from collections.abc import Mapping

import torch
from torch import Tensor

from inferpool.models.item import Outputs

_LEAST = 1e-6
"""Difference that counts as rounding for any value."""
_HARDLY_SUPPORTED = (torch.uint16, torch.uint32, torch.uint64)


def floats_of(outputs: Outputs) -> dict[str, Tensor]:
    """Return the outputs of one instance that are tensors, in forms that can be compared."""
    found = {}
    for name, output in outputs.items():
        if isinstance(output, list):
            (output,) = (each[None] for each in output)
        if isinstance(output, Tensor):
            if output.is_complex():
                output = torch.view_as_real(output.resolve_conj())
            elif output.is_quantized:
                output = output.dequantize()
            elif output.dtype in _HARDLY_SUPPORTED:
                output = output.to(torch.int64)
            found[name] = output
    return found


def is_rounding(one: Tensor, two: Tensor, most: float) -> bool:
    """Return whether two outputs differ by rounding alone; what is not finite must be the same."""
    if not one.is_floating_point():
        return torch.equal(one, two)
    one, two = one.double(), two.double()
    same = (one == two) | (one.isnan() & two.isnan())
    if bool(same.all()):
        return True
    difference = (one - two)[~same].abs().max().item()
    finite = one[one.isfinite()]
    largest = finite.abs().max().item() if finite.numel() else 0.0
    return difference <= max(most * largest, _LEAST)  # never so if it is NaN


def without_same(one: Tensor, two: Tensor) -> tuple[Tensor, Tensor]:
    """Return two outputs with zeros where they are not finite in the same way."""
    if not one.is_floating_point():
        return one, two
    same = ((one == two) | (one.isnan() & two.isnan())) & ~one.isfinite()
    return one.masked_fill(same, 0.0), two.masked_fill(same, 0.0)


def are_close(one: object, two: object) -> bool:
    """Return whether two JSON values are the same but for rounding."""
    if isinstance(one, list) and isinstance(two, list):
        return len(one) == len(two) and all(map(are_close, one, two))
    if isinstance(one, dict) and isinstance(two, dict):
        return one.keys() == two.keys() and all(are_close(one[key], two[key]) for key in one)
    if isinstance(one, float) and isinstance(two, float | int):
        return one == two or abs(one - two) <= 1e-3 * max(abs(one), abs(two)) + _LEAST
    return one == two


def form_of(tensors: Mapping[str, Tensor]) -> Mapping[str, object]:
    """Return the dtype and the shape of each tensor."""
    return {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}


def form_text(outputs: Mapping[str, Tensor]) -> str:
    """Return the shapes of outputs for people."""
    return ", ".join(f"{name!r} {list(x.shape)}" for name, x in outputs.items()) or "nothing"
