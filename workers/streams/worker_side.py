"""Main loop of a worker whose model answers in parts.

The main thread has one call of the model's generator under way. Before each of its steps it takes
what other threads have read and prepared meanwhile; after it, it sends the parts of all streams in
one message.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from typing import Any

import torch

from inferpool.models.accelerator.device import synchronize
from inferpool.models.accelerator.failures import is_lost_device, is_out_of_memory, raised
from inferpool.models.errors import BadReturnError, InputError
from inferpool.models.item import Features
from inferpool.models.streams import END
from inferpool.models.texts import described
from inferpool.workers.inside.compute import Computer
from inferpool.workers.inside.outcomes import error_of, refusal_of
from inferpool.workers.inside.preparing import Prepared, ShapeGroup
from inferpool.workers.inside.process import BEAT_S, BatchReceiver, SpareMemory
from inferpool.workers.inside.shortage import release
from inferpool.workers.inside.staging import take
from inferpool.workers.shared.heartbeat import Heartbeat
from inferpool.workers.shared.messages import (
    BatchDone,
    Drop,
    ItemError,
    Outcome,
    StreamPart,
    StreamParts,
)
from inferpool.workers.shared.outputs import OutputStore
from inferpool.workers.shared.worker_queue import WorkerQueue
from inferpool.workers.streams.arrivals import Arrivals
from inferpool.workers.streams.parts import PartMaker, sizes_cut
from inferpool.workers.streams.under_way import (
    OpenStream,
    PartsOfOneError,
    StreamBatch,
    StreamCall,
    merged,
)

logger = logging.getLogger(__name__)

MAX_STEP_BYTES = 1 << 25
"""Approximate limit of the parts in one message, which must fit into the head of an agent's."""
_MOST_SAMPLE_STEPS = 1000
"""Steps of a canary until its first part."""


