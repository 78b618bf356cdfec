"""The runner computes parts with what is idle, whatever happens to pools, workers and the store."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from inferpool.service.errors import UnavailableError
from inferpool.service.parts.jobs import runner as runner_module
from inferpool.service.parts.jobs.records import Job, LeasedPart, StoredInstance
from inferpool.service.parts.jobs.runner import Runner
from inferpool.service.parts.jobs.store.store import JobStore
from inferpool.service.queue.pool import Pool
from inferpool.workers.shared.arena import Arena
from inferpool.workers.shared.errors import WorkerStartError
from inferpool.workers.shared.messages import ItemError
from tests.fakes import FakeEngine, FakeWorker
from tests.service.api.server import until
from tests.service.parts.jobs.conftest import LIMITS
from tests.service.parts.jobs.stores import NOW, FailingCommits, new_job, take
from tests.service.pools import ready_pool

pytestmark = pytest.mark.usefixtures("virtual_time")

ARENA_BYTES = 1 << 20


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena(ARENA_BYTES)
    yield arena
    arena.close()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[JobStore]:
    store = JobStore.open(str(tmp_path / "jobs"), LIMITS)
    yield store
    store.close()


class Bench:
    """A runner, its store, and a pool whose workers answer when a test says so."""

    def __init__(self, store: JobStore, arena: Arena) -> None:
        self.store = store
        self.arena = arena
        self.engine = FakeEngine()
        self.pools: dict[str, Pool] = {}
        self.changes: list[Job] = []
        self.runner = Runner(
            store.leases,
            self.pools,
            lease_s=3600.0,  # the store has a clock of its own
            on_change=self.changes.append,
        )

    @property
    def pool(self) -> Pool:
        return self.pools["m"]

    @property
    def worker(self) -> FakeWorker:
        """The newest worker."""
        return self.engine.started[-1]

    def add(self, num: int = 3, *, id: str = "a", payload: bytes = b"x") -> None:
        with self.store.begin(new_job(id), NOW) as writer:
            for _ in range(num):
                writer.add(StoredInstance(kind="bytes", payload=payload))
            writer.commit(NOW)
        self.runner.wake()

    def job(self, id: str = "a") -> Job:
        job = self.store.job(id)
        assert job is not None
        return job

    def codes(self, id: str = "a") -> list[str]:
        """Return the code of each answer; "" if it is a prediction."""
        found = self.store.answers(id)
        return [answer.problem.code if answer.problem else "" for _, answer, _ in found]

    def versions(self, id: str = "a") -> list[int]:
        return [version for _, _, version in self.store.answers(id)]

    async def answer(self, until: Callable[[], bool]) -> int:
        """Answer batches until something is true; return how many instances were computed."""
        num = 0
        async with asyncio.timeout(60):
            while not until():
                for worker in self.engine.started:
                    while worker.batches and not worker.is_gone:
                        num += worker.sizes[0]
                        worker.answer([b"1"] * worker.sizes[0])
                await asyncio.sleep(0.001)
        return num

    async def finish(self, id: str = "a") -> int:
        """Answer batches until a job is over; return how many instances were computed."""
        return await self.answer(lambda: any(job.id == id and job.is_over for job in self.changes))


@contextlib.asynccontextmanager
async def running(store: JobStore, arena: Arena, num_workers: int = 1) -> AsyncIterator[Bench]:
    bench = Bench(store, arena)
    bench.pools["m"] = await ready_pool(bench.engine, arena, num_workers)
    task = asyncio.create_task(bench.runner.run())
    yield bench
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    for worker in bench.engine.started:
        while worker.batches:
            worker.answer()
    await asyncio.sleep(0)
    for pool in bench.pools.values():
        assert pool.dispatcher.num_unsettled == 0
        await pool.stop(0)
    assert arena.used_bytes == 0


async def test_a_part_whose_job_ends_before_it_is_begun_is_in_flight_no_more(
    store: JobStore, arena: Arena
) -> None:
    bench = Bench(store, arena)
    bench.pools["m"] = await ready_pool(bench.engine, arena, 1)
    bench.add()
    await bench.runner._lease()
    bench.runner.drop(bench.job())
    await until(lambda: not bench.runner._parts)
    assert (bench.runner._in_flight["m"], bench.runner._num_bytes) == (0, 0)
    await bench.runner._end()
    await bench.pool.stop(0)


async def test_each_instance_is_computed_once(store: JobStore, arena: Arena) -> None:
    async with running(store, arena) as bench:
        bench.add(300)
        assert await bench.finish() == 300
        assert bench.job().state == "succeeded"
        assert max(job.num_done for job in bench.changes) == 300
        assert len(bench.changes) == 5


async def test_only_a_few_parts_are_within_reach(store: JobStore, arena: Arena) -> None:
    async with running(store, arena) as bench:
        bench.add(2000)
        await until(lambda: bench.pool.dispatcher.num_background)
        for _ in range(100):
            await bench.answer(lambda: True)
            assert bench.pool.dispatcher.num_unsettled <= runner_module._LEAST_IN_FLIGHT
            await asyncio.sleep(0.001)


async def test_a_part_is_of_one_version_when_the_model_is_swapped(
    store: JobStore, arena: Arena
) -> None:
    async with running(store, arena) as bench:
        bench.add(64 * 4)
        former = bench.pool
        await until(lambda: former.dispatcher.num_background > 64)
        successor = await ready_pool(bench.engine, arena)
        successor.version = 2
        bench.pools["m"] = successor
        draining = asyncio.create_task(former.dispatcher.drain(20))
        assert await bench.finish() == 64 * 4  # nothing is computed again
        await draining
        assert bench.versions() == [1] * 128 + [2] * 128
        assert bench.job().versions == (1, 2)
        await former.stop(0)


async def test_what_a_former_version_does_not_finish_the_next_one_computes(
    store: JobStore, arena: Arena
) -> None:
    async with running(store, arena) as bench:
        bench.add(100)
        former = bench.pool
        await until(lambda: former.dispatcher.num_background > 64)
        await until(lambda: bench.worker.batches)
        bench.worker.answer([b"0"])
        successor = await ready_pool(bench.engine, arena)
        successor.version = 2
        bench.pools["m"] = successor
        former.dispatcher.cut_off("it took too long")
        await former.stop(0)
        await bench.finish()
        assert bench.versions() == [2] * 100
        assert [answer.value for _, answer, _ in store.answers("a")] == [b"1"] * 100


async def test_an_input_that_kills_workers_fails_alone(store: JobStore, arena: Arena) -> None:
    deaths = 0
    async with running(store, arena) as bench:
        bench.add(2, id="a", payload=b"killer")
        bench.add(20, id="b")
        async with asyncio.timeout(60):
            while not (bench.job("a").is_over and bench.job("b").is_over):
                for worker in bench.engine.started:
                    while worker.batches and not worker.is_gone:
                        item = worker.batches[0][0][0]
                        if arena.read(item.offset, item.num_bytes) == b"killer":
                            worker.die()
                            deaths += 1
                        else:
                            worker.answer([b"1"])
                await asyncio.sleep(0.001)
        assert deaths <= 3
        assert set(bench.codes("a")) <= {"worker_crashed", "quarantined"}
        assert bench.job("a").state == "failed"
        assert bench.codes("b") == [""] * 20


async def test_an_error_of_the_model_stands_in_its_place(store: JobStore, arena: Arena) -> None:
    async with running(store, arena) as bench:
        bench.add(3)
        for outcome in (b"1", ItemError("invalid_input", "no image"), b"1"):
            await until(lambda: bench.worker.batches)
            bench.worker.answer([outcome])
        await until(lambda: bench.job().is_over)
        assert bench.codes() == ["", "invalid_input", ""]
        assert bench.job().state == "succeeded"


async def test_it_waits_while_others_need_the_arena(store: JobStore, arena: Arena) -> None:
    async with running(store, arena) as bench:
        taken = [arena.put([bytes(1024)], 1024) for _ in range(ARENA_BYTES // 1024)]
        bench.add(3)
        await until(lambda: bench.runner._parts)
        await asyncio.sleep(0.05)
        assert not bench.worker.batches
        for offset in taken:
            assert offset is not None
            arena.free(offset)
        assert await bench.finish() == 3
        assert bench.codes() == [""] * 3


async def test_an_instance_that_never_fits_is_refused_in_its_place(
    store: JobStore, arena: Arena
) -> None:
    async with running(store, arena) as bench:
        bench.add(1, payload=bytes(ARENA_BYTES // 2 + 1))
        await until(lambda: bench.job().is_over)
        assert bench.codes() == ["too_large"]


@pytest.mark.slow
async def test_an_instance_that_no_worker_has_memory_for_comes_to_an_end(
    store: JobStore, arena: Arena
) -> None:
    async with running(store, arena) as bench:
        bench.add(2)
        num_tries = 0
        async with asyncio.timeout(60):
            while not bench.job().is_over:
                if bench.worker.batches:
                    num_tries += 1
                    bench.worker.answer([ItemError("exhausted", "out of memory")])
                await asyncio.sleep(0.001)
        assert num_tries == 2 * runner_module._MOST_TRIES
        assert bench.codes() == ["unavailable"] * 2


async def test_a_mistake_of_the_service_stands_in_its_place(
    store: JobStore, arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(store, arena) as bench:

        def fail(*_: object) -> None:
            raise KeyError("a mistake")

        monkeypatch.setattr(bench.pool, "submit", fail)
        bench.add(2)
        await until(lambda: bench.job().is_over)
        assert bench.codes() == ["internal_error"] * 2


async def test_a_cancelled_job_frees_the_pool_at_once(store: JobStore, arena: Arena) -> None:
    async with running(store, arena) as bench:
        bench.add(500, id="a")
        await until(lambda: bench.pool.dispatcher.num_background > 100)
        store.cancel("a", NOW)
        bench.runner.drop(bench.job("a"))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert bench.pool.dispatcher.num_unsettled == 0
        bench.add(1, id="b")
        bench.worker.answer([b"0"])  # the batch that it had begun
        assert await bench.finish("b") == 1
        assert bench.job("a").num_done == 0


async def test_results_are_kept_until_the_store_takes_them(
    store: JobStore, arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(store, arena) as bench:
        bench.add(100)
        await until(lambda: bench.pool.dispatcher.num_background > 64)
        commits = FailingCommits(store, monkeypatch)
        commits.plan("before", "after", "before", "before", "after")
        assert await bench.finish() == 100  # nothing is computed again
        assert bench.codes() == [""] * 100
        assert bench.changes[-1].state == "succeeded"


async def test_a_part_that_was_taken_over_is_given_up(
    store: JobStore, arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(store, arena) as bench:
        bench.add(10)
        await until(lambda: bench.pool.dispatcher.num_background == 9)
        tokens = list(bench.runner._parts)
        monkeypatch.setattr(store.leases, "lease", lambda *_: [])
        store.leases.give_back(tokens)  # as if another service had it
        await until(lambda: not bench.runner._parts)
        assert bench.pool.dispatcher.num_unsettled == 0
        bench.worker.answer([b"0"])
        assert bench.job().num_done == 0


async def test_a_pause_of_the_process_costs_it_no_lease(
    store: JobStore, arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own parts must not seem to be those of a dead service."""
    async with running(store, arena) as bench:
        bench.add(10)
        await until(lambda: bench.pool.dispatcher.num_background == 9)
        tokens, lease, num_looks = list(bench.runner._parts), store.leases.lease, 0

        def count_looks(*told: Any) -> Sequence[LeasedPart]:
            nonlocal num_looks
            num_looks += 1
            return lease(*told)

        monkeypatch.setattr(store.leases, "lease", count_looks)
        bench.runner._renewed_at -= 3600.0  # the whole process stood still
        assert store.leases.renew(tokens, -1.0) == set(tokens)
        bench.runner.wake()
        await until(lambda: num_looks)
        assert await bench.finish() == 10
        assert [part.number for part in take(store)] == []
        assert bench.job().num_done == 10


