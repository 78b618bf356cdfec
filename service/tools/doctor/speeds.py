"""How fast placements are: what is asked of whoever measures them, and what is answered."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """What a service answers that runs with a placement."""

    rate: float = 0.0
    """Inputs per second under full load."""
    ratio: float | None = None
    """To the first one that was measured; None for that."""
    problem: str = ""
    """Why it could not be measured; empty if it was."""


class Race(Protocol):
    """Measures placements."""

    def __call__(
        self,
        model: str,
        ways: Mapping[str, Mapping[str, object]],
        *,
        num_clients: int,
        is_side_by_side: bool,
    ) -> Mapping[str, Speed]:
        """Start a service for each, and put it under load.

        Args:
            model: The name of the model.
            ways: Settings of the model that make each placement, by what that is called. The others
                are held against the first.
            num_clients: That ask at once.
            is_side_by_side: Whether two can be there at a time, to be measured in turns.
        """
