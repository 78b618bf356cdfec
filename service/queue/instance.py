"""One instance in the ledger: the future of its result, and what the dispatcher knows of it."""

import asyncio
from typing import TYPE_CHECKING, Final, Protocol

from inferpool.service.queue.request import Result, SlotOwner
from inferpool.workers.messages import ItemRef

if TYPE_CHECKING:
    from inferpool.service.queue.batcher import Bucket

QUEUED: Final = 0
SENT: Final = 1
SETTLED: Final = 2
"""The states of an instance; the dispatcher says who owns its slot in each."""


class Ledger(Protocol):
    """Who keeps the books."""

    loop: asyncio.AbstractEventLoop

    def on_cancelled(self, instance: "Instance") -> None:
        """The caller of an instance has gone."""


class Instance(asyncio.Future[Result]):
    """One instance in the ledger, and the future of its result. Cancelling it takes it out."""

    __slots__ = (
        "arrived", "bucket", "is_solo", "ledger", "num_crashes", "owner", "ref", "state", "tick",
    )  # fmt: skip

    def __init__(self, ledger: Ledger, ref: ItemRef, owner: SlotOwner, arrived: float) -> None:
        super().__init__(loop=ledger.loop)
        self.ledger = ledger
        self.ref = ref
        self.owner = owner
        """Of its slot."""
        self.arrived = arrived
        self.state = QUEUED
        self.num_crashes = 0
        """Workers that died with it: all that died with a batch count as one."""
        self.is_solo = False
        self.bucket: Bucket
        self.tick = 0

    __hash__ = asyncio.Future.__hash__

    def cancel(self, msg: object = None) -> bool:
        """Give the instance up: nobody waits for it any more."""
        if self.done():
            return False
        self.ledger.on_cancelled(self)
        return super().cancel(msg)