class StreamLoop:
    """Main loop of a worker: begin streams, compute steps, and send their parts."""

    def __init__(
        self,
        computer: Computer,
        receiver: BatchReceiver,
        outbox: WorkerQueue,
        heartbeat: Heartbeat,
        outputs: OutputStore,
    ) -> None:
        """Take what a `WorkerLoop` takes; `outputs` stays unused, since parts are JSON."""
        self._computer = computer
        self._model = computer.model
        self._heartbeat = heartbeat
        self._outgoing = Outgoing(outbox)
        self._arrivals = Arrivals(computer, receiver)
        self._maker = PartMaker(computer)
        self._batches: dict[int, StreamBatch] = {}
        """Batches that are prepared, and not answered."""
        self._dropped: dict[int, set[int]] = {}
        """Rows that were dropped while their batch was prepared, by its id."""
        self._waiting: deque[OpenStream] = deque()
        self._suspects: deque[OpenStream] = deque()
        """Streams that have failed beside others before their first part."""
        self._canaries: deque[Prepared] = deque()
        self._call: StreamCall | None = None
        self._spare_memory = SpareMemory(time.monotonic())

    def serve(self) -> None:
        """Answer streams until the sentinel has arrived and all are over.

        Raises:
            EOFError: The front end is gone.
            torch.AcceleratorError: The device's context is lost.
        """
        self._arrivals.start()
        with torch.inference_mode():
            while self._take_arrivals():
                self._answer_canaries()
                self._begin()
                if self._call is not None:
                    self._step(self._call)
                    self._heartbeat.progressed()
                    self._spare_memory.worked(time.monotonic())
                for batch in self._outgoing.send():
                    del self._batches[batch.prepared.id]
                    self._heartbeat.answered()

    def _take_arrivals(self) -> bool:
        """Take what has arrived, and wait for something to do; return False if all is done."""
        while True:
            has_work = self._call or self._waiting or self._suspects or self._canaries
            is_idle = not (has_work or self._outgoing)
            if is_idle and self._arrivals.are_over:
                return False
            arrived = self._arrivals.next(BEAT_S if is_idle else 0)
            if isinstance(arrived, Prepared):
                self._accept(arrived)
            elif isinstance(arrived, Drop):
                self._drop(arrived)
            elif is_idle:
                self._heartbeat.beat()
                self._spare_memory.idle(time.monotonic())
            else:
                return True

    def _accept(self, prepared: Prepared) -> None:
        """Expect the streams of a batch to begin; those that could not be prepared fail now."""
        if prepared.is_canary:
            self._canaries.append(prepared)
            return
        batch = self._batches[prepared.id] = StreamBatch(prepared)
        for number, group in enumerate(prepared.groups):
            for row in group.indices:
                batch.streams[row].group = number
        dropped = self._dropped.pop(prepared.id, ())
        for stream, outcome in zip(batch.streams, prepared.outcomes, strict=True):
            if stream.index in dropped:
                self._leave(stream)
            elif isinstance(outcome, ItemError):
                self._fail(stream, outcome)
        live = [stream for stream in batch.streams if not stream.is_over]
        self._waiting.extend(sorted(live, key=lambda stream: stream.group))

    def _drop(self, drop: Drop) -> None:
        """End streams that nobody reads any more, without a word."""
        if drop.id in self._arrivals.preparing:
            self._dropped.setdefault(drop.id, set()).update(drop.indices)
            return
        batch = self._batches.get(drop.id)
        streams = batch.streams if batch is not None else []
        for row in drop.indices:
            if 0 <= row < len(streams) and not streams[row].is_over:
                self._leave(streams[row])

    def _begin(self) -> None:
        """Begin streams: those that wait join the call, or begin one if there is none."""
        call = self._call
        if call is None and self._suspects:
            self._start([self._suspects.popleft()], is_alone=True)
        elif call is None and self._waiting:
            self._start(self._next_together(), is_alone=False)
        elif call is not None and self._waiting and self._model.joins and call.may_be_joined:
            for streams, batch in self._collated(self._in_time(self._next_together())):
                self._try("admit", streams, lambda: call.admit(streams, batch))  # noqa: B023 - called at once

    def _next_together(self) -> list[OpenStream]:
        """Remove from those that wait what may be computed together."""
        waiting, first = self._waiting, self._waiting[0]
        if self._model.joins:
            chosen = [*waiting]
        elif self._model._streams_alone:
            chosen = [first]
        else:
            batch, group = first.batch, first.group
            chosen = [each for each in waiting if each.batch is batch and each.group == group]
        for _ in chosen:  # they are the first ones
            waiting.popleft()
        return chosen

    def _in_time(self, streams: Sequence[OpenStream]) -> list[OpenStream]:
        """Return streams that somebody waits for; those that are late fail."""
        now = time.monotonic()
        for stream in streams:
            if not stream.is_over and stream.ref.deadline <= now:
                text = "the deadline passed before it was computed"
                self._fail(stream, ItemError("deadline_exceeded", text))
        return [stream for stream in streams if not stream.is_over]

    def _start(self, streams: Sequence[OpenStream], *, is_alone: bool) -> None:
        """Call the model's generator for streams; those of other groups wait on."""
        found = self._collated(self._in_time(streams))
        for others, _ in reversed(found[1:]):
            self._waiting.extendleft(reversed(others))
        if found:
            members, batch = found[0]
            self._call = self._try(
                "stream",
                members,
                lambda: StreamCall(self._model, members, batch, is_alone=is_alone),
            )

    def _collated(self, streams: list[OpenStream]) -> list[tuple[list[OpenStream], Features]]:
        """Return streams in groups, each with its batch; what cannot be collated fails."""
        if not streams:
            return []
        prepared, group = streams[0].batch.prepared, None
        if prepared.groups:
            group = prepared.groups[streams[0].group]
        if group is None or group.batch is None or len(group.indices) != len(streams):
            prepared = merged(streams)
            self._computer.preparer.group(prepared)
            groups, rows = prepared.groups, streams
        else:
            groups, rows = [group], streams[0].batch.streams
        found = []
        for group in groups:
            members = [rows[row] for row in group.indices]
            batch = self._try("collate", members, lambda: self._batch_of(prepared, group))  # noqa: B023 - called at once
            if batch is not None:
                found.append((members, batch))
        return found

    def _batch_of(self, prepared: Prepared, group: ShapeGroup) -> Features:
        batch, group.batch = group.batch, None
        if batch is None:
            batch = self._computer.preparer.collate(prepared, group.indices)
        if prepared.handed_over is not None:
            take(prepared.handed_over, batch)
        return batch

    def _try(self, step: str, streams: Sequence[OpenStream], do: Callable[[], Any]) -> Any:
        """Do what calls the model for some streams; if it raises, fail them and return None."""
        now = time.monotonic()
        for stream in streams:
            stream.batch.began = stream.batch.began or now
        try:
            return do()
        except raised() as error:
            self._survive(streams, error, step)
            return None

    def _step(self, call: StreamCall) -> None:
        """Compute the next step of the call, and make its parts."""
        if call.untold and call.has_stepped:
            self._guarded("drop", call.tell_drops)
        try:
            found = call.step()
        except StopIteration:
            late = [stream for stream in call.streams.values() if call.is_untried(stream)]
            self._close()
            self._wait_again(late)
            for stream in call.streams.values():
                if stream not in late:
                    self._finish(stream)
        except PartsOfOneError:
            self._model._streams_alone = True
            self._close()
            self._wait_again([*call.streams.values()])
        except raised() as error:
            self._close()
            self._survive([*call.streams.values()], error, call.method)
        else:
            for position, part in found.items():
                self._make(call, call.streams[position], part)

    def _make(self, call: StreamCall, stream: OpenStream, part: object) -> None:
        if part is END:
            self._finish(stream)
            return
        made = self._maker.part_of(part, stream.item, stream.ref)
        if isinstance(made, ItemError):
            self._fail(stream, made)
            return
        call.is_alone = False
        stream.num_parts += 1
        self._outgoing.add(stream, made)

    def _wait_again(self, streams: Sequence[OpenStream]) -> None:
        """Put streams that were not begun before all others that wait."""
        self._waiting.extendleft(reversed(streams))

    def _survive(self, streams: Sequence[OpenStream], error: BaseException, step: str) -> None:
        """Fail streams that raised together; those without a part begin again, one by one.

        Raises:
            torch.AcceleratorError: The device's context is lost, even if the error was another.
        """
        if is_lost_device(error):
            raise error
        again = [each for each in streams if not each.num_parts] if len(streams) > 1 else []
        failing = [each for each in streams if each not in again]
        if again:
            self._suspects.extend(again)
            text = "%s failed for %d streams (%s): those without a part begin again, one by one"
            logger.warning(text, step, len(streams), described(error))
        if failing:
            failure = self._failure_of(failing, error, step)
            for stream in failing:
                self._fail(stream, failure)
        if is_out_of_memory(error):
            release(error)
        synchronize()  # a library's error may hide that the context is lost

    def _failure_of(
        self, streams: Sequence[OpenStream], error: BaseException, step: str
    ) -> ItemError:
        """Return the error of streams that raised together, and log it once."""
        first = streams[0]
        if isinstance(error, InputError):
            if len(streams) > 1:
                text = f"{step} raised InputError for {len(streams)} streams at once: {error}"
                error = BadReturnError(text)
        elif len(streams) == 1 and (refusal := refusal_of(first.item)):
            return refusal
        return error_of(error, step, first.ref, self._computer.error_detail)

    def _finish(self, stream: OpenStream) -> None:
        self._outgoing.add(stream, None)
        self._leave(stream, is_known=True)

    def _fail(self, stream: OpenStream, error: ItemError) -> None:
        self._outgoing.add(stream, error)
        self._leave(stream)

    def _leave(self, stream: OpenStream, *, is_known: bool = False) -> None:
        """Compute a stream no more, and answer its batch if it was the last one of it.

        Args:
            stream: The stream.
            is_known: The model has ended it.
        """
        stream.is_over = True
        batch, call = stream.batch, self._call
        batch.num_left -= 1
        if not batch.num_left:
            self._outgoing.done.append(batch)
        if call is None or not call.has(stream):
            return
        call.remove(stream, is_known=is_known)
        if not call.streams:
            self._close()

    def _close(self) -> None:
        """End the call of the generator, which first hears of the streams that it did not end."""
        call, self._call = self._call, None
        assert call is not None
        if call.untold and call.has_stepped and not self._model._streams_alone:
            self._guarded("drop", call.tell_drops)
        self._guarded("the end of a stream", call.close)

    def _guarded(self, step: str, do: Callable[[], None]) -> None:
        """Call the model where no stream depends on it: log what it raises."""
        try:
            do()
        except raised() as error:
            if is_lost_device(error):
                raise
            logger.error("%s raised %s", step, described(error), exc_info=error)

    def _answer_canaries(self) -> None:
        """Answer canaries: by the sample's first part, or at once if there are steps anyway."""
        if self._call is not None and not self._call.has_stepped:
            return
        while self._canaries:
            prepared = self._canaries.popleft()
            began = time.monotonic()
            outcomes = [] if self._call else self._computer.judge_sample(self._sampled(prepared))
            self._heartbeat.beat()
            self._outgoing.answer(prepared, outcomes, began)

    def _sampled(self, prepared: Prepared) -> list[bytes | ItemError]:
        """Compute the first part of a canary's sample, if it has one."""
        found = [each for each in prepared.outcomes if isinstance(each, ItemError)]
        if found or not prepared.groups:
            return [*found]
        item, ref = prepared.items[0], prepared.refs[0]
        (stream,), step = StreamBatch(prepared).streams, "collate"
        try:
            batch = self._batch_of(prepared, prepared.groups[0])
            step = "stream"
            call = StreamCall(self._model, [stream], batch, is_alone=True)
            with closing(call), suppress(StopIteration):
                for _ in range(_MOST_SAMPLE_STEPS):
                    self._heartbeat.progressed()
                    if (part := call.step().get(0, END)) is not END:
                        return [self._maker.part_of(part, item, ref)]
        except raised() as error:
            if is_lost_device(error):
                raise
            return [error_of(error, step, ref, self._computer.error_detail)]
        return []


