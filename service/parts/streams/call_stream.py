"""One call whose answer is sent part by part: what has come, what is sent, what waits to be read.

The model never waits for a client. What the client has not read is kept up to a bound; past that
its stream ends, and nobody else notices. Runs in the event loop.
"""

import asyncio
from collections.abc import Sequence
from copy import copy
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from inferpool.service.api.codecs.body import Payload
from inferpool.service.api.errors import kind_of, problem
from inferpool.service.api.exchange import (
    Exchange,
    ModelEntry,
    common_lines,
    lines_of,
    new_steps,
    outcome_of,
    put_into,
)
from inferpool.service.api.wire.budgets import EdgeLimits, UnreadAnswers
from inferpool.service.errors import NotAcceptableError, ReaderTooSlowError, ServiceError
from inferpool.service.parts.streams.forms import end_of, error_of, head_lines, part_of
from inferpool.service.queue.instance import InstanceTiming

if TYPE_CHECKING:
    from inferpool.service.parts.streams.wires import AsgiStream, SocketStream

_PART_BYTES = 128
"""The memory that a part takes besides its text."""
_OK = 200


class _Reader:
    """Gets the parts of one instance of a call."""

    __slots__ = ("_stream", "index", "num_parts")

    def __init__(self, stream: "CallStream", index: int) -> None:
        self._stream = stream
        self.index = index
        self.num_parts = 0

    def on_parts(self, parts: Sequence[bytes]) -> None:
        form, index = self._stream.form, self.index
        self.num_parts += len(parts)
        if form == "pieces":
            self._stream.send_pieces(parts)
        else:
            self._stream.send([part_of(form, index, bytes(part)) for part in parts])


