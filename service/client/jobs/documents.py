"""Reads the service's documents about jobs and their results."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, fields

from ..errors import InferpoolError, ProtocolError, error_class
from ..many import Outcome
from ..results import Json, Prediction, Reply, Timing, read_instance_error

STATES = ("queued", "running", "succeeded", "failed", "cancelled")
"""All states of a job, in the order of its life."""
_UNFINISHED = ("queued", "running")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobInfo:
    """State of a job. Times are seconds of the Unix epoch."""

    id: str
    state: str
    """`queued`, `running`, `succeeded`, `failed` (no instance has a prediction) or `cancelled`."""
    model: str
    versions: Sequence[int]
    """Versions of the model that computed instances so far."""
    num_instances: int
    num_done: int
    """Instances that have a prediction or an error."""
    num_failed: int
    """Instances that have an error."""
    created_at: float
    started_at: float | None
    ended_at: float | None
    expires_at: float | None
    """Moment when the service deletes it; None while it is not over."""
    error: InferpoolError | None
    """Reason why the job failed, or what ended it early."""
    request_id: str
    """ID to look for in the service's log."""
    document: Json = field(repr=False)
    """The whole answer of the service."""

    @property
    def is_over(self) -> bool:
        """True if it will not change any more."""
        return self.state not in _UNFINISHED


def read_job(reply: Reply) -> JobInfo:
    """Read the answer about one job.

    Raises:
        ProtocolError: The answer is not one of inferpool's.
    """
    return _info_of(_document_in(reply))


def read_jobs(reply: Reply) -> tuple[list[JobInfo], str | None]:
    """Read a page of jobs; return it with the name of the next one, or None.

    Raises:
        ProtocolError: The answer is not one of inferpool's.
    """
    document = _document_in(reply)
    try:
        return [_info_of(each) for each in document["jobs"]], document["next"]
    except (KeyError, TypeError) as error:
        raise ProtocolError(f"this is not inferpool's /jobs: {error!r}") from None


def read_line(line: bytes, info: JobInfo) -> Outcome:
    """Read a line of a result: the prediction, or the error, for one instance.

    Raises:
        ProtocolError: It is not such a line.
    """
    try:
        document = json.loads(line)
        index = document["index"]
        if "error" in document:
            error = read_error(document["error"], info.request_id)
            error.index = index
            return error
        return Prediction(
            predictions=[document["prediction"]],
            request_id=info.request_id,
            timing=Timing(),
            model=info.model,
            version=document.get("version"),
            index=index,
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        start = line[:200].decode("utf-8", "replace")
        raise ProtocolError(f"this is not a line of a job's result: {start!r}") from None


def read_error(document: Json, request_id: str) -> InferpoolError:
    """Read the error of an instance or of a job, with or without a status.

    Raises:
        KeyError: It is not an error.
    """
    if error := read_instance_error(document, 0, request_id):
        return error
    code = document["code"]
    return error_class(code, 500)(document["message"], code=code, request_id=request_id)


def _document_in(reply: Reply) -> Json:
    try:
        return json.loads(reply.content)
    except (ValueError, RecursionError):
        start = reply.content[:200].decode("utf-8", "replace")
        raise ProtocolError(f"this is not inferpool's /jobs: {start!r}") from None


def _info_of(document: Json) -> JobInfo:
    try:
        own = {each.name for each in fields(JobInfo)} - {"document", "error"}
        error = document["error"]
        return JobInfo(
            **{name: document[name] for name in own},
            error=read_error(error, document["request_id"]) if error else None,
            document=document,
        )
    except (KeyError, TypeError) as error:
        raise ProtocolError(f"this is not inferpool's description of a job: {error!r}") from None
