"""The documents that the routes of jobs answer with."""

from collections.abc import Sequence
from dataclasses import dataclass, fields

from inferpool.service.parts.jobs.records import Job, JobState


@dataclass(frozen=True, slots=True, kw_only=True)
class JobError:
    """Why a whole job failed, or what ended it early."""

    code: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class JobInfo:
    """A job as it is now."""

    id: str
    state: JobState
    """`succeeded` if one instance at least has a prediction, `failed` if none has."""
    model: str
    versions: Sequence[int]
    """The versions of the model that computed instances so far."""
    num_instances: int
    num_done: int
    """Instances that have a prediction or an error."""
    num_failed: int
    """Instances that have an error."""
    num_bytes: int
    """Bytes that it takes in the store."""
    priority: int
    """1 goes first among jobs, 9 last."""
    created_at: float
    """When it was accepted, in seconds of the Unix epoch."""
    started_at: float | None
    """When its first instances were taken to be computed; null before."""
    ended_at: float | None
    """When it came into its last state; null before."""
    expires_at: float | None
    """When it will be deleted with its result; null while it is not over."""
    error: JobError | None
    """Why the whole job failed, or what ended it early; null else."""
    webhook: str | None
    """The URL that is told when it is over."""
    request_id: str
    """The id of the call that made it, which is in the log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobList:
    """A page of jobs."""

    jobs: Sequence[JobInfo]
    """The newest first."""
    next: str | None
    """The value of `after` for the next page; null if this is the last one."""


def info_of(job: Job) -> JobInfo:
    """Return what clients see of a job."""
    problem = job.problem
    error = None if problem is None else JobError(code=problem.code, message=problem.message)
    alike = {each.name: getattr(job, each.name) for each in fields(JobInfo) if each.name != "error"}
    return JobInfo(error=error, **alike)