class CallStream:
    """Sends what the instances of one call give, in the order in which it comes."""

    def __init__(self, exchange: Exchange, num_instances: int) -> None:
        """Send nothing yet: the head waits for the first part."""
        self.form = exchange.call.chosen
        self._head = b"" if self.form == "pieces" else head_lines(self.form)
        self.readers = [_Reader(self, index) for index in range(num_instances)]
        self._exchange = exchange
        self._wire: SocketStream | AsgiStream | None = None
        """Sends what there is, once there is a head."""
        self._limits = exchange.predict.limits
        if exchange.predict.unread is None:
            exchange.predict.unread = UnreadAnswers(EdgeLimits().max_unread_bytes)
        self._unread = exchange.predict.unread
        self._num_left = num_instances
        self._kept: list[bytes] = []
        """Text that the client has not read, and that the wire takes no more of."""
        self._num_kept_bytes = 0
        self._status = _OK
        self._error: ServiceError | None = None
        """Why it ends before its instances have."""
        self._is_cut = False
        self._early: list[tuple[int, ServiceError]] = []
        """Errors of instances before there was any part."""

    @property
    def num_unread_bytes(self) -> int:
        """Bytes that wait to be written."""
        return self._num_kept_bytes

    def owner(self) -> str:
        """Return the owner of the memory that unread parts take."""
        return self._exchange.wire.owner_of(self._exchange.call)

    def begin(self) -> None:
        """Wait for the ends of the instances, which have been submitted.

        Raises:
            ServiceError: The only instance was refused.
        """
        outcomes = self._exchange.call.outcomes
        if len(outcomes) == 1 and isinstance(outcomes[0], ServiceError):
            raise outcomes[0]
        for index, outcome in enumerate(list(outcomes)):
            if isinstance(outcome, ServiceError):
                self._fail(index, outcome)
            else:
                outcome.add_done_callback(partial(self._on_end, index))

    def send(self, pieces: Sequence[bytes]) -> None:
        """Send text, or keep it until the client reads on; too much of it ends the stream."""
        if self._exchange.response_complete or self._error is not None:
            return
        if self._wire is None:
            self._send_head()
        if not self._kept and (self._wire is None or self._wire.is_writable):
            self._write(pieces)
            return
        self._kept += pieces
        self._num_kept_bytes += sum(map(len, pieces)) + _PART_BYTES * len(pieces)
        num_kept, num = len(self._kept), len(self.readers)
        if num_kept > num * self._limits.stream_buffer_parts:
            self._give_up(f"stream_buffer_parts = {self._limits.stream_buffer_parts}")
        elif self._num_kept_bytes > num * self._limits.stream_buffer_bytes and num_kept > 1:
            self._give_up(f"stream_buffer_bytes = {self._limits.stream_buffer_bytes}")
        else:
            self._unread.take(self, self._num_kept_bytes)

    def send_pieces(self, parts: Sequence[bytes]) -> None:
        """Send parts as a protocol renders them; one that cannot be sent ends the stream."""
        protocol, rest = self._exchange.call.protocol, list(map(bytes, parts))
        if self._exchange.response_complete or self._error is not None or not rest:
            return
        assert protocol is not None
        pieces: list[bytes] = []
        try:
            if self._wire is None:
                self._status, headers, first = protocol.first_piece(rest.pop(0))
                self._head = lines_of(headers)
                pieces.append(first)
            pieces += map(protocol.next_piece, rest)
        except ServiceError as error:
            self._end_soon(error)
        else:
            self.send(pieces)

    def cut_off(self) -> None:
        """End: others need the room that unread parts take."""
        self._give_up("max_unread_bytes, of which a key or an address has its share")

    def _send_head(self) -> None:
        call = self._exchange.call
        call.status = self._status
        lines = self._head + common_lines(call, None).encode()
        self._wire = self._exchange.wire.open_stream(self._exchange, lines, self._on_writable)
        for index, error in self._early:
            self._tell(index, error)
        self._early.clear()

    def _on_writable(self) -> None:
        """Send what was kept: the client has read everything before it."""
        kept, self._kept = self._kept, []
        self._release()
        if not self._exchange.response_complete:
            self._write(kept)

    def _write(self, pieces: Sequence[bytes]) -> None:
        data = b"".join(pieces)
        if data and self._wire is not None:  # an empty chunk would end the answer
            self._wire.send(data)

    def _release(self) -> None:
        self._num_kept_bytes = 0
        self._unread.give_back(self)

    def _give_up(self, bound: str) -> None:
        """End the stream: its client does not read what comes."""
        if self._error is not None:
            return
        self._kept.clear()
        self._release()
        text = f"the client has not read the parts that came, beyond {bound}"
        self._end_soon(ReaderTooSlowError(text))

    def _end_soon(self, error: ServiceError) -> None:
        """End all instances; not now, since parts of others may be on their way."""
        self._error, self._is_cut = error, self.form == "pieces"
        asyncio.get_running_loop().call_soon(self._end_instances, error)

    def _end_instances(self, error: ServiceError) -> None:
        for outcome in list(self._exchange.call.outcomes):
            if isinstance(outcome, asyncio.Future) and not outcome.done():
                ending: Any = outcome  # all kinds of instances that have readers can be ended
                ending.end(error)

    def _on_end(self, index: int, future: "asyncio.Future[Any]") -> None:
        exchange = self._exchange
        if exchange.response_complete:  # the client has gone
            self._kept.clear()
            self._release()
            return
        outcome = outcome_of(exchange.call, index, future)
        if isinstance(outcome, ServiceError):
            self._fail(index, outcome)
            return
        if self.form != "pieces":
            timing = msgspec.json.encode(_shown(outcome.timing))
            self.send([end_of(self.form, index, self.readers[index].num_parts, timing)])
        self._count_down()

    def _fail(self, index: int, error: ServiceError) -> None:
        if self._wire is not None:
            self._tell(index, error)
        else:
            self._early.append((index, error))
        self._count_down()

    def _tell(self, index: int, error: ServiceError) -> None:
        """Send the error of an instance, even to a client that reads nothing.

        An answer in pieces has no place for one, and is cut.
        """
        call = self._exchange.call
        call.error = error.code, error.message
        self._status = kind_of(error).status
        if self.form == "pieces":
            self._is_cut = True
            return
        _, _, document = problem(error, call.request_id, call.path)
        piece = error_of(self.form, index, self.readers[index].num_parts, document)
        if self._kept:
            self._kept.append(piece)
        else:
            self._write([piece])

    def _count_down(self) -> None:
        self._num_left -= 1
        if self._num_left:
            return
        exchange = self._exchange
        if self._wire is None:
            exchange.on_done(None)  # none had a part, and so the answer has a status of its own
            return
        self._write(self._kept)
        self._kept.clear()
        self._release()
        exchange.response_complete = True
        if self._is_cut:
            self._wire.cut()
        else:
            self._wire.end()
        exchange.close(self._status)


def stream_call(exchange: Exchange, entry: ModelEntry, payloads: Sequence[Payload]) -> None:
    """Submit the instances of a call, and send each part of their answers as it comes.

    Raises:
        ServiceError: The only instance is refused, or the model does not stream.
    """
    if not entry.interface.streams:  # an earlier version did
        raise NotAcceptableError("this version of the model does not answer in parts")
    exchange.call.ref.wants_tensors = False
    stream = CallStream(exchange, len(payloads))
    call = exchange.call
    call.num_instances = len(payloads)
    for payload, reader in zip(payloads, stream.readers, strict=True):
        ref, steps = copy(call.ref), new_steps(call)
        try:
            call.outcomes.append(entry.submit(ref, put_into(ref, payload), steps, reader=reader))
        except ServiceError as error:
            call.outcomes.append(error)
            if steps is not None:
                steps.code, steps.message = error.code, error.message
    exchange.let_go()
    stream.begin()


def _shown(timing: InstanceTiming) -> dict[str, float]:
    """Return the time of each stage in milliseconds, by the names of `Server-Timing`."""
    return {
        "queue_ms": round(timing.queue_s * 1e3, 2),
        "preprocess_ms": round(timing.prepare_s * 1e3, 2),
        "inference_ms": round(timing.compute_s * 1e3, 2),
    }
