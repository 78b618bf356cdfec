"""The reply to a call: its status, its header lines as they go onto the wire, and its body.

Every reply has the ids of the call and its timing. Headers are lines and not pairs because most
replies go straight to a socket; `pairs_of` takes them apart for ASGI.
"""

import asyncio
import logging
import re
import time
from collections.abc import Mapping, Sequence
from functools import lru_cache

from starlette.types import Send

from inferpool.service.api.call import Call
from inferpool.service.api.codecs.answers import Outcome, encode
from inferpool.service.api.codecs.parameters import OUTPUT_KEY, read_query
from inferpool.service.api.errors import (
    INTERNAL_MESSAGE,
    MethodNotAllowedError,
    problem,
)
from inferpool.service.errors import (
    InternalError,
    InvalidInputError,
    OverloadedError,
    ServiceError,
    UnavailableError,
)
from inferpool.service.queue.instance import InstanceTiming, Result

logger = logging.getLogger(__name__)

Reply = tuple[int, bytes, bytes]
"""Status, header lines each with its line break, and body."""

_IN_INSTANCE = re.compile(r"instance[:.\[]")
"""The place of an error in a JSON instance, as workers name it; they do not know its number."""
GIVEN_UP = "the service gave this input up"
CLOSE_LINE = b"connection: close\r\n"
_PRINTABLE = bytes(range(0x20, 0x7F))
_SMALL_BODY_BYTES = 64 * 1024
"""The server reads and drops a refused body up to this size; with a longer one it closes the
connection."""


def reply_to(call: Call) -> Reply:
    """Reply to a call once all its instances have their outcome.

    Raises:
        OverloadedError: Its only instance was refused. A flood of these is answered bit by bit.
    """
    outcomes = call.outcomes
    outcome = outcomes[0] if len(outcomes) == 1 else None
    if isinstance(outcome, asyncio.Future) and call.chosen == "json":
        # The most frequent case, and so in one step; `encode` would give the same.
        try:
            result = outcome.result()
        except OverloadedError:
            raise
        except (Exception, asyncio.CancelledError):
            pass  # answered below
        else:
            assert isinstance(result.value, bytes), "tensors came where JSON was asked for"
            body = b'{"predictions":[%b]}' % result.value
            common = common_lines(call, result.timing)
            head = f"content-type: application/json\r\ncontent-length: {len(body)}\r\n{common}"
            return 200, head.encode(), body
    return _reply_with_any([_outcome_of(call, *each) for each in enumerate(outcomes)], call)


def preflight_reply(call: Call, lines: str) -> Reply:
    """Reply to a browser's preflight; see `Cors.preflight_lines`."""
    return 204, (lines + common_lines(call, None)).encode(), b""


def refusal_of(call: Call, error: Exception) -> Reply:
    """Reply to a call that failed as a whole."""
    if not isinstance(error, ServiceError):
        logger.error("a call failed: %r", error, exc_info=error, extra=call.log_ids())
        if isinstance(error, MemoryError):
            error = UnavailableError("the service ran out of memory", retry_after_s=1)
        else:
            error = InternalError(INTERNAL_MESSAGE)
    call.error = error.code, error.message
    status, headers, body = problem(error, call.request_id, call.path)
    lines = lines_of(headers)
    if call.method == "HEAD":  # the same head, and no body (RFC 9110, 9.3.2)
        body = b""
    if isinstance(error, MethodNotAllowedError):
        lines += b"allow: POST\r\n"
    return status, lines + common_lines(call, None).encode(), body


def lines_of(headers: Sequence[tuple[bytes, bytes]]) -> bytes:
    """Render header lines, with a check of every text that is not our own.

    Raises:
        ValueError: A name or value has a character that would end its line, or is not ASCII.
    """
    lines = b"".join([b"%b: %b\r\n" % header for header in headers])
    if lines.translate(None, _PRINTABLE) != b"\r\n" * len(headers):
        raise ValueError(f"headers that cannot be sent: {headers!r}")
    return lines


def pairs_of(lines: bytes) -> list[tuple[bytes, bytes]]:
    """Return header lines as ASGI's pairs."""
    pairs = []
    for line in lines.split(b"\r\n")[:-1]:
        name, _, value = line.partition(b": ")
        pairs.append((name, value))
    return pairs


async def send_reply(send: Send, reply: Reply) -> None:
    """Send a whole reply by ASGI."""
    status, lines, body = reply
    await send({"type": "http.response.start", "status": status, "headers": pairs_of(lines)})
    await send({"type": "http.response.body", "body": body})


def _reply_with_any(outcomes: Sequence[Outcome], call: Call) -> Reply:
    output = read_query(call.query).get(OUTPUT_KEY) if call.query else None
    status, headers, body = encode(
        call.chosen,
        outcomes,
        is_batch=call.is_batch,
        output=output,
        request_id=call.request_id,
        path=call.path,
    )
    return status, lines_of(headers) + common_lines(call, _longest(outcomes)).encode(), body


def _outcome_of(call: Call, index: int, outcome: asyncio.Future[Result] | ServiceError) -> Outcome:
    if isinstance(outcome, ServiceError):
        return outcome
    if outcome.cancelled():
        return UnavailableError(GIVEN_UP)
    error = outcome.exception()
    if error is None:
        return outcome.result()
    if isinstance(error, ServiceError):
        if isinstance(error, InvalidInputError) and _IN_INSTANCE.match(error.message):
            error.message = error.message.replace("instance", f"instances[{index}]", 1)
        return error
    logger.error("an instance failed: %r", error, exc_info=error, extra=call.log_ids())
    return InternalError(INTERNAL_MESSAGE)


def common_lines(call: Call, timing: InstanceTiming | None) -> str:
    """Return the header lines of every answer; all ASCII, since ids and states were checked.

    Args:
        call: The call that is being answered.
        timing: Of its instances, if they were computed.
    """
    state = f"tracestate: {call.trace_state.decode()}\r\n" if call.trace_state else ""
    stages = ""
    if timing is not None:
        worked = _work_of(timing.prepare_s, timing.compute_s)
        stages = f"queue;dur={timing.queue_s * 1e3:.2f}, {worked}"
    return (
        f"x-request-id: {call.request_id}\r\n{call.version_line}"
        f"traceparent: 00-{call.trace_id}-{call.span_id}-{call.flags}\r\n{state}{call.cors_lines}"
        f"server-timing: {stages}total;dur={(time.monotonic() - call.started) * 1e3:.2f}\r\n"
    )


@lru_cache(maxsize=16)
def _work_of(prepare_s: float, compute_s: float) -> str:
    """Cached, because it is the same for all instances of a batch."""
    return f"preprocess;dur={prepare_s * 1e3:.2f}, inference;dur={compute_s * 1e3:.2f}, "


def _longest(outcomes: Sequence[Outcome]) -> InstanceTiming | None:
    """Return the longest time of each stage over all instances that were answered."""
    timings = [each.timing for each in outcomes if isinstance(each, Result)]
    if not timings:
        return None
    return InstanceTiming(
        max(timing.queue_s for timing in timings),
        max(timing.prepare_s for timing in timings),
        max(timing.compute_s for timing in timings),
    )


def is_long(headers: Mapping[bytes, bytes]) -> bool:
    """Return whether a refused body is too long to read and drop it for the next call's sake."""
    if b"transfer-encoding" in headers:
        return True
    length = headers.get(b"content-length", b"0")
    return not length.isdigit() or len(length) > 18 or int(length) > _SMALL_BODY_BYTES
