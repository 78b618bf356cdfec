"""Speeds of placements, shared by the tool that measures them and the one that reports them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Measured speed of a placement."""

    rate: float = 0.0
    ratio: float | None = None
    """Rate divided by that of the placement measured first; None for that one."""
    problem: str = ""
    """Reason why there is no measurement; empty if there is one."""


class Race(Protocol):
    """Function that measures placements."""

    def __call__(
        self,
        model: str,
        ways: Mapping[str, Mapping[str, object]],
        *,
        num_clients: int,
        is_side_by_side: bool,
    ) -> Mapping[str, Speed]:
        """Start a service for each placement, put it under load, and return the speeds.

        `ways` has the model's settings for each placement, by the placement's name; the first is
        the reference for the others. `is_side_by_side`: two services fit at a time, and take turns.
        """
