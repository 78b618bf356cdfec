"""Answers that come in parts: the instances of a model that streams, in the event loop.

Imported by the dispatcher of a model once a worker says that it streams. A stream is settled once,
at its end. Its arena slot stays the worker's until its whole batch has come back.

Before the first part a stream is an instance like any other: its deadline holds, and it is computed
again if its worker dies. From the first part on, the time between two parts, the time of all and
their number are bounded, and the death of its worker ends it.
"""

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from inferpool.models.spec import Interface
from inferpool.service.errors import (
    InternalError,
    OverloadedError,
    ServiceError,
    StreamGapError,
    StreamTooLongError,
)
from inferpool.service.queue.admission import Admission, RateMeter
from inferpool.service.queue.batch_sizing import SizeLimit
from inferpool.service.queue.instance import (
    SETTLED,
    Instance,
    InstanceTiming,
    Result,
    SlotOwner,
    StreamReader,
)
from inferpool.service.queue.ledger import Ledger
from inferpool.service.queue.scheduling.lanes import Lane, Lanes
from inferpool.workers.host.engine import WorkerHandle
from inferpool.workers.shared.messages import BatchDone, ItemError, ItemRef, StreamPart

logger = logging.getLogger(__name__)

MAX_COLLECTED_BYTES = 64 << 20
"""Bytes of parts that are kept for one stream without a reader."""
MAX_ALL_COLLECTED_BYTES = 256 << 20
"""Bytes of parts that are kept for all such streams of one version together."""
_NO_DEADLINE = -1
"""The tick of a stream whose first part has come: that was all that its deadline is for."""
_PART_BYTES = 64
"""Memory that a part takes besides its own bytes."""
_WEIGHT = 0.2
"""Weight of the newest stream in the moving averages."""


class StreamLimits(NamedTuple):
    """How long streams of a model may be; see its settings."""

    gap_s: float
    max_s: float
    max_parts: int


class StreamKeeper(Protocol):
    """The dispatcher, as its streams see it."""

    loop: asyncio.AbstractEventLoop

    def end(self, instance: Instance, error: ServiceError) -> None:
        """Answer an instance with an error, wherever it is."""

    def on_cancelled(self, instance: Instance) -> None:
        """Settle an instance after its caller has gone."""

    def ledger_of(self, instance: Instance) -> Ledger:
        """Return the ledger that has the instance's account."""


class StreamInstance(Instance):
    """An instance that is answered in parts. Its result comes once the stream is over."""

    __slots__ = (
        "batch", "collected", "ends_at", "first_at", "index", "is_over", "last_at", "num_bytes",
        "num_parts", "reader", "sent_at", "streams", "timer",
    )  # fmt: skip

    def __init__(
        self,
        streams: "Streams",
        ref: ItemRef,
        owner: SlotOwner,
        arrived: float,
        reader: StreamReader | None,
    ) -> None:
        super().__init__(streams.keeper, ref, owner, arrived)
        self.streams = streams
        self.reader = reader
        """Gets the parts; None collects them for the result."""
        self.collected: list[bytes] = []
        self.num_bytes = 0
        self.num_parts = 0
        self.sent_at = self.first_at = self.last_at = self.ends_at = 0.0
        self.batch: SentStreams | None = None
        """The batch that a worker holds it in."""
        self.index = 0
        """Its place in that batch."""
        self.is_over = False
        """The worker has ended it."""
        self.timer: asyncio.TimerHandle | None = None

    __hash__ = asyncio.Future.__hash__

    def cancel(self, msg: object = None) -> bool:
        """Cancel the stream: its caller does not wait any more."""
        is_cancelled = super().cancel(msg)
        if is_cancelled:
            self.streams.leave(self)
        return is_cancelled

    def end(self, error: ServiceError) -> None:
        """End the stream with an error, unless it is settled."""
        if self.state != SETTLED:
            self.dispatcher.end(self, error)  # type: ignore[attr-defined]  # a `StreamKeeper`

    def set_exception(self, error: type | BaseException, /) -> None:
        """Settle the stream with an error, which gets the parts that came before."""
        if isinstance(error, ServiceError):
            error.parts, error.num_parts = self.collected, self.num_parts
        super().set_exception(error)
        self.streams.leave(self)


class ComparedStream(StreamInstance):
    """A stream of a comparison of versions: no client sent it, so it is no traffic."""

    __slots__ = ()
    is_compared = True

    __hash__ = asyncio.Future.__hash__


