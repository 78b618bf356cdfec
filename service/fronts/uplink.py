"""A front's way to the dispatchers: its models, and what it has asked of them. Runs in a front."""

import asyncio
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Protocol

import msgspec

from inferpool.service.errors import InternalError, OverloadedError
from inferpool.service.fronts.link import Link
from inferpool.service.fronts.messages import (
    Ask,
    Count,
    Failure,
    FromMain,
    Inputs,
    Leave,
    MoveAway,
    Settled,
    Turn,
    error_of,
)
from inferpool.service.queue.request import Buffer, Result, Timing
from inferpool.service.queue.steps import Steps
from inferpool.workers.arena import Slots
from inferpool.workers.messages import ItemRef

if TYPE_CHECKING:
    from inferpool.models.spec import TensorSpec

_decode = msgspec.msgpack.Decoder(FromMain).decode


class Asked(asyncio.Future[Result]):
    """An instance that the main process has in its ledger. Cancelling it takes it out there."""

    __slots__ = ("id", "steps", "uplink")

    def __init__(self, uplink: "Uplink", id: int, steps: Steps | None) -> None:
        super().__init__(loop=uplink.loop)
        self.uplink = uplink
        self.id = id
        self.steps = steps

    def cancel(self, msg: object = None) -> bool:
        """Give the instance up: nobody waits for it any more."""
        if self.done():
            return False
        self.uplink.give_up(self.id)
        return super().cancel(msg)


class RemoteModel:
    """A model, as calls see it."""

    def __init__(self, uplink: "Uplink", index: int, name: str) -> None:
        self.name = name
        self.inputs: Sequence[TensorSpec] = ()
        self.num_full = 0
        """Instances that found no room in the arena, since that was last asked."""
        self._uplink = uplink
        self._index = index

    def submit(self, ref: ItemRef, chunks: Sequence[Buffer], steps: Steps | None = None) -> Asked:
        """Copy a payload into the arena, and submit it; the future says if it is refused.

        Raises:
            OverloadedError: There is no room for it.
        """
        asked = self._uplink.ask(self._index, ref, chunks, steps)
        if asked is None:
            self.num_full += 1
            raise OverloadedError("the arena for payloads is full", retry_after_s=1)
        return asked


class Commands(Protocol):
    """What the main process tells a front to do."""

    def count(self, command: Count) -> None:
        """Say what was counted."""

    def move_away(self) -> None:
        """Let each answer close its connection."""

    def leave(self, *, is_hurried: bool, flush_until: float) -> None:
        """End, once clients have read their answers, or at a moment."""

    def on_lost(self, reason: str) -> None:
        """The main process is gone."""


class Uplink:
    """Submits what comes in one turn of the loop by one message, and settles what comes back."""

    def __init__(
        self,
        reader: Connection,
        writer: Connection,
        slots: Slots,
        models: Sequence[str],
        commands: Commands,
    ) -> None:
        """Begin to listen to the main process.

        Args:
            reader: What it writes to.
            writer: What it reads from.
            slots: Of this front's part of the arena.
            models: Their names, in the order of the settings.
            commands: Who does what it says.
        """
        self.loop = asyncio.get_running_loop()
        self.models = {name: RemoteModel(self, index, name) for index, name in enumerate(models)}
        self._slots = slots
        self._commands = commands
        self._open: dict[int, Asked] = {}
        self._given_up: dict[int, Steps] = {}
        """Of those that are traced: what became of them comes all the same."""
        self._last_id = 0
        self._asks: list[Ask] = []
        self._cancelled: list[int] = []
        self._is_flush_due = False
        self.link = Link(reader, writer, _decode, self._take, commands.on_lost)

    def ask(
        self, model: int, ref: ItemRef, chunks: Sequence[Buffer], steps: Steps | None
    ) -> Asked | None:
        """Submit an instance; None where the arena has no room for it."""
        offset = self._slots.put(chunks, ref.num_bytes)
        if offset is None:
            return None
        ref.offset = offset
        self._last_id = id = self._last_id + 1
        self._asks.append(Ask(id, model, ref, steps is not None))
        self._open[id] = asked = Asked(self, id, steps)
        self._flush_soon()
        return asked

    def give_up(self, id: int) -> None:
        """Nobody waits for an instance any more."""
        asked = self._open.pop(id, None)
        if asked is not None:
            if asked.steps is not None:
                self._given_up[id] = asked.steps
            self._cancelled.append(id)
            self._flush_soon()

    def _flush_soon(self) -> None:
        if not self._is_flush_due:
            self._is_flush_due = True
            self.loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._is_flush_due = False
        asks, cancelled = self._asks, self._cancelled
        self._asks, self._cancelled = [], []
        self.link.send_turn(Turn, asks, cancelled, self._fail)

    def _fail(self, ask: Ask) -> None:
        """Settle an instance that cannot be sent."""
        self._slots.free(ask.ref.offset)
        self._given_up.pop(ask.id, None)
        asked = self._open.pop(ask.id, None)
        if asked is not None:
            text = "this input cannot be sent to the main process; see the log"
            asked.set_exception(InternalError(text))

    def _take(self, message: FromMain) -> None:
        match message:
            case Settled():
                self._settle(message)
            case Inputs():
                for model, inputs in zip(self.models.values(), message.models, strict=True):
                    if list(model.inputs) != inputs:  # calls remember them by their identity
                        model.inputs = inputs
            case Count():
                self._commands.count(message)
            case MoveAway():
                self._commands.move_away()
            case Leave():
                self._commands.leave(is_hurried=message.is_hurried, flush_until=message.flush_until)

    def _settle(self, settled: Settled) -> None:
        free = self._slots.free
        for offset in settled.freed:
            free(offset)
        for answer in settled.answers:
            asked = self._open.pop(answer.id, None)
            steps = self._given_up.pop(answer.id, None) if asked is None else asked.steps
            if steps is not None and answer.steps is not None:
                steps.take(answer.steps)
            if asked is None:
                continue  # it was given up
            value = answer.value
            if isinstance(value, Failure):
                asked.set_exception(error_of(value))
            else:
                timing = Timing(answer.queue_s, answer.prepare_s, answer.compute_s)
                asked.set_result(Result(value, timing))
