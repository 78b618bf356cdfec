"""Leases parts of jobs to the services that compute them, and keeps the results.

Each method is one transaction and may be called by any thread. Services on the same database cannot
wait for each other in a circle: a transaction locks parts before jobs, and each by its number.
"""

from collections.abc import Collection, Sequence
from typing import Any

import msgspec
from sqlalchemy import ColumnElement, and_, bindparam, func, select, update
from sqlalchemy.engine import Connection, Row

from inferpool.service.errors import InternalError, StoreFullError
from inferpool.service.parts.jobs.records import (
    UNFINISHED,
    Job,
    JobProblem,
    JobState,
    LeasedPart,
    LeaseRoom,
    PartResult,
    StoredInstance,
    StoreLimits,
)
from inferpool.service.parts.jobs.store.database import Database, told
from inferpool.service.parts.jobs.store.files import PartFiles
from inferpool.service.parts.jobs.store.rows import (
    count_failed,
    decode_instances,
    encode,
    ended,
    job_of,
    new_token,
    payload_name,
    result_name,
)
from inferpool.service.parts.jobs.store.tables import is_unfinished, jobs, parts


class PartLeases:
    """Leases parts of the jobs in the store, and commits their results."""

    def __init__(self, database: Database, files: PartFiles, limits: StoreLimits) -> None:
        self._database = database
        self._files = files
        self._limits = limits

    def lease(
        self, models: Collection[str], room: LeaseRoom, lease_s: float, now: float
    ) -> Sequence[LeasedPart]:
        """Lease parts of jobs that nobody computes: of owners in turn, and of their jobs in turn.

        The most urgent jobs of an owner come first; no priority moves it before another owner.

        Args:
            models: The models that can compute now.
            room: How much to take, and what owners have already.
            lease_s: How long they are this service's alone, unless it renews the lease.
            now: The time.
        """
        leased_at = func.max(jobs.c.leased_at).label("leased_at")
        with_free = self._with_free_parts(models)
        wanted = select(jobs.c.owner, leased_at).where(with_free).group_by(jobs.c.owner)
        with self._database.reading() as connection:
            rows = connection.execute(wanted).all()
        if not rows:
            return []
        rows = sorted(rows, key=lambda row: (_num_held(room, row.owner), row.leased_at))
        with self._database.writing() as connection:
            owners = [row.owner for row in rows]
            taken = self._take_in_turn(connection, owners, with_free, room)
            leased = self._note_leased(connection, {part.job for part in taken}, now)
            taken = [part for part in taken if part.job in leased]
            tokens = [new_token() for _ in taken]
            self._note_tokens(connection, taken, tokens, lease_s)
        return [
            LeasedPart(
                job=job_of(leased[part.job]),
                row=part.job,
                number=part.number,
                first=part.first,
                token=token,
                num_bytes=part.num_bytes,
                instances=self._instances_of(part, leased[part.job].folder),
            )
            for part, token in zip(taken, tokens, strict=True)
        ]

    def renew(self, tokens: Collection[str], lease_s: float) -> set[str]:
        """Prolong leases, and return those that still hold: of unfinished jobs, not taken over."""
        held = select(jobs.c.number).where(is_unfinished)
        are_these = parts.c.token.in_(tokens) & parts.c.job.in_(held)
        with self._database.writing() as connection:
            lock_parts(connection, are_these)
            renewed = update(parts).where(are_these)
            renewed = renewed.values(leased_until=self._database.clock + lease_s)
            return set(connection.scalars(renewed.returning(parts.c.token)))

    def give_back(self, tokens: Collection[str]) -> None:
        """Return parts that this service does not finish, so that others can compute them."""
        are_these = parts.c.token.in_(tokens)
        with self._database.writing() as connection:
            lock_parts(connection, are_these)
            connection.execute(update(parts).where(are_these).values(leased_until=0.0, token=None))

    def commit_part(self, part: LeasedPart, result: PartResult, now: float) -> Job | None:
        """Commit the results of a part, and end the job with its last one.

        It may be called again if it is unknown whether it succeeded.

        Returns:
            The job as it is now; None if the part was taken over, or the job is over or deleted.

        Raises:
            StoreFullError: There is no room; the part is leased on.
            UnavailableError: The store cannot be used. The result may be kept all the same.
        """
        assert len(result.answers) == len(part.instances)
        outcome = encode(result.answers)
        name = None
        if self._files.takes(outcome):  # before the transaction, since a disk may take long
            name = result_name(part.number, part.token)
            with told():
                self._database.check_room(len(outcome), for_result=True)
                self._files.write(part.job.folder, {name: outcome})
        try:
            with self._database.writing() as connection:
                job, is_there = self._commit(connection, part, result, outcome, name, now)
        except StoreFullError:  # after other errors, the transaction may have succeeded
            if name is not None:
                self._files.remove(part.job.folder, name)
            raise
        if job is not None:
            self._files.remove(part.job.folder, payload_name(part.number))
        elif name is not None and is_there:
            self._files.remove(part.job.folder, name)
        elif name is not None:
            self._files.remove_all(part.job.folder)
        return job

    def _with_free_parts(self, models: Collection[str]) -> ColumnElement[bool]:
        """Return which jobs of some models have parts that nobody computes."""
        is_free = and_(parts.c.job == jobs.c.number, parts.c.leased_until <= self._database.clock)
        has_free = select(parts.c.number).where(is_free).exists()
        return and_(is_unfinished, jobs.c.model.in_(models), has_free)

    def _take_in_turn(
        self,
        connection: Connection,
        owners: Sequence[str],
        with_free: ColumnElement[bool],
        room: LeaseRoom,
    ) -> list[Row[Any]]:
        """Return free parts of the jobs of some owners. Each owner has its share of the room.

        The jobs of an owner are read when it is its turn: most often a few of them fill the room.
        """
        taken: list[Row[Any]] = []
        left = (room.num_instances, room.num_bytes, room.num_parts)
        for index, owner in enumerate(owners):
            if min(left) <= 0:
                break
            own, num_owners = room.left_for(owner), len(owners) - index
            mine = (own.num_instances, own.num_bytes, own.num_parts)
            if min(mine) <= 0:
                continue
            most = [
                min(each, max(1, all_ // num_owners)) for each, all_ in zip(mine, left, strict=True)
            ]
            urgent_first = (jobs.c.priority, jobs.c.leased_at, jobs.c.number)
            its_jobs = select(jobs.c.number).where(with_free, jobs.c.owner == owner)
            its_jobs = its_jobs.order_by(*urgent_first).limit(most[2])
            parts_of_owner = self._take(
                connection,
                connection.scalars(its_jobs).all(),
                LeaseRoom(num_instances=most[0], num_bytes=most[1], num_parts=most[2]),
            )
            taken += parts_of_owner
            left = (
                left[0] - sum(part.num_instances for part in parts_of_owner),
                left[1] - sum(part.num_bytes for part in parts_of_owner),
                left[2] - len(parts_of_owner),
            )
        return taken

    def _take(
        self, connection: Connection, numbers: Sequence[int], room: LeaseRoom
    ) -> list[Row[Any]]:
        """Return free parts of some jobs in turn, locked until the transaction ends."""
        taken: list[Row[Any]] = []
        num_left, bytes_left = room.num_instances, room.num_bytes
        for index, number in enumerate(numbers):
            share = max(1, num_left // (len(numbers) - index))
            free = connection.execute(
                select(*parts.c["job", "number", "first", "num_instances", "num_bytes"])
                .where(parts.c.job == number, parts.c.leased_until <= self._database.clock)
                .order_by(parts.c.number)
                .limit(min(share, room.num_parts - len(taken)))
                .with_for_update(skip_locked=True)
            )
            for part in free.all():
                if share <= 0 or num_left <= 0 or bytes_left <= 0:
                    break
                share -= part.num_instances
                num_left -= part.num_instances
                bytes_left -= part.num_bytes
                taken.append(part)
            if len(taken) >= room.num_parts or num_left <= 0 or bytes_left <= 0:
                break
        return taken

    def _note_leased(
        self, connection: Connection, numbers: Collection[int], now: float
    ) -> dict[int, Row[Any]]:
        """Record that parts of jobs are leased; return the rows of jobs that are not over."""
        lock_jobs(connection, jobs.c.number.in_(numbers))
        leased = (
            update(jobs)
            .where(jobs.c.number.in_(numbers), is_unfinished)
            .values(
                state="running",
                leased_at=self._database.clock,
                started_at=func.coalesce(jobs.c.started_at, now),
            )
            .returning(*jobs.c)
        )
        return {row.number: row for row in connection.execute(leased)}

    def _note_tokens(
        self,
        connection: Connection,
        taken: Sequence[Row[Any]],
        tokens: Sequence[str],
        lease_s: float,
    ) -> None:
        if taken:
            connection.execute(
                update(parts)
                .where(parts.c.job == bindparam("of"), parts.c.number == bindparam("which"))
                .values(leased_until=self._database.clock + lease_s, token=bindparam("by")),
                [
                    {"of": part.job, "which": part.number, "by": token}
                    for part, token in zip(taken, tokens, strict=True)
                ],
            )

    def _instances_of(self, part: Row[Any], folder: str) -> Sequence[StoredInstance]:
        is_it = (parts.c.job == part.job) & (parts.c.number == part.number)
        with self._database.reading() as connection:
            payload = connection.scalar(select(parts.c.payload).where(is_it))
        if payload is None:
            with told():
                payload = self._files.read(folder, payload_name(part.number))
            if payload is None:
                self._database.check_file()
        try:
            return decode_instances(payload or b"")
        except msgspec.MsgspecError:
            problem = JobProblem(
                code=InternalError.code, message="the store has lost this input; send it again"
            )
            return [StoredInstance(kind=None, problem=problem)] * part.num_instances

    def _commit(
        self,
        connection: Connection,
        part: LeasedPart,
        result: PartResult,
        outcome: bytes,
        name: str | None,
        now: float,
    ) -> tuple[Job | None, bool]:
        """Return the job, if the result was kept, and whether there is a job."""
        is_it = (parts.c.job == part.row) & (parts.c.number == part.number)
        is_inside = parts.c.payload.is_not(None).label("is_inside")
        columns = *parts.c["num_bytes", "token", "result_token"], is_inside
        held = connection.execute(select(*columns).where(is_it).with_for_update()).first()
        is_this = jobs.c.number == part.row
        row = connection.execute(select(jobs).where(is_this).with_for_update()).first()
        if held is None or row is None:
            return None, False
        if held.result_token == part.token:  # by an earlier attempt
            return job_of(row), True
        if held.token != part.token or row.state not in UNFINISHED:
            return None, True
        if name is None and (more := len(outcome) - held.num_bytes * held.is_inside) > 0:
            self._database.check_room(more, connection, for_result=True)
        connection.execute(
            update(parts)
            .where(is_it)
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
            "num_bytes": row.num_bytes - held.num_bytes + len(outcome),
            "num_parts_left": row.num_parts_left - 1,
            "versions": ",".join(map(str, sorted(versions))),
        }
        if row.num_parts_left == 1:
            state: JobState = "failed" if num_failed == num_done else "succeeded"
            values |= ended(state, None, now, self._limits.retention_s)
        changed = update(jobs).where(is_this).values(values)
        return job_of(connection.execute(changed.returning(*jobs.c)).one()), True


def _num_held(room: LeaseRoom, owner: str) -> int:
    held = room.held.get(owner)
    return 0 if held is None else held.num_instances


def lock_parts(connection: Connection, which: ColumnElement[bool]) -> None:
    """Lock parts by their numbers; SQLite has one transaction that writes, and no such locks."""
    held = select(parts.c.number).where(which).order_by(parts.c.job, parts.c.number)
    if connection.dialect.name != "sqlite":
        connection.execute(held.with_for_update())


def lock_jobs(connection: Connection, which: ColumnElement[bool]) -> None:
    """Lock jobs in the same way."""
    held = select(jobs.c.number).where(which).order_by(jobs.c.number)
    if connection.dialect.name != "sqlite":
        connection.execute(held.with_for_update())
