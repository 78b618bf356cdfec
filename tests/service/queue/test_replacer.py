import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

import inferpool.service.queue.replacer
from inferpool.models.files.opened import mark_of
from inferpool.models.speed_names import SpeedReport
from inferpool.service.errors import RestartFailedError
from inferpool.service.queue.pool import Pool
from inferpool.workers.host.engine import WorkerId
from inferpool.workers.shared.arena import Arena
from inferpool.workers.shared.config import WorkerConfig
from inferpool.workers.shared.errors import WorkerStartError
from tests.fakes import FakeEngine, FakeWorker
from tests.service.pools import MeasuringEngine, ready_pool, until


@pytest.mark.parametrize(("wanted", "is_changed"), [("folded", True), ("compiled", False)])
async def test_a_worker_that_changes_over_stays_ready(wanted: str, is_changed: bool, arena: Arena):
    engine = MeasuringEngine()
    pool = await ready_pool(engine, arena, speed="auto")
    found = SpeedReport(preset=wanted)
    changing = asyncio.create_task(pool.replacer.change_over(pool.slots[0], found, 1))
    await until(lambda: len(engine.started) == 2 or not pool.is_ready)
    while not changing.done():
        assert pool.is_ready
        await asyncio.sleep(0)
    assert await changing is is_changed
    assert engine.told == {"m/0#0": None, "m/0#1": None}  # it looks into the cache
    await pool.stop(0)


