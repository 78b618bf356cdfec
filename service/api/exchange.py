"""One call to `/predict` from its head to its answer, without any input or output of its own.

`Predict` has what all calls share, `Call` is one of them as a value, `Exchange` handles it, and
`reply_to` renders its answer. A reply has its header lines as they go onto the wire, not as pairs,
because most replies go straight to a socket.

The owner of the connection passes on the call as it comes, and reports when the client hangs up.
The exchange passes its answer to a `Wire`: `service.api.wire.protocol` on our own server,
`service.api.asgi` on any ASGI server. All run in the event loop.
"""

import asyncio
import logging
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import KW_ONLY, dataclass, field
from functools import lru_cache
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple, Protocol

import msgspec
from starlette.types import Send

from inferpool.models.attached import attached, protocol_at
from inferpool.models.spec import Interface, Kind, TensorHeader, TensorSpec
from inferpool.service.api.auth import Guard
from inferpool.service.api.codecs.answers import (
    STREAMED,
    AnswerFormat,
    Outcome,
    choose_format,
    encode,
)
from inferpool.service.api.codecs.body import (
    BodyContext,
    Decoded,
    Limits,
    Payload,
    add_piece,
    joined,
)
from inferpool.service.api.codecs.parameters import OUTPUT_KEY, read_query
from inferpool.service.api.codecs.requests import decode
from inferpool.service.api.cors import Cors
from inferpool.service.api.errors import (
    INTERNAL_MESSAGE,
    Answer,
    MethodNotAllowedError,
    problem,
)
from inferpool.service.api.preferences import is_async
from inferpool.service.api.trace import new_ids, request_id_of, trace_of, trace_state_of
from inferpool.service.api.wire.budgets import EdgeLimits, Refusals, UnfinishedRequests
from inferpool.service.errors import (
    BadRequestError,
    InternalError,
    InvalidInputError,
    OverloadedError,
    ServiceError,
    TooLargeError,
    UnavailableError,
    UnknownModelError,
)
from inferpool.service.queue.instance import (
    Buffer,
    CanaryShare,
    InstanceSteps,
    InstanceTiming,
    Result,
    SlotOwner,
    StreamReader,
)
from inferpool.service.queue.shares import owner_of_address
from inferpool.workers.shared.arena import OpenSlot, Slots
from inferpool.workers.shared.messages import ContentBlob, ItemRef

logger = logging.getLogger(__name__)

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
PREFIX = "/predict"
JOBS = "/jobs"
VERSION_HEADER = b"x-model-version"
"""With it a call asks for a version of the model in the path."""
VERSIONS = "/versions/"
DEFAULT_MODEL = "*"
"""The name for which a protocol gets the default model."""
_CLIENT_GONE = 499
_FIRST_ERROR = 400
_PREFLIGHT = 204
_MAX_TRACED_INSTANCES = 16
"""Further instances of a call are counted, but not traced."""
_PRIORITIES = {b"%d" % priority: priority for priority in range(1, 10)}
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

    @property
    def outputs(self) -> Sequence[TensorSpec]:
        """The tensors it returns; empty if its answers are JSON, or unknown."""

    @property
    def interface(self) -> Interface:
        """How clients speak to it; the usual one until a worker is ready."""

    def submit(
        self,
        ref: ItemRef,
        chunks: Sequence[Buffer],
        steps: InstanceSteps | None = None,
        owner: SlotOwner | None = None,
        *,
        reader: StreamReader | None = None,
    ) -> asyncio.Future[Result]:
        """Admit an instance; `reader` gets its parts. Cancelling the future gives it up.

        The ref is complete but for its offset, and belongs to the instance from now on. `steps`
        records what happens to the instance, if its call is traced. `owner` is that of the
        payload's slot, if the payload is in the arena already and the ref has its offset; if the
        instance is refused, the slot stays the caller's.

        Raises:
            ServiceError: It is refused.
        """


