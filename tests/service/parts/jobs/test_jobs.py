"""Jobs are computed by the pools of the service, whatever happens to their workers."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path

import pytest

from inferpool.service.errors import UnavailableError, UnknownJobError
from inferpool.service.parts.jobs.jobs import Jobs
from inferpool.service.parts.jobs.keeper import StoreKeeper
from inferpool.service.parts.jobs.records import JobProblem, NewJob, StoredInstance
from inferpool.service.parts.jobs.store.store import JobStore
from inferpool.service.parts.jobs.webhooks import Webhooks
from inferpool.service.queue.pool import Pool
from inferpool.workers.shared.arena import Arena
from tests.fakes import FakeEngine
from tests.service.api.server import until
from tests.service.parts.jobs.conftest import LIMITS
from tests.service.pools import ready_pool


@contextlib.asynccontextmanager
async def running(place: str, pools: Mapping[str, Pool]) -> AsyncIterator[Jobs]:
    jobs = Jobs(StoreKeeper(place, LIMITS), pools, "m", Webhooks((), b""))
    jobs.start()
    try:
        await jobs.keeper._settled.wait()  # calls wait for ten seconds alone
        yield jobs
    finally:
        await jobs.stop()


@contextlib.asynccontextmanager
async def answering(arena: Arena) -> AsyncIterator[Pool]:
    """Yield a pool whose worker answers each batch as soon as it comes."""
    engine = FakeEngine()
    pool = await ready_pool(engine, arena)

    async def answer() -> None:
        while True:
            for worker in engine.started:
                while worker.batches and not worker.is_gone:
                    worker.answer([b'"yes"'] * worker.sizes[0])
            await asyncio.sleep(0.001)

    task = asyncio.create_task(answer())
    yield pool
    await pool.stop(0)
    task.cancel()


def new_job(id: str = "a", model: str = "m") -> NewJob:
    return NewJob(id=id, model=model, body_digest="d")


def instances(num: int, num_unread: int = 0) -> Iterator[StoredInstance]:
    for _ in range(num - num_unread):
        yield StoredInstance(kind="bytes", payload=b"x")
    for _ in range(num_unread):
        yield StoredInstance(kind=None, problem=JobProblem(code="bad_request", message="cut"))


async def lines(jobs: Jobs, id: str = "a") -> list[bytes]:
    found = [chunk async for chunk in jobs.answers(id, "")]
    return [answer.value for chunk in found for _, answer, _ in chunk]


async def test_a_job_is_computed(arena: Arena, place: str) -> None:
    async with answering(arena) as pool, running(place, {"m": pool}) as jobs:
        assert (await jobs.create(new_job(), lambda: instances(300, 2))).state == "queued"
        job = await jobs.watches.until("a", "", 60)
        assert (job.state, job.num_done, job.num_failed) == ("succeeded", 300, 2)
        assert job.versions == (pool.version,)
        assert await lines(jobs) == [b'"yes"'] * 298 + [b""] * 2
        assert pool.dispatcher.num_unsettled == 0


async def test_a_cancelled_job_is_computed_no_further(arena: Arena, place: str) -> None:
    engine = FakeEngine()
    pool = await ready_pool(engine, arena)
    async with running(place, {"m": pool}) as jobs:
        await jobs.create(new_job(), lambda: instances(100))
        await until(lambda: engine.started[0].batches)
        waiting = asyncio.create_task(jobs.watches.until("a", "", 60))
        await asyncio.sleep(0)
        assert (await jobs.cancel("a", "")).state == "cancelled"
        assert (await waiting).state == "cancelled"
        await until(lambda: not pool.dispatcher.num_unsettled)
        await jobs.delete("a", "")
        with pytest.raises(UnknownJobError):
            await jobs.job("a", "")
    await pool.stop(0)


async def test_a_store_that_cannot_be_opened_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "jobs").write_text("a file")
    async with running(str(tmp_path / "jobs"), {}) as jobs:
        with pytest.raises(UnavailableError, match=r"store of jobs .* cannot be opened") as refused:
            await jobs.jobs("", ["queued"], 9, None)
        assert str(tmp_path) not in str(refused.value)
        assert str(tmp_path) in caplog.text


async def test_an_error_that_nobody_foresaw_ends_nothing_else(
    arena: Arena, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: JobStore) -> None:
        raise ZeroDivisionError("made to fail")

    monkeypatch.setattr(JobStore, "counts", fail)
    async with answering(arena) as pool, running(place, {"m": pool}) as jobs:
        await jobs.create(new_job("a"), lambda: instances(1))
        assert (await jobs.watches.until("a", "", 60)).is_over
        await jobs.create(new_job("b"), lambda: instances(1))
        assert (await jobs.watches.until("b", "", 60)).is_over


async def test_nobody_waits_for_a_job_when_the_service_ends(arena: Arena, place: str) -> None:
    pool = await ready_pool(FakeEngine(), arena)
    async with running(place, {"m": pool}) as jobs:
        await jobs.create(new_job(), lambda: instances(1))
        waiting = asyncio.create_task(jobs.watches.until("a", "", 3600))
        await until(lambda: jobs.watches._watches)
        jobs.end()
        assert not (await waiting).is_over
    await pool.stop(0)


async def test_a_store_that_opens_while_the_service_stops_is_closed(place: str) -> None:
    jobs = Jobs(StoreKeeper(place, LIMITS), {}, "m", Webhooks((), b""))
    jobs.start()
    await asyncio.sleep(0)  # a thread has begun to open it
    await jobs.stop()
    JobStore.open(place, LIMITS).close()  # one in a folder would be in use


async def test_ends_and_answers_are_counted(arena: Arena, place: str) -> None:
    async with answering(arena) as pool, running(place, {"m": pool}) as jobs:
        await jobs.create(new_job("a"), lambda: instances(5, 2))
        await jobs.create(new_job("b"), lambda: instances(1, 1))
        assert (await jobs.watches.until("a", "", 60)).is_over
        assert (await jobs.watches.until("b", "", 60)).versions == ()
        await jobs.create(new_job("c", model="other"), lambda: instances(2))
        await asyncio.gather(jobs.cancel("c", ""), jobs.cancel("c", ""))
        found = {(each.name, *each.labels): each.value for each in jobs.read_gauges()}
        assert jobs.durations.count == 3
    for state in ("succeeded", "failed", "cancelled"):
        assert found["jobs_ended", state] == 1
    assert found["job_instances", "m", "succeeded"] == 3
    assert found["job_instances", "m", "failed"] == 3
    assert found["job_store_open",] == 1
