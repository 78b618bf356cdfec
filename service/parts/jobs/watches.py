"""Wakes calls that wait for jobs when these change. In the event loop.

A change comes with the job as it is then, so that a thousand waiting calls read nothing. The store
is read for changes that other services make: once for all calls that wait for a job.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from math import inf

from inferpool.service.errors import UnknownJobError
from inferpool.service.parts.jobs.records import Job


class Watches:
    """The jobs that calls wait for."""

    def __init__(self, read: Callable[[str, str], Awaitable[Job]], *, poll_s: float) -> None:
        """Watch nothing yet.

        Args:
            read: Reads a job by its id and owner, and raises `UnknownJobError` if there is none.
            poll_s: How often to read what has not changed.
        """
        self._read = read
        self._poll_s = poll_s
        self._watches: dict[tuple[str, str], _Watch] = {}
        """By id and owner."""
        self._is_ended = False

    async def until(self, id: str, owner: str, timeout_s: float) -> Job:
        """Return a job when it is over, or as it is when the time is up.

        Raises:
            UnknownJobError: There is none, or it was deleted meanwhile.
        """
        end = time.monotonic() + timeout_s
        with self._of(id, owner) as watch:
            job = self._take(watch, await self._read(id, owner))
            if watch.over.is_set():
                return job
            while not watch.over.is_set() and time.monotonic() < end:
                await self._wait(watch, watch.over, end)
            if watch.is_deleted or watch.job is None:
                raise UnknownJobError(f"the job {id} was deleted")
            return watch.job

    async def follow(self, id: str, owner: str) -> AsyncGenerator[Job, None]:
        """Yield a job as it is now, then after each change, until it is over or deleted.

        Raises:
            UnknownJobError: There is none.
        """
        with self._of(id, owner) as watch:
            job = self._take(watch, await self._read(id, owner))
            yield job
            while not watch.over.is_set() or watch.job != job:
                if watch.job == job:
                    await self._wait(watch, watch.changed)
                if watch.is_deleted or watch.job is None:
                    return
                if watch.job != job:
                    job = watch.job
                    yield job

    def tell(self, job: Job) -> None:
        """Wake calls that wait for a job, with the job as it is now."""
        if (watch := self._watches.get((job.id, job.owner))) is not None:
            self._take(watch, job)

    def forget(self, id: str, owner: str) -> None:
        """End the waits for a job that was deleted."""
        if (watch := self._watches.pop((id, owner), None)) is not None:
            watch.is_deleted = True
            watch.end()

    def end(self) -> None:
        """End all waits, now and later."""
        self._is_ended = True
        for watch in self._watches.values():
            watch.end()

    @contextlib.contextmanager
    def _of(self, id: str, owner: str) -> "Iterator[_Watch]":
        watch = self._watches.setdefault((id, owner), _Watch())
        watch.num_waiting += 1
        if self._is_ended:
            watch.end()
        try:
            yield watch
        finally:
            watch.num_waiting -= 1
            if not watch.num_waiting and self._watches.get((id, owner)) is watch:
                del self._watches[id, owner]

    def _take(self, watch: "_Watch", job: Job) -> Job:
        """Record a job as it is now, and return the newest that is known of it."""
        watch.read_at = time.monotonic()
        before = watch.job
        if before is not None:
            if before.created_at != job.created_at:  # another job has its id by now
                self.forget(job.id, job.owner)
                return job
            # Commits are made in threads, and their reports may overtake each other.
            if before == job or (before.is_over, before.num_done) > (job.is_over, job.num_done):
                return before
        watch.job = job
        watch.change()
        if job.is_over:
            watch.over.set()
        return job

    async def _wait(self, watch: "_Watch", event: asyncio.Event, end: float = inf) -> None:
        """Wait for an event, until a moment at the latest; read the job if that is due."""
        due = watch.read_at + self._poll_s
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(due, end) - time.monotonic()):
                await event.wait()
        async with watch.reading:
            if (
                event.is_set()
                or watch.job is None
                or time.monotonic() < watch.read_at + self._poll_s
            ):
                return
            try:
                self._take(watch, await self._read(watch.job.id, watch.job.owner))
            except UnknownJobError:
                self.forget(watch.job.id, watch.job.owner)


class _Watch:
    """The last known state of a job that calls wait for."""

    def __init__(self) -> None:
        self.job: Job | None = None
        self.is_deleted = False
        self.num_waiting = 0
        self.read_at = 0.0
        """When it was read or told, as a monotonic moment."""
        self.reading = asyncio.Lock()
        self.changed = asyncio.Event()
        """Set at the next change; then there is a new one."""
        self.over = asyncio.Event()
        """Set when there is no more to wait for."""

    def change(self) -> None:
        """Wake all calls that wait for the next change."""
        self.changed.set()
        self.changed = asyncio.Event()

    def end(self) -> None:
        """End all waits for this job."""
        self.change()
        self.over.set()
