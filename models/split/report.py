"""What is known of a split replica, for people and for its next life. Without torch."""

import msgspec


class RankPart(msgspec.Struct, frozen=True):
    """What one rank holds of a network."""

    rank: int
    num_bytes: int
    """Of its parameters and buffers, counted in its own process."""
    text: str
    """Which part that is, for a person: "layer3 to fc", "1/2 of each of 36 matrices"."""


class SplitReport(msgspec.Struct, frozen=True):
    """How a network was split."""

    cuts: tuple[str, ...] = ()
    """Of a pipeline: the submodules that its stages begin with, but for the first."""
    note: str = ""
    """Why there, for a person."""
