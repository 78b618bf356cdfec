"""Memory that a network takes, for people and for other processes. No torch."""

import msgspec

from inferpool.models.spec import Split


class Way(msgspec.Struct, frozen=True, kw_only=True):
    """One way to lay a network on devices."""

    split: Split | None
    num_ranks: int = 1
    rank_bytes: tuple[int, ...] = ()
    """Parameters and buffers of each rank."""
    text: str = ""
    """The parts of the ranks, for a person."""
    problem: str = ""
    """The reason why the network cannot be laid so; empty if it can."""


class Survey(msgspec.Struct, frozen=True, kw_only=True):
    """Memory that one network takes, whole and split."""

    num_bytes: int
    """Bytes of its parameters and buffers."""
    num_rows: int
    """Rows of the batch that was computed."""
    activation_bytes: int | None = None
    """The most that the batch needed beside the parameters; None where that was not measured."""
    note: str = ""
    """The reason why something was not measured."""
    ways: tuple[Way, ...] = ()
