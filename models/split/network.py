"""Loads networks on one device or on several, and serves the followers' parts of a split one.

The lead's `load` gets a callable, which has the other ranks compute their parts. A follower's
`load` ends where its part is loaded: it serves the lead's calls from then on.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch
from torch import nn

from inferpool.models.errors import PassesThrough
from inferpool.models.files.checkpoint import load_weights
from inferpool.models.spec import Placement, RankPart, SplitReport
from inferpool.models.split.pipeline import load_pipeline
from inferpool.models.split.ranks import NetworkToSplit, Ranks
from inferpool.models.split.tensor import load_tensor_parallel

_POLL_S = 1.0


class SplitNetwork(Protocol):
    """One rank's part of a network."""

    @property
    def part(self) -> RankPart:
        """The part that this rank holds."""

    @property
    def report(self) -> SplitReport:
        """A report on the split, the same on each rank."""

    def __call__(self, *args: object, **kwargs: object) -> object:
        """Have all ranks compute; on the lead, under `torch.inference_mode()`.

        Raises:
            RankError: Another rank has raised; the group goes on serving.
            EOFError: Another rank is gone.
        """

    def serve_next(self, timeout_s: float) -> None:
        """Wait for the lead's next call and compute this rank's part of it; on a follower.

        Raises:
            EOFError: The lead lets this rank go, or is gone.
            TimeoutError: No call has come.
            torch.AcceleratorError: The device's context is lost.
        """


class LoadIsOver(PassesThrough):
    """Ends `load` on a follower, which has loaded its part: the rest of it is for the lead."""


def load_whole(
    build: Callable[[], nn.Module], weights: Path | str | None, placement: Placement
) -> nn.Module:
    """Build a network, read its weights and lay it on one device, to infer.

    Raises:
        ModelError: The weights cannot be read, or do not fit.
    """
    network = build()
    if weights is not None:
        load_weights(network, weights)
    return network.eval().requires_grad_(False).to(torch.device(placement.devices[0]))


def load_part(ranks: Ranks, network: NetworkToSplit) -> SplitNetwork:
    """Load this rank's part of a network.

    Raises:
        ModelError: The network cannot be loaded or split.
        EOFError: Another rank has failed.
    """
    if ranks.split == "tensor":
        return load_tensor_parallel(ranks, network)
    return load_pipeline(ranks, network)


def serve(network: SplitNetwork, on_beat: Callable[[], None]) -> None:
    """Compute this rank's part of what the lead calls, until the lead lets go. On followers.

    Args:
        network: The part of this rank.
        on_beat: Called after each call, and every second without one.

    Raises:
        torch.AcceleratorError: The device's context is lost.
    """
    while True:
        try:
            network.serve_next(_POLL_S)
        except TimeoutError:
            pass
        except EOFError:
            return
        on_beat()
