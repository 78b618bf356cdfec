"""The main process's side of a front: submits its instances and sends back their results.

Runs in the main process's event loop, one for each process that a front has had.
"""

import asyncio
import logging
import mmap
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

import msgspec

from inferpool.service.errors import (
    InternalError,
    ReaderTooSlowError,
    ServiceError,
    UnavailableError,
)
from inferpool.service.parts.fronts.link import Link
from inferpool.service.parts.fronts.messages import (
    Answers,
    CountRequest,
    Failure,
    FromFront,
    FrontCounts,
    InstanceAnswer,
    Listening,
    ModelRow,
    ModelTable,
    MovedAway,
    StreamEnded,
    StreamTurn,
    Submission,
    Submissions,
    TableTaken,
    error_of,
    failure_of,
)
from inferpool.service.queue.instance import InstanceSteps, Result
from inferpool.workers.shared.arena import slot_bytes
from inferpool.workers.shared.log_lines import log_line
from inferpool.workers.shared.messages import ContentBlob, LogLine
from inferpool.workers.shared.queues import FrameError

if TYPE_CHECKING:  # each front imports this module, and not the catalog
    from inferpool.service.catalog.catalog import Catalog

logger = logging.getLogger(__name__)

_MAX_WAITING_BYTES = 16 << 20
"""Bytes that wait to be read by a front, above which its streams end."""
_GIVEN_UP = Failure("cancelled", "nobody waits for it any more")
_decode = msgspec.msgpack.Decoder(FromFront).decode


