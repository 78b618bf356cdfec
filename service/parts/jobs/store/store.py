"""Stores jobs durably, and shows them.

Each method is one transaction and may be called by any thread; `leases.py` describes the locks.
"""

from collections.abc import Collection, Iterator, Sequence
from typing import Any, Self

import msgspec
from sqlalchemy import ColumnElement, case, func, select, update
from sqlalchemy.engine import Connection, Row

from inferpool.service.errors import InternalError, ServiceError, StartError
from inferpool.service.parts.jobs.records import (
    STATES,
    UNFINISHED,
    DueWebhook,
    Job,
    JobAnswer,
    JobProblem,
    JobState,
    NewJob,
    StoreCounts,
    StoreLimits,
    WaitingWebhook,
)
from inferpool.service.parts.jobs.store.database import Database, told
from inferpool.service.parts.jobs.store.files import PartFiles
from inferpool.service.parts.jobs.store.folder import HeldFolder
from inferpool.service.parts.jobs.store.leases import PartLeases, lock_jobs, lock_parts
from inferpool.service.parts.jobs.store.rows import (
    decode_answers,
    ended,
    job_of,
    payload_name,
    result_name,
)
from inferpool.service.parts.jobs.store.tables import is_accepted, is_unfinished, jobs, parts
from inferpool.service.parts.jobs.store.writer import JobWriter, find_former

_ABANDONED_S = 600.0
_PAGE_PARTS = 16
"""Parts whose results are read at once."""
_SHRUNK_AT_ONCE = 128
"""Steps of 1 MiB by which SQLite's file shrinks each time that the store is cleaned."""
_DELETED_AT_ONCE = 20
"""Jobs; each may have 15,625 parts, and everybody else waits meanwhile."""


