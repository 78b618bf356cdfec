"""Writes a new job into the store, part by part, and accepts it as a whole."""

from types import TracebackType
from typing import Any, Self

from sqlalchemy import func, insert, select, update
from sqlalchemy.engine import Connection
from sqlalchemy.exc import IntegrityError

from inferpool.service.errors import IdempotencyError, InvalidInputError, OverQuotaError
from inferpool.service.jobs.records import (
    PART_BYTES,
    PART_INSTANCES,
    Job,
    NewJob,
    StoredInstance,
    StoreLimits,
)
from inferpool.service.jobs.store.database import Database
from inferpool.service.jobs.store.files import PartFiles
from inferpool.service.jobs.store.rows import encode, job_of, payload_name
from inferpool.service.jobs.store.tables import jobs, parts

_FLUSH_BYTES = 4 * PART_BYTES
"""Payload bytes that may wait in memory. A smaller job costs a single transaction."""


class JobWriter:
    """A job on its way into the store. Used by one thread, as a context manager.

    Nobody sees the job before `commit`; leaving without it discards what was written.
    """

    def __init__(
        self, database: Database, files: PartFiles, new: NewJob, limits: StoreLimits, now: float
    ) -> None:
        self._database = database
        self._files = files
        self._new = new
        self._limits = limits
        self._now = now
        self._row: int | None = None
        """The number of the job's row, once it is written."""
        self._part: list[StoredInstance] = []
        self._part_bytes = 0
        self._waiting: list[dict[str, Any]] = []
        """Whole parts that are not written yet."""
        self._waiting_bytes = 0
        self._num_parts = 0
        self._num_instances = 0
        self._num_bytes = 0

    def __enter__(self) -> Self:
        """Return the writer."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Discard what was written, unless it was accepted."""
        self.discard()

    def add(self, instance: StoredInstance) -> None:
        """Add the next instance.

        Raises:
            OverQuotaError: The key's jobs would take more bytes than they may.
            StoreFullError: The store has no room.
            UnavailableError: The store cannot be used.
        """
        self._part.append(instance)
        self._part_bytes += len(instance.payload)
        if len(self._part) >= PART_INSTANCES or self._part_bytes >= PART_BYTES:
            self._close_part()
            if self._waiting_bytes >= _FLUSH_BYTES:
                with self._database.writing() as connection:
                    self._write(connection)

    def commit(self, now: float) -> tuple[Job, bool]:
        """Accept the job: once this returns, neither a crash nor a power cut loses it.

        Returns:
            The job and True; or the one that the same call has made before, and False.

        Raises:
            IdempotencyError: Another call has made a job with this id or key.
            InvalidInputError: It has no instances.
            OverQuotaError: The key has all the jobs, or bytes of them, that it may have.
            StoreFullError: The store has no room.
            UnavailableError: The store cannot be used.
        """
        self._close_part()
        if not self._num_instances:
            raise InvalidInputError("the body has no instances; a job needs one at least")
        new = self._new
        try:
            with self._database.writing() as connection:
                if (former := self._former(connection)) is not None:
                    return former, False
                self._check_number(connection)
                self._write(connection)
                accepted = (
                    update(jobs)
                    .where(jobs.c.number == self._row)
                    .values(
                        id=new.id,
                        idempotency_key=new.idempotency_key,
                        num_instances=self._num_instances,
                        num_parts_left=self._num_parts,
                        created_at=now,
                        leased_at=0.0,
                    )
                    .returning(*jobs.c)
                )
                job = job_of(connection.execute(accepted).one())
        except IntegrityError:  # another service has just accepted it
            with self._database.reading() as connection:
                former = self._former(connection)
            if former is None:
                raise
            return former, False
        self._row = None
        return job, True

    def discard(self) -> None:
        """Remove what was written, unless it was accepted."""
        row, self._row = self._row, None
        if row is not None:
            with self._database.writing() as connection:
                connection.execute(jobs.delete().where(jobs.c.number == row))
            self._files.remove_all(row)

    def _former(self, connection: Connection) -> Job | None:
        """Return the job that this call has made before.

        Raises:
            IdempotencyError: Another call has made a job with this id or key.
        """
        new, is_same = self._new, jobs.c.id == self._new.id
        if new.idempotency_key is not None:
            has_key = jobs.c.idempotency_key == new.idempotency_key
            is_same |= (jobs.c.owner == new.owner) & has_key
        for row in connection.execute(select(jobs).where(is_same)):
            job = job_of(row)
            if (job.owner, job.body_digest) == (new.owner, new.body_digest):
                return job
            what = "id" if row.id == new.id else "Idempotency-Key"
            raise IdempotencyError(
                f"another call has made a job with this {what}; use a new one for another call"
            )
        return None

    def _check_number(self, connection: Connection) -> None:
        mine = (jobs.c.owner == self._new.owner) & jobs.c.id.is_not(None)
        num_jobs = connection.scalar(select(func.count()).where(mine)) or 0
        if num_jobs >= self._limits.max_jobs:
            raise OverQuotaError(
                f"there are {num_jobs} jobs already, which is max_jobs; delete some that are over",
                retry_after_s=10,
            )

    def _close_part(self) -> None:
        if not self._part:
            return
        payload = encode(self._part)
        self._waiting.append(
            {
                "number": self._num_parts,
                "first": self._num_instances,
                "num_instances": len(self._part),
                "num_bytes": len(payload),
                "payload": payload,
                "leased_until": 0.0,
                "version": 0,
            }
        )
        self._num_parts += 1
        self._num_instances += len(self._part)
        self._num_bytes += len(payload)
        self._waiting_bytes += len(payload)
        self._part, self._part_bytes = [], 0

    def _write(self, connection: Connection) -> None:
        """Write the parts that wait, and the row of the job before the first ones."""
        self._database.check_room(self._waiting_bytes)
        mine = select(func.coalesce(func.sum(jobs.c.num_bytes), 0))
        used = connection.scalar(mine.where(jobs.c.owner == self._new.owner)) or 0
        if used + self._waiting_bytes > self._limits.max_bytes:
            raise OverQuotaError(
                f"the jobs would take more than {self._limits.max_bytes} bytes, which is "
                "max_job_bytes; delete some that are over, or send a smaller one",
                retry_after_s=10,
            )
        row = self._row if self._row is not None else self._insert_row(connection)
        try:
            self._write_parts(connection, row)
        except BaseException:
            if self._row is None:  # another job may get this number as soon as it is undone
                self._files.remove_all(row)
            raise
        changed = {"num_bytes": self._num_bytes, "leased_at": self._now}
        connection.execute(update(jobs).where(jobs.c.number == row).values(changed))
        self._row = row
        self._waiting, self._waiting_bytes = [], 0

    def _write_parts(self, connection: Connection, row: int) -> None:
        for part in self._waiting:
            payload, part["job"] = part["payload"], row
            if self._files.takes(payload):
                self._files.write(row, payload_name(part["number"]), payload)
                part["payload"] = None
        if self._waiting:
            connection.execute(insert(parts), self._waiting)

    def _insert_row(self, connection: Connection) -> int:
        new = self._new
        values = {
            "owner": new.owner,
            "body_digest": new.body_digest,
            "model": new.model,
            "parameters": new.parameters,
            "webhook": new.webhook,
            "priority": new.priority,
            "trace": new.trace,
            "request_id": new.request_id,
            "state": "queued",
            "created_at": self._now,
        }
        inserted = connection.execute(insert(jobs).values(values).returning(jobs.c.number))
        return int(inserted.scalar_one())
