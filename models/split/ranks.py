"""The processes that one replica is split over, and the network that they load in parts."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeAlias

import torch
from torch import Tensor, nn

from inferpool.models.spec import Split, SplitReport
from inferpool.models.split.tensor_plan import OwnPlan
from inferpool.models.split.turnstile import BatchClock

Example: TypeAlias = Sequence[Tensor | None] | Mapping[str, Tensor | None]
"""Arguments of a network, by position or by name; None where the shape is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkToSplit:
    """A network that all ranks are to load in parts."""

    build: Callable[[], nn.Module]
    """Makes the network, the same one each time."""
    weights: Path | str | None
    """A checkpoint to load into it; None leaves it as built."""
    example: Example
    split_points: Sequence[str]
    """Submodules that the stages of a pipeline begin with, as the user says; empty: chosen."""
    tensor_plan: OwnPlan | None
    """The user's plan; None takes the network's own, or finds one."""
    known: SplitReport | None
    """How it was split before, if it was found to compute the same then."""
    room_bytes: int
    """Memory that this rank may take of its device; 0 where that is not known."""


class Ranks(Protocol):
    """One rank's place among those of its replica.

    Rank 0 leads: only it is given batches. While it calls a network that is split, the others
    compute their parts of it.

    `torch.distributed` is initialised with these ranks as its default group before a model is
    loaded, for collectives. Messages go beside it, and tell the receiver which tensors come: so
    nobody waits in a collective for a rank that has raised, and shapes may differ from call to
    call.
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

    def send(self, to: int, message: object, tensors: Sequence[Tensor] = ()) -> None:
        """Send a message, and tensors with it, to another rank; does not wait for their receipt.

        Args:
            to: The receiver.
            message: Numbers, strings, lists and dicts, for msgpack.
            tensors: They may have any device, dtype and shape, and must not be written to
                afterwards.

        Raises:
            EOFError: That rank is gone.
        """

    def receive(self, source: int, timeout_s: float | None = None) -> tuple[object, list[Tensor]]:
        """Wait for the next message of another rank; its tensors come on this rank's device.

        Args:
            source: The sender.
            timeout_s: How long to wait at most; None waits until that rank is gone.

        Raises:
            EOFError: That rank is gone, or lets this one go.
            OutOfStepError: This rank has no memory for the tensors: its process must end, since
                what comes next would be taken for them.
            TimeoutError: No message has come.
        """

    def giving_way(self) -> AbstractContextManager[BatchClock]:
        """Let other batches run the model's code while a call is on its way through the ranks.

        The lead may have several batches under way, each in a thread. One of these runs the model's
        code, and the others wait until it gives way, or has an answer.

        Returns:
            A context in which the thread gives way. It yields the clock of the caller's batch, to
            be stopped while the call waits for others.
        """
