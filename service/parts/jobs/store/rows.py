"""Rows of the tables as values, and values as bytes."""

import uuid
from collections.abc import Sequence
from typing import Any

import msgspec
from sqlalchemy import case

from inferpool.service.parts.jobs.records import (
    Job,
    JobAnswer,
    JobProblem,
    JobState,
    StoredInstance,
)
from inferpool.service.parts.jobs.store.tables import jobs

encode = msgspec.msgpack.Encoder().encode
decode_instances = msgspec.msgpack.Decoder(list[StoredInstance]).decode
decode_answers = msgspec.msgpack.Decoder(list[JobAnswer]).decode

_OTHER = {"id", "versions", "problem", "parameters"}
_SAME = [name for name in Job.__struct_fields__ if name not in _OTHER]
"""Fields of a job that have a column of their name, and its value."""


def job_of(row: Any) -> Job:
    """Return a row of the table of jobs as a value."""
    problem = None
    if row.problem_code is not None:
        problem = JobProblem(code=row.problem_code, message=row.problem_message)
    return Job(
        id=row.name,
        versions=tuple(map(int, row.versions.split(","))) if row.versions else (),
        problem=problem,
        parameters=bytes(row.parameters),
        **{name: getattr(row, name) for name in _SAME},
    )


def ended(
    state: JobState, problem: JobProblem | None, now: float, retention_s: float
) -> dict[str, object]:
    """Return the columns of a job that has just ended."""
    return {
        "state": state,
        "ended_at": now,
        "expires_at": now + retention_s,
        "problem_code": problem and problem.code,
        "problem_message": problem and problem.message,
        "webhook_due": case((jobs.c.webhook.is_not(None), now)),
    }


def payload_name(part: int) -> str:
    """Return the name of the file with a part's payload."""
    return f"{part}.in"


def result_name(part: int, token: str) -> str:
    """Return the name of the file with a part's result, which only one lease can write."""
    return f"{part}.{token}.out"


def new_token() -> str:
    """Return a name that nothing else has: no lease, no folder."""
    return uuid.uuid4().hex


def count_failed(answers: Sequence[JobAnswer]) -> int:
    """Return how many instances have an error."""
    return sum(answer.problem is not None for answer in answers)
