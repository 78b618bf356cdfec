"""A front's side of the link to the main process: the models as calls see them. Runs in a front."""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

import msgspec

from inferpool.service.errors import InternalError, OverloadedError, ServiceError
from inferpool.service.parts.fronts.link import Link
from inferpool.service.parts.fronts.messages import (
    Answers,
    Command,
    Failure,
    FromMain,
    ModelRow,
    ModelTable,
    StreamEnded,
    StreamTurn,
    Submission,
    Submissions,
    TableTaken,
    error_of,
    failure_of,
)
from inferpool.service.queue.admission import KeyShare
from inferpool.service.queue.instance import (
    Buffer,
    InstanceSteps,
    InstanceTiming,
    Result,
    SlotOwner,
    StreamReader,
)
from inferpool.workers.shared.arena import Slots
from inferpool.workers.shared.messages import ItemRef

if TYPE_CHECKING:
    from inferpool.models.spec import TensorSpec
    from inferpool.service.telemetry.metrics import RejectReason

logger = logging.getLogger(__name__)

_decode = msgspec.msgpack.Decoder(FromMain).decode


class PendingInstance(asyncio.Future[Result]):
    """An instance that the main process has in its ledger; cancelling removes it there."""

    __slots__ = ("front_side", "id", "steps")

    def __init__(self, front_side: "FrontSide", id: int, steps: InstanceSteps | None) -> None:
        super().__init__(loop=front_side.loop)
        self.front_side = front_side
        self.id = id
        self.steps = steps

    def cancel(self, msg: object = None) -> bool:
        """Cancel the instance: nobody waits for it any more."""
        if self.done():
            return False
        self.front_side.give_up(self.id)
        return super().cancel(msg)


class PendingStream(PendingInstance):
    """An instance whose answer comes in parts, which a reader of this front gets."""

    __slots__ = ("num_parts", "reader")

    def __init__(
        self, front_side: "FrontSide", id: int, steps: InstanceSteps | None, reader: StreamReader
    ) -> None:
        super().__init__(front_side, id, steps)
        self.reader = reader
        self.num_parts = 0

    def take(self, parts: list[bytes]) -> None:
        """Pass on parts."""
        self.num_parts += len(parts)
        try:
            self.reader.on_parts(parts)
        except Exception:
            logger.exception("parts could not be passed on")
            self.end(InternalError("a part could not be passed on; see the log"))

    def end(self, error: ServiceError) -> None:
        """End the stream with an error, here and in the main process, unless it is over."""
        if not self.done():
            error.num_parts = self.num_parts
            self.front_side.end(self.id, error)
            self.set_exception(error)


class RemoteModel:
    """A version of a model in the main process, as the calls of a front see it."""

    def __init__(self, front_side: "FrontSide", row: ModelRow, key_share: float) -> None:
        self.name = row.name
        self.version = row.version
        self.is_serving = row.is_serving
        self.canary = row.canary
        self.inputs: Sequence[TensorSpec] = row.inputs
        self.outputs: Sequence[TensorSpec] = row.outputs
        self.interface = row.interface
        self._rejected = front_side.rejected[row.name]
        self._key_share = KeyShare(key_share, self._rejected)
        self._front_side = front_side
        self._number = row.number

    def update(self, row: ModelRow) -> None:
        """Copy what has changed."""
        self.is_serving, self.canary = row.is_serving, row.canary
        self.interface, self.outputs = row.interface, row.outputs
        if list(self.inputs) != row.inputs:  # calls remember them by their identity
            self.inputs = row.inputs

    def submit(
        self,
        ref: ItemRef,
        chunks: Sequence[Buffer],
        steps: InstanceSteps | None = None,
        owner: SlotOwner | None = None,
        *,
        reader: StreamReader | None = None,
    ) -> PendingInstance:
        """Copy a payload into the arena, and submit it; the future fails if it is refused.

        With an `owner` the payload has a slot already. A `reader` gets the parts of the answer,
        where the model answers in parts.

        Raises:
            OverShareError: Its key has its share of the arena.
            OverloadedError: The arena has no room for it.
        """
        front_side = self._front_side
        if owner is None:
            if ref.caller:
                self._key_share.check_bytes(front_side.slots, ref)
            offset = front_side.slots.put(chunks, ref.num_bytes, ref.caller)
            if offset is None:
                self._rejected["arena_full"] += 1
                raise OverloadedError("the arena for payloads is full", retry_after_s=1)
            ref.offset = offset
        return front_side.submit(self._number, ref, steps, reader)


