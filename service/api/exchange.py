"""One call to `/predict` from its head to its answer, without any input or output of its own.

The owner of the connection passes on the call as it comes, and reports when the client hangs up.
The exchange passes its answer to a `Wire`: `service.api.wire.protocol` on our own server,
`service.api.asgi` on any ASGI server. All run in the event loop.
"""

import asyncio
import time
from collections.abc import Sequence
from copy import copy
from typing import ClassVar, Protocol

import msgspec

from inferpool.service.api.call import (
    UNKNOWN_MODEL,
    Call,
    ModelEntry,
    WholeBody,
    begin_call,
)
from inferpool.service.api.codecs.answers import choose_format
from inferpool.service.api.codecs.body import BodyContext, Decoded, Payload, add_piece
from inferpool.service.api.codecs.requests import decode
from inferpool.service.api.errors import MethodNotAllowedError
from inferpool.service.api.predict import Predict
from inferpool.service.api.replies import Reply, is_long, preflight_reply, refusal_of, reply_to
from inferpool.service.api.trace import new_ids
from inferpool.service.errors import (
    BadRequestError,
    OverloadedError,
    ServiceError,
    TooLargeError,
    UnavailableError,
)
from inferpool.service.queue.instance import Buffer, InstanceSteps, Result
from inferpool.workers.shared.messages import ItemRef

_CLIENT_GONE = 499
_FIRST_ERROR = 400
_PREFLIGHT = 204
_MAX_TRACED_INSTANCES = 16
"""Further instances of a call are counted, but not traced."""
_PRIORITIES = {b"%d" % priority: priority for priority in range(1, 10)}


class Wire(Protocol):
    """Sends the answer of an exchange."""

    def send_continue(self) -> None:
        """Ask the client to send its body."""

    def owner_of(self, call: Call) -> str:
        """Return the owner of the memory that a call takes."""

    def send_answer(self, exchange: "Exchange", reply: Reply) -> int | None:
        """Send the answer, and return its status: 499 if the client has gone.

        Returns None if the status is not known yet; then the wire closes the exchange.
        """


class _NoEvent:
    """Replaces the event that uvicorn sets for its ASGI calls; nothing waits for it."""

    def set(self) -> None:
        return


