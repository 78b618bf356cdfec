"""The streams of the batches that one worker holds. Imported once a model answers in parts.

The worker's process is not trusted: a part that cannot be ends it, like any other wrong message.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import msgspec
from msgspec.structs import replace

from inferpool.workers.shared.messages import BatchDone, Drop, ItemError, Outcome, StreamPart
from inferpool.workers.shared.queues import FrameError

if TYPE_CHECKING:
    from asyncio import Future

    from inferpool.workers.host.engine import OnParts
    from inferpool.workers.shared.queues import FrameWriter

_encode = msgspec.msgpack.Encoder().encode
_DROPPED = ItemError("deadline_exceeded", "nobody waits for this stream any more")


class HoldsStreams(Protocol):
    """A batch that a worker holds."""

    @property
    def future(self) -> "Future[BatchDone] | None":
        """Its answer."""

    @property
    def streams(self) -> "HeldStreams | None":
        """Its streams; None if it has none."""


class HeldByWorker(Protocol):
    """All batches that a worker holds."""

    answered_at: float
    """When something came of one of them."""

    @property
    def batches(self) -> "Mapping[int, HoldsStreams]":
        """The batches by their numbers."""


class Failures(Protocol):
    """The failures of a worker in a row."""

    def forget_failures(self) -> None:
        """Count them anew."""


class Carrying(Protocol):
    """The sender of batches to a worker: a `Carrier`, whose module imports this one."""

    proven_at: float

    @property
    def held(self) -> HeldByWorker:
        """The batches that the worker holds."""

    @property
    def canary(self) -> Failures:
        """Its canaries."""

    @property
    def writer(self) -> "FrameWriter | None":
        """Its inbox."""


class HeldStreams:
    """The streams of one batch, and how those ended that are over."""

    def __init__(self, num: int, on_parts: "OnParts") -> None:
        self._on_parts = on_parts
        self._ends: list[Outcome | None] = [None] * num
        """None while a stream goes on."""
        self._dropped: set[int] = set()

    def take(self, parts: Sequence[StreamPart]) -> None:
        """Pass on parts of streams that go on.

        Raises:
            FrameError: There is no such stream, or it is over.
        """
        ends, dropped = self._ends, self._dropped
        for part in parts:
            index, value = part.index, part.value
            if not 0 <= index < len(ends) or ends[index] is not None:
                raise FrameError(f"a part of stream {index}, which is over or never was")
            if not isinstance(value, bytes):
                ends[index] = b"" if value is None else value
        wanted = [each for each in parts if each.index not in dropped] if dropped else parts
        if wanted:
            self._on_parts(wanted)

    def drop(self, indices: Sequence[int]) -> list[int]:
        """Pass on nothing more of some streams; return those that still go on."""
        going = {place for place, end in enumerate(self._ends) if end is None} - self._dropped
        left = [index for index in indices if index in going]
        self._dropped.update(left)
        return left

    def ended(self, done: BatchDone) -> BatchDone:
        """Return the answer to the batch with what its streams ended with.

        Raises:
            FrameError: A stream has no end, and nobody has dropped it.
        """
        outcomes: list[Outcome] = []
        for index, (end, outcome) in enumerate(zip(self._ends, done.outcomes, strict=True)):
            if index in self._dropped:
                outcomes.append(_DROPPED)
            elif end is not None or isinstance(outcome, ItemError):
                outcomes.append(outcome if end is None else end)
            else:
                raise FrameError(f"an answer to batch {done.id}, whose stream {index} goes on")
        return replace(done, outcomes=outcomes)


def pass_on(carrier: Carrying, parts: Sequence[StreamPart]) -> None:
    """Pass on parts that a worker has sent: each step has the time of a batch, and proves it.

    Raises:
        FrameError: The worker holds no such batch or stream.
    """
    share_out(parts, carrier.held.batches.get)
    carrier.held.answered_at = now = time.monotonic()
    if any(isinstance(part.value, bytes) for part in parts):
        carrier.proven_at = now
        carrier.canary.forget_failures()


def drop(carrier: Carrying, future: "Future[BatchDone]", indices: Sequence[int]) -> None:
    """Ask a worker to end some streams of a batch, unless they are over."""
    message = dropped(carrier.held.batches, future, indices)
    if message is not None and carrier.writer is not None:
        carrier.writer.write(_encode(message))


def share_out(parts: Sequence[StreamPart], held: Callable[[int], HoldsStreams | None]) -> None:
    """Pass on parts to the batches of their streams, in their order.

    Raises:
        FrameError: There is no such batch or stream.
    """
    begin = 0
    while begin < len(parts):
        id, end = parts[begin].id, begin + 1
        while end < len(parts) and parts[end].id == id:
            end += 1
        batch = held(id)
        if batch is None or batch.streams is None:
            raise FrameError(f"a part of batch {id}, which it does not hold")
        batch.streams.take(parts[begin:end])
        begin = end


def dropped(
    batches: Mapping[int, HoldsStreams], future: "Future[BatchDone]", indices: Sequence[int]
) -> Drop | None:
    """Drop streams of a batch, and return what its worker must hear; None if they are over."""
    for id, batch in batches.items():
        if batch.future is future and batch.streams is not None:
            left = batch.streams.drop(indices)
            return Drop(id, left) if left else None
    return None