async def test_what_cannot_be_given_back_at_once_is_given_back_later(
    store: JobStore, arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(store, arena) as bench:
        bench.add(10)
        await until(lambda: bench.pool.dispatcher.num_background == 9)
        give_back, num_calls = store.leases.give_back, 0

        def fail_first(tokens: list[str]) -> None:
            nonlocal num_calls
            num_calls += 1
            if num_calls == 1:
                raise UnavailableError("the database restarts")
            give_back(tokens)

        monkeypatch.setattr(store.leases, "give_back", fail_first)
        removed = bench.pools.pop("m")
        removed.dispatcher.cut_off("it is removed")
        await removed.stop(0)
        await until(lambda: num_calls > 1)
        await until(lambda: take(store))


@pytest.mark.parametrize("after_s", [0.0, 0.002, 0.02])
async def test_all_parts_are_given_back_at_the_end(
    store: JobStore, arena: Arena, after_s: float
) -> None:
    async with running(store, arena) as bench:
        bench.add(100)
        await asyncio.sleep(after_s)
    assert sum(len(part.instances) for part in take(store)) == 100


async def test_a_part_waits_no_longer_than_a_while_for_workers(
    store: JobStore, arena: Arena
) -> None:
    """Another service on the same store may have some."""
    async with running(store, arena) as bench:
        bench.add(10)
        await until(lambda: bench.worker.batches)
        bench.engine.failures = [WorkerStartError("no luck", permanent=False) for _ in range(9)]
        bench.worker.die()
        await asyncio.sleep(25.0)
        assert not take(store)
        await asyncio.sleep(15.0)
        assert take(store)
        assert not bench.runner._parts
