"""Calls of `ModelStreamInfer`: many requests in one call, and an answer or more for each.

An error of a request stands in the place of its answer, and the call goes on. Answers come in the
order of their requests; those of models that answer in parts come as they are. Event loop.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Sequence
from copy import copy
from functools import partial
from typing import Any

from grpc import StatusCode, aio

from inferpool.service.api.codecs.body import Decoded, Limits, Payload
from inferpool.service.api.errors import kind_of
from inferpool.service.api.exchange import (
    Exchange,
    ModelEntry,
    Predict,
    Reply,
    new_steps,
    outcome_of,
    put_into,
)
from inferpool.service.errors import (
    OverloadedError,
    ReaderTooSlowError,
    ServiceError,
    UnavailableError,
)
from inferpool.service.parts.open_inference.grpc.infer import (
    InferCall,
    InferWire,
    begin_infer,
    field_of,
    response_pieces,
    set_parameters,
    with_deadline,
)
from inferpool.service.parts.open_inference.grpc.schema import INFERENCE, schema
from inferpool.service.parts.open_inference.grpc.statuses import Headers
from inferpool.service.parts.open_inference.tensors import outputs_of
from inferpool.service.queue.instance import Buffer, InstanceTiming, Result

_Response = schema().message(INFERENCE, "ModelStreamInferResponse")
_INFER_TAG = bytes([_Response.DESCRIPTOR.fields_by_name["infer_response"].number << 3 | 2])
MAX_UNDER_WAY = 256
"""Requests of one call that are not answered; nothing more of it is read meanwhile."""
MAX_STREAMS = 256
"""Calls at once."""
_FINAL = "triton_final_response"
"""A parameter of each answer: no other answer to the request follows."""
_WANTS_FINAL = "triton_enable_empty_final_response"
"""A parameter of a request: an empty answer shall say that a stream is over."""
_NO_TIME = InstanceTiming(0.0, 0.0, 0.0)
_OK = 200


class StreamCalls:
    """Answers calls of `ModelStreamInfer`."""

    def __init__(self, predict: Predict, write_timeout_s: float) -> None:
        """Submit to the models of an endpoint; clients must read an answer in some time."""
        self._predict = predict
        self._write_timeout_s = write_timeout_s
        self._open: set[InferStream] = set()
        self._owners: Counter[str] = Counter()
        self._is_draining = False

    async def answer(self, context: Any, headers: Headers, client: str | None) -> None:
        """Answer one call.

        Args:
            context: That of grpcio.
            headers: The metadata of the call.
            client: The address that it comes from.
        """
        owner = self._predict.owner_of(dict(headers), client)
        num = self._owners[owner]
        if num >= self._predict.unread.share * (MAX_STREAMS - (len(self._open) - num)):
            raise OverloadedError(f"there are {len(self._open)} streams", retry_after_s=1)
        if self._is_draining:
            raise UnavailableError("this server is shutting down", retry_after_s=1)
        stream = InferStream(context, self._predict, headers, client, self._write_timeout_s)
        self._owners[owner] += 1
        self._open.add(stream)
        try:
            await stream.run()
        finally:
            self._open.discard(stream)
            self._owners[owner] -= 1
            if not self._owners[owner]:
                del self._owners[owner]

    def begin_drain(self) -> None:
        """End all calls once the requests that have come are answered."""
        self._is_draining = True
        for stream in self._open:
            stream.drain()


class InferStream:
    """One call: its requests under way, and the answers that its client has not read."""

    def __init__(
        self,
        context: Any,
        predict: Predict,
        headers: Headers,
        client: str | None,
        write_timeout_s: float,
    ) -> None:
        """Read nothing yet. See `StreamCalls.answer` for the arguments."""
        self.limits: Limits = predict.limits
        self._context = context
        self._predict = predict
        self._headers = headers
        self._client = client
        self._write_timeout_s = write_timeout_s
        self._line: deque[_Place] = deque()
        """Requests whose answers wait for those before them."""
        self._parted: set[_Place] = set()
        """Requests that are being answered in parts."""
        self._outgoing: deque[tuple[bytes, bool]] = deque()
        """Messages to send, and whether each is the last one to its request."""
        self.num_unread_bytes = self._num_waiting_bytes = 0
        """Bytes of all answers, and of those among them that wait in line."""
        self._num_under_way = 0
        self._wake = asyncio.Event()
        """There is something to send, or nothing more to read."""
        self._has_room = asyncio.Event()
        self._is_draining = False
        self._reading: asyncio.Task[None] | None = None
        self._task: asyncio.Task[Any] | None = None
        self._error: ServiceError | None = None
        """Why the call is cut off."""

    async def run(self) -> None:
        """Answer all requests of the call."""
        self._task = asyncio.current_task()
        self._reading = reading = asyncio.create_task(self._read_all(), name="requests")
        try:
            while not reading.done() or (self._num_under_way and not _has_failed(reading)):
                await self._wake.wait()
                self._wake.clear()
                await self._send_all()
            if _has_failed(reading):
                await reading
        except asyncio.CancelledError:
            if self._error is None:
                raise
            assert self._task is not None
            self._task.uncancel()
            raise self._error from None
        finally:
            reading.cancel()
            for place in (*self._line, *self._parted):
                place.abandon()
            self._predict.unread.give_back(self)
        if self._is_draining:
            await self._context.abort(StatusCode.UNAVAILABLE, "this server is shutting down")

    def drain(self) -> None:
        """Read nothing more."""
        self._is_draining = True
        if self._reading is not None:
            self._reading.cancel()

    def owner(self) -> str:
        """Return the owner of the memory that unread answers take."""
        return self._predict.owner_of(dict(self._headers), self._client)

    def cut_off(self) -> None:
        """End the call: others need the memory that its unread answers take."""
        self._cut_off("max_unread_bytes, of which a key or an address has its share")

    def send(self, message: bytes, *, is_last: bool) -> None:
        """Send a message as soon as the client reads those before it; an empty one is not sent."""
        self._outgoing.append((message, is_last))
        self._keep(len(message))
        self._wake.set()

    def keeps_too_much(self) -> str:
        """Return the setting that unread parts are over; empty if they are not."""
        num, limits = max(1, len(self._parted)), self.limits
        if len(self._outgoing) > num * limits.stream_buffer_parts + MAX_UNDER_WAY:
            return f"stream_buffer_parts = {limits.stream_buffer_parts}"
        num_bytes = self.num_unread_bytes - self._num_waiting_bytes
        if len(self._outgoing) > 1 and num_bytes > num * limits.stream_buffer_bytes:
            return f"stream_buffer_bytes = {limits.stream_buffer_bytes}"
        return ""

    def part(self, place: "_Place") -> None:
        """Answer a request in parts, which wait for no other request."""
        self._line.remove(place)
        self._parted.add(place)
        self._move_on()

    def over(self, place: "_Place") -> None:
        """Send the answer of a request once it is its turn."""
        self._parted.discard(place)
        if place.message:
            self._num_waiting_bytes += len(place.message)
            self._keep(len(place.message))
        self._move_on()

    def _move_on(self) -> None:
        while self._line and (message := self._line[0].message) is not None:
            self._line.popleft()
            self._num_waiting_bytes -= len(message)
            self._outgoing.append((message, True))
            self._wake.set()

    def _keep(self, num_bytes: int) -> None:
        self.num_unread_bytes += num_bytes
        if self.num_unread_bytes:
            self._predict.unread.take(self, self.num_unread_bytes)
        else:
            self._predict.unread.give_back(self)

    async def _send_all(self) -> None:
        while self._outgoing:
            message, is_last = self._outgoing[0]
            if message:
                await self._write(message)
                self._keep(-len(message))
            self._outgoing.popleft()
            if is_last:
                self._num_under_way -= 1
                self._has_room.set()

    async def _write(self, message: bytes) -> None:
        """Send a message, or cut the call off if the client does not read it."""
        loop = asyncio.get_running_loop()
        timer = loop.call_later(self._write_timeout_s, self._cut_off, "write_timeout_s")
        try:
            await self._context.write(message)
        finally:
            timer.cancel()

    def _cut_off(self, bound: str) -> None:
        self._error = ReaderTooSlowError(f"the client reads too slowly ({bound})")
        if self._task is not None:
            self._task.cancel()

    async def _read_all(self) -> None:
        try:
            while (message := await self._context.read()) is not aio.EOF:
                self._begin(message)
                del message  # it may be large, and the next one may take long
                while self._num_under_way >= MAX_UNDER_WAY:
                    self._has_room.clear()
                    await self._has_room.wait()
        finally:
            self._wake.set()

    def _begin(self, message: bytes) -> None:
        self._num_under_way += 1
        place = _Place(self, message)
        self._line.append(place)
        headers = with_deadline(self._headers, self._context.time_remaining())
        wire = InferWire(self._predict, self._client, place.on_answer)
        exchange = begin_infer(wire, self._predict, place, len(message), headers)
        if place.message is None:
            place.exchange = exchange


def _has_failed(task: "asyncio.Task[None]") -> bool:
    return task.done() and not task.cancelled() and task.exception() is not None


class _Place(InferCall):
    """One request of a stream, and its place in the line."""

    def __init__(self, stream: InferStream, message: bytes) -> None:
        super().__init__(message, stream.limits)
        self.exchange: Exchange | None = None
        self.message: bytes | None = None
        """The answer, once it is there."""
        self.parameters = {_FINAL: True}
        self._stream = stream
        self._num_left = 0
        self._status = _OK

    __hash__ = object.__hash__

    def decode(
        self, exchange: Exchange, entry: ModelEntry, chunks: Sequence[Buffer]
    ) -> Decoded | None:
        """Read the request; if its model answers in parts, submit it too."""
        decoded = super().decode(exchange, entry, chunks)
        if decoded is None or not entry.interface.streams:
            return decoded
        exchange.call.ref.parameters = decoded.parameters
        exchange.call.ref.wants_tensors = False
        self._submit(exchange, entry, decoded.payloads)
        return None

    def on_answer(self, exchange: Exchange, reply: Reply) -> None:
        """Keep the answer until it is its turn, and nothing else of the request."""
        self.exchange = exchange
        self.message = reply[2] if self.failure is None else self._error_of(self.failure)
        self._arrived = None
        self.exchange = self.early = self.failure = None  # frames of errors hold the body
        self._stream.over(self)

    def render(self, pieces: Sequence[Buffer]) -> bytes:
        """Return the message of an answer."""
        return b"".join(field_of(_INFER_TAG, pieces))

    def abandon(self) -> None:
        """Give the request up: the client is gone."""
        if self.exchange is not None:
            self.exchange.abandon()

    def send_parts(self, index: int, parts: Sequence[bytes]) -> None:
        """Send parts of the answer to an instance."""
        exchange = self.exchange_now
        if exchange.response_complete:
            return
        entry, request = exchange.call.entry, self.request
        assert entry is not None
        assert request is not None
        parameters: dict[str, object] = {_FINAL: False}
        if len(exchange.call.outcomes) > 1:
            parameters["instance"] = index
        try:
            for part in parts:
                outputs = outputs_of(request, entry, [Result(bytes(part), _NO_TIME)])
                pieces = response_pieces(entry, self.id, outputs, parameters)
                self._stream.send(self.render(pieces), is_last=False)
        except ServiceError as error:
            self._end(error)
        if bound := self._stream.keeps_too_much():
            text = f"the client has not read the parts that came, beyond {bound}"
            self._end(ReaderTooSlowError(text))

    @property
    def exchange_now(self) -> Exchange:
        """The exchange of the request, once it is submitted."""
        assert self.exchange is not None
        return self.exchange

    def _submit(self, exchange: Exchange, entry: ModelEntry, payloads: Sequence[Payload]) -> None:
        """Submit all instances of the request, each with a reader of its parts.

        Raises:
            ServiceError: The only one is refused.
        """
        self.exchange = exchange
        call = exchange.call
        call.num_instances = self._num_left = len(payloads)
        for index, payload in enumerate(payloads):
            ref, steps = copy(call.ref), new_steps(call)
            reader = _PartReader(self, index)
            try:
                chunks = put_into(ref, payload)
                call.outcomes.append(entry.submit(ref, chunks, steps, reader=reader))
            except ServiceError as error:
                if len(payloads) == 1:
                    raise
                call.outcomes.append(error)
        exchange.let_go()
        self._stream.part(self)
        for index, outcome in enumerate(list(call.outcomes)):
            if isinstance(outcome, ServiceError):
                self._fail(outcome)
                self._count_down()
            else:
                outcome.add_done_callback(partial(self._on_end, index))

    def _on_end(self, index: int, future: "asyncio.Future[Any]") -> None:
        exchange = self.exchange_now
        if exchange.response_complete:  # the client has gone
            if not future.cancelled():
                future.exception()
            return
        outcome = outcome_of(exchange.call, index, future)
        if isinstance(outcome, ServiceError):
            self._fail(outcome)
        self._count_down()

    def _fail(self, error: ServiceError) -> None:
        call = self.exchange_now.call
        call.error = error.code, error.message
        self._status = kind_of(error).status
        self._stream.send(self._error_of(error), is_last=False)

    def _count_down(self) -> None:
        self._num_left -= 1
        if self._num_left:
            return
        exchange = self.exchange_now
        entry, request = exchange.call.entry, self.request
        assert entry is not None
        assert request is not None
        message = b""
        if request.parameters.get(_WANTS_FINAL):
            message = self.render(response_pieces(entry, self.id, (), {_FINAL: True}))
        self._stream.send(message, is_last=True)
        self._stream.over(self)
        exchange.response_complete = True
        exchange.close(self._status)

    def _end(self, error: ServiceError) -> None:
        """End all instances of the request, soon: the caller is among those who read parts."""
        for outcome in self.exchange_now.call.outcomes:
            if isinstance(outcome, asyncio.Future) and not outcome.done():
                ending: Any = outcome  # all kinds of instances that have readers can be ended
                asyncio.get_running_loop().call_soon(ending.end, error)

    def _error_of(self, error: ServiceError) -> bytes:
        response = _Response(error_message=error.message)
        answer = response.infer_response
        answer.id = self.id
        if self.request is not None and self.exchange_now.call.entry is not None:
            answer.model_name = self.exchange_now.call.entry.name
            set_parameters(answer.parameters, {_FINAL: not self._num_left})
        return bytes(response.SerializeToString())


class _PartReader:
    """Gets the parts of one instance of a request."""

    __slots__ = ("_index", "_place")

    def __init__(self, place: _Place, index: int) -> None:
        self._place = place
        self._index = index

    def on_parts(self, parts: Sequence[bytes]) -> None:
        self._place.send_parts(self._index, parts)
