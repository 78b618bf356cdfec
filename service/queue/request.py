"""One instance as a value: its payload, what is asked of it, and where its time went.

An HTTP call carries one or more instances. The ledger, credit, retries and deadlines count
instances; DESIGN's "request" is one of them.
"""

from collections.abc import Sequence
from typing import Protocol

import msgspec

from inferpool.models.spec import TensorHeader
from inferpool.service.queue.steps import Steps
from inferpool.workers.messages import Kind, TensorBlob

Buffer = bytes | bytearray | memoryview


class SlotOwner(Protocol):
    """Who gives out slots of the arena, and takes them back."""

    def free(self, offset: int) -> None:
        """No worker reads this slot any more."""


class Payload(msgspec.Struct, frozen=True, gc=False):
    """The body of one instance: to be copied into the arena, or there already."""

    kind: Kind
    chunks: Sequence[Buffer]
    """The bytes, in pieces as they came, so that the arena gets the only copy."""
    headers: tuple[TensorHeader, ...] = ()
    """For kind "tensors": what lies where in the joined chunks."""
    owner: SlotOwner | None = None
    """Whose slot it lies in, where it is in the arena already."""
    offset: int | None = None
    """Of that slot."""

    @property
    def num_bytes(self) -> int:
        """Length of the joined chunks."""
        chunks = self.chunks
        return len(chunks[0]) if len(chunks) == 1 else sum(map(len, chunks))


class CallOptions(msgspec.Struct, frozen=True, gc=False):
    """What one HTTP call asks of all its instances."""

    deadline: float
    """A moment of the event loop's clock (CLOCK_MONOTONIC), in seconds."""
    priority: int = 5
    """1 goes first, 9 last."""
    wants_tensors: bool = False
    parameters: bytes = b""
    """A JSON object for the model, or nothing."""
    trace: str = ""
    """See `ItemRef`."""
    steps: Steps | None = None
    """Where to note what becomes of the instance, if that is traced: then no other has these."""


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