class Outgoing:
    """Parts of a step, and the answers to batches, on their way to the front end."""

    def __init__(self, outbox: WorkerQueue) -> None:
        self._outbox = outbox
        self._parts: list[StreamPart] = []
        self.done: list[StreamBatch] = []
        """Batches that are to be answered after these parts."""

    def __bool__(self) -> bool:
        """Return whether there is something to be sent."""
        return bool(self._parts or self.done)

    def add(self, stream: OpenStream, value: bytes | ItemError | None) -> None:
        """Have a part of a stream sent, or its end."""
        self._parts.append(StreamPart(stream.batch.prepared.id, stream.index, value))

    def send(self) -> list[StreamBatch]:
        """Send the parts, and answer the batches that are over; return these."""
        parts, self._parts = self._parts, []
        start = 0
        sizes = [len(part.value) if isinstance(part.value, bytes) else 0 for part in parts]
        for num in sizes_cut(sizes, MAX_STEP_BYTES):
            if num:
                self._outbox.put(StreamParts(parts[start : start + num]))
            start += num
        done, self.done = self.done, []
        for batch in done:
            self.answer(batch.prepared, [b""] * len(batch.streams), batch.began)
        return done

    def answer(self, prepared: Prepared, outcomes: Sequence[Outcome], began: float) -> None:
        """Answer a batch, the computation of which began at a time, or never (0.0)."""
        now = time.monotonic()
        began = began or now
        self._outbox.put(
            BatchDone(
                prepared.id,
                [*outcomes],
                prepared.prepare_s,
                now - began,
                prepare_began=prepared.began,
                compute_began=began,
            )
        )