class MainSide:
    """Submits what one front sends, with one message each way per turn of the event loop."""

    def __init__(
        self,
        name: str,
        reader: Connection,
        writer: Connection,
        *,
        part: "ArenaPart",
        models: "Catalog",
        on_counts: Callable[[FrontCounts], None],
        on_end: Callable[[str], None],
    ) -> None:
        """Begin to listen to the front.

        `on_end` is called once with the reason why the front will send nothing more.
        """
        self._name = name
        self._loop = asyncio.get_running_loop()
        self.is_up: asyncio.Future[None] = self._loop.create_future()
        """Done once the front accepts connections and knows the models."""
        self.has_moved: asyncio.Future[None] = self._loop.create_future()
        """Done once most of its clients have gone."""
        self._part = part
        self._models = models
        self._on_counts = on_counts
        self._instances: dict[int, asyncio.Future[Result]] = {}
        self._parts: dict[int, list[bytes]] = {}
        """Parts of streams that came in this turn of the event loop."""
        self._count_ids = count(1)
        self._counting: dict[int, asyncio.Future[None]] = {}
        self._table = ModelTable(0, [])
        self._taken_id = 0
        self._taking: list[tuple[int, asyncio.Future[None]]] = []
        """Waits until the front has taken a table, each with that table's id."""
        self._has_spoken = False
        self.link = Link(reader, writer, _decode, self._take, on_end, Answers, self._send_failure)
        part.on_freed = self.link.add_id

    @property
    def has_unsettled(self) -> bool:
        """The front waits for answers."""
        return bool(self._instances)

    def tell_models(self) -> None:
        """Send the table of the models, if it has changed; the front asks for the first one."""
        if self._table.id:
            rows = rows_of(self._models)
            if rows != self._table.rows:
                self._send_table(rows)

    def until_known(self) -> "asyncio.Future[None]":
        """Return a future that is done once the front knows the models, or is gone."""
        future: asyncio.Future[None] = self._loop.create_future()
        if self._taken_id == self._table.id:
            future.set_result(None)
        else:
            self._taking.append((self._table.id, future))
        return future

    def count(self) -> "asyncio.Future[None]":
        """Ask for the front's counts; done once they are passed on, or the front is gone."""
        future: asyncio.Future[None] = self._loop.create_future()
        id = next(self._count_ids)
        self._counting[id] = future
        self.link.send(CountRequest(id, logging.getLogger().level))
        return future

    def has_been_heard(self) -> bool:
        """Return whether the front has sent anything since the last call."""
        has_spoken, self._has_spoken = self._has_spoken, False
        return has_spoken

    def close(self) -> None:
        """Cancel all instances of a front that is gone."""
        self.link.read_rest()
        self.link.close()
        self._part.on_freed = None
        instances, self._instances = self._instances, {}
        for instance in instances.values():
            instance.cancel()
        for future in (*self._counting.values(), *(future for _, future in self._taking)):
            if not future.done():
                future.set_result(None)

    def _take(self, message: FromFront) -> None:
        self._has_spoken = True
        match message:
            case Submissions():
                for submission in message.submissions:
                    self._submit(submission)
                for id in message.cancelled:
                    instance = self._instances.get(id)
                    if instance is not None:
                        instance.cancel()
            case StreamEnded():
                self._end_stream(message)
            case FrontCounts():
                self._take_counts(message)
            case LogLine():
                log_line(message, {"front": self._name})
            case TableTaken():
                self._note_taken(message.id)
            case Listening():
                self._send_table(rows_of(self._models))
            case MovedAway():
                self.has_moved.set_result(None)

    def _send_table(self, rows: list[ModelRow]) -> None:
        self._table = ModelTable(self._table.id + 1, rows)
        self.link.send(self._table)

    def _note_taken(self, id: int) -> None:
        self._taken_id = id
        if not self.is_up.done():
            self.is_up.set_result(None)
        for least, future in self._taking:
            if least <= id and not future.done():
                future.set_result(None)
        self._taking = [each for each in self._taking if each[0] > id]

    def _submit(self, submission: Submission) -> None:
        part, ref = self._part, submission.ref
        data = part.take(ref.offset, ref.num_bytes)
        steps = InstanceSteps() if submission.is_traced else None
        try:
            model = self._models.loaded.get(submission.model)
            if model is None:  # the front was told, and hung for too long
                raise UnavailableError("this version of the model has gone", retry_after_s=1)
            if submission.wants_parts:
                reader = FrontReader(self, submission.id)
                instance = model.submit(ref, (data,), steps, part, reader)
            else:
                instance = model.submit(ref, (data,), steps, part)
        except Exception as error:
            if not isinstance(error, ServiceError):
                logger.exception("an instance of %s could not be taken", self._name)
            part.free(ref.offset)
            failure = failure_of(error)
            if steps is not None:
                steps.code, steps.message = failure.code, failure.message
            self._answer(InstanceAnswer(submission.id, failure, steps=steps))
            return
        self._instances[submission.id] = instance
        instance.add_done_callback(partial(self._on_done, submission.id, steps))

    def _on_done(
        self, id: int, steps: InstanceSteps | None, instance: "asyncio.Future[Result]"
    ) -> None:
        if self._instances.pop(id, None) is None:
            return  # the front is gone
        if self._parts:
            self._send_parts()  # those of this stream come before its end
        if instance.cancelled():  # nobody waits for it, but a trace still wants its steps
            if steps is not None:
                self._answer(InstanceAnswer(id, _GIVEN_UP, steps=steps))
            return
        error = instance.exception()
        if error is not None:
            self._answer(InstanceAnswer(id, failure_of(error), steps=steps))
            return
        result = instance.result()
        timing = result.timing
        times = timing.queue_s, timing.prepare_s, timing.compute_s
        self._answer(InstanceAnswer(id, result.value, *times, steps))

    def take_parts(self, id: int, parts: Sequence[bytes]) -> None:
        """Send parts of a stream with all others of this turn.

        Raises:
            ReaderTooSlowError: The front has not read what came before.
        """
        if self.link.num_waiting_bytes > _MAX_WAITING_BYTES:
            raise ReaderTooSlowError(
                "the front end is too slow to read this stream", retry_after_s=1
            )
        if not self._parts:
            self._loop.call_soon(self._send_parts)
        self._parts.setdefault(id, []).extend(parts)

    def end_stream(self, id: int, error: ServiceError) -> None:
        """End a stream with an error."""
        end = getattr(self._instances.get(id), "end", None)  # only a `StreamInstance` has it
        if end is not None:
            end(error)

    def _send_parts(self) -> None:
        parts, self._parts = self._parts, {}
        if parts:
            self.link.send(StreamTurn(parts))

    def _end_stream(self, message: StreamEnded) -> None:
        error = error_of(message.failure)
        if not isinstance(error, ServiceError):
            raise FrameError(f"a stream that ended with {error!r}")
        self.end_stream(message.id, error)

    def _answer(self, answer: InstanceAnswer) -> None:
        value, num_bytes = answer.value, 0
        if isinstance(value, list):
            num_bytes = sum(len(each.buffer) for each in value)
        elif not isinstance(value, Failure):
            num_bytes = len(value.buffer if isinstance(value, ContentBlob) else value)
        self.link.add(answer, num_bytes)

    def _send_failure(self, answer: InstanceAnswer) -> None:
        """Report to the front that an answer could not be encoded."""
        failure = failure_of(InternalError("its answer cannot be sent on; see the log"))
        self.link.send(Answers([InstanceAnswer(answer.id, failure)], []))

    def _take_counts(self, counts: FrontCounts) -> None:
        future = self._counting.pop(counts.id, None)
        if future is None and counts.id:  # a front that leaves sends its last counts as number 0
            raise FrameError(f"counts {counts.id}, which nobody asked for")
        self._on_counts(counts)
        if future is not None and not future.done():
            future.set_result(None)


