"""One instance in the queue: what a caller asked for, and the future of its result.

An HTTP call carries one or more instances. Each has a deadline, is retried and is answered by
itself. If its call is traced, `InstanceSteps` notes what happened to it. All moments are seconds
of CLOCK_MONOTONIC, which all processes of a host share.
"""

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, Protocol
from zlib import crc32

import msgspec

from inferpool.workers.shared.messages import ContentBlob, ItemRef, TensorBlob

if TYPE_CHECKING:
    from inferpool.service.queue.batcher import Bucket

Buffer = bytes | bytearray | memoryview

QUEUED: Final = 0
SENT: Final = 1
SETTLED: Final = 2
"""The states of an instance; `dispatcher.py` says who owns its arena slot in each."""
NO_TICK = 0
"""The tick of an instance whose deadline is not near; see `ledger.py`."""


class SlotOwner(Protocol):
    """The allocator of a slot in the arena, which takes the slot back."""

    def free(self, offset: int) -> None:
        """Free a slot. No worker reads it any more."""


class InstanceTiming(msgspec.Struct, frozen=True, gc=False):
    """Seconds that an instance spent in each stage."""

    queue_s: float
    """All waiting: in the queue, and in the worker that answered."""
    prepare_s: float
    """Decoding and collating its batch."""
    compute_s: float
    """The forward pass and the rendering of its batch, without waits for a pipeline's others."""


BACKGROUND = 10
"""The priority of work that takes only what is idle. Clients give priorities from 1 to 9."""


class Result(msgspec.Struct, frozen=True, gc=False):
    """The prediction for one instance."""

    value: bytes | list[TensorBlob] | ContentBlob
    """Rendered JSON, content, or the output tensors where the call asked for them."""
    timing: InstanceTiming


class StreamReader(Protocol):
    """The reader of an answer that comes in parts."""

    def on_parts(self, parts: Sequence[bytes]) -> None:
        """Receive the next parts, each as JSON, in the event loop."""


class CancelListener(Protocol):
    """The dispatcher, as an instance sees it."""

    loop: asyncio.AbstractEventLoop

    def on_cancelled(self, instance: "Instance") -> None:
        """Settle an instance after its caller has gone."""


class Instance(asyncio.Future[Result]):
    """One instance, and the future of its result. Cancelling it takes it out of the queue."""

    __slots__ = (
        "arrived", "bucket", "dispatcher", "is_solo", "num_crashes", "num_hosts_lost", "owner",
        "ref", "state", "tick",
    )  # fmt: skip

    def __init__(
        self, dispatcher: CancelListener, ref: ItemRef, owner: SlotOwner, arrived: float
    ) -> None:
        super().__init__(loop=dispatcher.loop)
        self.dispatcher = dispatcher
        self.ref = ref
        self.owner = owner
        """The owner of the arena slot that holds the payload."""
        self.arrived = arrived
        self.state = QUEUED
        self.num_crashes = 0
        """Workers that died with it. All that died with a whole batch count as one."""
        self.num_hosts_lost = 0
        """Hosts that were lost with it, which it is not blamed for."""
        self.is_solo = False
        """The instance must be computed in a batch of its own."""
        self.bucket: Bucket
        self.tick = NO_TICK

    num_parts = 0
    """Parts that its caller has been sent; see `StreamInstance`."""
    is_compared = False
    """True in `ComparedInstance`. An attribute of the class costs each instance nothing."""

    __hash__ = asyncio.Future.__hash__

    def cancel(self, msg: object = None) -> bool:
        """Cancel the instance: its caller does not wait any more."""
        if self.done():
            return False
        self.dispatcher.on_cancelled(self)
        return super().cancel(msg)


class ComparedInstance(Instance):
    """An instance of a comparison of versions: no client sent it, so it is no traffic."""

    __slots__ = ()
    is_compared = True

    __hash__ = asyncio.Future.__hash__


class CanaryShare(msgspec.Struct, frozen=True, array_like=True):
    """A version that answers a share of the calls to the one that serves."""

    path: str
    """The rest of the path of calls that name it; see `Predict.models`."""
    share: float

    def gets(self, request_id: str) -> bool:
        """Return whether it answers a call; the same for all calls with the same id."""
        return crc32(request_id.encode()) < self.share * 2**32


class Attempt(msgspec.Struct, array_like=True):
    """One time that a traced instance was sent to a worker."""

    worker: str
    """Model and slot, such as "resnet/0", the same for all incarnations."""
    incarnation: int
    device: str
    """The kind of device: "NVIDIA H100 80GB HBM3", "cpu"."""
    batch_size: int
    sent: float
    prepare_began: float = 0.0
    """0.0 if it is not known to have begun, as for the two below."""
    prepare_s: float = 0.0
    compute_began: float = 0.0
    compute_s: float = 0.0
    first_part: float = 0.0
    """When its first part came, if it is answered in parts."""
    lost: float = 0.0
    """When the worker was found to be lost; 0.0 if it was not."""
    reason: str = ""
    """Why the worker was lost."""
    host: str = ""
    """The host that ran the worker; empty for the front end's."""


class InstanceSteps(msgspec.Struct, array_like=True):
    """The life of a traced instance, from its arrival to its end. Spans are made of it."""

    arrived: float = 0.0
    settled: float = 0.0
    """0.0 while it has no answer."""
    code: str = ""
    """The code of the error that it ended with; empty if it succeeded."""
    message: str = ""
    tries: list[Attempt] = []

    def take(self, noted: "InstanceSteps") -> None:
        """Copy what another process has noted about the same instance.

        If the call was given up, another thread may be making its spans meanwhile. It skips an
        instance without an arrival, so that is set last.
        """
        self.code, self.message = noted.code, noted.message
        self.settled, self.tries = noted.settled, noted.tries
        self.arrived = noted.arrived
