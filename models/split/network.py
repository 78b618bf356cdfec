"""Loads a network on several devices, and serves the followers' parts of it.

The lead's `load` gets a callable, which has the other ranks compute their parts. A follower's
`load` ends where its part is loaded: it serves the lead's calls from then on.
"""

from collections.abc import Callable

from inferpool.models.runtime import NetworkToSplit, SplitNetwork
from inferpool.models.split.pipeline import load_pipeline
from inferpool.models.split.ranks import Ranks
from inferpool.models.split.tensor import load_tensor_parallel

_POLL_S = 1.0


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
