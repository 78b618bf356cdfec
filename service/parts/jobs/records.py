"""Values of jobs, which the store keeps, the runner computes and the routes show.

A job's instances are numbered from 0. They are stored in *parts*: consecutive instances that are
leased, computed and committed together. All times are seconds of the Unix epoch.
"""

from collections.abc import Mapping, Sequence
from typing import Literal, get_args

import msgspec

from inferpool.models.spec import Kind, TensorHeader
from inferpool.service.queue.shares import allowance

JobState = Literal["queued", "running", "succeeded", "failed", "cancelled"]
STATES: Sequence[JobState] = get_args(JobState)
"""All states in the order of a job's life."""
UNFINISHED: Sequence[JobState] = ("queued", "running")
"""The states of a job that is not over; the others are final."""

PART_INSTANCES = 64
"""The most instances of a part. A crash costs at most one more computation of each."""
PART_BYTES = 2**20
"""A part is closed when it holds so many payload bytes."""


class JobProblem(msgspec.Struct, frozen=True, omit_defaults=True):
    """Why an instance has no prediction, or why a job failed."""

    code: str
    """A code of a `ServiceError`, such as `invalid_input`."""
    message: str


class StoredInstance(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One instance of a job as it lies in the store."""

    kind: Kind | None
    """Kind of the payload; None if the instance could not be read."""
    payload: bytes = b""
    headers: tuple[TensorHeader, ...] = ()
    problem: JobProblem | None = None
    """Why it could not be read; then it is never computed."""


class NewJob(msgspec.Struct, frozen=True, kw_only=True):
    """A job that a client asks for, before its instances are known."""

    id: str
    owner: str = ""
    """The fingerprint of the API key; empty if calls need none."""
    model: str
    parameters: bytes = b""
    """A JSON object for all instances, or empty."""
    body_digest: str
    """SHA-256 of the model, the options and the body, to tell repeats from other calls."""
    idempotency_key: str | None = None
    webhook: str | None = None
    """The URL to tell when the job is over."""
    priority: int = 5
    trace: str = ""
    """Trace id, a hyphen and span id of the call that made it; empty if that is not traced."""
    request_id: str = ""


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """A job as it is now."""

    id: str
    """The name that its owner knows it by; another owner's job may have the same."""
    owner: str
    folder: str = ""
    """The name of the folder with its files, which no other job ever has."""
    state: JobState
    model: str
    versions: tuple[int, ...] = ()
    """The versions of the model that computed instances so far."""
    num_instances: int
    num_done: int = 0
    """Instances that have a prediction or an error."""
    num_failed: int = 0
    """Instances that have an error."""
    num_bytes: int
    """Payload and result bytes that it takes in the store."""
    created_at: float
    started_at: float | None = None
    ended_at: float | None = None
    expires_at: float | None = None
    """When it will be deleted; None while it is not over."""
    problem: JobProblem | None = None
    """Why the whole job failed, or what ended it early."""
    parameters: bytes = b""
    body_digest: str = ""
    webhook: str | None = None
    priority: int = 5
    trace: str = ""
    request_id: str = ""

    @property
    def is_over(self) -> bool:
        """It will not change any more."""
        return self.state not in UNFINISHED


class LeaseRoom(msgspec.Struct, frozen=True, kw_only=True):
    """How much to lease. All of it may be exceeded by one part."""

    num_instances: int
    num_bytes: int
    num_parts: int
    share: float = 1.0
    """The part of what others leave that one owner may have."""
    held: Mapping[str, "LeaseRoom"] = {}
    """Instances in flight of the models to lease for, by owner, and bytes and parts of all."""

    def left_for(self, owner: str) -> "LeaseRoom":
        """Return the most that an owner may have on top.

        One that has no instances here may have a part, however much it has of other models.
        """
        own = self.held.get(owner)
        if own is None:
            own = LeaseRoom(num_instances=0, num_bytes=0, num_parts=0)
        least = 0 if own.num_instances else 1
        more = [
            max(least, int(allowance(has, left, self.share)))
            for has, left in (
                (own.num_instances, self.num_instances),
                (own.num_bytes, self.num_bytes),
                (own.num_parts, self.num_parts),
            )
        ]
        return LeaseRoom(num_instances=more[0], num_bytes=more[1], num_parts=more[2])


class LeasedPart(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a job that this host computes now, until its lease is out."""

    job: Job
    row: int
    """The number by which the store knows the job."""
    number: int
    """The number of the part in its job, from 0."""
    first: int
    """The number of its first instance."""
    token: str
    """Says which lease it is: only its holder can commit the part."""
    num_bytes: int
    """Bytes of its payload in the store."""
    instances: Sequence[StoredInstance]


class JobAnswer(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The outcome of one instance."""

    value: bytes
    """The prediction as JSON; empty if there is none."""
    problem: JobProblem | None = None


class PartResult(msgspec.Struct, frozen=True, kw_only=True):
    """The outcomes of a part, in the order of its instances."""

    answers: Sequence[JobAnswer]
    version: int
    """The version of the model that computed it; 0 if none was needed."""


class StoreLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of the store."""

    retention_s: float
    """A job is deleted so long after its end."""
    max_jobs: int
    """Jobs of one API key, or of all calls if they need none."""
    max_bytes: int
    """Bytes in the store of all its jobs."""
    share: float = 1.0
    """The part of what others leave that one key may have: of the workers' turns, of the disk and
    of calls to webhooks."""


class StoreCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of everything that the store holds."""

    jobs: Mapping[JobState, int]
    num_waiting: int
    """Instances of unfinished jobs that have no answer yet."""
    num_bytes: int


class WaitingWebhook(msgspec.Struct, frozen=True, kw_only=True):
    """A call to a webhook that is due."""

    number: int
    """The number by which the store knows it."""
    owner: str
    receiver: str
    """The owner and the host that is called. No other owner waits for what the host does to it."""


class DueWebhook(msgspec.Struct, frozen=True, kw_only=True):
    """A job that is over, with a webhook to call now."""

    call: WaitingWebhook
    job: Job
    num_attempts: int
    """The attempts that failed."""
