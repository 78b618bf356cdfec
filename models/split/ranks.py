"""The processes that one replica is split over, as one of them sees the others."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor

from inferpool.models.spec import Split
from inferpool.models.split.turnstile import BatchClock


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
