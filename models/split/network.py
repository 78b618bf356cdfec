"""Networks on one device or on several: how they are loaded, and what the ranks of a split one do.

The lead's `load` gets a callable, which has the other ranks compute their parts. A follower's ends
where its part is loaded: it serves the lead's calls from then on.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch
from torch import nn

from models.checkpoint import load_weights
from models.errors import ModelError
from models.spec import Placement
from models.split.pipeline import load_pipeline
from models.split.ranks import Ranks
from models.split.rehearsal import Example
from models.split.report import Part, SplitReport
from models.split.tensor import load_tensor_parallel

if TYPE_CHECKING:
    from models.base import Model

_POLL_S = 1.0


class SplitNetwork(Protocol):
    """One rank's part of a network."""

    @property
    def part(self) -> Part:
        """What this rank holds."""

    @property
    def report(self) -> SplitReport:
        """How the network was split; each rank has the same."""

    def __call__(self, *args: object, **kwargs: object) -> object:
        """Have all ranks compute; on the lead, under `torch.inference_mode()`.

        Raises:
            RankError: Another rank has met with an error; the group goes on serving.
            EOFError: Another rank is gone.
        """

    def serve_next(self, timeout_s: float) -> None:
        """Wait for the lead's next call and compute this rank's part of it; on a follower.

        Raises:
            EOFError: The lead lets this rank go, or is gone.
            TimeoutError: None has come.
            torch.AcceleratorError: The device's context is lost.
        """


class LoadIsOver(BaseException):
    """A follower has loaded its part: what `load` does after that is the lead's."""


def load_model(model: "Model", placement: Placement) -> None:
    """Load a model, or this rank's part of it if `model.ranks` is set.

    Raises:
        ModelError: It cannot be had, or cannot be split.
        EOFError: Another rank has failed.
    """
    try:
        model.load(placement)
    except LoadIsOver:
        return
    if model.ranks is not None and model.split_network is None:
        raise ModelError(
            f"{type(model).__name__} cannot be split: only what `load` loads by `load_network` can"
        )


def load_network(
    model: "Model",
    build: Callable[[], nn.Module],
    weights: Path | str | None,
    placement: Placement,
    example: Example,
) -> Callable[..., object]:
    """Do what `Model.load_network` says.

    Raises:
        ModelError: The network cannot be had, or cannot be split.
        LoadIsOver: This rank follows, and has loaded its part.
        EOFError: Another rank has failed.
    """
    if model.ranks is None:
        network = build()
        if weights is not None:
            load_weights(network, weights)
        return network.eval().requires_grad_(False).to(torch.device(placement.devices[0]))
    if model.split_network is not None:
        raise ModelError("a replica that is split has one network: `load_network` is called twice")
    model.split_network = _load_split(model, model.ranks, build, weights, example)
    if model.ranks.rank:
        raise LoadIsOver
    return model.split_network


def serve(model: "Model", on_beat: Callable[[], None]) -> None:
    """Compute this rank's part of what the lead calls, until the lead lets go. On followers.

    Args:
        model: Loaded by `load_model`.
        on_beat: Called after each call, and every second without one.

    Raises:
        torch.AcceleratorError: The device's context is lost.
    """
    assert model.split_network is not None
    while True:
        try:
            model.split_network.serve_next(_POLL_S)
        except TimeoutError:
            pass
        except EOFError:
            return
        on_beat()


def _load_split(
    model: "Model",
    ranks: Ranks,
    build: Callable[[], nn.Module],
    weights: Path | str | None,
    example: Example,
) -> SplitNetwork:
    if ranks.split == "tensor":
        return load_tensor_parallel(
            ranks,
            build,
            weights,
            example,
            tensor_plan=model.tensor_plan,
            known=model.known_split,
        )
    return load_pipeline(
        ranks,
        build,
        weights,
        example,
        split_points=model.split_points,
        known=model.known_split,
        room_bytes=model.room_bytes,
    )
