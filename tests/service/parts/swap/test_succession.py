"""Swaps over fake workers where memory is too short for both versions."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from inferpool.service.errors import ServiceError, UnavailableError, VersionRefusedError
from inferpool.service.parts.swap.changes import Changes
from inferpool.service.parts.swap.decision import SwapDecision
from inferpool.service.parts.swap.room import Room
from inferpool.service.settings.state import StateFile
from inferpool.workers.host.device_memory import HOST
from inferpool.workers.host.engine import WorkerId
from inferpool.workers.shared.arena import Arena
from inferpool.workers.shared.config import WorkerConfig
from inferpool.workers.shared.errors import WorkerStartError
from tests.fakes import FakeEngine, FakeWorker, ref_to
from tests.service.catalog.test_catalog import ECHO, Kept
from tests.service.pools import until

EACH = 100 << 20
"""The memory of a worker."""


class BoundedEngine(FakeEngine):
    """Starts workers where there is memory for so many, and fails a test that starts more."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most
        self.log: list[str] = []
        """Workers that have come (+) and gone (-), in order."""
        self.bad: set[int] = set()
        """Versions whose workers cannot be started."""
        self.gate = asyncio.Event()
        """Workers of other versions than the first start once this is set."""
        self.gate.set()

    @property
    def num_alive(self) -> int:
        return sum(not worker.is_gone for worker in self.started)

    async def start(
        self, id: WorkerId, config: WorkerConfig, on_progress: Callable[[str], None]
    ) -> FakeWorker:
        if id.version in self.bad:
            raise WorkerStartError("it is broken", permanent=True)
        if id.version > 1:
            await self.gate.wait()
        worker = await super().start(id, config, on_progress)
        self.log.append(f"+{id.number}")
        worker._gone.add_done_callback(lambda _: self.log.append(f"-{id.number}"))
        assert self.num_alive <= self.most, self.log
        return worker


class TightStage(Kept):
    """A model with some workers on a host with memory for `most`, and its clients."""

    def __init__(self, arena: Arena, replicas: int, most: int) -> None:
        self.ended: set[object] = set()
        """Workers whose processes have ended, which nobody has noticed yet."""
        model = ECHO.model_copy(update={"replicas": replicas})
        super().__init__(arena, StateFile(None, {"m": model}), BoundedEngine(most))
        self.changes = Changes(
            self.catalog,
            self.metrics,
            None,
            Room(
                lambda model, placement: {HOST: EACH},
                lambda: {
                    HOST: (self.bounded.most - self.bounded.num_alive + len(self.ended)) * EACH
                },
                lambda worker: {} if worker in self.ended else {HOST: EACH},
            ),
            grace_s=5,
        )
        self.answers: list[object] = []
        self.errors: list[ServiceError] = []
        self.least_ready = replicas
        """The fewest workers that were ready for calls at any time."""

    @property
    def bounded(self) -> BoundedEngine:
        assert isinstance(self.engine, BoundedEngine)
        return self.engine

    @asynccontextmanager
    async def asked(self) -> AsyncIterator[None]:
        """Send calls to the version that serves, and let workers answer with their version."""
        is_over = asyncio.Event()

        async def ask() -> None:
            while not is_over.is_set():
                serving = self.catalog.serving["m"]
                self.least_ready = min(self.least_ready, serving.dispatcher.num_ready)
                try:
                    answer = await serving.submit(ref_to(b"x", 20), [b"x"])
                    self.answers.append(answer.value)
                except ServiceError as error:
                    self.errors.append(error)
                    await asyncio.sleep(0.001)

        async def work() -> None:
            while True:
                for worker in self.bounded.started:
                    while worker.batches:
                        worker.answer([b"%d" % worker.id.version] * worker.sizes[0])
                await asyncio.sleep(0)

        working = asyncio.create_task(work())
        asking = [asyncio.create_task(ask()) for _ in range(3)]
        await until(lambda: self.catalog.serving["m"].is_ready)
        try:
            yield
        finally:
            is_over.set()
            await asyncio.gather(*asking)
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)

    async def swap(self, **request: object) -> None:
        """Swap, and wait until all is done that belongs to it."""
        self.changes.begin_swap("m", {"policy": "force", **request})
        try:
            await self.changes.until_decided("m")
        finally:
            await until(lambda: not self.changes.model_info("m").change)

    def state_of(self, number: int) -> tuple[str, str]:
        (each,) = (v for v in self.changes.model_info("m").versions if v.number == number)
        return each.state, each.reason

    def workers(self) -> list[str]:
        """Return the workers that are ready."""
        pools = [version.pool for version in self.catalog.versions("m")]
        return [slot.id.number for pool in pools for slot in pool.slots if slot.handle]

    async def close(self) -> None:
        await self.changes.stop()
        await self.catalog.stop()
        await asyncio.gather(*(each.pool.stop(0) for each in self.catalog.loaded.values()))