class StreamRate(RateMeter):
    """Estimates how soon an instance that waits gets its first part.

    A stream may take minutes, and its first part come at once; so both are learned apart.
    """

    def learn_first(self, first_s: float) -> None:
        """Learn from the seconds between a stream's sending and its first part."""
        self.batch_s += _WEIGHT * (first_s - self.batch_s) if self.batch_s else first_s

    def learn_whole(self, whole_s: float, num_at_once: int) -> None:
        """Learn from the seconds of a whole stream; a worker computes some of them at once."""
        item_s = whole_s / num_at_once
        self.item_s += _WEIGHT * (item_s - self.item_s) if self.item_s else item_s

    def under_load(self, now: float) -> tuple[float, float]:
        """Return the seconds until a worker has room for the next one, and to the first part."""
        return self.item_s, self.batch_s


class Streams:
    """All streams of one dispatcher."""

    def __init__(
        self,
        keeper: StreamKeeper,
        admission: Admission,
        size_limit: SizeLimit,
        interface: Interface,
    ) -> None:
        """Expect the first stream.

        Args:
            keeper: Settles them.
            admission: Knows how long streams may be. Gets a rate that long ones do not spoil.
            size_limit: Bounds batches to one instance, where the model takes them one by one.
            interface: How the model streams.
        """
        self.keeper = keeper
        self.limits = StreamLimits(*admission.stream_limits)
        self.num_open = 0
        """Streams that workers compute."""
        self.num_collected_bytes = 0
        self.joins = interface.joins
        self.rate = StreamRate(size_limit.now)
        admission.rate = self.rate
        size_limit.hold()
        if interface.joins or interface.alone:
            size_limit.now = size_limit.own = 1

    def instance(
        self,
        ref: ItemRef,
        owner: SlotOwner,
        arrived: float,
        reader: StreamReader | None,
        *,
        is_compared: bool,
    ) -> Instance:
        """Return a new stream."""
        cls = ComparedStream if is_compared else StreamInstance
        return cls(self, ref, owner, arrived, reader)

    def run(
        self, worker: WorkerHandle, batch: Sequence[Instance], now: float
    ) -> "asyncio.Future[BatchDone]":
        """Send a batch to a worker.

        Raises:
            Exception: It cannot be encoded. Nothing was sent.
        """
        streams: list[StreamInstance] = []
        for instance in batch:
            if not isinstance(instance, StreamInstance):
                raise TypeError("it came before the model was known to answer in parts")
            streams.append(instance)
        sent = SentStreams(self, worker, streams)
        sent.future = worker.run([stream.ref for stream in streams], sent.on_parts)
        for index, stream in enumerate(streams):
            stream.batch, stream.index, stream.is_over = sent, index, False
            stream.sent_at = now
        self.num_open += len(streams)
        return sent.future

    def answered(
        self, lanes: Lanes, lane: Lane, batch: list[Instance], done: BatchDone, now: float
    ) -> None:
        """Settle the streams of a batch that has come back, and that are not settled yet."""
        # What a whole batch takes says nothing about when the worker has time for another.
        lanes.answered(lane, batch, now, was_computed=False)
        width = lane.worker.credit if self.joins else len(batch)
        for instance, outcome in zip(batch, done.outcomes, strict=True):
            assert isinstance(instance, StreamInstance)
            if not isinstance(outcome, ItemError):
                self.rate.learn_whole(now - instance.sent_at, width)
            if instance.state != SETTLED:  # it failed before it had a place in a stream
                self.over(instance, outcome if isinstance(outcome, ItemError) else None, now)
            self.close(instance)

    def lost(self, batch: Sequence[Instance]) -> None:
        """Forget that a worker computes these streams: it is lost."""
        for instance in batch:
            assert isinstance(instance, StreamInstance)
            instance.is_over = True
            self.close(instance)

    def close(self, stream: StreamInstance) -> None:
        """Count a stream as one that no worker computes any more."""
        if stream.batch is not None:
            stream.batch = None
            self.num_open -= 1

    def begin(self, stream: StreamInstance, now: float) -> None:
        """Begin to bound a stream by its own limits, at its first part."""
        stream.first_at = now
        stream.ends_at = now + self.limits.max_s
        ledger = self.keeper.ledger_of(stream)
        ledger.deadlines.discard(stream)
        stream.tick = _NO_DEADLINE
        _trace_first(ledger, stream, now)
        ledger.metrics.stream_first_part.observe(now - stream.arrived)
        ledger.metrics.queue_wait.observe(stream.sent_at - stream.arrived)
        self.rate.learn_first(now - stream.sent_at)
        loop = self.keeper.loop
        first_s = min(self.limits.gap_s, self.limits.max_s)
        stream.timer = loop.call_later(first_s, self._look, stream)

    def take(self, stream: StreamInstance, value: bytes, now: float) -> None:
        """Pass on a part of a stream."""
        num = stream.num_parts + 1
        if num > self.limits.max_parts:
            stream.end(StreamTooLongError(f"it has more than {self.limits.max_parts} parts"))
            return
        metrics = self.keeper.ledger_of(stream).metrics
        if num == 1:
            self.begin(stream, now)
        else:
            metrics.stream_part_gap.observe(now - stream.last_at)
        stream.num_parts, stream.last_at = num, now
        metrics.stream_parts += 1
        if stream.reader is None:
            self._collect(stream, value)
            return
        try:
            stream.reader.on_parts((value,))
        except Exception:
            logger.exception("a part could not be passed on", extra=stream.ref.log_ids())
            stream.end(InternalError("a part could not be passed on; see the log"))

    def over(self, stream: StreamInstance, error: ItemError | None, now: float) -> None:
        """Settle a stream that its worker has ended."""
        stream.is_over = True
        ledger = self.keeper.ledger_of(stream)
        if error is not None:
            ledger.fail_item(stream, error)
            return
        if not stream.num_parts:
            _trace_first(ledger, stream, now)
        value = b"[]" if stream.reader else b"[" + b",".join(stream.collected) + b"]"
        queue_s = max(0.0, stream.sent_at - stream.arrived)
        timing = InstanceTiming(queue_s, 0.0, max(0.0, now - stream.sent_at))
        ledger.metrics.succeeded += 1
        ledger.settle(stream)
        stream.set_result(Result(value, timing))
        self.leave(stream)

    def leave(self, stream: StreamInstance) -> None:
        """Release what a settled stream holds, and end it in its worker if it goes on there."""
        if stream.timer is not None:
            stream.timer.cancel()
            stream.timer = None
        self.num_collected_bytes -= stream.num_bytes
        stream.num_bytes, stream.collected = 0, []
        if stream.batch is not None and not stream.is_over:
            stream.is_over = True
            stream.batch.drop(stream.index)

    def _collect(self, stream: StreamInstance, value: bytes) -> None:
        num_bytes = len(value) + _PART_BYTES
        stream.collected.append(value)
        stream.num_bytes += num_bytes
        self.num_collected_bytes += num_bytes
        if stream.num_bytes > MAX_COLLECTED_BYTES:
            text = f"its parts have more than {MAX_COLLECTED_BYTES >> 20} MiB together"
            stream.end(StreamTooLongError(f"{text}; ask for a stream of events instead"))
        elif self.num_collected_bytes > MAX_ALL_COLLECTED_BYTES:
            text = "too many parts are kept for callers that read no stream"
            stream.end(OverloadedError(text, retry_after_s=1))

    def _look(self, stream: StreamInstance) -> None:
        """End a stream that is over one of its limits in time."""
        if stream.state == SETTLED:
            return
        now = time.monotonic()
        gap_ends_at = stream.last_at + self.limits.gap_s
        if now >= stream.ends_at:
            stream.end(StreamTooLongError(f"it took more than {self.limits.max_s:g} s"))
        elif now >= gap_ends_at:
            stream.end(StreamGapError(f"no part came for {self.limits.gap_s:g} s"))
        else:
            due_s = max(0.001, min(stream.ends_at, gap_ends_at) - now)
            stream.timer = self.keeper.loop.call_later(due_s, self._look, stream)


def _trace_first(ledger: Ledger, stream: StreamInstance, now: float) -> None:
    """Record when the first part of a stream came, or when it ended without any."""
    for steps in ledger.traced.of((stream,)):
        steps.tries[-1].first_part = now


class SentStreams:
    """The streams of one batch that a worker holds."""

    def __init__(
        self, streams: Streams, worker: WorkerHandle, batch: Sequence[StreamInstance]
    ) -> None:
        self._streams = streams
        self._worker = worker
        self._batch = batch
        self.future: asyncio.Future[BatchDone]

    def on_parts(self, parts: Sequence[StreamPart]) -> None:
        """Receive parts, and ends of streams."""
        now = time.monotonic()
        streams = self._streams
        for part in parts:
            stream, value = self._batch[part.index], part.value
            if stream.state == SETTLED:
                continue
            if isinstance(value, bytes):
                streams.take(stream, value, now)
            else:
                streams.over(stream, value, now)

    def drop(self, index: int) -> None:
        """End a stream in the worker."""
        self._worker.drop(self.future, (index,))
