"""One HTTP call to `/predict` as a value, and the heads of calls that are known."""

import asyncio
import time
from collections.abc import Callable, Sequence
from copy import copy
from typing import NamedTuple, Protocol

import msgspec

from inferpool.models.spec import Kind, TensorSpec
from inferpool.service.api.codecs.answers import AnswerFormat
from inferpool.service.api.codecs.body import joined
from inferpool.service.api.trace import new_ids, request_id_of, trace_of, trace_state_of
from inferpool.service.errors import ServiceError
from inferpool.service.queue.instance import Buffer, CanaryShare, InstanceSteps, Result
from inferpool.workers.shared.messages import ItemRef

UNKNOWN_MODEL = "unknown"
"""The metrics label of calls for unknown models: clients must not be able to make up labels."""

HEAD_END = b"\r\n\r\n"
MAX_KNOWN_HEAD_BYTES = 2048
_MAX_HEADS = 512
_ONE_CALL_HEADERS = (
    b"x-request-id",
    b"traceparent",
    b"tracestate",
    b"expect",
    b"transfer-encoding",
)
"""Headers of a single call: a head with one of them will not come again, or needs more checks."""


class Tracing(Protocol):
    """Decides which calls are traced, and stores them when they are over."""

    def begin(self, call: "Call") -> None:
        """Set `flags`, `steps` and the ref's `trace`; a call with `steps` is traced."""

    def take(self, call: "Call", status: int, duration_s: float) -> None:
        """Store a traced call that is over; never blocks."""


class ModelEntry(Protocol):
    """A version of a model, as calls see it."""

    @property
    def name(self) -> str:
        """The name in the path."""

    @property
    def version(self) -> int:
        """The number of the version."""

    @property
    def is_serving(self) -> bool:
        """Calls that name no version are for this one; if not, each call looks anew."""

    @property
    def canary(self) -> CanaryShare | None:
        """The version that gets a share of its calls; it `is_serving` False meanwhile."""

    @property
    def inputs(self) -> Sequence[TensorSpec]:
        """The tensors it takes; empty if unknown."""

    def submit(
        self, ref: ItemRef, chunks: Sequence[Buffer], steps: InstanceSteps | None = None
    ) -> asyncio.Future[Result]:
        """Admit an instance. Cancelling the future gives the instance up.

        The ref is complete but for its offset, and belongs to the instance from now on. `steps`
        records what happens to the instance, if its call is traced.

        Raises:
            ServiceError: It is refused.
        """


class WholeBody(msgspec.Struct, frozen=True):
    """How to read a body that as a whole is the payload of one instance."""

    kind: Kind
    parameters: bytes
    inputs: Sequence[TensorSpec]
    """The model's inputs at that time."""


class Call(msgspec.Struct):
    """One HTTP call on its way through. It is a struct because those fill their defaults in C."""

    method: str
    path: str
    query: bytes
    headers: dict[bytes, bytes]
    """Names in lower case; values of repeated headers are joined by commas."""
    started: float
    """CLOCK_MONOTONIC seconds."""
    entry: ModelEntry | None
    request_id: str
    trace_id: str
    span_id: str
    ref: ItemRef
    """The call's options for each instance; for a single instance, the ref that goes to the
    worker."""
    flags: str = "00"
    trace_state: bytes = b""
    parent_id: str = ""
    """The caller's span, if it named one."""
    version_line: str = ""
    """The header line of the answer that says which version it is of."""
    cors_lines: str = ""
    """Header lines of the answer, for a page's browser."""
    steps: list[InstanceSteps] | None = None
    """The steps of the first instances, if the call is traced."""
    error: tuple[str, str] | None = None
    """Code and message of its refusal."""
    route: str = ""
    """The pattern of its route; empty for `/predict`."""
    status: int = 0
    """The status of an answer on another route."""
    job: str = ""
    """The id of the job that it has become."""
    chosen: AnswerFormat = "json"
    is_batch: bool = False
    num_instances: int = 0
    outcomes: list[asyncio.Future[Result] | ServiceError] = []
    """For each instance a future, or why it was refused."""
    earlier: "Call | None" = None
    """An earlier call with the same head."""
    form: WholeBody | None = None
    """How to read the body, if an earlier call with the same head has shown it."""

    def choose(self, entry: ModelEntry | None) -> None:
        """Set the version that the call is for. Later calls with the same head need not."""
        self.entry = entry
        self.version_line = "" if entry is None else f"x-model-version: {entry.version}\r\n"

    def log_ids(self) -> dict[str, str]:
        """Return the ids by which a log line about the call is found."""
        return {
            "request_id": self.request_id,
            "trace_id": self.trace_id,
            "span_id": self.span_id,
        }


def begin_call(
    method: str, path: str, query: bytes, headers: Sequence[tuple[bytes, bytes]]
) -> Call:
    """Return a new call, with the ids in its headers or else new ones.

    The method is in upper case, headers are in lower case. The path is decoded, and without the
    path that the server is mounted under; the query is without its "?".
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
    """A head, the call that it began, and the length of the body that follows it."""

    head: bytes
    call: Call
    num_body_bytes: int
    keep_alive: bool
    """The client may send another call on the connection."""


class KnownHeads(dict[bytes, KnownHead]):
    """Heads of calls that passed their checks, so that the same bytes are not parsed again.

    A client sends the same head with every call of a connection, and a load balancer much the same.
    What the checks depend on (keys, limits) does not change while the service runs; a version that
    serves no more is noticed when the call is submitted. The number of heads is bounded. Event loop
    only.
    """

    def remember(self, head: bytes, call: Call, keep_alive: bool) -> None:
        """Store the head of a call that passed its checks, before the call is submitted."""
        num_body_bytes = call.headers.get(b"content-length")
        if num_body_bytes is None or not head.endswith(HEAD_END):
            return
        if not head.startswith(b"POST "):
            return  # the parser skips empty lines before a request, and so may have seen another
        if any(name in call.headers for name in _ONE_CALL_HEADERS):
            return
        if len(self) >= _MAX_HEADS:
            self.clear()
        call = copy(call)
        call.ref = copy(call.ref)
        self[head] = KnownHead(head, call, int(num_body_bytes), keep_alive)


OnDone = Callable[[str, int, float], None]
"""Called with the model, status and seconds of each call."""
OnFailure = Callable[[Call, int, float], None]
"""Called with each call that was refused or failed, its status and seconds; for the log."""