class JobStore:
    """The jobs of one service, or of all services that share a PostgreSQL database."""

    def __init__(self, database: Database, limits: StoreLimits) -> None:
        self._database = database
        self._limits = limits
        folder = database.folder
        self._files = PartFiles(None if folder is None else folder / "parts")
        self.leases = PartLeases(database, self._files, limits)

    @classmethod
    def open(cls, place: str, limits: StoreLimits, held: HeldFolder | None = None) -> Self:
        """Open the store at a folder or a URL `postgresql://…`, and bring its tables up to date.

        `held` is the folder, if it is held already.

        Raises:
            StartError: It cannot be used; the message says why.
        """
        database = Database(place, held)
        try:
            store = cls(database, limits)
            if database.folder is not None:  # all leases and writers were those of a dead one
                store._forget_dead()
        except (ServiceError, OSError) as error:  # such as a full disk
            database.close()
            raise StartError(f"the store of jobs {place}: {error}") from error
        return store

    def close(self) -> None:
        """Close the database. Other calls are over."""
        self._database.close()

    def check(self) -> None:
        """Check that it can be used; see `Database.check`."""
        self._database.check()

    @property
    def may_be_opened(self) -> bool:
        """After the folder was gone, the store can be opened again without losing anything."""
        file = self._database.file
        return file is None or file.may_be_opened

    def begin(self, new: NewJob, now: float) -> JobWriter:
        """Return a writer for the instances of a new job."""
        return JobWriter(self._database, self._files, new, self._limits, now)

    def job(self, id: str, owner: str = "") -> Job | None:
        """Return a job of an owner."""
        with self._database.reading() as connection:
            row = connection.execute(select(jobs).where(_is(id, owner))).first()
        return None if row is None else job_of(row)

    def former(self, new: NewJob) -> Job | None:
        """Return the job that the same call has made before.

        Raises:
            IdempotencyError: Another call has made a job with this id or key.
        """
        with self._database.reading() as connection:
            return find_former(connection, new)

    def jobs(
        self,
        *,
        owner: str = "",
        states: Sequence[JobState] = STATES,
        limit: int,
        before: str | None = None,
    ) -> Sequence[Job]:
        """Return jobs of an owner, the newest first.

        `before` is the id of the last one of the page before.
        """
        wanted = select(jobs).where(is_accepted, jobs.c.owner == owner, jobs.c.state.in_(states))
        if before is not None:
            number = select(jobs.c.number).where(_is(before, owner)).scalar_subquery()
            wanted = wanted.where(jobs.c.number < number)
        with self._database.reading() as connection:
            found = connection.execute(wanted.order_by(jobs.c.number.desc()).limit(limit))
            return [job_of(row) for row in found]

    def cancel(self, id: str, now: float, owner: str = "") -> Job | None:
        """End a job that is not over; return it as it is now, or None if there is none."""
        is_this = _is(id, owner)
        problem = JobProblem(code="cancelled", message="the job was cancelled")
        with self._database.writing() as connection:
            values = ended("cancelled", problem, now, self._limits.retention_s)
            connection.execute(update(jobs).where(is_this, is_unfinished).values(values))
            row = connection.execute(select(jobs).where(is_this)).first()
        return None if row is None else job_of(row)

    def delete(self, id: str, owner: str = "") -> None:
        """Remove a job in any state, with all that it has."""
        self._delete(_is(id, owner))

    def fail_jobs(self, model: str, problem: JobProblem, now: float) -> Sequence[Job]:
        """End all unfinished jobs of a model, with a problem for what is not computed."""
        num_left = jobs.c.num_instances - jobs.c.num_done
        values = ended("failed", problem, now, self._limits.retention_s) | {
            "state": case((jobs.c.num_done > jobs.c.num_failed, "succeeded"), else_="failed"),
            "num_failed": jobs.c.num_failed + num_left,
            "num_done": jobs.c.num_instances,
        }
        are_these = is_unfinished & (jobs.c.model == model)
        failed = update(jobs).where(are_these).values(values).returning(*jobs.c)
        with self._database.writing() as connection:
            lock_jobs(connection, are_these)
            return [job_of(row) for row in connection.execute(failed)]

    def answers(
        self, id: str, first: int = 0, count: int | None = None, owner: str = ""
    ) -> Iterator[tuple[int, JobAnswer, int]]:
        """Yield index, answer and version of the instances that have an answer, in order.

        What was not computed when its job ended has the job's problem for an answer. A job that is
        deleted meanwhile yields no more of them, even if a new job has its id.
        """
        end = None if count is None else first + count
        number = -1
        is_this = _is(id, owner)
        while True:
            with self._database.reading() as connection:
                row = connection.execute(select(jobs).where(is_this)).first()
                if row is None:
                    return
                is_this = jobs.c.number == row.number
                wanted = (
                    select(parts)
                    .where(parts.c.job == row.number, parts.c.number > number)
                    .where(parts.c.first + parts.c.num_instances > first)
                    .where(parts.c.first < (row.num_instances if end is None else end))
                    .order_by(parts.c.number)
                    .limit(_PAGE_PARTS)
                )
                page = connection.execute(wanted).all()
            if not page:
                return
            job = job_of(row)
            for part in page:
                number = part.number
                answers = self._answers_of(job, row.folder, part)
                for index, answer in enumerate(answers, part.first):
                    if first <= index and (end is None or index < end):
                        yield index, answer, part.version

    def clean(self, now: float, abandoned_s: float = _ABANDONED_S) -> int:
        """Delete expired jobs, and those that lost their writer; return how many.

        A job on its way that got no part for `abandoned_s` seconds has lost its writer.
        """
        is_abandoned = ~is_accepted & (jobs.c.leased_at < self._database.clock - abandoned_s)
        num_deleted = 0
        while num := self._delete((jobs.c.expires_at <= now) | is_abandoned):
            num_deleted += num
        for _ in range(_SHRUNK_AT_ONCE):
            if not self._database.shrink():
                break
        return num_deleted

    def counts(self) -> StoreCounts:
        """Return how much the store holds."""
        num_left = func.sum(jobs.c.num_instances - jobs.c.num_done)
        with self._database.reading() as connection:
            rows = connection.execute(
                select(jobs.c.state, func.count(), num_left, func.sum(jobs.c.num_bytes))
                .where(is_accepted)
                .group_by(jobs.c.state)
            ).all()
        return StoreCounts(
            jobs={state: sum(row[1] for row in rows if row[0] == state) for state in STATES},
            num_waiting=sum(int(row[2]) for row in rows if row[0] in UNFINISHED),
            num_bytes=sum(int(row[3]) for row in rows),
        )

    def waiting_webhooks(
        self, limit: int, now: float, busy: Collection[str]
    ) -> Sequence[WaitingWebhook]:
        """Return calls to webhooks that are due: of owners in turn, and of their receivers in turn.

        Args:
            limit: The most of them.
            now: The time.
            busy: Receivers that are not to be called now.
        """
        is_due = (jobs.c.webhook_due <= now) & jobs.c.receiver.not_in(busy)
        oldest_first = func.row_number().over(
            partition_by=jobs.c.receiver, order_by=jobs.c.webhook_due
        )
        columns = jobs.c["number", "owner", "receiver", "webhook_due", "webhook_attempts"]
        due = select(*columns, oldest_first.label("turn")).where(is_due).subquery()
        turn = func.row_number().over(
            partition_by=due.c.owner,
            order_by=(due.c.turn, due.c.webhook_attempts, due.c.webhook_due),
        )
        wanted = select(*due.c["number", "owner", "receiver"]).order_by(turn).limit(limit)
        with self._database.reading() as connection:
            return [
                WaitingWebhook(number=row.number, owner=row.owner, receiver=row.receiver)
                for row in connection.execute(wanted)
            ]

    def take_webhooks(
        self, calls: Sequence[WaitingWebhook], lease_s: float, now: float
    ) -> Sequence[DueWebhook]:
        """Lease the calls that are due still, for `lease_s`."""
        by_number = {call.number: call for call in calls}
        due = (
            select(jobs)
            .where(jobs.c.number.in_(by_number), jobs.c.webhook_due <= now)
            .with_for_update(skip_locked=True)
        )
        with self._database.writing() as connection:
            rows = connection.execute(due).all()
            numbers = [row.number for row in rows]
            connection.execute(
                update(jobs).where(jobs.c.number.in_(numbers)).values(webhook_due=now + lease_s)
            )
        return [
            DueWebhook(
                call=by_number[row.number], job=job_of(row), num_attempts=row.webhook_attempts
            )
            for row in rows
        ]

    def note_webhook(self, number: int, next_at: float | None) -> None:
        """Store when a webhook is tried next after an attempt that failed; None: never again."""
        with self._database.writing() as connection:
            connection.execute(
                update(jobs)
                .where(jobs.c.number == number)
                .values(webhook_due=next_at, webhook_attempts=jobs.c.webhook_attempts + 1)
            )

    def postpone_webhooks(self, receiver: str, until: float) -> None:
        """Postpone all calls to a receiver until a moment."""
        with self._database.writing() as connection:
            is_earlier = (jobs.c.receiver == receiver) & (jobs.c.webhook_due < until)
            connection.execute(update(jobs).where(is_earlier).values(webhook_due=until))

    def _answers_of(self, job: Job, folder: str, part: Row[Any]) -> Sequence[JobAnswer]:
        if part.result_token is None:
            problem = job.problem if job.is_over else None
            return [JobAnswer(value=b"", problem=problem)] * part.num_instances if problem else []
        outcome = part.result
        if outcome is None:
            with told():
                outcome = self._files.read(folder, result_name(part.number, part.result_token))
            if outcome is None:
                self._database.check_file()
        try:
            return decode_answers(outcome or b"")
        except msgspec.MsgspecError:
            if self.job(job.id, job.owner) is None:  # it was deleted meanwhile
                return []
            problem = JobProblem(
                code=InternalError.code, message="the store has lost this answer; send it again"
            )
            return [JobAnswer(value=b"", problem=problem)] * part.num_instances

    def _delete(self, which: ColumnElement[bool]) -> int:
        """Delete at most `_DELETED_AT_ONCE` jobs, so that others need not wait long."""
        some = select(jobs.c.number).where(which).limit(_DELETED_AT_ONCE)
        with self._database.writing() as connection:
            are_these = jobs.c.number.in_(connection.scalars(some).all())
            lock_parts(connection, parts.c.job.in_(select(jobs.c.number).where(are_these)))
            lock_jobs(connection, are_these)
            deleted = jobs.delete().where(are_these, which).returning(jobs.c.folder)
            folders = connection.scalars(deleted).all()
        for folder in folders:
            self._files.remove_all(folder)
        return len(folders)

    def _forget_dead(self) -> None:
        """Free what a former service of this folder had leased or begun to write."""
        with self._database.writing() as connection:
            connection.execute(jobs.delete().where(~is_accepted))
            connection.execute(
                update(parts).where(parts.c.leased_until > 0).values(leased_until=0.0, token=None)
            )
            connection.execute(update(jobs).where(is_unfinished).values(leased_at=0.0))
        with self._database.reading() as connection:
            for folder in self._files.jobs():
                is_it = jobs.c.folder == folder
                number = connection.scalar(select(jobs.c.number).where(is_it))
                if number is None:
                    self._files.remove_all(folder)
                else:
                    self._files.keep_only(folder, _names_of(connection, number))


def _names_of(connection: Connection, job: int) -> set[str]:
    columns = parts.c["number", "result_token"]
    is_payload = parts.c.payload.is_(None) & parts.c.result_token.is_(None)
    is_result = parts.c.result.is_(None) & parts.c.result_token.is_not(None)
    rows = connection.execute(select(*columns).where(parts.c.job == job, is_payload | is_result))
    return {
        payload_name(row.number)
        if row.result_token is None
        else result_name(row.number, row.result_token)
        for row in rows
    }


def _is(id: str, owner: str) -> ColumnElement[bool]:
    """Return the condition that a job has this owner and id."""
    return (jobs.c.owner == owner) & (jobs.c.name == id)