class FileEngine(FakeEngine):
    """Each worker is made of one file, as the file is when the worker starts."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        path.write_text("old")
        self.on_start: Callable[[FileEngine, WorkerId], None] = lambda engine, id: None
        """May raise, or change the file, before a worker starts."""

    async def start(
        self, id: WorkerId, config: WorkerConfig, on_progress: Callable[[str], None]
    ) -> FakeWorker:
        self.on_start(self, id)
        mark = mark_of(str(self.path))
        worker = await super().start(id, config, on_progress)
        worker.ready = msgspec.structs.replace(worker.ready, files=[mark] if mark else [])
        return worker


@pytest.fixture
def engine(tmp_path: Path) -> FileEngine:
    return FileEngine(tmp_path / "w")


async def three_ready(engine: FakeEngine, arena: Arena) -> Pool:
    pool = await ready_pool(engine, arena, 3)
    await pool._supervisor._files.until_remembered()
    return pool


def serving(pool: Pool) -> list[str]:
    return [str(slot.handle.id) for slot in pool.slots if slot.handle]


UNLUCKY = WorkerStartError("SyntaxError", permanent=True)


def fail_second() -> Callable[[FileEngine, WorkerId], None]:
    """Let the second successor fail, the first time."""
    luck = iter([True, False])

    def on_start(engine: FileEngine, id: WorkerId) -> None:
        if not next(luck, True):
            raise UNLUCKY

    return on_start


def fail_all_but_first(engine: FileEngine, id: WorkerId) -> None:
    if id.worker != "m/0":
        raise UNLUCKY


def fail_beside(*workers: str) -> Callable[[FileEngine, WorkerId], None]:
    """Let no successor of these come up while its predecessor is there."""

    def on_start(engine: FileEngine, id: WorkerId) -> None:
        if id.worker in workers and not engine.started[id.slot].is_gone:
            raise WorkerStartError("out of memory", permanent=False)

    return on_start


@pytest.mark.parametrize(
    "on_start", [fail_second(), fail_beside("m/1")], ids=["failed once", "no room for two"]
)
async def test_restart_ends_with_the_new_files_for_all_once_two_have_loaded_them(
    engine: FileEngine,
    arena: Arena,
    on_start: Callable[[FileEngine, WorkerId], None],
):
    pool = await three_ready(engine, arena)
    engine.path.write_text("newer")
    engine.on_start = on_start
    await pool.replacer.replace(pool.slots, 1)
    assert serving(pool) == ["m/0#1", "m/1#1", "m/2#1"]
    assert pool.replacer.restart.state == "done"
    await pool.stop(0)


@pytest.mark.parametrize(
    ("content", "on_start", "old_first", "error", "after"),
    [
        # A file that could be loaded only once is given up for the old one.
        (
            "newer",
            fail_beside("m/1", "m/2"),
            False,
            r"m/1 .* serves on .*m/0 served with other",
            ["m/1#0", "m/2#0"],
        ),
        ("old", fail_beside("m/1"), False, "m/1 was not replaced", ["m/0#1", "m/1#0", "m/2#1"]),
        ("old", fail_all_but_first, True, "m/1 did not come up again", ["m/0#1", "m/2#0"]),
    ],
    ids=["loaded only once", "same files", "old first"],
)
async def test_restart_that_fails_leaves_what_can_serve_with_the_same_files(
    engine: FileEngine,
    arena: Arena,
    content: str,
    on_start: Callable[[FileEngine, WorkerId], None],
    old_first: bool,
    error: str,
    after: list[str],
):
    pool = await three_ready(engine, arena)
    if content != "old":
        engine.path.write_text(content)
    engine.on_start = on_start
    with pytest.raises(RestartFailedError, match=error):
        await pool.replacer.replace(pool.slots, 1, old_first=old_first)
    assert serving(pool) == after
    if content == "newer":
        assert (pool.slots[0].state, pool.slots[0].cause) == ("backoff", "files")
        engine.path.write_text("old")
        pool.slots[0].is_asked_to_start.set()  # or its pause would have to end first
        await until(lambda: pool.slots[0].state == "ready")
    await pool.stop(0)


async def test_restart_takes_files_that_change_meanwhile(engine: FileEngine, arena: Arena):
    pool = await three_ready(engine, arena)

    def change(engine: FileEngine, id: WorkerId) -> None:
        if str(id) == "m/1#1":
            engine.path.write_text("newest")
        assert len(serving(pool)) == 3  # none leaves before its successor is ready

    engine.path.write_text("newer")
    engine.on_start = change
    await pool.replacer.replace(pool.slots, 1)
    assert serving(pool) == ["m/0#2", "m/1#1", "m/2#1"]
    newest = [mark_of(str(engine.path))]
    assert all(slot.handle and slot.handle.ready.files == newest for slot in pool.slots)
    engine.on_start = lambda engine, id: None
    engine.started[-1].die()  # the last to start is m/0
    await until(lambda: serving(pool)[0] == "m/0#3")
    await pool.stop(0)


async def test_restart_whose_first_successor_fails_changes_nothing(arena: Arena):
    engine = FakeEngine()
    pool = await ready_pool(engine, arena, 2)
    engine.failures = [UNLUCKY]
    with pytest.raises(RestartFailedError, match=r"m/0 .* serves on as it was: SyntaxError"):
        await pool.replacer.replace(pool.slots, 1)
    assert [slot.handle for slot in pool.slots] == engine.started
    assert (pool.replacer.restart.state, pool.is_ready) == ("failed", True)
    await pool.stop(0)


async def test_restart_without_memory_is_refused(monkeypatch: pytest.MonkeyPatch, arena: Arena):
    monkeypatch.setattr(inferpool.service.queue.replacer, "available_bytes", lambda: -1)
    engine = FakeEngine()
    pool = await ready_pool(engine, arena, 2)
    with pytest.raises(RestartFailedError, match=r"MiB are free; .*old_first=true"):
        await pool.replacer.replace(pool.slots, 1)
    assert len(engine.started) == 2
    await pool.replacer.replace(pool.slots, 1, old_first=True)
    assert [slot.handle for slot in pool.slots] == engine.started[2:]
    await pool.stop(0)


async def test_stop_while_a_successors_files_are_read_leaves_none(engine: FileEngine, arena: Arena):
    pool = await ready_pool(engine, arena, 2)
    restart = asyncio.create_task(pool.replacer.replace(pool.slots, 1))
    engine.on_start = lambda engine, id: restart.cancel()  # at the next await, for the files
    with pytest.raises(asyncio.CancelledError):
        await restart
    assert [worker.is_gone for worker in engine.started] == [False, False, True]
    assert (pool.replacer.restart.state, pool.is_ready) == ("failed", True)
    await pool.stop(0)


async def test_a_restart_goes_on_while_hosts_leave_and_join(engine: FileEngine, arena: Arena):
    pool = await three_ready(engine, arena)
    engine.path.write_text("newer")
    lost = pool.slots[1]

    def on_start(engine: FileEngine, id: WorkerId) -> None:
        if id.slot == 1:
            engine.on_start = lambda *_: None
            engine.started[1].lose_host()
            pool._supervisor.remove(lost, "silence")
            joined = replace(lost.config, host="b")
            pool.extend([joined])

    engine.on_start = on_start
    await pool.replacer.replace(pool.slots, 1)
    assert pool.replacer.restart.state == "done"
    await until(lambda: len(serving(pool)) == 3)
    assert serving(pool)[:2] == ["m/0#1", "m/2#1"]
    assert not pool._supervisor.outdated()
    await pool.stop(0)


async def test_a_restart_of_a_worker_whose_host_is_lost_fails(engine: FileEngine, arena: Arena):
    pool = await three_ready(engine, arena)

    def on_start(engine: FileEngine, id: WorkerId) -> None:
        pool._supervisor.remove(pool.slots[id.slot], "silence")

    engine.on_start = on_start
    with pytest.raises(RestartFailedError, match="hosts of all workers were lost"):
        await pool.replacer.replace(pool.slots[:1], 1)
    assert serving(pool) == ["m/1#0", "m/2#0"]
    await pool.stop(0)


@pytest.mark.parametrize(("old_first", "workers"), [(True, "012"), (False, "0")])
async def test_a_restart_shows_which_workers_start_without_their_predecessors(
    engine: FileEngine, arena: Arena, old_first: bool, workers: str
):
    pool = await three_ready(engine, arena)
    engine.path.write_text("newer")
    engine.on_start = fail_beside("m/1", "m/2")  # unless the old ones go first, m/0 has to go back
    restart = asyncio.create_task(pool.replacer.replace(pool.slots, 1, old_first=old_first))
    shown = set()
    while not restart.done():
        shown.add(pool.replacer.restart.text)
        await asyncio.sleep(0)
    assert (restart.exception() is None) is old_first
    assert {f"m/{each} starts again" for each in workers} == {
        text for text in shown if "again" in text
    }
    await pool.stop(0)
