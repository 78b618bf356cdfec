"""What a network takes, whole and split: as `survey` measures it. Without torch."""

import msgspec

from inferpool.models.spec import Split


class Way(msgspec.Struct, frozen=True, kw_only=True):
    """One way to lay a network on devices."""

    split: Split | None
    num_ranks: int = 1
    rank_bytes: tuple[int, ...] = ()
    """Parameters and buffers of each rank."""
    text: str = ""
    """What each rank has, for a person."""
    problem: str = ""
    """Why the network cannot be laid so; empty if it can."""


class Survey(msgspec.Struct, frozen=True, kw_only=True):
    """What one network takes."""

    num_bytes: int
    """Of its parameters and buffers."""
    num_rows: int
    """Of the batch that the rest was measured with."""
    activation_bytes: int | None = None
    """The most that the batch needed beside the parameters; None where that was not measured."""
    note: str = ""
    """Why something was not measured."""
    ways: tuple[Way, ...] = ()