class CallProtocol(Protocol):
    """How calls of another protocol than our own are read and answered.

    All else about them is as for `/predict`. `models.attached.CALLS` has the paths.
    """

    methods: ClassVar[Sequence[str]] = ("POST",)
    """The methods of its calls."""
    submits_in_turn: ClassVar[bool] = False
    """Instances without room in the queue wait for those before; a call needs all its answers."""

    def has_path(self, path: str) -> bool:
        """Return whether a path is one of its calls, which fits one of its patterns."""
        return True

    def name_in(self, call: "Call") -> str | None:
        """Return the key in `Predict.models` that a call asks for.

        It is `DEFAULT_MODEL` if the call leaves the choice to the service, and None if its body
        names the model.
        """

    def key_in(self, call: "Call", models: Mapping[str, ModelEntry]) -> str | None:
        """Return what `name_in` does; for a protocol where it depends on the models."""
        return self.name_in(call)

    def opened(self, exchange: "Exchange", chunks: Sequence[Buffer]) -> "CallProtocol":
        """Return the protocol of one call, which knows its name, from its whole body.

        It is called where `key_in` returns None. Raises as `decode` does.
        """
        raise RuntimeError("the heads of these calls name their model")

    def decode(
        self, exchange: "Exchange", entry: ModelEntry, chunks: Sequence[Buffer]
    ) -> Decoded | None:
        """Read a whole body, and complete the options in the call's `ref`.

        None: it is read elsewhere; then `Exchange.submit` comes again, unless the call is over.

        Raises:
            ServiceError: It cannot be read, or does not fit the model.
        """

    def reply(self, call: "Call", outcomes: Sequence[Outcome]) -> Answer:
        """Render the outcomes of all instances of a call."""

    def problem(self, error: ServiceError, call: "Call") -> Answer:
        """Render an error."""

    def first_piece(self, part: bytes) -> Answer:
        """Return status, headers and first bytes of an answer in "pieces", from its first part.

        A protocol that sets `Call.chosen` to this form in `decode` has this and `next_piece`.
        """
        raise RuntimeError("this protocol does not answer in pieces")

    def next_piece(self, part: bytes) -> bytes:
        """Return the bytes of a later part."""
        raise RuntimeError("this protocol does not answer in pieces")


class WholeBody(msgspec.Struct, frozen=True):
    """How to read a body that as a whole is the payload of one instance."""

    kind: Kind
    parameters: bytes
    inputs: Sequence[TensorSpec]
    """The model's inputs at that time."""
    interface: Interface
    """Its interface at that time."""
    headers: tuple[TensorHeader, ...]
    is_batch: bool


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
    """The status of an answer on another route, or in pieces."""
    job: str = ""
    """The id of the job that it has become."""
    chosen: AnswerFormat = "json"
    protocol: CallProtocol | None = None
    """How it is read and answered, if not as `/predict`."""
    is_batch: bool = False
    is_old: bool = False
    """The client speaks HTTP/1.0, which knows no chunks."""
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
        if call.entry is None or call.entry.interface.media_types is None:
            return  # its model has not loaded yet: nobody knows the forms of its answers
        if len(self) >= _MAX_HEADS:
            self.clear()
        call = copy(call)
        call.ref = copy(call.ref)
        self[head] = KnownHead(head, call, int(num_body_bytes), keep_alive)


def _choose_form(call: Call, entry: ModelEntry | None) -> None:
    """Choose the form of the answer, of those that a model has.

    Raises:
        NotAcceptableError: The call allows none of them.
    """
    if call.protocol is not None or entry is None:
        call.chosen = "protocol"
        return
    accept = call.headers.get(b"accept")
    if accept is not None:
        call.chosen = choose_format(accept, entry.interface)
        call.ref.wants_content = call.chosen == "content"
        call.ref.wants_tensors = call.chosen != "json" and not call.ref.wants_content


OnDone = Callable[[str, int, float], None]
"""Called with the model, status and seconds of each call."""
OnFailure = Callable[[Call, int, float], None]
"""Called with each call that was refused or failed, its status and seconds; for the log."""


