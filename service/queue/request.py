"""What an instance is submitted with besides its `ItemRef`, and what it becomes.

An HTTP call carries one or more instances. The ledger, credit, retries and deadlines count
instances; DESIGN's "request" is one of them.
"""

from typing import Protocol

import msgspec

from inferpool.workers.messages import TensorBlob

Buffer = bytes | bytearray | memoryview


class SlotOwner(Protocol):
    """Who gives out slots of the arena, and takes them back."""

    def free(self, offset: int) -> None:
        """No worker reads this slot any more."""


class Timing(msgspec.Struct, frozen=True, gc=False):
    """Where an instance's time went, in seconds."""

    queue_s: float
    """All that it waited: here, and in the worker that answered."""
    prepare_s: float
    """Decoding and collating its batch."""
    compute_s: float
    """The forward pass and the rendering of its batch, without waits for a pipeline's others."""


class Result(msgspec.Struct, frozen=True, gc=False):
    """The prediction for one instance."""

    value: bytes | list[TensorBlob]
    """Rendered JSON, or the output tensors where the call asked for them."""
    timing: Timing