class FrontSide:
    """Submits the instances of one turn in one message, and settles them by the answers."""

    def __init__(
        self,
        reader: Connection,
        writer: Connection,
        slots: Slots,
        on_command: Callable[[Command], None],
        on_lost: Callable[[str], None],
        key_share: float = 1.0,
    ) -> None:
        """Begin to listen to the main process.

        `on_lost` is called with the reason when the main process is gone. Each API key may use
        `key_share` of the slots that others leave.
        """
        self.loop = asyncio.get_running_loop()
        self.models: dict[str, RemoteModel] = {}
        """By the rest of the path; see `Predict.models`."""
        self.rejected: defaultdict[str, defaultdict[RejectReason, int]] = defaultdict(
            lambda: defaultdict(int)
        )
        """Instances refused here since the last count, by model and reason."""
        self._by_number: dict[int, RemoteModel] = {}
        self._key_share = key_share
        self.slots = slots
        self._on_command = on_command
        self._open: dict[int, PendingInstance] = {}
        self._given_up: dict[int, InstanceSteps] = {}
        """InstanceSteps of traced instances that were given up: their answers still come."""
        self._last_id = 0
        self.link = Link(reader, writer, _decode, self._take, on_lost, Submissions, self._fail)

    def submit(
        self,
        model: int,
        ref: ItemRef,
        steps: InstanceSteps | None,
        reader: StreamReader | None = None,
    ) -> PendingInstance:
        """Submit an instance, whose payload is in the arena."""
        self._last_id = id = self._last_id + 1
        pending: PendingInstance
        if reader is None:
            self.link.add(Submission(id, model, ref, steps is not None))
            pending = PendingInstance(self, id, steps)
        else:
            self.link.add(Submission(id, model, ref, steps is not None, wants_parts=True))
            pending = PendingStream(self, id, steps, reader)
        self._open[id] = pending
        return pending

    def give_up(self, id: int) -> None:
        """Cancel an instance that nobody waits for any more."""
        pending = self._open.pop(id, None)
        if pending is not None:
            if pending.steps is not None:
                self._given_up[id] = pending.steps
            self.link.add_id(id)

    def end(self, id: int, error: ServiceError) -> None:
        """End a stream that its reader cannot follow, in the main process too."""
        pending = self._open.pop(id, None)
        if pending is not None:
            if pending.steps is not None:
                self._given_up[id] = pending.steps
            self.link.send_turn()  # what was submitted before
            self.link.send(StreamEnded(id, failure_of(error)))

    def take_rejected(self) -> list[tuple[str, "RejectReason", int]]:
        """Return what was refused here since the last time, by model and reason."""
        taken = [
            (name, reason, num)
            for name, reasons in self.rejected.items()
            for reason, num in reasons.items()
        ]
        known = {model.name for model in self._by_number.values()}
        for name, reasons in list(self.rejected.items()):
            reasons.clear()
            if name not in known:
                del self.rejected[name]
        return taken

    def take_models(self, rows: Sequence[ModelRow]) -> None:
        """Know these versions, and no others."""
        known, self._by_number = self._by_number, {}
        for model in known.values():
            model.is_serving = False  # calls that still hold one of those that are gone look anew
        self.models.clear()
        for row in rows:
            model = known.get(row.number) or RemoteModel(self, row, self._key_share)
            model.update(row)
            self._by_number[row.number] = model
            self.models.update(dict.fromkeys(row.paths, model))

    def _fail(self, submission: Submission) -> None:
        """Settle an instance that could not be encoded."""
        self.slots.free(submission.ref.offset)
        self._given_up.pop(submission.id, None)
        pending = self._open.pop(submission.id, None)
        if pending is not None:
            text = "this input cannot be sent to the main process; see the log"
            pending.set_exception(InternalError(text))

    def _take(self, message: FromMain) -> None:
        match message:
            case Answers():
                self._settle(message)
            case StreamTurn():
                for id, parts in message.parts.items():
                    pending = self._open.get(id)
                    if isinstance(pending, PendingStream):  # else it was given up
                        pending.take(parts)
            case ModelTable():
                self.take_models(message.rows)
                self.link.send_turn()  # what was submitted by an older table
                self.link.send(TableTaken(message.id))
            case _:
                self._on_command(message)

    def _settle(self, message: Answers) -> None:
        free = self.slots.free
        for offset in message.freed:
            free(offset)
        for answer in message.answers:
            pending = self._open.pop(answer.id, None)
            steps = self._given_up.pop(answer.id, None) if pending is None else pending.steps
            if steps is not None and answer.steps is not None:
                steps.take(answer.steps)
            if pending is None:
                continue  # it was given up
            value = answer.value
            if isinstance(value, Failure):
                pending.set_exception(error_of(value))
            else:
                timing = InstanceTiming(answer.queue_s, answer.prepare_s, answer.compute_s)
                pending.set_result(Result(value, timing))
