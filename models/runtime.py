"""Values that a worker gives a model: settings, and its place among the ranks of its replica."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor, nn

from inferpool.models.errors import PassesThrough
from inferpool.models.spec import MAX_IMAGE_PIXELS, Decoding, RankPart, Split, SplitReport

Example: TypeAlias = Sequence[Tensor | None] | Mapping[str, Tensor | None]
"""Arguments of a network, by position or by name; None where the shape is not known."""


class LoadIsOver(PassesThrough):
    """Ends `load` on a follower once its part is loaded: the rest of it is for the lead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkToSplit:
    """A network that all ranks are to load in parts."""

    build: Callable[[], nn.Module]
    """Makes the network, the same one each time."""
    weights: Path | str | None
    """A checkpoint to load into it; None leaves it as built."""
    example: Example
    split_points: Sequence[str]
    """Submodules that the stages of a pipeline begin with, if named by the user; else empty."""
    tensor_plan: Mapping[str, object] | None
    """The user's plan; None uses the network's own, or finds one."""


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
            EOFError: The lead has no more calls, or is gone.
            TimeoutError: No call has come.
            torch.AcceleratorError: The device's context is lost.
        """


class ReplicaRank(Protocol):
    """One rank's place among those of its replica, as its model sees it.

    Rank 0 leads: only it is given batches. While it calls a network that is split, the others
    compute their parts of it. `torch.distributed` is initialised with these ranks as its default
    group before a model is loaded, for collectives.
    """

    @property
    def rank(self) -> int:
        """The number of this rank, from 0."""

    @property
    def size(self) -> int:
        """The number of ranks."""

    @property
    def split(self) -> Split:
        """The kind of split."""

    @property
    def device(self) -> torch.device:
        """The device of this rank."""

    def load(self, network: NetworkToSplit) -> SplitNetwork:
        """Load this rank's part of a network.

        Raises:
            ModelError: The network cannot be loaded or split.
            EOFError: Another rank has failed.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Runtime:
    """Values that a worker gives a model before `load`; `Model` describes those that users read."""

    max_image_pixels: int = MAX_IMAGE_PIXELS
    decode: Decoding = "exact"
    stack_instances: Callable[[list[Tensor]], Tensor] = torch.stack
    ranks: ReplicaRank | None = None
    max_batch_tokens: int | None = None
    seed: int | None = None
    """The seed of torch that this process was given before the user's code ran; None if unknown."""
    split_network: SplitNetwork | None = None
    """The part of this rank, after `load_network`; None if the model is not split."""


class _FromRuntime:
    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, model: Any, owner: Any) -> object:
        return getattr((owner if model is None else model)._runtime, self._name)

    def __set__(self, model: Any, value: object) -> None:
        model._runtime = replace(model._runtime, **{self._name: value})


def from_runtime() -> Any:
    """Return an attribute of a model that reads and sets the attribute of its runtime by name."""
    return _FromRuntime()
