"""One HTTP call to `/predict` as a value, its head if it is known, and the model that it asks."""

import asyncio
import time
from collections.abc import Callable, Sequence
from copy import copy
from typing import NamedTuple, Protocol

import msgspec

from inferpool.models.spec import TensorSpec
from inferpool.service.api.codecs.answers import AnswerFormat
from inferpool.service.api.codecs.body import joined
from inferpool.service.api.trace import new_ids, request_id_of, trace_of, trace_state_of
from inferpool.service.errors import ServiceError
from inferpool.service.queue.instance import Buffer, InstanceSteps, Result
from inferpool.workers.messages import ItemRef, Kind

UNKNOWN_MODEL = "unknown"
"""The label of calls for models that are not there: any other would let clients make up labels."""

HEAD_END = b"\r\n\r\n"
MAX_KNOWN_HEAD_BYTES = 2048
_MAX_HEADS = 512
_OF_ONE_CALL = (b"x-request-id", b"traceparent", b"tracestate", b"expect", b"transfer-encoding")
"""A head with one of these will not come again, or needs more than to be known."""


class Tracing(Protocol):
    """Who decides which calls are traced, and takes them when they are over."""

    def begin(self, call: "Call") -> None:
        """Set `flags`, `steps` and the ref's `trace` of a call; with `steps`, it is traced."""

    def take(self, call: "Call", status: int, duration_s: float) -> None:
        """A call with `steps` is over; never blocks."""


class ModelEntry(Protocol):
    """A model, as calls see it."""

    @property
    def name(self) -> str:
        """As it stands in the path."""

    @property
    def inputs(self) -> Sequence[TensorSpec]:
        """What it takes; empty where that is not known."""

    def submit(
        self, ref: ItemRef, chunks: Sequence[Buffer], steps: InstanceSteps | None = None
    ) -> asyncio.Future[Result]:
        """Admit an instance. Cancelling the future gives the instance up.

        Args:
            ref: Complete but for its offset; it belongs to the instance from now on.
            chunks: The payload, in pieces.
            steps: Where to note what becomes of the instance, if its call is traced.

        Raises:
            ServiceError: It is refused.
        """


class WholeBody(msgspec.Struct, frozen=True):
    """How a body is read that is the payload of one instance as it is."""

    kind: Kind
    parameters: bytes
    inputs: Sequence[TensorSpec]
    """Of the model as it was then."""


class Call(msgspec.Struct):
    """One HTTP call on its way through: a struct, because that fills its defaults in C."""

    method: str
    path: str
    query: bytes
    headers: dict[bytes, bytes]
    """Names in lower case; those that came several times joined by commas."""
    started: float
    """CLOCK_MONOTONIC seconds."""
    entry: ModelEntry | None
    request_id: str
    trace_id: str
    span_id: str
    ref: ItemRef
    """What it asks of each instance; of a single instance, the one that goes to the worker."""
    flags: str = "00"
    trace_state: bytes = b""
    parent_id: str = ""
    """The caller's span, where it has named one."""
    cors_lines: str = ""
    """Header lines of the answer, for the browser of a page."""
    steps: list[InstanceSteps] | None = None
    """Of its first instances, if it is traced."""
    error: tuple[str, str] | None = None
    """Code and message of what it was refused with."""
    route: str = ""
    """Which one it took, as a pattern; empty: that of its model."""
    status: int = 0
    """Of an answer on another route."""
    chosen: AnswerFormat = "json"
    is_read: bool = False
    """The whole body has arrived."""
    is_batch: bool = False
    num_instances: int = 0
    outcomes: list[asyncio.Future[Result] | ServiceError] = []
    """Of each instance: a future, or why it was refused."""
    earlier: "Call | None" = None
    """One with the same head."""
    form: WholeBody | None = None
    """How the body is read, if that is known from an earlier call with the same head."""

    def log_ids(self) -> dict[str, str]:
        """By which a log line about it is found, and the trace that it belongs to."""
        return {
            "request_id": self.request_id,
            "trace_id": self.trace_id,
            "span_id": self.span_id,
        }


def begin_call(
    method: str, path: str, query: bytes, headers: Sequence[tuple[bytes, bytes]]
) -> Call:
    """A call that has just come, with the ids that it brought or else new ones.

    Args:
        method: In upper case.
        path: Decoded, and without what the server is mounted under.
        query: Without the "?".
        headers: Names in lower case.
    """
    started = time.monotonic()
    found = dict(headers)
    if len(found) != len(headers):
        found = joined(headers)
    trace_id, span_id = new_ids()
    given = found.get(b"x-request-id")
    request_id = trace_id if given is None else request_id_of(given) or trace_id
    ref = ItemRef("bytes", 0, 0, 0.0, request_id=request_id)
    call = Call(method, path, query, found, started, None, request_id, trace_id, span_id, ref)
    given = found.get(b"traceparent")
    trace = trace_of(given) if given is not None else None
    if trace is not None:
        call.trace_id, call.parent_id, call.flags = trace
        call.trace_state = trace_state_of(found)
        ref.trace = f"{call.trace_id}-{span_id}"
    return call


class KnownHead(NamedTuple):
    """A head, as the call that it began, and how many bytes of body follow it."""

    head: bytes
    call: Call
    num_body_bytes: int


class KnownHeads(dict[bytes, KnownHead]):
    """Heads of calls that were checked before, so that the same bytes are not parsed again.

    A client sends the same head with every call of a connection, and a load balancer much the same.
    What the checks depend on (keys, limits, models) does not change while the service runs. There
    is a bounded number of heads. Used by the event loop alone.
    """

    def remember(self, head: bytes, call: Call) -> None:
        """Keep the head of a call that was checked and not submitted, if it may come again."""
        num_body_bytes = call.headers.get(b"content-length")
        if num_body_bytes is None or not head.endswith(HEAD_END):
            return
        if not head.startswith(b"POST "):
            return  # the parser skips empty lines before a request, and so may have seen another
        if any(name in call.headers for name in _OF_ONE_CALL):
            return
        if len(self) >= _MAX_HEADS:
            self.clear()
        call = copy(call)
        call.ref = copy(call.ref)
        self[head] = KnownHead(head, call, int(num_body_bytes))


OnDone = Callable[[str, int, float], None]
"""Told the model, the status and the seconds of each call."""
OnFailure = Callable[[Call, int, float], None]
"""Told each call that was refused or failed, with its status and seconds; for the log."""