@dataclass(slots=True, eq=False)
class Predict:
    """Settings that all calls to `/predict` in one process share."""

    models: Mapping[str, ModelEntry]
    """Versions of models by the rest of the path: the model's name, or what `path_of` returns; and
    by the whole of a path of their own. They come and go while the service runs."""
    _: KW_ONLY
    default: str | None = None
    """The model of `/predict` without a name."""
    optional: Sequence[Mapping[str, str]] = ()
    """The protocols that the settings turn on, from `service.api.optional_calls`."""
    root_path: bytes = b""
    """The path that may stand before all paths of calls over sockets, as in a URL."""
    limits: Limits = field(default_factory=Limits)
    unfinished: UnfinishedRequests = field(
        default_factory=lambda: UnfinishedRequests(EdgeLimits().max_unfinished_bytes)
    )
    unread: Any = None
    """The `UnreadAnswers` that count the parts of streams too; the first stream makes them."""
    refusals: Refusals = field(default_factory=Refusals)
    slots: Slots | None = None
    """The arena, for large bodies that go there as they come; None: each is to be whole before."""
    guard: Guard | None = None
    """Checks keys; None if calls need none."""
    cors: Cors | None = None
    """Pages that may call; None allows only pages of this host."""
    tracing: Tracing | None = None
    """Traces calls; costs nothing if None."""
    on_done: OnDone | None = None
    on_failure: OnFailure | None = None

    def __post_init__(self) -> None:
        """Drop a guard that allows every call, so that it costs nothing."""
        if self.guard is not None and not self.guard.restricts_predict:
            self.guard = None

    @property
    def names(self) -> list[str]:
        """The models that are served."""
        return [path for path in self.models if "/" not in path]

    def owner_of(self, headers: Mapping[bytes, bytes], client: str | None) -> str:
        """Return the owner of the memory that a call takes: its key if known, else its address.

        Args:
            headers: Those of the call.
            client: The address that it comes from.
        """
        if self.guard is not None and self.guard.allows("predict", headers):
            return self.guard.owner_of("predict", headers, client)
        return owner_of_address(client)

    def takes(self, path: str) -> bool:
        """Return whether a path is of this endpoint, a model's own, or one of a protocol's."""
        is_own = is_predict(path) or self.own(path) is not None
        return is_own or protocol_at(path, self.optional) is not None

    def own(self, path: str) -> ModelEntry | None:
        """Return the version that serves the model with a path of its own; None if none has it."""
        return self.models.get(path.removesuffix("/")) if path[:1] == "/" else None

    def find(self, call: Call) -> ModelEntry | None:
        """Return the version that a call is for now; None if there is none."""
        name = self.name_in(call)
        return None if name is None else self.models.get(name)

    def find_now(self, call: Call) -> ModelEntry | None:
        """Return the version that computes a call: a canary, if the call is in its share.

        Calls that name a version get that one.
        """
        name = self.name_in(call)
        entry = None if name is None else self.models.get(name)
        if entry is None or entry.canary is None or name != entry.name:
            return entry
        canary = entry.canary
        return self.models.get(canary.path, entry) if canary.gets(call.request_id) else entry

    def unknown(self, call: Call) -> UnknownModelError:
        """Return the error for a call to a model or version that is not served."""
        error: UnknownModelError = attached("unknown model")(self, call)
        return error

    def name_in(self, call: Call) -> str | None:
        """Return the key in `models` that a call asks for; None if its head names nothing."""
        rest = call.path[len(PREFIX) + 1 :]
        name = rest.removesuffix("/") if rest else self.default
        if call.protocol is not None:
            given = call.protocol.key_in(call, self.models)
            name = self.default if given == DEFAULT_MODEL else given
        elif not is_predict(call.path):
            entry = self.own(call.path)
            name = call.path if entry is None else entry.name
        version = call.headers.get(VERSION_HEADER)
        if name is None or version is None:
            return name
        asked_for = f"{VERSIONS}{version.decode('latin-1')}"
        return name if name.endswith(asked_for) else name + asked_for


def methods_of(call: Call) -> Sequence[str]:
    """Return the methods that a call's path takes."""
    return ("POST",) if call.protocol is None else call.protocol.methods


def path_of(name: str, version: int) -> str:
    """Return the rest of the path of a version of a model."""
    return f"{name}{VERSIONS}{version}"


def is_job(path: str, headers: Iterable[tuple[bytes, bytes]], own: Callable[[str], object]) -> bool:
    """Return whether a call is for the routes of jobs: by its path, or as the client prefers.

    `own` is `Predict.own`.
    """
    if path == JOBS or path.startswith(JOBS + "/"):
        return True
    return is_async(headers) and (is_predict(path) or own(path) is not None)


