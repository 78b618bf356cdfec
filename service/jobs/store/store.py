"""Keeps jobs through crashes, and leases their parts to the services that compute them.

Each method is one transaction and may be called by any thread. Transactions lock a part before its
job, so that services on the same database cannot wait for each other.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Self

from sqlalchemy import ColumnElement, and_, case, func, select, update
from sqlalchemy.engine import Connection, Row

from inferpool.service.errors import ServiceError, StartError
from inferpool.service.jobs.records import (
    STATES,
    UNFINISHED,
    DueWebhook,
    Job,
    JobAnswer,
    JobProblem,
    JobState,
    LeasedPart,
    NewJob,
    PartResult,
    StoreCounts,
    StoreLimits,
)
from inferpool.service.jobs.store.database import Database
from inferpool.service.jobs.store.files import PartFiles
from inferpool.service.jobs.store.rows import (
    count_failed,
    decode_answers,
    decode_instances,
    encode,
    job_of,
    new_token,
    payload_name,
    result_name,
)
from inferpool.service.jobs.store.tables import jobs, parts
from inferpool.service.jobs.store.writer import JobWriter

_ABANDONED_S = 600.0
"""A job on its way that got no part for so long has lost its writer."""
_PAGE_PARTS = 16
"""Parts whose results are read at once."""
_DELETED_AT_ONCE = 100

_is_accepted = jobs.c.id.is_not(None)
_is_unfinished = _is_accepted & jobs.c.state.in_(UNFINISHED)


class JobStore:
    """The jobs of one service, or of all services that share a PostgreSQL database."""

    def __init__(self, database: Database, limits: StoreLimits) -> None:
        self._database = database
        self._limits = limits
        folder = database.folder
        self._files = PartFiles(None if folder is None else folder / "parts")

    @classmethod
    def open(cls, place: str, limits: StoreLimits) -> Self:
        """Open the store at a folder or a URL `postgresql://…`, and bring its tables up to date.

        Raises:
            StartError: It cannot be used; the message says why.
        """
        database = Database(place)
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

    def begin(self, new: NewJob, now: float) -> JobWriter:
        """Return a writer for the instances of a new job."""
        return JobWriter(self._database, self._files, new, self._limits, now)

    def job(self, id: str, owner: str | None = None) -> Job | None:
        """Return a job, unless it is another owner's; None for `owner` means anyone's."""
        with self._database.reading() as connection:
            row = connection.execute(select(jobs).where(jobs.c.id == id, _of(owner))).first()
        return None if row is None else job_of(row)

    def keyed(self, owner: str, idempotency_key: str) -> Job | None:
        """Return the job that was made with an idempotency key."""
        has_key = (jobs.c.owner == owner) & (jobs.c.idempotency_key == idempotency_key)
        with self._database.reading() as connection:
            row = connection.execute(select(jobs).where(has_key, _is_accepted)).first()
        return None if row is None else job_of(row)

    def jobs(
        self,
        *,
        owner: str | None = None,
        states: Sequence[JobState] = STATES,
        limit: int,
        before: str | None = None,
    ) -> Sequence[Job]:
        """Return jobs, the newest first; `before` is the id of the last one of the page before."""
        wanted = select(jobs).where(_of(owner), _is_accepted, jobs.c.state.in_(states))
        if before is not None:
            number = select(jobs.c.number).where(jobs.c.id == before).scalar_subquery()
            wanted = wanted.where(jobs.c.number < number)
        with self._database.reading() as connection:
            found = connection.execute(wanted.order_by(jobs.c.number.desc()).limit(limit))
            return [job_of(row) for row in found]

    def lease(
        self, models: Collection[str], limit: int, lease_s: float, now: float
    ) -> Sequence[LeasedPart]:
        """Take parts of jobs that nobody computes, of the most urgent jobs in turn.

        Args:
            models: The models that can compute now.
            limit: The most parts.
            lease_s: How long they are this service's alone, unless it renews the lease.
            now: The time.
        """
        is_free = and_(parts.c.job == jobs.c.number, parts.c.leased_until <= now)
        wanted = (
            select(jobs.c.number)
            .where(_is_unfinished, jobs.c.model.in_(models))
            .where(select(parts.c.number).where(is_free).exists())
            .order_by(jobs.c.priority, jobs.c.leased_at, jobs.c.number)
            .limit(limit)
        )
        with self._database.reading() as connection:
            numbers = connection.scalars(wanted).all()
        leased: list[LeasedPart] = []
        for index, number in enumerate(numbers):
            share = max(1, (limit - len(leased)) // (len(numbers) - index))
            leased += self._lease_of(number, min(share, limit - len(leased)), now + lease_s, now)
            if len(leased) >= limit:
                break
        return leased

    def renew(self, tokens: Collection[str], lease_s: float, now: float) -> set[str]:
        """Prolong leases, and return those that still hold: of unfinished jobs, not taken over."""
        held = select(jobs.c.number).where(_is_unfinished)
        renewed = (
            update(parts)
            .where(parts.c.token.in_(tokens), parts.c.job.in_(held))
            .where(parts.c.leased_until.is_not(None))
            .values(leased_until=now + lease_s)
            .returning(parts.c.token)
        )
        with self._database.writing() as connection:
            return set(connection.scalars(renewed))

    def give_back(self, tokens: Collection[str]) -> None:
        """Let others compute parts at once that this service does not finish."""
        with self._database.writing() as connection:
            connection.execute(
                update(parts)
                .where(parts.c.token.in_(tokens), parts.c.leased_until.is_not(None))
                .values(leased_until=0.0, token=None)
            )

    def commit_part(self, part: LeasedPart, result: PartResult, now: float) -> Job | None:
        """Keep the results of a part for good, and end the job with its last one.

        Returns:
            The job as it is now; None if the part was taken over, or the job is over or deleted.

        Raises:
            StoreFullError: There is no room; the part is leased on.
        """
        outcome = encode(result.answers)
        name = None
        if self._files.takes(outcome):
            name = result_name(part.number, part.token)
        try:
            with self._database.writing() as connection:
                job = self._commit(connection, part, result, outcome, name, now)
        except BaseException:
            if name is not None:
                self._files.remove(part.row, name)
            raise
        if job is not None:
            self._files.remove(part.row, payload_name(part.number))
        return job

    def cancel(self, id: str, now: float) -> Job | None:
        """End a job that is not over; return it as it is now, or None if there is none."""
        problem = JobProblem(code="cancelled", message="the job was cancelled")
        with self._database.writing() as connection:
            values = self._ended("cancelled", problem, now)
            connection.execute(update(jobs).where(jobs.c.id == id, _is_unfinished).values(values))
            row = connection.execute(select(jobs).where(jobs.c.id == id)).first()
        return None if row is None else job_of(row)

    def delete(self, id: str) -> None:
        """Remove a job and all that it has, whatever its state."""
        self._delete(jobs.c.id == id)

    def fail_jobs(self, model: str, problem: JobProblem, now: float) -> Sequence[Job]:
        """End all unfinished jobs of a model, with a problem for what is not computed."""
        num_left = jobs.c.num_instances - jobs.c.num_done
        values = self._ended("failed", problem, now) | {
            "state": case((jobs.c.num_done > jobs.c.num_failed, "succeeded"), else_="failed"),
            "num_failed": jobs.c.num_failed + num_left,
            "num_done": jobs.c.num_instances,
        }
        ended = update(jobs).where(jobs.c.model == model, _is_unfinished).values(values)
        with self._database.writing() as connection:
            return [job_of(row) for row in connection.execute(ended.returning(*jobs.c))]

    def answers(
        self, id: str, first: int = 0, count: int | None = None
    ) -> Iterator[tuple[int, JobAnswer, int]]:
        """Yield index, answer and version of the instances that have an answer, in order.

        What was not computed when its job ended has the job's problem for an answer.
        """
        end = None if count is None else first + count
        number = -1
        while True:
            with self._database.reading() as connection:
                row = connection.execute(select(jobs).where(jobs.c.id == id)).first()
                if row is None:
                    return
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
                for index, answer in enumerate(self._answers_of(job, part), part.first):
                    if first <= index and (end is None or index < end):
                        yield index, answer, part.version

    def clean(self, now: float) -> int:
        """Delete jobs whose time is over, and those that lost their writer; return how many."""
        is_abandoned = jobs.c.id.is_(None) & (jobs.c.leased_at < now - _ABANDONED_S)
        num_deleted = 0
        while num := self._delete((jobs.c.expires_at <= now) | is_abandoned):
            num_deleted += num
        return num_deleted

    def counts(self) -> StoreCounts:
        """Return how much the store holds."""
        num_left = func.sum(jobs.c.num_instances - jobs.c.num_done)
        with self._database.reading() as connection:
            rows = connection.execute(
                select(jobs.c.state, func.count(), num_left, func.sum(jobs.c.num_bytes))
                .where(_is_accepted)
                .group_by(jobs.c.state)
            ).all()
        return StoreCounts(
            jobs={state: sum(row[1] for row in rows if row[0] == state) for state in STATES},
            num_waiting=sum(int(row[2]) for row in rows if row[0] in UNFINISHED),
            num_bytes=sum(int(row[3]) for row in rows),
        )

    def waiting_models(self) -> Mapping[str, int]:
        """Return how many instances of unfinished jobs have no answer yet, by model."""
        num_left = func.sum(jobs.c.num_instances - jobs.c.num_done)
        wanted = select(jobs.c.model, num_left).where(_is_unfinished).group_by(jobs.c.model)
        with self._database.reading() as connection:
            return {model: int(num) for model, num in connection.execute(wanted)}

    def due_webhooks(self, limit: int, lease_s: float, now: float) -> Sequence[DueWebhook]:
        """Take jobs whose webhook must be told now; nobody else takes them for `lease_s`."""
        due = (
            select(jobs)
            .where(jobs.c.webhook_due <= now)
            .order_by(jobs.c.webhook_due)
            .limit(limit)
            .with_for_update(skip_locked=True)
        )
        with self._database.writing() as connection:
            rows = connection.execute(due).all()
            numbers = [row.number for row in rows]
            connection.execute(
                update(jobs).where(jobs.c.number.in_(numbers)).values(webhook_due=now + lease_s)
            )
        return [DueWebhook(job=job_of(row), num_attempts=row.webhook_attempts) for row in rows]

    def note_webhook(self, id: str, next_at: float | None) -> None:
        """Keep when a webhook is tried next after an attempt that failed; None: never again."""
        with self._database.writing() as connection:
            connection.execute(
                update(jobs)
                .where(jobs.c.id == id)
                .values(webhook_due=next_at, webhook_attempts=jobs.c.webhook_attempts + 1)
            )

    def _lease_of(self, job: int, limit: int, until: float, now: float) -> list[LeasedPart]:
        with self._database.writing() as connection:
            free = connection.execute(
                select(parts)
                .where(parts.c.job == job, parts.c.leased_until <= now)
                .order_by(parts.c.number)
                .limit(limit)
                .with_for_update(skip_locked=True)
            ).all()
            if not free:
                return []
            row = connection.execute(
                update(jobs)
                .where(jobs.c.number == job, _is_unfinished)
                .values(
                    state="running",
                    leased_at=now,
                    started_at=func.coalesce(jobs.c.started_at, now),
                )
                .returning(*jobs.c)
            ).first()
            if row is None:
                return []
            leased = []
            for part in free:
                token = new_token()
                connection.execute(
                    update(parts)
                    .where(parts.c.job == job, parts.c.number == part.number)
                    .values(leased_until=until, token=token)
                )
                payload = part.payload
                if payload is None:
                    payload = self._files.read(job, payload_name(part.number))
                leased.append(
                    LeasedPart(
                        job=job_of(row),
                        row=job,
                        number=part.number,
                        first=part.first,
                        token=token,
                        instances=decode_instances(payload),
                    )
                )
        return leased

    def _commit(
        self,
        connection: Connection,
        part: LeasedPart,
        result: PartResult,
        outcome: bytes,
        name: str | None,
        now: float,
    ) -> Job | None:
        is_mine = (parts.c.job == part.row) & (parts.c.number == part.number)
        is_mine &= (parts.c.token == part.token) & parts.c.leased_until.is_not(None)
        held = connection.execute(select(parts.c.num_bytes).where(is_mine).with_for_update())
        num_bytes = held.scalar()
        is_this = (jobs.c.number == part.row) & _is_unfinished
        row = connection.execute(select(jobs).where(is_this).with_for_update()).first()
        if num_bytes is None or row is None:
            return None
        if name is not None:
            self._files.write(part.row, name, outcome)
        connection.execute(
            update(parts)
            .where(is_mine)
            .values(
                payload=None,
                result=outcome if name is None else None,
                result_token=part.token,
                token=None,
                leased_until=None,
                num_bytes=len(outcome),
                version=result.version,
            )
        )
        num_failed = row.num_failed + count_failed(result.answers)
        num_done = row.num_done + len(result.answers)
        versions = set(job_of(row).versions) | ({result.version} - {0})
        values = {
            "num_done": num_done,
            "num_failed": num_failed,
            "num_bytes": row.num_bytes - num_bytes + len(outcome),
            "num_parts_left": row.num_parts_left - 1,
            "versions": ",".join(map(str, sorted(versions))),
        }
        if row.num_parts_left == 1:
            state: JobState = "failed" if num_failed == num_done else "succeeded"
            values |= self._ended(state, None, now)
        changed = update(jobs).where(jobs.c.number == part.row).values(values)
        return job_of(connection.execute(changed.returning(*jobs.c)).one())

    def _ended(self, state: JobState, problem: JobProblem | None, now: float) -> dict[str, object]:
        """Return the columns of a job that has just ended."""
        return {
            "state": state,
            "ended_at": now,
            "expires_at": now + self._limits.retention_s,
            "problem_code": problem and problem.code,
            "problem_message": problem and problem.message,
            "webhook_due": case((jobs.c.webhook.is_not(None), now)),
        }

    def _answers_of(self, job: Job, part: Row[Any]) -> Sequence[JobAnswer]:
        if part.result_token is None:
            problem = job.problem if job.is_over else None
            return [JobAnswer(value=b"", problem=problem)] * part.num_instances if problem else []
        outcome = part.result
        if outcome is None:
            name = result_name(part.number, part.result_token)
            try:
                outcome = self._files.read(part.job, name)
            except FileNotFoundError:  # the job was deleted meanwhile
                return []
        return decode_answers(outcome)

    def _delete(self, which: ColumnElement[bool]) -> int:
        """Delete at most `_DELETED_AT_ONCE` jobs, so that others need not wait long."""
        with self._database.writing() as connection:
            numbers = connection.scalars(
                select(jobs.c.number).where(which).limit(_DELETED_AT_ONCE)
            ).all()
            held = select(parts.c.number).where(parts.c.job.in_(numbers))
            connection.execute(held.order_by(parts.c.job, parts.c.number).with_for_update())
            connection.execute(jobs.delete().where(jobs.c.number.in_(numbers)))
        for number in numbers:
            self._files.remove_all(number)
        return len(numbers)

    def _forget_dead(self) -> None:
        """Free what a former service of this folder had leased or begun to write."""
        with self._database.writing() as connection:
            connection.execute(jobs.delete().where(jobs.c.id.is_(None)))
            connection.execute(
                update(parts).where(parts.c.leased_until > 0).values(leased_until=0.0, token=None)
            )
            self._files.keep_only(set(connection.scalars(select(jobs.c.number))))


def _of(owner: str | None) -> ColumnElement[bool]:
    """Return the condition that a job is an owner's, or anyone's if that is None."""
    return jobs.c.id.is_not(None) if owner is None else jobs.c.owner == owner
