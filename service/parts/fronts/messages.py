"""The messages between a front and the main process.

A front is started with a `FrontConfig`. Then each side sends at most one msgpack message per turn
of its event loop.
"""

from dataclasses import dataclass
from typing import Any

import msgspec

from inferpool.models.spec import USUAL_INTERFACE, Interface, TensorSpec
from inferpool.service import errors
from inferpool.service.api.wire.budgets import EdgeLimits, EdgeUse
from inferpool.service.errors import ServiceError
from inferpool.service.queue.instance import CanaryShare, InstanceSteps
from inferpool.service.settings.settings import Settings
from inferpool.service.telemetry.distribution import Exemplar
from inferpool.service.telemetry.metrics import RejectReason
from inferpool.workers.shared.messages import ContentBlob, ItemRef, LogLine, TensorBlob


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontConfig:
    """Everything a front needs to know; pickled into its process."""

    name: str
    """The name in the log: "front/0"."""
    main_pid: int
    settings: Settings
    limits: EdgeLimits
    part: range
    """The part of the arena where it puts payloads."""
    held: dict[int, int]
    """Offsets and lengths of slots there that workers still read for a front that died."""
    forwarding_path: str
    """The Unix socket on which the main process answers all other routes."""
    family: int
    """The address family of the connections."""
    log_level: int
    number: int = 0
    """The front's number among all."""
    counted: Any = None
    """The memory in which all fronts count the bytes that they keep for clients: `WritableMemory`,
    and an `mmap` in the front's process."""


class Submission(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One instance; its payload lies in the front's part of the arena."""

    id: int
    model: int
    """The number of the version, as `ModelTable` gives it."""
    ref: ItemRef
    is_traced: bool
    """The answer should bring `steps`."""
    wants_parts: bool = False
    """The front reads the parts of the answer as they come."""


class Submissions(msgspec.Struct, frozen=True, array_like=True, tag="turn"):
    """Front to main: instances submitted and given up in one turn of the event loop."""

    submissions: list[Submission]
    cancelled: list[int]


class StreamEnded(msgspec.Struct, frozen=True, array_like=True, tag="ended"):
    """Front to main: a stream ends here, such as one with a reader that is too slow."""

    id: int
    failure: "Failure"


class FrontCounts(msgspec.Struct, frozen=True, array_like=True, tag="counts"):
    """Front to main, in answer to `CountRequest`: what it has counted since the last time."""

    id: int
    calls: list[tuple[str, int, int]]
    """Model label, status, number of calls."""
    durations: list[tuple[str, tuple[list[int], float], tuple[list[int], float]]]
    """Model label, then successful calls and errors: each the number of calls per bucket of
    `DURATION_EDGES_S`, and the sum of their durations in seconds."""
    exemplars: list[tuple[str, list[tuple[int, Exemplar]]]]
    """Model label, and an exemplar per bucket."""
    rejected: list[tuple[str, RejectReason, int]]
    """Model name, and instances that the front refused itself, by reason."""
    num_taken: int
    """Connections received from the main process since the start."""
    num_open: int
    """Connections that are open now."""
    edge: EdgeUse
    traced: tuple[int, int]
    """Traced calls that were exported and dropped."""


class Listening(msgspec.Struct, frozen=True, array_like=True, tag="listening"):
    """Front to main, once: it can accept connections, as soon as it knows the models."""


class MovedAway(msgspec.Struct, frozen=True, array_like=True, tag="moved"):
    """Front to main, in answer to `MoveAway`: most clients have gone."""


class TableTaken(msgspec.Struct, frozen=True, array_like=True, tag="taken"):
    """Front to main, in answer to `ModelTable`: no later submission uses an older one."""

    id: int


FromFront = Submissions | StreamEnded | FrontCounts | TableTaken | Listening | MovedAway | LogLine


class Failure(msgspec.Struct, frozen=True, tag="failure", gc=False, omit_defaults=True):
    """A `ServiceError` as text and code."""

    code: str
    message: str
    retry_after_s: int | None = None
    parts: list[bytes] = []
    num_parts: int = 0


class StreamTurn(msgspec.Struct, frozen=True, array_like=True, tag="parts"):
    """Main to front: parts of streams that came in one turn of the event loop, by their ids."""

    parts: dict[int, list[bytes]]


class InstanceAnswer(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """How one instance ended, and where its time went."""

    id: int
    value: bytes | list[TensorBlob] | ContentBlob | Failure
    queue_s: float = 0.0
    prepare_s: float = 0.0
    compute_s: float = 0.0
    steps: InstanceSteps | None = None


class Answers(msgspec.Struct, frozen=True, array_like=True, tag="settled"):
    """Main to front: instances that ended in one turn of the event loop."""

    answers: list[InstanceAnswer]
    freed: list[int]
    """Offsets of slots that no worker reads any more."""


class ModelRow(msgspec.Struct, frozen=True, array_like=True):
    """One version of a model, as a front needs to know it."""

    number: int
    """No other version gets this number."""
    name: str
    version: int
    is_serving: bool
    inputs: list[TensorSpec]
    """Empty until they are known."""
    outputs: list[TensorSpec]
    paths: list[str]
    """The paths of the calls that it is for; see `Predict.models`."""
    canary: CanaryShare | None = None
    interface: Interface = USUAL_INTERFACE


class ModelTable(msgspec.Struct, frozen=True, array_like=True, tag="models"):
    """Main to front: all versions that calls may get to."""

    id: int
    rows: list[ModelRow]


class CountRequest(msgspec.Struct, frozen=True, array_like=True, tag="count"):
    """Main to front: send your counts, and log from this level on."""

    id: int
    log_level: int


class MoveAway(msgspec.Struct, frozen=True, array_like=True, tag="move"):
    """Main to front: close each connection with its answer, and say when most clients are gone."""


class Leave(msgspec.Struct, frozen=True, array_like=True, tag="leave"):
    """Main to front: close what is left, and end. Sent again to hurry a front that is leaving."""

    is_hurried: bool
    flush_until: float
    """The moment until which clients may read their answers."""


Command = CountRequest | MoveAway | Leave
FromMain = Answers | StreamTurn | ModelTable | Command

_ERRORS: dict[str, type[ServiceError]] = {
    error.code: error
    for error in vars(errors).values()
    if isinstance(error, type) and issubclass(error, ServiceError)
}


def failure_of(error: BaseException) -> Failure:
    """Return an error in its form for messages to a front."""
    if isinstance(error, ServiceError):
        return Failure(
            error.code, error.message, error.retry_after_s, list(error.parts), error.num_parts
        )
    return Failure("mistake", f"in the main process: {error!r}")


def error_of(failure: Failure) -> Exception:
    """Return the error that has crossed; a `RuntimeError` if it was no `ServiceError`."""
    error = _ERRORS.get(failure.code)
    if error is None:
        return RuntimeError(failure.message)
    made = error(failure.message, retry_after_s=failure.retry_after_s)
    if failure.num_parts:
        made.parts, made.num_parts = failure.parts, failure.num_parts
    return made