def is_predict(path: str) -> bool:
    """Return whether a path belongs to this endpoint."""
    return path.startswith(PREFIX) and (len(path) == len(PREFIX) or path[len(PREFIX)] == "/")


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

    def open_stream(
        self, exchange: "Exchange", lines: bytes, on_writable: Callable[[], None]
    ) -> Any:
        """Send the head of an answer in pieces; see `service.parts.streams` for what it returns."""


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
    slot: OpenSlot | None = None
    """The slot that the body goes into as it comes; None if its pieces are kept, or unwanted."""
    _refusal: ServiceError | None = None
    _chunks: list[Buffer] = []
    _is_counted: bool = False
    """`UnfinishedRequests` counts the body."""

    message_event: ClassVar = SimpleNamespace(set=lambda: None)
    """Replaces the event that uvicorn sets for its ASGI calls; nothing waits for it."""

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
        if (predict.optional or not is_predict(path)) and predict.own(path) is None:
            call.protocol = protocol_at(path, predict.optional)
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
            self.submit(self._chunks or (b"",))
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
        self.submit((body,))

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
            self.submit(self._chunks or (b"" if self.slot is None else self.slot.view,))

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
        """Refuse the call once those before it are answered: its body cannot be read."""
        self.keep_alive = False
        self._refusal = error
        self.let_go()
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
        self.let_go()
        if not self.response_complete:
            self.response_complete = True
            give_up(self.call.outcomes)
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
        if call.method not in methods_of(call):
            allowed = ", ".join(methods_of(call))
            raise MethodNotAllowedError(f"{call.path} takes {allowed}, not {call.method}")
        if call.entry is None and (
            call.protocol is None or call.protocol.key_in(call, predict.models) is not None
        ):
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
        _choose_form(call, call.entry)

    def _check_size(self) -> None:
        if self.num_bytes > self.predict.limits.max_body_bytes:
            raise self.predict.limits.too_large()

    def submit(self, chunks: Sequence[Buffer]) -> None:
        """Submit all instances of the body, and answer when each has its outcome."""
        call = self.call
        entry, form, ref = call.entry, call.form, call.ref
        slot, owner = self.slot, None
        try:
            if entry is None:
                assert call.protocol is not None
                call.protocol = call.protocol.opened(self, chunks)
            if entry is None or not entry.is_serving:
                entry = _entry_now(call, self.predict)
            if form and form.inputs is entry.inputs and form.interface is entry.interface:
                ref.kind, ref.num_bytes, ref.parameters = form.kind, self.num_bytes, form.parameters
                ref.headers, call.is_batch = form.headers, form.is_batch
                if slot is not None:
                    ref.offset, owner = slot.offset, slot.slots
            else:
                decoded = self._decode(entry, chunks)
                if decoded is None:
                    return
                ref.parameters = decoded.parameters
                if call.chosen in STREAMED:
                    attached("stream of a call")(self, entry, decoded.payloads)
                    return
                if len(decoded.payloads) > 1:
                    attached("several instances")(self, entry, decoded.payloads)
                    return
                chunks = put_into(ref, decoded.payloads[0])
            future = entry.submit(ref, chunks, new_steps(call), owner)
        except OverloadedError as error:
            self._refuse_soon(error)
            return
        except Exception as error:
            self._refuse(error)
            return
        call.num_instances = 1
        call.outcomes.append(future)
        if slot is not None:
            slot.is_handed_on = owner is not None
        if slot is not None or self._chunks:
            self.let_go()
        future.add_done_callback(self.on_done)

    def decode_as_own(
        self, entry: ModelEntry, chunks: Sequence[Buffer], *, by_head: bool = False
    ) -> Decoded | None:
        """Read a body as `/predict` does; for a protocol that shares its path, from `decode`.

        `by_head`: the head alone says so, and so the next calls with it are `/predict`'s too.
        """
        if not by_head:
            self.call.earlier = None
        for call in filter(None, (self.call, self.call.earlier)):
            call.protocol, call.chosen = None, "json"
            _choose_form(call, entry)
        return self._decode(entry, chunks)

    def _decode(self, entry: ModelEntry, chunks: Sequence[Buffer]) -> Decoded | None:
        call = self.call
        if call.protocol is None:
            limits = self.predict.limits
            head = BodyContext(call.headers, call.query, entry.inputs, limits, entry.interface)
            decoded = decode(call.headers.get(b"content-type", b""), list(map(bytes, chunks)), head)
        elif (found := call.protocol.decode(self, entry, chunks)) is not None:
            decoded = found
        else:
            return None
        call.is_batch = decoded.is_batch
        if decoded.is_whole and call.earlier is not None and call.chosen not in STREAMED:
            kind, _, headers = msgspec.structs.astuple(decoded.payloads[0])
            known = entry.inputs, entry.interface
            call.earlier.form = WholeBody(
                kind, decoded.parameters, *known, headers, decoded.is_batch
            )
        return decoded

    def on_done(self, _: object) -> None:
        """Answer: each instance has its outcome."""
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
        """Refuse the call in this iteration of the event loop, or in a later one."""
        self.let_go()
        error.__traceback__ = None  # its frames hold the body

        def refuse() -> None:
            if not self.response_complete:
                self._refuse(error)

        self.predict.refusals.add(refuse)

    def _refuse(self, error: Exception) -> None:
        give_up(self.call.outcomes)
        self.let_go()
        self._answer(refusal_of(self.call, error))

    def _answer(self, reply: Reply) -> None:
        self.response_complete = True
        status = self.wire.send_answer(self, reply)
        if status is not None:
            self.close(status)

    def let_go(self) -> None:
        """Drop the body."""
        self._chunks = []
        if self.slot is not None:
            self.slot.close()
            self.slot = None
        if self._is_counted:
            self._is_counted = False
            self.predict.unfinished.give_back(self)