@asynccontextmanager
async def serving(arena: Arena, replicas: int, most: int) -> AsyncIterator[TightStage]:
    """Serve a model with these workers, once all are ready."""
    stage = TightStage(arena, replicas, most)
    try:
        pool = stage.catalog.serving["m"]
        await until(lambda: all(slot.handle for slot in pool.slots))
        stage.bounded.log.clear()
        yield stage
    finally:
        await stage.close()


async def test_where_both_fit_the_new_version_loads_whole_beside_the_other(arena):
    async with serving(arena, 2, 4) as it:
        async with it.asked():
            await it.swap()
        assert it.bounded.log == ["+2/0", "+2/1"]
        assert it.workers() == ["0", "1", "2/0", "2/1"]
        assert it.state_of(1)[0] == "kept"
        assert not it.errors


async def test_where_one_more_worker_fits_it_takes_over_and_the_others_follow(arena):
    async with serving(arena, 2, 3) as it:
        async with it.asked():
            await it.swap()
        assert it.bounded.log[0] == "+2/0"
        assert it.bounded.log[-1] == "+2/1"
        assert sorted(it.bounded.log[1:-1]) == ["-0", "-1"]
        assert it.workers() == ["2/0", "2/1"]
        state, reason = it.state_of(1)
        assert state == "gone"
        assert "to go back loads it again" in reason
        assert not it.errors
        assert set(it.answers) == {b"1", b"2"}


async def test_where_no_further_worker_fits_the_old_version_gives_up_one_by_one(arena):
    async with serving(arena, 4, 4) as it:
        async with it.asked():
            await it.swap()
        begun = ["-0", "+2/0", "-1", "+2/1"]
        assert it.bounded.log[:4] == begun, "at half, the new version takes over"
        assert sorted(it.bounded.log[4:6]) == ["-2", "-3"]
        assert sorted(it.bounded.log[6:]) == ["+2/2", "+2/3"]
        assert it.least_ready == 2
        assert not it.errors


async def test_memory_of_a_worker_whose_end_nobody_noticed_yet_is_not_given_away(arena):
    async with serving(arena, 2, 2) as it:
        it.ended = {it.bounded.started[1]}
        async with it.asked():
            await it.swap()
        assert it.bounded.log[:2] == ["-0", "+2/0"]


async def test_workers_come_back_if_the_new_version_is_refused(arena):
    async with serving(arena, 3, 3) as it:
        it.bounded.bad = {2}
        async with it.asked():
            with pytest.raises(VersionRefusedError, match="2/0 did not come up: it is broken"):
                await it.swap()
            await until(lambda: it.workers() == ["0", "1", "2"])
        assert it.bounded.log == ["-0", "+0"]
        assert set(it.answers) == {b"1"}
        assert not it.errors


async def test_a_single_worker_that_leaves_no_room_stays_and_the_figures_say_why(arena):
    async with serving(arena, 1, 1) as it:
        async with it.asked():
            with pytest.raises(
                VersionRefusedError, match=r"1 worker need.* ask for it with old_first"
            ) as e:
                await it.swap()
        assert e.value.figures == {"needed_bytes": EACH, "free_bytes": 0}
        assert it.bounded.log == []
        assert not it.errors


@pytest.mark.parametrize("policy", ["shadow", "canary"])
async def test_policies_that_need_both_versions_cannot_let_the_old_one_leave(arena, policy):
    async with serving(arena, 1, 1) as it:
        with pytest.raises(VersionRefusedError, match="another policy"):
            await it.swap(policy=policy, old_first=True)
        assert it.workers() == ["0"]


