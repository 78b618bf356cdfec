"""The processes that one replica is split over, as the network's parts see them."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from torch import Tensor

from inferpool.models.runtime import ReplicaRank
from inferpool.models.spec import SplitReport
from inferpool.models.split.turnstile import BatchClock


class Ranks(ReplicaRank, Protocol):
    """One rank's place among those of its replica, with the ways to the others.

    Messages go beside the collectives, and tell the receiver which tensors come: so nobody waits in
    a collective for a rank that has raised, and shapes may differ from call to call.
    """

    @property
    def known_split(self) -> SplitReport | None:
        """The split of an earlier incarnation, which was verified."""

    @property
    def room_bytes(self) -> int:
        """Bytes of its device's memory that this rank may take; 0 if unknown."""

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
            EOFError: That rank is gone, or has no more calls.
            OutOfStepError: This rank has no memory for the tensors: its process must end, since
                what comes next would be taken for them.
            TimeoutError: No message has come.
        """

    def giving_way(self) -> AbstractContextManager[BatchClock]:
        """Allow other batches to run the model's code while a call passes through the ranks.

        The lead may have several batches under way, each in a thread. One of these runs the model's
        code, and the others wait until it gives way, or has an answer.

        Returns:
            A context in which the thread gives way. It yields the clock of the caller's batch, to
            be stopped while the call waits for others.
        """
