"""All that crosses between a front and the main process.

A front is started with a `Job`. After that it is one msgpack value per turn of a loop.
"""

from dataclasses import dataclass

import msgspec

from inferpool.models.spec import TensorSpec
from inferpool.service import errors
from inferpool.service.api.wire.budgets import EdgeUse
from inferpool.service.api.wire.connections import EdgeLimits
from inferpool.service.errors import ServiceError
from inferpool.service.queue.steps import Steps
from inferpool.service.settings.settings import Settings
from inferpool.service.telemetry.exemplars import Exemplar
from inferpool.workers.messages import ItemRef, LogLine, TensorBlob


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """All that a front needs to know; pickled into its process."""

    name: str
    """For the log: "front/0"."""
    main_pid: int
    settings: Settings
    limits: EdgeLimits
    part: range
    """Where in the arena it puts payloads."""
    held: dict[int, int]
    """Slots there that workers still read on behalf of an earlier life, and their lengths."""
    relay_path: str
    """The socket on which the main process answers what is no prediction."""
    family: int
    """Of the connections' addresses."""
    log_level: int


class Ask(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One instance that a front submits; its payload lies in the front's part of the arena."""

    id: int
    model: int
    """Its place among the models of the settings."""
    ref: ItemRef
    is_traced: bool
    """What becomes of it is wanted with the answer."""


class Turn(msgspec.Struct, frozen=True, array_like=True, tag="turn"):
    """Front to main: what its callers began and gave up in one turn of its loop."""

    asks: list[Ask]
    cancelled: list[int]


class Counts(msgspec.Struct, frozen=True, array_like=True, tag="counts"):
    """Front to main, in answer to `Count`: what it has counted since the last time."""

    id: int
    calls: list[tuple[str, int, int]]
    """Label of the model, status, how many."""
    durations: list[tuple[str, tuple[list[int], float], tuple[list[int], float]]]
    """Label of the model, and of its answers and of its errors: calls by part of
    `DURATION_EDGES_S`, and their sum in seconds."""
    exemplars: list[tuple[str, list[tuple[int, Exemplar]]]]
    """Label of the model, and those of its durations by bucket."""
    num_full: list[tuple[str, int]]
    """Model, and instances for which the front's part of the arena had no room."""
    num_taken: int
    """Connections that it was ever given and has taken."""
    num_open: int
    """Of those, the ones that are open."""
    edge: EdgeUse
    traced: tuple[int, int]
    """Traced calls that were exported and dropped."""


class Listening(msgspec.Struct, frozen=True, array_like=True, tag="listening"):
    """Front to main, once: it takes connections."""


class MovedAway(msgspec.Struct, frozen=True, array_like=True, tag="moved"):
    """Front to main, in answer to `MoveAway`."""


FromFront = Turn | Counts | Listening | MovedAway | LogLine


class Failure(msgspec.Struct, frozen=True, gc=False):
    """A `ServiceError`, as text and code."""

    code: str
    message: str
    retry_after_s: int | None = None


class Answer(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """How one instance ended, and where its time went."""

    id: int
    value: bytes | list[TensorBlob] | Failure
    queue_s: float = 0.0
    prepare_s: float = 0.0
    compute_s: float = 0.0
    steps: Steps | None = None
    """Of one that is traced."""


class Settled(msgspec.Struct, frozen=True, array_like=True, tag="settled"):
    """Main to front: what ended in one turn of the loop."""

    answers: list[Answer]
    freed: list[int]
    """Slots that no worker reads any more."""


class Inputs(msgspec.Struct, frozen=True, array_like=True, tag="inputs"):
    """Main to front: what each model takes, as far as that is known."""

    models: list[list[TensorSpec]]


class Count(msgspec.Struct, frozen=True, array_like=True, tag="count"):
    """Main to front: say what you have counted, and log from this level on."""

    id: int
    log_level: int


class MoveAway(msgspec.Struct, frozen=True, array_like=True, tag="move"):
    """Main to front: let each answer close its connection, and say when most have gone."""


class Leave(msgspec.Struct, frozen=True, array_like=True, tag="leave"):
    """Main to front: close what is left, and end. Comes again where that is to be hurried."""

    is_hurried: bool
    flush_until: float
    """The moment until which clients may read their answers."""


FromMain = Settled | Inputs | Count | MoveAway | Leave

_ERRORS: dict[str, type[ServiceError]] = {
    error.code: error
    for error in vars(errors).values()
    if isinstance(error, type) and issubclass(error, ServiceError)
}
_MISTAKE = "mistake"
"""The code of what is no `ServiceError`."""


def failure_of(error: BaseException) -> Failure:
    """An error as it crosses."""
    if isinstance(error, ServiceError):
        return Failure(error.code, error.message, error.retry_after_s)
    return Failure(_MISTAKE, f"in the main process: {error!r}")


def error_of(failure: Failure) -> Exception:
    """An error that has crossed."""
    error = _ERRORS.get(failure.code)
    if error is None:
        return RuntimeError(failure.message)
    return error(failure.message, retry_after_s=failure.retry_after_s)