class Exchange(msgspec.Struct, eq=False):
    """One call to `/predict`; on our own connections it replaces uvicorn's cycle.

    It is a struct because those fill their defaults in C.
    """

    wire: Wire
    predict: Predict
    call: Call
    keep_alive: bool = True
    """The client may send another call on this connection."""
    is_complete: bool = False
    """The whole call has arrived."""
    is_started: bool = False
    expects_continue: bool = False
    """The client waits to be asked for its body."""
    disconnected: bool = False
    response_complete: bool = False
    num_bytes: int = 0
    """Bytes of the body that have come."""
    _refusal: ServiceError | None = None
    _chunks: list[Buffer] = []
    _is_counted: bool = False
    """`UnfinishedRequests` counts the body."""

    message_event: ClassVar = _NoEvent()

    @classmethod
    def open(
        cls,
        wire: Wire,
        predict: Predict,
        method: str,
        path: str,
        query: bytes,
        headers: Sequence[tuple[bytes, bytes]],
    ) -> "Exchange":
        """Begin a call (see `begin_call`). It raises nothing, so that the answer has an id."""
        call = begin_call(method, path, query, headers)
        call.choose(predict.find(call))
        if predict.cors is not None:
            call.cors_lines = predict.cors.lines_for(call.headers.get(b"origin"))
        if predict.tracing is not None:
            predict.tracing.begin(call)
        return cls(wire, predict, call)

    @classmethod
    def from_known_head(cls, wire: Wire, predict: Predict, earlier: Call) -> "Exchange":
        """Begin a call with the same head as an earlier one that passed its checks."""
        call: Call = earlier.__copy__()  # type: ignore[attr-defined]  # its stubs lack it
        call.started = started = time.monotonic()
        call.trace_id, call.span_id = new_ids()
        call.request_id = call.trace_id
        call.ref = ref = earlier.ref.__copy__()  # type: ignore[attr-defined]  # as above
        ref.deadline = started + (ref.deadline - earlier.started)
        ref.request_id = call.request_id
        call.outcomes = []
        call.earlier = earlier
        if predict.tracing is not None:
            predict.tracing.begin(call)
        return cls(wire, predict, call, True, False, True)

    def start(self) -> None:
        """Check the call, and submit it if its body has come."""
        self.is_started = True
        try:
            if self._refusal is not None:
                raise self._refusal
            if self.call.method == "OPTIONS" and self._answer_preflight():
                return
            self._check()
            self._check_size()
        except Exception as error:
            self._refuse(error)
            return
        if self.is_complete:
            self._submit(self._chunks or (b"",))
        elif self.expects_continue:
            self.expects_continue = False
            self.wire.send_continue()

    @property
    def leaves_body(self) -> bool:
        """It has its answer, and the rest of its body is not to be read for the next call's sake.

        A client that was not asked for its body may send another call in its place.
        """
        if self.is_complete:
            return False
        return not self.keep_alive or self.expects_continue or is_long(self.call.headers)

    def take(self, body: Buffer) -> None:
        """Submit a call with a known head, given its whole body."""
        self.is_complete = True
        self.num_bytes = len(body)
        self._submit((body,))

    def feed(self, chunk: Buffer) -> None:
        """Store a piece of the body."""
        if self._refusal is not None:
            return
        if self._chunks:
            add_piece(self._chunks, chunk)
        else:
            self._chunks.append(chunk)
        self.num_bytes += len(chunk)
        if self.is_started:
            try:
                self._check_size()
            except TooLargeError as error:
                self._refuse(error)

    def complete(self) -> None:
        """Submit the body, which is whole now."""
        self.is_complete = True
        if self.is_started:
            self._submit(self._chunks or (b"",))

    def count(self) -> None:
        """Count the bytes of an unfinished body against the budget of all connections."""
        if self.num_bytes and self._refusal is None:
            try:
                self.predict.unfinished.hold(self, self.num_bytes)
            except OverloadedError as error:
                self.fail(error)
            else:
                self._is_counted = True

    def owner(self) -> str:
        """Return the owner of the memory that its unfinished body takes."""
        return self.wire.owner_of(self.call)

    def fail(self, error: ServiceError) -> None:
        """Refuse the call in its turn: its body cannot be read."""
        self.keep_alive = False
        self._refusal = error
        self._let_go()
        if self.is_started and not self.response_complete:
            self._refuse(error)

    give_way = fail
    """`UnfinishedRequests` calls this to make room for bodies that come faster."""

    def give_up_body(self) -> None:
        """Refuse the call if its body has not arrived: the server is shutting down."""
        if not self.is_complete and not self.response_complete:
            self.keep_alive = False
            self._refuse(UnavailableError("this server is shutting down", retry_after_s=1))

    def abandon(self) -> None:
        """Cancel the call: the client is gone."""
        self._let_go()
        if not self.response_complete:
            self.response_complete = True
            self._give_up()
            self.close(_CLIENT_GONE)

    def close(self, status: int) -> None:
        """Record a call that is over; 499 means that the client did not wait.

        Preflights are not recorded: they ask for no prediction.
        """
        call, predict = self.call, self.predict
        call.outcomes.clear()  # they may hold large outputs, and others may keep the call
        if status == _PREFLIGHT:
            return
        duration_s = time.monotonic() - call.started
        if predict.on_done is not None:
            name = UNKNOWN_MODEL if call.entry is None else call.entry.name
            predict.on_done(name, status, duration_s)
        if status >= _FIRST_ERROR and predict.on_failure is not None:
            predict.on_failure(call, status, duration_s)
        if call.steps is not None and predict.tracing is not None:
            predict.tracing.take(call, status, duration_s)

    def _answer_preflight(self) -> bool:
        """Answer a browser's preflight; return False if the call is none.

        It needs no key: browsers send none with it.
        """
        cors, call = self.predict.cors, self.call
        lines = None if cors is None else cors.preflight_lines(call.method, call.headers)
        if lines is None:
            return False
        self._answer(preflight_reply(call, lines))
        return True

    def _check(self) -> None:
        """Check the head of a call before its body is read; raises what is wrong."""
        call, predict = self.call, self.predict
        headers = call.headers
        if predict.guard is not None:
            call.ref.caller = predict.guard.check("predict", headers)
        if call.method != "POST":
            raise MethodNotAllowedError(f"{call.path} takes POST, not {call.method}")
        if call.entry is None:
            raise predict.unknown(call)
        limits = predict.limits
        length = headers.get(b"content-length")
        if length is not None:
            limits.check_length(length)
        timeout = headers.get(b"x-timeout-ms")
        timeout_s = limits.default_timeout_s if timeout is None else limits.timeout_s(timeout)
        call.ref.deadline = call.started + timeout_s
        priority = headers.get(b"x-priority")
        if priority is not None:
            if priority not in _PRIORITIES:
                raise BadRequestError("X-Priority: must be 1 (first) to 9 (last)")
            call.ref.priority = _PRIORITIES[priority]
        accept = headers.get(b"accept")
        if accept is not None:
            call.chosen = choose_format(accept)
            call.ref.wants_tensors = call.chosen != "json"

    def _check_size(self) -> None:
        if self.num_bytes > self.predict.limits.max_body_bytes:
            raise self.predict.limits.too_large()

    def _submit(self, chunks: Sequence[Buffer]) -> None:
        """Submit all instances of the body, and answer when each has its outcome."""
        call = self.call
        entry, form, ref = call.entry, call.form, call.ref
        assert entry is not None
        try:
            if not entry.is_serving:
                entry = self._entry_now()
            if form is not None and form.inputs is entry.inputs:
                ref.kind, ref.num_bytes, ref.parameters = form.kind, self.num_bytes, form.parameters
            else:
                decoded = self._decode(entry, chunks)
                ref.parameters = decoded.parameters
                if len(decoded.payloads) > 1:
                    self._submit_several(entry, decoded.payloads)
                    return
                chunks = _put_into(ref, decoded.payloads[0])
            future = entry.submit(ref, chunks, self._steps())
        except OverloadedError as error:
            self._refuse_soon(error)
            return
        except Exception as error:
            self._refuse(error)
            return
        call.num_instances = 1
        call.outcomes.append(future)
        if self._chunks:
            self._let_go()
        future.add_done_callback(self._on_done)

    def _entry_now(self) -> ModelEntry:
        """Return the version that the call is for now, since versions come and go."""
        call = self.call
        entry = self.predict.find_now(call)
        call.choose(entry)
        if entry is None:
            raise self.predict.unknown(call)
        if call.earlier is not None:  # so that the next call with this head need not look
            call.earlier.choose(entry)
        return entry

    def _decode(self, entry: ModelEntry, chunks: Sequence[Buffer]) -> Decoded:
        call = self.call
        head = BodyContext(call.headers, call.query, entry.inputs, self.predict.limits)
        decoded = decode(call.headers.get(b"content-type", b""), list(map(bytes, chunks)), head)
        call.is_batch = decoded.is_batch
        if decoded.is_whole and call.earlier is not None:
            kind = decoded.payloads[0].kind
            call.earlier.form = WholeBody(kind, decoded.parameters, entry.inputs)
        return decoded

    def _steps(self) -> InstanceSteps | None:
        """Return where to record one more instance; None if the call is not traced."""
        traced = self.call.steps
        if traced is None or len(traced) >= _MAX_TRACED_INSTANCES:
            return None
        steps = InstanceSteps()
        traced.append(steps)
        return steps

    def _submit_several(self, entry: ModelEntry, payloads: Sequence[Payload]) -> None:
        """Submit several instances; one that is refused becomes an error in its place."""
        call = self.call
        outcomes = call.outcomes
        call.num_instances = len(payloads)
        for payload in payloads:
            ref, steps = copy(call.ref), self._steps()
            try:
                outcomes.append(entry.submit(ref, _put_into(ref, payload), steps))
            except ServiceError as error:
                outcomes.append(error)
                if steps is not None:
                    steps.code, steps.message = error.code, error.message
        self._let_go()
        done = _all_done([each for each in outcomes if not isinstance(each, ServiceError)])
        done.add_done_callback(self._on_done)

    def _on_done(self, _: object) -> None:
        if self.response_complete:
            return
        try:
            reply = reply_to(self.call)
        except OverloadedError as error:
            self._refuse_soon(error)
            return
        except Exception as error:
            self._refuse(error)
            return
        self._answer(reply)

    def _refuse_soon(self, error: OverloadedError) -> None:
        """Refuse the call in this turn, or in a later one if it is still open then."""
        self._let_go()
        error.__traceback__ = None  # its frames hold the body

        def refuse() -> None:
            if not self.response_complete:
                self._refuse(error)

        self.predict.refusals.add(refuse)

    def _refuse(self, error: Exception) -> None:
        self._give_up()
        self._let_go()
        self._answer(refusal_of(self.call, error))

    def _answer(self, reply: Reply) -> None:
        self.response_complete = True
        status = self.wire.send_answer(self, reply)
        if status is not None:
            self.close(status)

    def _give_up(self) -> None:
        """Cancel all instances: nobody waits for them any more."""
        for outcome in self.call.outcomes:
            if isinstance(outcome, ServiceError):
                continue
            if not outcome.done():
                outcome.cancel()
            elif not outcome.cancelled():
                outcome.exception()  # else asyncio logs that nobody retrieved it

    def _let_go(self) -> None:
        """Drop the body."""
        self._chunks = []
        if self._is_counted:
            self._is_counted = False
            self.predict.unfinished.give_back(self)


def _put_into(ref: ItemRef, payload: Payload) -> Sequence[Buffer]:
    """Complete a ref for an instance, and return its payload's pieces."""
    ref.kind, ref.headers = payload.kind, payload.headers
    ref.num_bytes = sum(map(len, payload.chunks))
    return payload.chunks


def _all_done(futures: Sequence["asyncio.Future[Result]"]) -> "asyncio.Future[None]":
    """Return a future that is done with the last of several; it keeps no results."""
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    left = len(futures)
    if not left:
        done.set_result(None)

    def count_down(_: object) -> None:
        nonlocal left
        left -= 1
        if not left and not done.done():
            done.set_result(None)

    for future in futures:
        future.add_done_callback(count_down)
    return done
