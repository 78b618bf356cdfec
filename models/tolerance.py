"""Tolerances: how far the outputs of a faster network may be from the exact ones. In workers."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from inferpool.models.attached import attached


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """The result of a comparison."""

    is_within: bool
    deviation: float
    """The largest deviation, in the tolerance's own measure."""
    text: str
    """The figures for people."""


class Tolerance(Protocol):
    """Decides what still counts as the same answer."""

    def judge(self, exact: Mapping[str, Any], other: Mapping[str, Any]) -> Agreement:
        """Compare the outputs for the same samples, each with the sample dimension first.

        An output may also be a list, with a tensor for each sample.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueTolerance:
    """Allows each number to be off by a fraction of its output's largest; for any network."""

    relative: float = 1e-3

    def judge(self, exact: Mapping[str, Any], other: Mapping[str, Any]) -> Agreement:
        """Compare number by number; whole numbers must be equal."""
        worst = 0.0
        for name, wanted in exact.items():
            found = other.get(name)
            if isinstance(wanted, list) or isinstance(found, list):
                wanted, found = attached("lists to compare")(wanted, found)
            if found is None or found.shape != wanted.shape or found.dtype != wanted.dtype:
                text = f"output {name!r} has another form"
                return Agreement(is_within=False, deviation=float("inf"), text=text)
            worst = max(worst, _relative(wanted, found))
        return Agreement(
            is_within=worst <= self.relative,
            deviation=worst,
            text=f"off by {worst:.2g} of the largest value, allowed is {self.relative:.2g}",
        )


def _relative(wanted: Tensor, found: Tensor) -> float:
    if not wanted.is_floating_point():
        return 0.0 if torch.equal(wanted, found) else float("inf")
    if not wanted.numel():
        return 0.0
    difference = (wanted - found).abs().max().item()
    if difference == 0:
        return 0.0
    largest = wanted.abs().max().item()
    ratio = difference / largest if largest else float("inf")
    return ratio if ratio == ratio else float("inf")  # NaN agrees with nothing