async def test_more_workers_than_ever_fit_are_refused_before_any_leaves(arena):
    async with serving(arena, 2, 2) as it:
        with pytest.raises(VersionRefusedError, match="free even once version 1 has left") as error:
            await it.swap(replicas=3, old_first=True)
        assert error.value.figures == {"needed_bytes": 3 * EACH, "free_bytes": 2 * EACH}
        assert it.bounded.log == []


async def test_with_old_first_calls_wait_until_the_new_version_answers_them(arena):
    async with serving(arena, 1, 1) as it:
        it.bounded.gate.clear()
        async with it.asked():
            swap = asyncio.create_task(it.swap(old_first=True))
            await until(lambda: it.bounded.num_alive == 0)
            await until(lambda: it.catalog.serving["m"].dispatcher.num_queued == 3)
            assert not it.catalog.serving["m"].is_ready
            assert "calls wait" in it.catalog.serving["m"].reason
            assert it.changes.model_info("m").change
            it.bounded.gate.set()
            await swap
            num = len(it.answers)
            await until(lambda: len(it.answers) > num + 10)
        assert it.bounded.log == ["-0", "+2/0"]
        assert it.answers[-1] == b"2"
        assert not it.errors
        assert it.metrics.total("m").in_flight == 0


async def test_with_old_first_the_former_version_comes_back_if_the_new_one_is_refused(arena):
    async with serving(arena, 1, 1) as it:
        it.bounded.bad = {2}
        async with it.asked():
            with pytest.raises(VersionRefusedError, match="did not come up"):
                await it.swap(old_first=True)
            await until(lambda: it.workers() == ["0"])
            num = len(it.answers)
            await until(lambda: len(it.answers) > num + 10)
        assert it.bounded.log == ["-0", "+0"]
        assert set(it.answers) == {b"1"}
        assert all(isinstance(error, UnavailableError) for error in it.errors)
        assert all(error.retry_after_s for error in it.errors)
        assert it.catalog.serving["m"].version == 1
        assert it.catalog.settings.models["m"] == it.catalog.version("m").settings


async def test_a_version_without_workers_is_waited_for_only_before_it_leaves(arena, monkeypatch):
    num_asked = 0

    async def is_ready(self: SwapDecision) -> bool:
        nonlocal num_asked
        num_asked += 1
        return False

    monkeypatch.setattr(SwapDecision, "_is_old_ready", is_ready)
    async with serving(arena, 1, 1) as it:
        await it.swap(old_first=True, policy="verified")
        assert it.catalog.serving["m"].version == 2
    assert num_asked == 1


async def test_a_way_back_loads_the_former_version_again(arena):
    async with serving(arena, 1, 1) as it:
        async with it.asked():
            await it.swap(old_first=True)
            it.changes.begin_rollback("m")
            await it.changes.until_decided("m")
            await until(lambda: not it.changes.model_info("m").change)
            num = len(it.answers)
            await until(lambda: len(it.answers) > num + 10)
        assert it.answers[-1] == b"3"
        assert it.state_of(2) == ("rolled_back", "it was asked for")
        assert it.bounded.log == ["-0", "+2/0", "-2/0", "+3/0"]
        assert not it.errors


async def test_a_worker_that_dies_as_it_leaves_loses_no_call(arena):
    async with serving(arena, 2, 2) as it:
        it.bounded.gate.clear()
        async with it.asked():
            first = it.bounded.started[0]

            async def stop(grace_s: float) -> None:
                first.die(started=False)

            first.stop = stop  # type: ignore[method-assign]
            swap = asyncio.create_task(it.swap())
            await until(lambda: first.is_gone)
            it.bounded.gate.set()
            await swap
        assert not it.errors
        assert it.workers() == ["2/0", "2/1"]
        assert it.metrics.total("m").in_flight == 0


async def test_a_version_that_does_not_come_up_again_makes_room_for_one_that_does(arena):
    async with serving(arena, 1, 1) as it:
        it.bounded.bad = {1}
        it.bounded.started[0].die()
        await until(lambda: it.catalog.serving["m"].slots[0].num_failures > 1)
        await it.swap()
        assert it.workers() == ["2/0"]
