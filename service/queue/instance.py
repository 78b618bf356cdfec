"""One instance in the queue: what a caller asked for, and the future of its result.

An HTTP call carries one or more instances. Each has a deadline, is retried and is answered by
itself.
"""

import asyncio
from typing import TYPE_CHECKING, Final, Protocol

import msgspec

from inferpool.workers.messages import ItemRef, TensorBlob

if TYPE_CHECKING:
    from inferpool.service.queue.batcher import Bucket

Buffer = bytes | bytearray | memoryview

QUEUED: Final = 0
SENT: Final = 1
SETTLED: Final = 2
"""The states of an instance; `dispatcher.py` says who owns its arena slot in each."""


class SlotOwner(Protocol):
    """The allocator of a slot in the arena, which takes the slot back."""

    def free(self, offset: int) -> None:
        """Free a slot. No worker reads it any more."""


class Timing(msgspec.Struct, frozen=True, gc=False):
    """Seconds that an instance spent in each stage."""

    queue_s: float
    """All waiting: in the queue, and in the worker that answered."""
    prepare_s: float
    """Decoding and collating its batch."""
    compute_s: float
    """The forward pass and the rendering of its batch, without waits for a pipeline's others."""


class Result(msgspec.Struct, frozen=True, gc=False):
    """The prediction for one instance."""

    value: bytes | list[TensorBlob]
    """Rendered JSON, or the output tensors where the call asked for them."""
    timing: Timing


class CancelListener(Protocol):
    """The dispatcher, as an instance sees it."""

    loop: asyncio.AbstractEventLoop

    def on_cancelled(self, instance: "Instance") -> None:
        """Forget an instance whose caller has gone."""


class Instance(asyncio.Future[Result]):
    """One instance, and the future of its result. Cancelling it takes it out of the queue."""

    __slots__ = (
        "arrived", "bucket", "is_solo", "ledger", "num_crashes", "owner", "ref", "state", "tick",
    )  # fmt: skip

    def __init__(
        self, ledger: CancelListener, ref: ItemRef, owner: SlotOwner, arrived: float
    ) -> None:
        super().__init__(loop=ledger.loop)
        self.ledger = ledger
        self.ref = ref
        self.owner = owner
        """The owner of the arena slot that holds the payload."""
        self.arrived = arrived
        self.state = QUEUED
        self.num_crashes = 0
        """Workers that died with it. All that died with a whole batch count as one."""
        self.is_solo = False
        """The instance must be computed in a batch of its own."""
        self.bucket: Bucket
        self.tick = 0

    __hash__ = asyncio.Future.__hash__

    def cancel(self, msg: object = None) -> bool:
        """Give the instance up, since nobody waits for it any more."""
        if self.done():
            return False
        self.ledger.on_cancelled(self)
        return super().cancel(msg)
