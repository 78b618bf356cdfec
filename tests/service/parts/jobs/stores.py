"""Fills stores of jobs, computes what they lease, and reads the results."""

from collections.abc import Sequence
from typing import Any, Literal, NoReturn

import pytest

from inferpool.service.errors import UnavailableError
from inferpool.service.parts.jobs.records import (
    Job,
    JobAnswer,
    LeasedPart,
    LeaseRoom,
    NewJob,
    PartResult,
    StoredInstance,
)
from inferpool.service.parts.jobs.store.store import JobStore

NOW = 1_000_000.0


def new_job(id: str = "a", **changes: object) -> NewJob:
    values: dict[str, object] = {"model": "m", "body_digest": "d"} | changes
    return NewJob(id=id, **values)  # type: ignore[arg-type]  # values of many types


def instance(number: int, num_bytes: int = 0) -> StoredInstance:
    return StoredInstance(kind="json", payload=str(number).encode().ljust(num_bytes))


def add(
    store: JobStore, num: int = 3, *, num_bytes: int = 0, id: str = "a", **changes: object
) -> tuple[Job, bool]:
    with store.begin(new_job(id, **changes), NOW) as writer:
        for number in range(num):
            writer.add(instance(number, num_bytes))
        return writer.commit(NOW)


def take(
    store: JobStore,
    num_parts: int = 9,
    *,
    lease_s: float = 60.0,
    now: float = NOW,
    model: str = "m",
) -> Sequence[LeasedPart]:
    """Lease some parts, whatever their size."""
    room = LeaseRoom(num_instances=10**6, num_bytes=2**40, num_parts=num_parts)
    return store.leases.lease({model}, room, lease_s, now)


def compute(part: LeasedPart, version: int = 1, num_bytes: int = 0) -> PartResult:
    """Double each number."""
    return PartResult(
        answers=[
            JobAnswer(value=b"%d" % (2 * int(each.payload)) + b" " * num_bytes)
            for each in part.instances
        ],
        version=version,
    )


def finish(store: JobStore, now: float = NOW) -> None:
    while leased := take(store, 4, now=now):
        for part in leased:
            assert store.leases.commit_part(part, compute(part), now) is not None


def values(store: JobStore, id: str = "a", first: int = 0, count: int | None = None) -> list[int]:
    return [int(answer.value) for _, answer, _ in store.answers(id, first, count)]


class FailingCommits:
    """Makes commits of a store fail, before they are done or after.

    Whoever commits cannot tell which, as after a lost connection or an error of the disk.
    """

    def __init__(self, store: JobStore, monkeypatch: pytest.MonkeyPatch) -> None:
        self._plan: list[str] = []
        engine = store._database._engine
        commit = engine.dialect.do_commit
        error = engine.dialect.loaded_dbapi.OperationalError

        def do_commit(connection: Any) -> None:
            plan = self._plan.pop(0) if self._plan else ""
            if plan != "before":
                commit(connection)
            if plan:
                raise error("made to fail")

        monkeypatch.setattr(engine.dialect, "do_commit", do_commit)

    def plan(self, *failures: Literal["before", "after", ""]) -> None:
        """Decide about the next commits of transactions; "" lets one succeed."""
        self._plan = list(failures)

    def unavailable(self) -> NoReturn:
        """Stand for a method that needs a connection."""
        raise UnavailableError("made to fail")
