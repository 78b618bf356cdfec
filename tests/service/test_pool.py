import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

import service.pool
from models.opened import mark_of
from models.spec import Placement
from models.speed.names import SpeedReport
from service.admission import Admission
from service.dispatcher import Dispatcher
from service.errors import GivenUpError, RestartFailedError, UnavailableError
from service.metrics import ModelMetrics
from service.pool import Announcer, Pool
from service.quarantine import Quarantine
from service.request import CallOptions, Payload
from tests.fakes import FakeEngine, FakeWorker
from workers.arena import Arena
from workers.config import ModelConfig, WorkerConfig
from workers.engine import WorkerId
from workers.errors import WorkerStartError
from workers.supervisor import RestartPolicy

CONFIG = WorkerConfig(
    model=ModelConfig(name="m", source="echo"), placement=Placement(devices=("cpu",))
)


class Silent:
    def progress(self, worker: str, stage: str) -> None: ...
    def ready(self, worker: str, seconds: float) -> None: ...
    def failed(self, worker: str, reason: str) -> None: ...


def pool_over(
    engine: FakeEngine,
    arena: Arena,
    announcer: Announcer | None = None,
    configs: Sequence[WorkerConfig] = (CONFIG,),
    **policy: int,
) -> Pool:
    metrics = ModelMetrics("m")
    dispatcher = Dispatcher(
        name="m",
        arena=arena,
        admission=Admission(max_queue_length=10, max_batch_size=1, rejected=metrics.rejected),
        quarantine=Quarantine(name="m", duration_s=60),
        metrics=metrics,
        max_batch_size=1,
    )
    return Pool(
        name="m",
        configs=configs,
        engine=engine,
        dispatcher=dispatcher,
        policy=RestartPolicy(**policy),
        metrics=metrics,
        announcer=announcer or Silent(),
        on_change=lambda: None,
    )


def submit(pool: Pool) -> "asyncio.Future[object]":
    options = CallOptions(deadline=time.monotonic() + 30)
    return pool.submit(Payload("bytes", [b"x"]), options, "id")  # type: ignore[return-value]


def run(go: Callable[[Arena], Awaitable[None]]) -> None:
    arena = Arena(1 << 16)
    try:
        asyncio.run(asyncio.wait_for(go(arena), 10))
    finally:
        arena.close()


async def until(claim: Callable[[], object]) -> None:
    while not claim():  # noqa: ASYNC110  # the supervisor tells nobody but the pool
        await asyncio.sleep(0)


def test_nobody_is_ready_yet_and_that_can_be_tried_again():
    async def go(arena: Arena) -> None:
        pool = pool_over(FakeEngine(), arena)
        pool.start()
        with pytest.raises(UnavailableError, match="starting: waiting to start") as caught:
            submit(pool)
        assert caught.value.retry_after_s == 1
        await until(lambda: pool.is_ready)
        submit(pool).cancel()
        await pool.stop(0)

    run(go)


def test_time_to_come_back_covers_the_pause_before_the_next_start():
    async def go(arena: Arena) -> None:
        failures = [WorkerStartError("no luck", permanent=False)] * 5
        pool = pool_over(FakeEngine(failures), arena)
        pool.start()
        slot = pool.slots[0]
        await until(lambda: slot.state == "backoff" and slot.num_failures == 2)
        slot.due += 6  # as after a few failures more
        with pytest.raises(UnavailableError, match="backoff: no luck") as caught:
            submit(pool)
        assert caught.value.retry_after_s in (4, 5, 6, 7)
        await pool.stop(0)

    run(go)


def test_model_that_was_given_up_does_not_ask_for_another_try():
    async def go(arena: Arena) -> None:
        pool = pool_over(FakeEngine([WorkerStartError("wrong weights", permanent=True)]), arena)
        pool.start()
        await until(lambda: pool.is_lost)
        with pytest.raises(GivenUpError, match="wrong weights") as caught:
            submit(pool)
        assert caught.value.retry_after_s is None
        await pool.stop(0)

    run(go)


class Measuring(FakeEngine):
    """Its workers take a while for their presets, which is no part of what a restart would take."""

    def __init__(self) -> None:
        super().__init__()
        self.told: dict[str, SpeedReport | None] = {}
        """By incarnation: the preset that it need not choose."""

    async def start(
        self, id: WorkerId, config: WorkerConfig, on_progress: Callable[[str], None]
    ) -> FakeWorker:
        worker = await super().start(id, config, on_progress)
        self.told[str(id)] = config.chosen
        speed = SpeedReport(preset="folded", gain=1.5, note="bf16 refused", measured_s=0.2)
        worker.ready = msgspec.structs.replace(worker.ready, speed=speed)
        await asyncio.sleep(0.2)
        return worker


def test_worker_after_a_crash_is_told_what_the_one_before_chose_and_one_asked_for_is_not():
    async def go(arena: Arena) -> None:
        engine = Measuring()
        pool = pool_over(engine, arena, configs=[replace(CONFIG, speed="auto")])
        pool.start()
        await until(lambda: pool.is_ready)
        engine.started[0].die()
        await until(lambda: len(engine.started) == 2 and pool.is_ready)
        await pool.replace(pool.slots, 1)
        chosen = engine.started[0].ready.speed
        assert engine.told == {"m/0#0": None, "m/0#1": chosen, "m/0#2": None}
        await pool.stop(0)

    run(go)


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
    monkeypatch.setattr(service.pool, "available_bytes", lambda: -1)

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


def test_stop_while_the_files_of_a_successor_are_read_leaves_no_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "w").write_text("1")
    mark = mark_of(str(tmp_path / "w"))
    assert mark is not None

    async def go(arena: Arena) -> None:
        engine = FakeEngine()
        pool = await two_ready(engine, arena)
        start = engine.start

        async def with_files(
            id: WorkerId, config: WorkerConfig, on_progress: Callable[[str], None]
        ) -> FakeWorker:
            worker = await start(id, config, on_progress)
            worker.ready = msgspec.structs.replace(worker.ready, files=[mark])
            restart.cancel()  # at the next await, which is for the files
            return worker

        engine.start = with_files  # type: ignore[method-assign]
        restart = asyncio.create_task(pool.replace(pool.slots, 1))
        with pytest.raises(asyncio.CancelledError):
            await restart
        assert [worker.is_gone for worker in engine.started] == [False, False, True]
        assert (pool.restart.state, pool.is_ready) == ("failed", True)
        await pool.stop(0)

    run(go)


class Noting(Silent):
    def __init__(self) -> None:
        self.seconds: list[float] = []

    def ready(self, worker: str, seconds: float) -> None:
        self.seconds.append(seconds)


def test_ready_tells_all_the_time_since_the_start_and_the_speed_once(
    caplog: pytest.LogCaptureFixture,
):
    async def go(arena: Arena) -> None:
        engine, told = Measuring(), Noting()
        config = replace(CONFIG, speed="auto")
        pool = pool_over(engine, arena, announcer=told, configs=[config, config])
        pool.start()
        await until(lambda: len(told.seconds) == 2)
        engine.started[0].die()
        await until(lambda: len(told.seconds) == 3)
        assert min(told.seconds) >= 0.19
        await pool.stop(0)

    with caplog.at_level(logging.INFO):
        run(go)
    lines = [line for line in caplog.messages if "speed" in line]
    assert lines == ["m speed: folded, 1.50 x exact, largest deviation 0"]
