"""Those who wait for a job learn what it becomes, and cost the store next to nothing."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator

import msgspec
import pytest

from inferpool.service.errors import UnknownJobError
from inferpool.service.parts.jobs.records import Job
from inferpool.service.parts.jobs.watches import Watches
from tests.service.api.server import until

BEGUN = Job(
    id="a", owner="", state="running", model="m", num_instances=9, num_bytes=0, created_at=1
)


def at(num_done: int, **changes: object) -> Job:
    return msgspec.structs.replace(BEGUN, num_done=num_done, **changes)


class OneJob:
    """Holds a job, and counts how often it is read."""

    def __init__(self, job: Job | None = BEGUN) -> None:
        self.job = job
        self.num_reads = 0

    async def read(self, id: str, owner: str) -> Job:
        await asyncio.sleep(0)
        self.num_reads += 1
        if self.job is None:
            raise UnknownJobError("no")
        return self.job


async def next_of(jobs: AsyncGenerator[Job, None]) -> Job:
    async with asyncio.timeout(60):
        return await anext(jobs)


async def test_many_who_wait_read_a_job_that_changes_only_once_each() -> None:
    store = OneJob()
    watches = Watches(store.read, poll_s=1000)
    waiting = [asyncio.create_task(watches.until("a", "", 1000)) for _ in range(1000)]
    await until(lambda: store.num_reads == len(waiting))
    for num_done in range(8):
        watches.tell(at(num_done))
        await asyncio.sleep(0)
    over = at(9, state="succeeded")
    watches.tell(over)
    assert await asyncio.gather(*waiting) == [over] * len(waiting)
    assert store.num_reads == len(waiting)
    assert not watches._watches


async def test_changes_by_other_services_are_read_once_for_all() -> None:
    store = OneJob()
    watches = Watches(store.read, poll_s=0.01)
    waiting = [asyncio.create_task(watches.until("a", "", 1000)) for _ in range(100)]
    await until(lambda: store.num_reads >= len(waiting) + 3)
    store.job = over = at(9, state="failed")
    before = store.num_reads
    assert await asyncio.gather(*waiting) == [over] * len(waiting)
    assert store.num_reads <= before + 2


async def test_nothing_is_left_of_those_who_wait_no_more() -> None:
    watches = Watches(OneJob(None).read, poll_s=1000)
    with pytest.raises(UnknownJobError):
        await watches.until("a", "", 1000)
    assert not watches._watches
    watches = Watches(OneJob().read, poll_s=0.001)
    assert await watches.until("a", "", 0.01) == BEGUN
    waiting = asyncio.create_task(watches.until("a", "", 1000))
    changes = watches.follow("a", "")
    assert await next_of(changes) == BEGUN
    await until(lambda: watches._watches)
    waiting.cancel()
    await changes.aclose()
    with contextlib.suppress(asyncio.CancelledError):
        await waiting
    assert not watches._watches


async def test_what_is_told_late_is_no_change() -> None:
    watches = Watches(OneJob().read, poll_s=1000)
    changes = watches.follow("a", "")
    assert await next_of(changes) == BEGUN
    watches.tell(at(4))
    watches.tell(at(2))
    assert (await next_of(changes)).num_done == 4
    watches.tell(at(9, state="succeeded"))
    watches.tell(at(8))
    assert (await next_of(changes)).state == "succeeded"
    with pytest.raises(StopAsyncIteration):
        await next_of(changes)


async def test_a_deleted_job_is_not_taken_for_another_of_its_id() -> None:
    store = OneJob()
    watches = Watches(store.read, poll_s=1000)
    changes = watches.follow("a", "")
    assert await next_of(changes) == BEGUN
    waiting = asyncio.create_task(watches.until("a", "", 1000))
    await until(lambda: store.num_reads == 2)
    watches.tell(at(5, created_at=9.0, owner="ben"))  # another job, with the same id
    watches.tell(at(5, created_at=2.0))
    with pytest.raises(UnknownJobError):
        await waiting
    with pytest.raises(StopAsyncIteration):
        await next_of(changes)
    store.job = over = at(9, created_at=2.0, state="succeeded")
    assert await watches.until("a", "", 1000) == over


async def test_nobody_waits_after_the_end() -> None:
    watches = Watches(OneJob().read, poll_s=1000)
    waiting = asyncio.create_task(watches.until("a", "", 1000))
    await until(lambda: watches._watches)
    watches.end()
    assert await waiting == BEGUN
    assert await watches.until("a", "", 1000) == BEGUN
    assert [job async for job in watches.follow("a", "")] == [BEGUN]
