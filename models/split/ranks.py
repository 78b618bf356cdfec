"""The processes that one replica is split over, as one of them sees the others. Workers only."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor

from inferpool.models.spec import Split
from inferpool.models.split.turnstile import BatchClock


class Ranks(Protocol):
    """One rank's place among those of its replica.

    Rank 0 leads: it alone is given batches, and has what is written in the settings. While it
    calls a network that is split, the others compute their parts of it.

    `torch.distributed` is initialised with these ranks as its default group before a model is
    loaded, for what computes with collectives. Messages go beside it, and tell the receiver what
    tensors come: so nobody waits in a collective for a rank that has met with an error, and shapes
    may differ from call to call.
    """

    @property
    def rank(self) -> int:
        """Which one this is, from 0."""

    @property
    def size(self) -> int:
        """How many there are."""

    @property
    def split(self) -> Split:
        """How the replica is split."""

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""

    def send(self, to: int, message: object, tensors: Sequence[Tensor] = ()) -> None:
        """Send a message, and tensors with it, to another rank; does not wait for their receipt.

        Args:
            to: Which rank.
            message: What msgpack can say: numbers, strings, lists, dicts.
            tensors: Of any device, dtype and shape; they must not be written to afterwards.

        Raises:
            EOFError: That rank is gone.
        """

    def receive(self, source: int, timeout_s: float | None = None) -> tuple[object, list[Tensor]]:
        """Wait for the next message of another rank; its tensors come on this rank's device.

        Args:
            source: Which rank.
            timeout_s: How long to wait at most; None waits until that rank is gone.

        Raises:
            EOFError: That rank is gone, or lets this one go.
            TimeoutError: None has come.
        """

    def giving_way(self) -> AbstractContextManager[BatchClock]:
        """What a call is in, on the lead, while all that it does is its own and the other ranks'.

        The lead may have several batches under way, each in a thread. One of these runs the model's
        code, and the others wait until it gives way, or has an answer. What is entered is the clock
        of the caller's batch, to be stopped while the call waits for others.
        """