def _entry_now(call: Call, predict: Predict) -> ModelEntry:
    """Return the version that a call is for now, since versions come and go."""
    entry = predict.find_now(call)
    call.choose(entry)
    if entry is None:
        raise predict.unknown(call)
    _choose_form(call, entry)
    if call.earlier is not None:  # so that the next call with this head need not look
        call.earlier.choose(entry)
        _choose_form(call.earlier, entry)
    return entry


def give_up(outcomes: Sequence["asyncio.Future[Result] | ServiceError"]) -> None:
    """Cancel instances that nobody waits for any more."""
    for outcome in outcomes:
        if isinstance(outcome, ServiceError):
            continue
        if not outcome.done():
            outcome.cancel()
        elif not outcome.cancelled():
            outcome.exception()  # else asyncio logs that nobody retrieved it


def new_steps(call: Call) -> InstanceSteps | None:
    """Return where to record one more instance; None if the call is not traced."""
    traced = call.steps
    if traced is None or len(traced) >= _MAX_TRACED_INSTANCES:
        return None
    steps = InstanceSteps()
    traced.append(steps)
    return steps


def put_into(ref: ItemRef, payload: Payload) -> Sequence[Buffer]:
    """Complete a ref for an instance, and return its payload's pieces."""
    ref.kind, ref.headers = payload.kind, payload.headers
    ref.num_bytes = sum(map(len, payload.chunks))
    return payload.chunks


def reply_to(call: Call) -> Reply:
    """Reply to a call once all its instances have their outcome.

    Raises:
        OverloadedError: Its only instance was refused. A flood of these is answered bit by bit.
    """
    outcomes = call.outcomes
    outcome = outcomes[0] if len(outcomes) == 1 else None
    assert call.entry is not None
    if (
        isinstance(outcome, asyncio.Future)
        and call.chosen == "json"
        and call.entry.interface.envelope
    ):
        # The most frequent case, and so in one step; `encode` would give the same.
        try:
            result = outcome.result()
        except OverloadedError:
            raise
        except (Exception, asyncio.CancelledError):
            pass  # answered below
        else:
            if isinstance(result.value, bytes):
                body = b'{"predictions":[%b]}' % result.value
                common = common_lines(call, result.timing)
                head = f"content-type: application/json\r\ncontent-length: {len(body)}\r\n{common}"
                return 200, head.encode(), body
    return _reply_with_any([outcome_of(call, *each) for each in enumerate(outcomes)], call)


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
    if call.protocol is None:
        status, headers, body = problem(error, call.request_id, call.path)
    else:
        status, headers, body = call.protocol.problem(error, call)
    lines = lines_of(headers)
    if call.method == "HEAD":  # the same head, and no body (RFC 9110, 9.3.2)
        body = b""
    if isinstance(error, MethodNotAllowedError):
        lines += f"allow: {', '.join(methods_of(call))}\r\n".encode()
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
    render = own_answer if call.protocol is None else call.protocol.reply
    status, headers, body = render(call, outcomes)
    return status, lines_of(headers) + common_lines(call, _longest(outcomes)).encode(), body


def own_answer(call: Call, outcomes: Sequence[Outcome]) -> Answer:
    """Render the outcomes of a call as `/predict` does; for another protocol as JSON or content."""
    assert call.entry is not None
    envelope = call.entry.interface.envelope
    chosen = call.chosen if call.protocol is None else "json"
    has_content = any(isinstance(getattr(each, "value", None), ContentBlob) for each in outcomes)
    if has_content or chosen == "content":
        answer: Answer = attached("answers with content")(
            outcomes,
            accept=call.headers.get(b"accept"),
            is_batch=call.is_batch,
            envelope=envelope,
            is_exposed="expose-headers" in call.cors_lines,
            request_id=call.request_id,
            path=call.path,
        )
        return answer
    is_plain = chosen == "json" or not call.query
    return encode(
        chosen,
        outcomes,
        is_batch=call.is_batch,
        envelope=envelope,
        output=None if is_plain else read_query(call.query).get(OUTPUT_KEY),
        request_id=call.request_id,
        path=call.path,
    )


def outcome_of(call: Call, index: int, outcome: asyncio.Future[Result] | ServiceError) -> Outcome:
    """Return the result or the error of an instance of a call that is over."""
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
