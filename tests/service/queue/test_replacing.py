import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

import inferpool.service.queue.replacing
from inferpool.models.files.opened import mark_of
from inferpool.service.errors import RestartFailedError
from inferpool.service.queue.pool import Pool
from inferpool.workers.arena import Arena
from inferpool.workers.config import WorkerConfig
from inferpool.workers.errors import WorkerStartError
from inferpool.workers.host.engine import WorkerId
from tests.fakes import FakeEngine, FakeWorker
from tests.service.pools import CONFIG, Measuring, pool_over, run, until


@pytest.mark.parametrize(("wanted", "is_changed"), [("folded", True), ("compiled", False)])
def test_worker_is_changed_over_without_a_moment_in_which_none_is_ready(
    wanted: str, is_changed: bool
):
    async def go(arena: Arena) -> None:
        engine = Measuring()
        pool = pool_over(engine, arena, configs=[replace(CONFIG, speed="auto")])
        pool.start()
        await until(lambda: pool.is_ready)
        changing = asyncio.create_task(pool.change_over(pool.slots[0], wanted, 1))
        await until(lambda: len(engine.started) == 2 or not pool.is_ready)
        while not changing.done():
            assert pool.is_ready
            await asyncio.sleep(0)
        assert await changing is is_changed
        assert engine.told == {"m/0#0": None, "m/0#1": None}  # it looks into the cache
        await pool.stop(0)

    run(go)


def unlucky() -> WorkerStartError:
    return WorkerStartError("SyntaxError", permanent=True)


async def two_ready(engine: FakeEngine, arena: Arena) -> Pool:
    pool = pool_over(engine, arena, configs=[CONFIG, CONFIG])
    pool.start()
    await until(lambda: all(slot.handle for slot in pool.slots))
    return pool


def test_restart_whose_first_successor_fails_changes_nothing():
    async def go(arena: Arena) -> None:
        engine = FakeEngine()
        pool = await two_ready(engine, arena)
        engine.failures = [unlucky()]
        with pytest.raises(RestartFailedError, match=r"m/0 .* serves on as it was: SyntaxError"):
            await pool.replace(pool.slots, 1)
        assert [slot.handle for slot in pool.slots] == engine.started
        assert (pool.restart.state, pool.is_ready) == ("failed", True)
        await pool.stop(0)

    run(go)


