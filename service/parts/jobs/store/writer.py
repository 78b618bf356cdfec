"""Writes a new job into the store, part by part, and accepts it as a whole.

The order of each step makes it last: files, their folder, the transaction that names them.
"""

import contextlib
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

from sqlalchemy import func, insert, select, update
from sqlalchemy.engine import Connection
from sqlalchemy.exc import IntegrityError

from inferpool.service.errors import (
    IdempotencyError,
    InvalidInputError,
    OverQuotaError,
    ServiceError,
    UnavailableError,
)
from inferpool.service.parts.jobs.records import (
    PART_BYTES,
    PART_INSTANCES,
    Job,
    NewJob,
    StoredInstance,
    StoreLimits,
)
from inferpool.service.parts.jobs.store.database import Database, told
from inferpool.service.parts.jobs.store.files import PartFiles
from inferpool.service.parts.jobs.store.rows import encode, job_of, new_token, payload_name
from inferpool.service.parts.jobs.store.tables import jobs, parts

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
        self._folder = new_token()
        self._is_written = False
        """Files or rows of the job may be there."""
        self._is_uncertain = False
        """The job may have been accepted: the database did not answer."""
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
        self._discard()

    def add(self, instance: StoredInstance) -> None:
        """Add the next instance.

        Raises:
            OverQuotaError: The key has all the jobs, or bytes of them, that it may have.
            StoreFullError: The store has no room.
            UnavailableError: The store cannot be used.
        """
        self._part.append(instance)
        self._part_bytes += len(instance.payload)
        if len(self._part) >= PART_INSTANCES or self._part_bytes >= PART_BYTES:
            self._close_part()
            if self._waiting_bytes >= _FLUSH_BYTES:
                self._write_files()
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
            UnavailableError: The store cannot be used. It may have been accepted all the same.
        """
        self._close_part()
        if not self._num_instances:
            raise InvalidInputError("the body has no instances; a job needs one at least")
        self._write_files()
        try:
            with self._database.writing() as connection:
                if (former := find_former(connection, self._new)) is not None:
                    return former, False
                job = self._accept(connection, now)
        except IntegrityError:  # another service has just accepted it
            with self._database.reading() as connection:
                former = find_former(connection, self._new)
            if former is None:
                raise
            return former, False
        except UnavailableError:
            self._is_uncertain = True
            row = None
            with contextlib.suppress(ServiceError), self._database.reading() as connection:
                is_mine = (jobs.c.folder == self._folder) & jobs.c.name.is_not(None)
                row = connection.execute(select(jobs).where(is_mine)).first()
            if row is None:
                raise
            job = job_of(row)
        self._is_written = False
        return job, True

    def _discard(self) -> None:
        """Remove what was written, unless it was accepted."""
        if not self._is_written:
            return
        is_mine = jobs.c.folder == self._folder
        is_accepted = None
        try:
            with self._database.writing() as connection:
                connection.execute(jobs.delete().where(is_mine, jobs.c.name.is_(None)))
                is_accepted = connection.scalar(select(jobs.c.number).where(is_mine))
        except ServiceError:  # it is logged; `clean` deletes the row
            if self._is_uncertain:
                return
        if is_accepted is None:
            self._files.remove_all(self._folder)

    def _accept(self, connection: Connection, now: float) -> Job:
        self._write(connection)
        accepted = (
            update(jobs)
            .where(jobs.c.number == self._row)
            .values(
                name=self._new.id,
                idempotency_key=self._new.idempotency_key,
                num_instances=self._num_instances,
                num_parts_left=self._num_parts,
                created_at=now,
                leased_at=0.0,
            )
            .returning(*jobs.c)
        )
        return job_of(connection.execute(accepted).one())

    def _check_quota(self, connection: Connection) -> None:
        new, limits = self._new, self._limits
        self._database.lock(connection, new.owner)  # two may not take the last place
        mine = select(func.count(jobs.c.name), func.coalesce(func.sum(jobs.c.num_bytes), 0))
        num_jobs, used = connection.execute(mine.where(jobs.c.owner == new.owner)).one()
        if num_jobs >= limits.max_jobs:
            raise OverQuotaError(
                f"there are {num_jobs} jobs already, which is max_jobs; delete some that are over",
                retry_after_s=10,
            )
        if used + self._waiting_bytes > limits.max_bytes:
            raise OverQuotaError(
                f"the jobs would take more than {limits.max_bytes} bytes, which is max_job_bytes; "
                "delete some that are over, or send a smaller one",
                retry_after_s=10,
            )
        if limits.share < 1:
            self._database.check_share(used, self._waiting_bytes, limits.share)

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

    def _write_files(self) -> None:
        """Write the large payloads that wait, before the transaction: a disk may take long."""
        large = [part for part in self._waiting if self._files.takes(part["payload"])]
        self._is_written = True
        with told():
            self._database.check_room(sum(part["num_bytes"] for part in large))
            contents = {payload_name(part["number"]): part["payload"] for part in large}
            self._files.write(self._folder, contents)
        for part in large:
            part["payload"] = None

    def _write(self, connection: Connection) -> None:
        """Write the parts that wait, and the row of the job before the first ones."""
        self._check_quota(connection)
        num_bytes = sum(part["num_bytes"] for part in self._waiting if part["payload"])
        self._database.check_room(num_bytes, connection)
        if self._row is None:
            self._row = self._insert_row(connection)
        changed = {"num_bytes": self._num_bytes, "leased_at": self._database.clock}
        mine = update(jobs).where(jobs.c.number == self._row).values(changed)
        if not connection.execute(mine).rowcount:
            raise UnavailableError("the job came so slowly that it was given up", retry_after_s=1)
        if self._waiting:
            connection.execute(insert(parts), [part | {"job": self._row} for part in self._waiting])
        self._waiting, self._waiting_bytes = [], 0

    def _insert_row(self, connection: Connection) -> int:
        new = self._new
        same = ("owner", "body_digest", "model", "parameters", "webhook", "priority", "trace")
        values = {name: getattr(new, name) for name in same} | {
            "folder": self._folder,
            "receiver": new.webhook and f"{new.owner} {urlsplit(new.webhook).netloc.lower()}",
            "request_id": new.request_id,
            "state": "queued",
            "created_at": self._now,
        }
        inserted = connection.execute(insert(jobs).values(values).returning(jobs.c.number))
        return int(inserted.scalar_one())


def find_former(connection: Connection, new: NewJob) -> Job | None:
    """Return the job that the same call has made before.

    Raises:
        IdempotencyError: Another call has made a job with this id or key.
    """
    is_same = jobs.c.name == new.id
    if new.idempotency_key is not None:
        is_same |= jobs.c.idempotency_key == new.idempotency_key
    for row in connection.execute(select(jobs).where(jobs.c.owner == new.owner, is_same)):
        job = job_of(row)
        if job.body_digest == new.body_digest:
            return job
        what = "id" if row.name == new.id else "Idempotency-Key"
        raise IdempotencyError(
            f"another call has made a job with this {what}; use a new one for another call"
        )
    return None
