"""POST /predict and /predict/{model}: from bytes to instances and back. Runs in the event loop.

The steps are plain functions on a `Call` (`open`, `check`, `submit`, then `reply_to` or
`refusal_of`, `close`), so that what speaks to the socket can be an ASGI server, through
`__call__`, or a protocol class with no ASGI in between.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from typing import Any

from service.api.answers import choose_format
from service.api.auth import Guard
from service.api.body import BodyPace, Decoded, Head, Limits, add_piece
from service.api.budgets import UnfinishedRequests
from service.api.call import (
    Call,
    ModelEntry,
    OnAccess,
    OnDone,
    Tracing,
    WholeBody,
    begin_call,
    options_of,
)
from service.api.call_headers import with_call_headers
from service.api.codecs import decode
from service.api.connections import EdgeLimits
from service.api.cors import Cors
from service.api.errors import (
    MethodNotAllowedError,
)
from service.api.hangups import HangupWatch, Receive, Waiting
from service.api.replies import GIVEN_UP, pairs_of, refusal_of, reply_to
from service.api.trace import new_ids
from service.errors import (
    BadRequestError,
    CancelledByClientError,
    ServiceError,
    TooLargeError,
    UnavailableError,
    UnknownModelError,
)
from service.request import Buffer, CallOptions, Payload, Result

logger = logging.getLogger(__name__)

Scope = MutableMapping[str, Any]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

PREFIX = "/predict"
_MAX_DIGITS = 18
"""Of a number that is worth reading; Python reads 4,300 at most."""
_PRIORITIES = {b"%d" % priority: priority for priority in range(1, 10)}


class Predict:
    """The endpoint, as an ASGI application and as the steps that it is made of."""

    def __init__(
        self,
        models: Mapping[str, ModelEntry],
        *,
        default: str | None = None,
        limits: Limits | None = None,
        unfinished: UnfinishedRequests | None = None,
        guard: Guard | None = None,
        cors: Cors | None = None,
        tracing: Tracing | None = None,
        on_done: OnDone | None = None,
        on_access: OnAccess | None = None,
    ) -> None:
        """Serve models.

        Args:
            models: By the name in the path; looked up anew for each call.
            default: The one that `/predict` without a name means; None where there is none.
            limits: How much a call may ask for.
            unfinished: Counts the bodies that have begun to come.
            guard: Who may call; costs nothing where no key is needed.
            cors: Which pages may call; None: none, but for those of this host.
            tracing: Who traces calls; costs nothing while it is None.
            on_done: For metrics.
            on_access: For the access log; costs nothing while it is None.
        """
        self.models = models
        self.default = default
        self.limits = limits or Limits()
        self.unfinished = unfinished or UnfinishedRequests(EdgeLimits().max_unfinished_bytes)
        self._guard = guard if guard and guard.restricts_predict else None
        self._cors = cors
        self._tracing = tracing
        self._on_done = on_done
        self._on_access = on_access
        self._watch = HangupWatch()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one ASGI call."""
        call = self.open(
            scope["method"],
            route_path(scope),
            scope["query_string"],
            [(name, value.strip(b" \t")) for name, value in scope["headers"]],  # RFC 9112, 5.1
        )
        if self._cors is not None:
            sending = with_call_headers(call, send)
            if await self._cors.answer_preflight(call.method, call.headers, sending):
                return
        try:
            self.check(call)
            chunks = await self._read(call, receive)
            await self._wait(call, self.submit(call, chunks), receive)
            status, lines, body = reply_to(call)
        except CancelledByClientError:
            self.close(call, 499)
            return
        except Exception as error:
            status, lines, body = refusal_of(call, error)
        try:
            pairs = pairs_of(lines)
            await send({"type": "http.response.start", "status": status, "headers": pairs})
            await send({"type": "http.response.body", "body": body})
        except OSError:  # what ASGI 2.4 has `send` raise when the client has gone
            status = 499
        self.close(call, status)

    def open(
        self, method: str, path: str, query: bytes, headers: Sequence[tuple[bytes, bytes]]
    ) -> Call:
        """Begin a call. Raises nothing, so that whatever follows has an id to be answered under.

        Args:
            method: In upper case.
            path: Decoded, and without what the server is mounted under.
            query: Without the "?".
            headers: Names in lower case.
        """
        call = begin_call(method, path, query, headers)
        name = path[len(PREFIX) + 1 :] or self.default
        if name is not None:
            call.entry = self.models.get(name)
        if self._cors is not None:
            call.cors_lines = self._cors.lines_for(call.headers.get(b"origin"))
        if self._tracing is not None:
            self._tracing.begin(call)
        return call

    def again(self, earlier: Call) -> Call:
        """Begin a call whose head is that of an earlier one that was checked, byte for byte.

        Args:
            earlier: Checked, and not submitted.
        """
        call: Call = earlier.__copy__()  # type: ignore[attr-defined]  # its stubs lack it
        call.started = started = time.monotonic()
        call.deadline = started + (earlier.deadline - earlier.started)
        call.trace_id, call.span_id = new_ids()
        call.request_id = call.trace_id
        call.outcomes = []
        call.earlier = earlier
        if self._tracing is not None:
            self._tracing.begin(call)
        return call

    def check(self, call: Call) -> None:
        """See, before its body is read, whether a call can be answered.

        Raises:
            UnauthorizedError: It has no key that is known.
            ForbiddenError: Its key is for something else.
            MethodNotAllowedError: It is no POST.
            UnknownModelError: The model is not there.
            TooLargeError: Its body is going to be too large.
            BadRequestError: A header is malformed.
            NotAcceptableError: It accepts no form that there is.
        """
        if self._guard is not None:
            self._guard.check("predict", call.headers)
        if call.method != "POST":
            raise MethodNotAllowedError(f"{call.path} takes POST, not {call.method}")
        if call.entry is None:
            raise self._unknown(call.path)
        headers = call.headers
        length = headers.get(b"content-length")
        if length is not None:
            if not length.isdigit():
                raise BadRequestError("Content-Length: is not a number")
            if len(length) > 18 or int(length) > self.limits.max_body_bytes:
                raise self.too_large()
        timeout = headers.get(b"x-timeout-ms")
        timeout_s = self.limits.default_timeout_s if timeout is None else self._timeout_s(timeout)
        call.deadline = call.started + timeout_s
        priority = headers.get(b"x-priority")
        if priority is not None:
            if priority not in _PRIORITIES:
                raise BadRequestError("X-Priority: must be 1 (first) to 9 (last)")
            call.priority = _PRIORITIES[priority]
        call.chosen = choose_format(headers.get(b"accept"))

    def submit(self, call: Call, chunks: Sequence[Buffer]) -> "asyncio.Future[Any]":
        """Submit all instances of a body that has arrived.

        Returns:
            A future that is done when each instance has its answer; for a single instance it is
            the instance's, and may raise its `ServiceError`.

        Raises:
            ServiceError: The body cannot be taken, or its only instance is refused.
        """
        call.is_read = True
        entry = call.entry
        assert entry is not None
        form = call.form
        if form is not None and form.inputs is entry.inputs:
            payload, parameters = Payload(form.kind, chunks), form.parameters
        else:
            decoded = self._decode(call, entry, chunks)
            payloads, parameters = decoded.payloads, decoded.parameters
            if len(payloads) > 1:
                return self._submit_all(call, entry, payloads, parameters)
            payload = payloads[0]
        future = entry.submit(payload, options_of(call, parameters), call.request_id)
        call.num_instances = 1
        call.outcomes.append(future)
        return future

    def abandon(self, call: Call) -> None:
        """Give up all instances of a call that nobody waits for any more."""
        for outcome in call.outcomes:
            if isinstance(outcome, ServiceError):
                continue
            if not outcome.done():
                outcome.cancel()
            elif not outcome.cancelled():
                outcome.exception()  # asyncio complains of exceptions that nobody looks at

    def close(self, call: Call, status: int) -> None:
        """Record a call that is over; 499 says that the client did not wait."""
        call.outcomes.clear()  # they may hold large outputs, and others may hold the call
        duration_s = time.monotonic() - call.started
        if self._on_done is not None:
            self._on_done(call.label, status, duration_s)
        if self._on_access is not None:
            self._on_access(call, status, duration_s)
        if call.steps is not None and self._tracing is not None:
            self._tracing.take(call, status, duration_s)

    def _decode(self, call: Call, entry: ModelEntry, chunks: Sequence[Buffer]) -> Decoded:
        head = Head(call.headers, call.query, entry.inputs, self.limits)
        decoded = decode(call.headers.get(b"content-type", b""), list(map(bytes, chunks)), head)
        call.is_batch = decoded.is_batch
        if decoded.is_whole and call.earlier is not None:
            kind = decoded.payloads[0].kind
            call.earlier.form = WholeBody(kind, decoded.parameters, entry.inputs)
        return decoded

    async def _read(self, call: Call, receive: Receive) -> Sequence[Buffer]:
        """Read the body, in pieces as they come."""
        message = await receive()
        if message["type"] == "http.disconnect":
            raise CancelledByClientError("the client hung up before its body was complete")
        chunk: bytes = message.get("body", b"")
        if not message.get("more_body", False) and len(chunk) <= self.limits.max_body_bytes:
            return (chunk,)
        # Only who has sent a part of a body is timed: the others hold no memory.
        pace = BodyPace(call.deadline, call.started, self.limits)
        try:
            async with asyncio.timeout_at(pace.next_check) as timer:
                return await self._read_rest(chunk, message, receive, pace, timer)
        except TimeoutError:
            raise pace.error() from None

    async def _read_rest(
        self,
        chunk: bytes,
        message: MutableMapping[str, Any],
        receive: Receive,
        pace: BodyPace,
        timer: asyncio.Timeout,
    ) -> Sequence[Buffer]:
        chunks: list[Buffer] = [chunk]
        num_bytes = len(chunk)
        sender = _Sender(timer)
        try:
            while num_bytes <= self.limits.max_body_bytes:
                if not message.get("more_body", False):
                    return chunks
                if sender.refusal is not None:
                    raise sender.refusal
                self.unfinished.hold(sender, num_bytes)
                if pace.has_moved_on(num_bytes):
                    timer.reschedule(pace.next_check)
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise CancelledByClientError("the client hung up before its body was complete")
                chunk = message.get("body", b"")
                num_bytes += len(chunk)
                add_piece(chunks, chunk)
            raise self.too_large()
        except asyncio.CancelledError:
            if sender.refusal is not None and timer.expired():
                raise sender.refusal from None
            raise
        finally:
            self.unfinished.give_back(sender)

    async def _wait(self, call: Call, future: "asyncio.Future[Any]", receive: Receive) -> None:
        waiting = Waiting(future, receive)
        self._watch.add(waiting)
        try:
            await future
        except asyncio.CancelledError:
            self.abandon(call)
            if waiting.is_gone:
                raise CancelledByClientError("the client hung up") from None
            task = asyncio.current_task()
            if future.cancelled() and task is not None and not task.cancelling():
                raise UnavailableError(GIVEN_UP) from None
            raise
        finally:
            self._watch.discard(waiting)

    def _submit_all(
        self, call: Call, entry: ModelEntry, payloads: Sequence[Payload], parameters: bytes
    ) -> "asyncio.Future[Any]":
        """Submit several instances; one that is refused is an error in its place."""
        outcomes = call.outcomes
        call.num_instances = len(payloads)
        options: CallOptions | None = None
        try:
            for payload in payloads:
                if options is None or options.steps is not None:  # which are of one alone
                    options = options_of(call, parameters)
                try:
                    outcomes.append(entry.submit(payload, options, call.request_id))
                except ServiceError as error:
                    outcomes.append(error)
                    if options.steps is not None:
                        options.steps.code, options.steps.message = error.code, error.message
        except BaseException:
            self.abandon(call)
            raise
        return _all_done([each for each in outcomes if not isinstance(each, ServiceError)])

    def _timeout_s(self, value: bytes) -> float:
        """What a caller grants: who would wait for longer than may be gets what may be."""
        digits = value.lstrip(b"0")
        if not digits.isdigit():
            raise BadRequestError("X-Timeout-Ms: must be a whole number of milliseconds, from 1")
        longest_s = self.limits.max_timeout_s
        return min(int(digits) / 1e3, longest_s) if len(digits) < _MAX_DIGITS else longest_s

    def _unknown(self, path: str) -> UnknownModelError:
        names = ", ".join(self.models) or "none"
        name = path[len(PREFIX) + 1 :]
        if not name:
            return UnknownModelError(f"no model is the default; name one in the path: {names}")
        return UnknownModelError(f"no model is called {name[:80]!r}; there are: {names}")

    def too_large(self) -> TooLargeError:
        """The error for a body over the limit."""
        return TooLargeError(
            f"the body has more than {self.limits.max_body_bytes} bytes, which is the limit"
        )


class _Sender:
    """A client whose body is being read."""

    def __init__(self, timer: asyncio.Timeout) -> None:
        self._timer = timer
        self.refusal: ServiceError | None = None

    def give_way(self, error: ServiceError) -> None:
        """Stop reading, since the body came more slowly than those that need the room."""
        self.refusal = error
        self._timer.reschedule(asyncio.get_running_loop().time())


def route_path(scope: Scope) -> str:
    """The path of an ASGI call without what the server is mounted under."""
    path: str = scope["path"]
    root = scope.get("root_path")
    return path.removeprefix(root) if root else path


def is_predict(path: str) -> bool:
    """Whether a path belongs to this endpoint."""
    return path.startswith(PREFIX) and (len(path) == len(PREFIX) or path[len(PREFIX)] == "/")


def _all_done(futures: Sequence["asyncio.Future[Result]"]) -> "asyncio.Future[None]":
    """A future that is done with the last of several; unlike `asyncio.gather`, it keeps nothing."""
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