class Loading(FakeEngine):
    """Its workers are made of one file, as it is when they start."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        path.write_text("old")
        self.on_start: Callable[[WorkerId], None] = lambda id: None
        """May raise, or change the file, before a worker starts."""

    async def start(
        self, id: WorkerId, config: WorkerConfig, on_progress: Callable[[str], None]
    ) -> FakeWorker:
        self.on_start(id)
        mark = mark_of(str(self.path))
        worker = await super().start(id, config, on_progress)
        worker.ready = msgspec.structs.replace(worker.ready, files=[mark] if mark else [])
        return worker


async def all_ready(engine: FakeEngine, arena: Arena, num_workers: int = 3) -> Pool:
    pool = pool_over(engine, arena, configs=[CONFIG] * num_workers)
    pool.start()
    await until(lambda: all(slot.handle for slot in pool.slots))
    await pool._supervisor._files.until_remembered()
    return pool


def names_of_serving(pool: Pool) -> list[str]:
    return [str(slot.handle.id) for slot in pool.slots if slot.handle]


def test_restart_during_which_the_files_change_again_ends_with_the_last_for_all(tmp_path: Path):
    async def go(arena: Arena) -> None:
        engine = Loading(tmp_path / "w")
        pool = await all_ready(engine, arena)

        def change(id: WorkerId) -> None:
            if str(id) == "m/1#1":
                engine.path.write_text("newest")
            assert len(names_of_serving(pool)) == 3  # none leaves before its successor is ready

        engine.path.write_text("newer")
        engine.on_start = change
        await pool.replace(pool.slots, 1)
        assert names_of_serving(pool) == ["m/0#2", "m/1#1", "m/2#1"]
        assert {str(slot.handle.ready.files) for slot in pool.slots if slot.handle} == {
            str([mark_of(str(engine.path))])
        }
        engine.on_start = lambda id: None
        engine.started[-1].die()  # the last to start is m/0
        await until(lambda: names_of_serving(pool)[0] == "m/0#3")
        await pool.stop(0)

    run(go)


def test_restart_tries_again_what_did_not_come_up_once_a_successor_is_up(tmp_path: Path):
    async def go(arena: Arena) -> None:
        engine = Loading(tmp_path / "w")
        pool = await all_ready(engine, arena)
        luck = iter([True, False])

        def fail_once(id: WorkerId) -> None:
            if not next(luck, True):
                raise unlucky()

        engine.path.write_text("newer")
        engine.on_start = fail_once
        await pool.replace(pool.slots, 1)
        assert names_of_serving(pool) == ["m/0#1", "m/1#1", "m/2#1"]
        await pool.stop(0)

    run(go)


def fail_beside(engine: FakeEngine, *workers: str) -> Callable[[WorkerId], None]:
    """Successors of these do not come up while their predecessors are there."""

    def on_start(id: WorkerId) -> None:
        if id.worker in workers and not engine.started[id.slot].is_gone:
            raise WorkerStartError("out of memory", permanent=False)

    return on_start


def test_worker_with_old_files_leaves_first_where_two_have_loaded_the_new(tmp_path: Path):
    async def go(arena: Arena) -> None:
        engine = Loading(tmp_path / "w")
        pool = await all_ready(engine, arena)
        engine.path.write_text("newer")
        engine.on_start = fail_beside(engine, "m/1")
        await pool.replace(pool.slots, 1)
        assert names_of_serving(pool) == ["m/0#1", "m/1#1", "m/2#1"]
        assert pool.restart.state == "done"
        await pool.stop(0)

    run(go)


def test_restart_whose_new_files_load_only_once_ends_with_the_old_ones(tmp_path: Path):
    async def go(arena: Arena) -> None:
        engine = Loading(tmp_path / "w")
        pool = await all_ready(engine, arena)
        engine.path.write_text("newer")
        engine.on_start = fail_beside(engine, "m/1", "m/2")
        with pytest.raises(RestartFailedError, match=r"m/1 .* serves on .*m/0 served with other"):
            await pool.replace(pool.slots, 1)
        assert names_of_serving(pool) == ["m/1#0", "m/2#0"]
        assert (pool.slots[0].state, pool.slots[0].cause) == ("backoff", "files")
        engine.path.write_text("old")
        pool.slots[0].is_asked_to_start.set()  # or its pause would have to end first
        await until(lambda: pool.slots[0].state == "ready")
        await pool.stop(0)

    run(go)


def test_worker_that_cannot_be_replaced_stays_where_the_files_are_the_same(tmp_path: Path):
    async def go(arena: Arena) -> None:
        engine = Loading(tmp_path / "w")
        pool = await all_ready(engine, arena)
        engine.on_start = fail_beside(engine, "m/1")
        with pytest.raises(RestartFailedError, match="m/1 was not replaced"):
            await pool.replace(pool.slots, 1)
        assert names_of_serving(pool) == ["m/0#1", "m/1#0", "m/2#1"]
        await pool.stop(0)

    run(go)


def test_restart_that_lets_the_old_leave_first_stops_at_the_first_that_stays_down(tmp_path: Path):
    async def go(arena: Arena) -> None:
        engine = Loading(tmp_path / "w")
        pool = await all_ready(engine, arena)

        def fail(id: WorkerId) -> None:
            if id.worker != "m/0":
                raise unlucky()

        engine.on_start = fail
        with pytest.raises(RestartFailedError, match="m/1 did not come up again"):
            await pool.replace(pool.slots, 1, old_first=True)
        assert names_of_serving(pool) == ["m/0#1", "m/2#0"]
        await pool.stop(0)

    run(go)


def test_restart_without_memory_for_two_is_refused_and_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(inferpool.service.queue.replacing, "available_bytes", lambda: -1)

    async def go(arena: Arena) -> None:
        engine = FakeEngine()
        pool = await two_ready(engine, arena)
        with pytest.raises(RestartFailedError, match=r"MiB are free; .*old_first=true"):
            await pool.replace(pool.slots, 1)
        assert len(engine.started) == 2
        await pool.replace(pool.slots, 1, old_first=True)
        assert [slot.handle for slot in pool.slots] == engine.started[2:]
        await pool.stop(0)

    run(go)


def test_stop_while_the_files_of_a_successor_are_read_leaves_no_worker(tmp_path: Path):
    (tmp_path / "w").write_text("1")
    mark = mark_of(str(tmp_path / "w"))
    assert mark is not None

    class Engine(FakeEngine):
        async def start(
            self, id: WorkerId, config: WorkerConfig, on_progress: Callable[[str], None]
        ) -> FakeWorker:
            worker = await super().start(id, config, on_progress)
            if restart is not None:
                worker.ready = msgspec.structs.replace(worker.ready, files=[mark])
                restart.cancel()  # at the next await, which is for the files
            return worker

    restart: asyncio.Task[None] | None = None

    async def go(arena: Arena) -> None:
        nonlocal restart
        engine = Engine()
        pool = await two_ready(engine, arena)
        restart = asyncio.create_task(pool.replace(pool.slots, 1))
        with pytest.raises(asyncio.CancelledError):
            await restart
        assert [worker.is_gone for worker in engine.started] == [False, False, True]
        assert (pool.restart.state, pool.is_ready) == ("failed", True)
        await pool.stop(0)

    run(go)