class FrontReader:
    """The reader of a stream, in another process."""

    def __init__(self, main_side: MainSide, id: int) -> None:
        self._main_side = main_side
        self._id = id

    def on_parts(self, parts: Sequence[bytes]) -> None:
        """Send parts to the front; a front that does not read them ends the stream."""
        try:
            self._main_side.take_parts(self._id, parts)
        except ReaderTooSlowError as error:
            self._main_side.end_stream(self._id, error)


def rows_of(models: "Catalog") -> list[ModelRow]:
    """Return what fronts need to know of the versions that calls may get to."""
    rows = []
    for number, model in models.loaded.items():
        paths = [path for path, entry in models.entries.items() if entry is model]
        if paths:
            rows.append(
                ModelRow(
                    number,
                    model.name,
                    model.version,
                    model.is_serving,
                    list(model.inputs),
                    list(model.outputs),
                    paths,
                    model.canary,
                    model.interface,
                )
            )
    return rows


class ArenaPart:
    """A front's part of the arena, and the slots of it that are in use.

    It outlives the front's process: workers may still read slots of a front that died, and the next
    process begins with those taken.
    """

    def __init__(self, memory: mmap.mmap, where: range) -> None:
        self.where = where
        self.held: dict[int, int] = {}
        """Offsets of the slots in use, and the lengths of their payloads."""
        self.on_freed: Callable[[int], None] | None = None
        """Called with the offset of each slot that is freed, while the front lives."""
        self._memory = memoryview(memory)

    @property
    def used_bytes(self) -> int:
        """Bytes of the slots in use, with their padding."""
        return sum(map(slot_bytes, self.held.values()))

    def take(self, offset: int, num_bytes: int) -> memoryview:
        """Mark a slot as used, and return its memory.

        Raises:
            FrameError: The slot is in use, or lies outside this part.
        """
        end = offset + num_bytes
        if offset < self.where.start or end > self.where.stop or offset in self.held:
            raise FrameError(f"a slot at {offset} that cannot be")
        self.held[offset] = num_bytes
        return self._memory[offset:end]

    def free(self, offset: int) -> None:
        """Free a slot that no worker reads any more."""
        del self.held[offset]
        if self.on_freed is not None:
            self.on_freed(offset)

    def close(self) -> None:
        """Release the memory, so that it can be unmapped."""
        self._memory.release()
