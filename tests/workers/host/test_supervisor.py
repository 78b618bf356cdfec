import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import pytest

import inferpool.workers.host.supervisor
from inferpool.models.files.opened import mark_of
from inferpool.workers.errors import WorkerStartError
from inferpool.workers.host.engine import WorkerHandle
from inferpool.workers.host.generation import FilesOfAll, Generation
from inferpool.workers.host.supervisor import RestartPolicy, WorkerSlot, WorkerSupervisor
from tests.fakes import FakeEngine
from tests.workers.contract import config_of


class Log:
    """A watcher that remembers, and can be waited for."""

    def __init__(self) -> None:
        self.events: list[tuple[str, str]] = []
        self._changed = asyncio.Event()

    def on_progress(self, slot: WorkerSlot) -> None:
        self._note("progress", slot)

    def on_ready(self, slot: WorkerSlot) -> None:
        self._note("ready", slot)

    def on_gone(self, handle: WorkerHandle) -> None:
        self.events.append(("gone", str(handle.id)))

    def on_down(self, slot: WorkerSlot) -> None:
        self._note(f"down {slot.state}", slot)

    async def until(self, event: str, times: int = 1) -> None:
        while [name for name, _ in self.events].count(event) < times:
            self._changed.clear()
            await asyncio.wait_for(self._changed.wait(), 5)

    def _note(self, event: str, slot: WorkerSlot) -> None:
        self.events.append((event, str(slot.id)))
        self._changed.set()


def unlucky() -> WorkerStartError:
    return WorkerStartError("no luck", permanent=False)


@pytest.fixture
def supervise(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(inferpool.workers.host.supervisor, "_FIRST_BACKOFF_S", 0.01)

    def supervise(
        engine: FakeEngine,
        test: Callable[[WorkerSupervisor, Log], Awaitable[None]],
        num_workers: int = 1,
    ) -> None:
        async def go() -> None:
            log = Log()
            policy = RestartPolicy(max_restarts=3)
            supervisor = WorkerSupervisor(
                lambda *told: engine.start(*told),  # which tests replace
                log,
                policy,
                FilesOfAll(lambda worker: worker.ready.files),
            )
            supervisor.start("m", [config_of()] * num_workers)
            await test(supervisor, log)
            await supervisor.stop(1)
            assert {slot.state for slot in supervisor.slots} <= {"stopped", "failed"}

        asyncio.run(asyncio.wait_for(go(), 20))

    return supervise


def test_every_slot_comes_up_and_is_announced(supervise):
    async def test(supervisor: WorkerSupervisor, log: Log) -> None:
        await log.until("ready", 2)
        assert [slot.state for slot in supervisor.slots] == ["ready", "ready"]
        assert ("progress", "m/1#0") in log.events

    supervise(FakeEngine(), test, num_workers=2)


def test_dead_worker_is_replaced_by_its_next_incarnation_and_the_others_go_on(supervise):
    engine = FakeEngine()

    async def test(supervisor: WorkerSupervisor, log: Log) -> None:
        await log.until("ready", 2)
        assert supervisor.slots[0].ended_at is None
        engine.started[0].die()
        await log.until("ready", 3)
        assert supervisor.slots[0].ended_at is not None
        assert log.events[-1] == ("ready", "m/0#1")
        assert supervisor.slots[0].num_restarts == 1
        assert supervisor.slots[0].cause == "signal"
        assert supervisor.slots[1].num_restarts == 0

    supervise(engine, test, num_workers=2)


def test_failed_starts_are_tried_again(supervise):
    async def test(supervisor: WorkerSupervisor, log: Log) -> None:
        await log.until("ready")
        assert [name for name, _ in log.events] == [
            "down backoff",
            "down backoff",
            "progress",
            "ready",
        ]

    supervise(FakeEngine([unlucky(), unlucky()]), test)


def test_what_a_model_raises_is_logged_once_until_it_raises_something_else(
    supervise, caplog: pytest.LogCaptureFixture
):
    def raised(text: str, number: int) -> WorkerStartError:
        trace = f"at {number:#x}\n{text}"
        return WorkerStartError(f"{text} {number}", permanent=False, traceback=trace)

    async def test(supervisor: WorkerSupervisor, log: Log) -> None:
        await log.until("ready")

    supervise(FakeEngine([raised("no disk", 1), raised("no disk", 23), raised("no net", 1)]), test)
    said = [(each.getMessage(), each.exc_text or "") for each in caplog.records]
    assert said == [
        ("m/0#0 cannot load its model", "at 0x1\nno disk"),
        ("m/0#0 did not start: no disk 1", ""),
        ("m/0#1 did not start, as m/0#0 did not: no disk 23", ""),
        ("m/0#2 cannot load its model", "at 0x1\nno net"),
        ("m/0#2 did not start: no net 1", ""),
    ]


def test_permanent_failure_gives_the_worker_up_at_once(supervise):
    async def test(supervisor: WorkerSupervisor, log: Log) -> None:
        await log.until("down failed")
        assert supervisor.slots[0].reason == "wrong weights"

    supervise(FakeEngine([WorkerStartError("wrong weights", permanent=True)]), test)


def test_crash_loop_is_given_up_visibly(supervise):
    async def test(supervisor: WorkerSupervisor, log: Log) -> None:
        await log.until("down failed")
        assert "4 times in a row: given up" in supervisor.slots[0].reason

    supervise(FakeEngine([unlucky() for _ in range(9)]), test)


def test_deaths_with_work_done_between_them_are_no_crash_loop(supervise):
    engine = FakeEngine()

    async def test(supervisor: WorkerSupervisor, log: Log) -> None:
        for life in range(8):
            await log.until("ready", life + 1)
            engine.started[-1].has_worked = True
            engine.started[-1].die()
        await log.until("ready", 9)

    supervise(engine, test)


def test_stop_during_a_backoff_ends_it(supervise, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(inferpool.workers.host.supervisor, "_FIRST_BACKOFF_S", 100.0)

    async def test(supervisor: WorkerSupervisor, log: Log) -> None:
        await log.until("down backoff", 2)

    supervise(FakeEngine([unlucky(), unlucky()]), test)


def test_worker_that_dies_at_work_is_not_to_blame(supervise):
    engine = FakeEngine()

    async def test(supervisor: WorkerSupervisor, log: Log) -> None:
        for life in range(8):
            await log.until("ready", life + 1)
            engine.started[-1].run([])
            engine.started[-1].die()
        await log.until("ready", 9)

    supervise(engine, test)


def test_worker_that_dies_of_all_its_work_is_not_started_again_and_again_at_once(
    supervise, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(inferpool.workers.host.supervisor, "_FIRST_BACKOFF_S", 100.0)
    engine = FakeEngine()

    async def test(supervisor: WorkerSupervisor, log: Log) -> None:
        (slot,) = supervisor.slots
        for life in range(3):
            await log.until("ready", life + 1)
            engine.started[-1].run([])
            engine.started[-1].die()
        await log.until("down backoff", 3)
        assert slot.due - asyncio.get_running_loop().time() > 20

    supervise(engine, test)


def test_an_answer_between_deaths_at_work_ends_the_row(supervise, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(inferpool.workers.host.supervisor, "_FIRST_BACKOFF_S", 100.0)
    engine = FakeEngine()

    async def test(supervisor: WorkerSupervisor, log: Log) -> None:
        for life in range(5):
            await log.until("ready", life + 1)
            worker = engine.started[-1]
            if life == 2:
                worker.run([])
                worker.answer([b"1"])
            worker.run([])
            worker.die()
        await log.until("ready", 6)

    supervise(engine, test)


def test_worker_that_was_ready_once_is_never_given_up(supervise):
    engine = FakeEngine()

    async def test(supervisor: WorkerSupervisor, log: Log) -> None:
        for life in range(6):
            await log.until("ready", life + 1)
            engine.started[-1].die()
        await log.until("ready", 7)
        assert supervisor.slots[0].num_failures == 6

    supervise(engine, test)


def test_worker_that_was_ready_once_is_tried_again_though_its_model_cannot_be_loaded_now(supervise):
    engine = FakeEngine()

    async def test(supervisor: WorkerSupervisor, log: Log) -> None:
        await log.until("ready")
        engine.failures = [WorkerStartError("SyntaxError", permanent=True) for _ in range(6)]
        engine.started[0].die()
        await log.until("ready", 2)
        assert [name for name, _ in log.events].count("down failed") == 0

    supervise(engine, test)


def test_worker_that_pauses_starts_at_once_when_asked_to(
    supervise, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(inferpool.workers.host.supervisor, "_FIRST_BACKOFF_S", 100.0)

    async def test(supervisor: WorkerSupervisor, log: Log) -> None:
        await log.until("down backoff", 2)
        assert await asyncio.wait_for(supervisor.replace(supervisor.slots[0], 1), 5)

    supervise(FakeEngine([unlucky(), unlucky()]), test)


def test_dead_worker_is_announced_before_it_is_replaced(supervise):
    engine = FakeEngine()

    async def test(supervisor: WorkerSupervisor, log: Log) -> None:
        await log.until("ready")
        engine.started[0].die()
        await log.until("ready", 2)
        names = [name for name, _ in log.events]
        assert names.index("gone") < names.index("down backoff")

    supervise(engine, test)


def test_start_that_raises_anything_else_is_said_and_gives_the_slot_up(supervise):
    class Broken(FakeEngine):
        async def start(self, id, config, on_progress):
            raise ZeroDivisionError("a mistake")

    async def test(supervisor: WorkerSupervisor, log: Log) -> None:
        await log.until("down failed")

    supervise(Broken(), test)


def test_worker_that_comes_up_during_the_stop_is_stopped(supervise):
    engine = FakeEngine()
    is_starting = asyncio.Event()

    class Slow(FakeEngine):
        async def start(self, id, config, on_progress):
            is_starting.set()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(1)
            return await engine.start(id, config, on_progress)

    async def test(supervisor: WorkerSupervisor, log: Log) -> None:
        await is_starting.wait()

    supervise(Slow(), test)
    assert all(worker.is_gone for worker in engine.started)


def test_a_worker_that_is_replaced_finishes_first_and_counts_no_failure(supervise):
    async def test(supervisor: WorkerSupervisor, log: Log) -> None:
        await log.until("ready", 2)
        for _ in range(5):  # more often than failures would be allowed
            assert await supervisor.replace(supervisor.slots[0], 1)
        first, second = supervisor.slots
        assert (first.id.incarnation, first.state, first.num_failures) == (5, "ready", 0)
        assert first.cause == "asked"
        assert (second.id.incarnation, second.state) == (0, "ready")
        gone = log.events.index(("gone", "m/0#0"))
        assert gone < log.events.index(("ready", "m/0#1"))

    supervise(FakeEngine(), test, num_workers=2)


def test_a_successor_that_does_not_come_up_is_told(supervise):
    engine = FakeEngine()

    async def test(supervisor: WorkerSupervisor, log: Log) -> None:
        await log.until("ready")
        engine.failures = [unlucky()]
        assert not await supervisor.replace(supervisor.slots[0], 1)
        await log.until("ready", 2)

    supervise(engine, test)


def test_a_successor_takes_over_before_the_old_one_leaves_and_is_looked_after(supervise):
    engine = FakeEngine()

    async def test(supervisor: WorkerSupervisor, log: Log) -> None:
        await log.until("ready")
        slot = supervisor.slots[0]
        for _ in range(2):
            await supervisor.succeed(slot, slot.config, 1)
        assert (slot.id.incarnation, slot.state, slot.handle) == (2, "ready", engine.started[2])
        assert [worker.is_gone for worker in engine.started] == [True, True, False]
        assert log.events.index(("ready", "m/0#1")) < log.events.index(("gone", "m/0#0"))
        engine.started[2].die()
        await log.until("ready", 4)
        assert slot.id.incarnation == 3

    supervise(engine, test)


def test_a_worker_whose_successor_does_not_come_up_stays(supervise):
    engine = FakeEngine()

    async def test(supervisor: WorkerSupervisor, log: Log) -> None:
        await log.until("ready")
        slot = supervisor.slots[0]
        engine.failures = [unlucky()]
        with pytest.raises(WorkerStartError, match="no luck"):
            await supervisor.succeed(slot, config_of(), 1)
        assert (slot.handle, slot.state) == (engine.started[0], "ready")
        assert ("gone", "m/0#0") not in log.events

    supervise(engine, test)


def test_a_successor_leaves_again_where_the_worker_came_to_an_end_meanwhile(supervise):
    engine = FakeEngine()

    async def test(supervisor: WorkerSupervisor, log: Log) -> None:
        await log.until("ready")
        slot = supervisor.slots[0]
        start = engine.start

        async def die_meanwhile(*arguments: object) -> object:
            engine.started[0].die()
            await log.until("ready", 2)
            return await start(*arguments)

        engine.start = die_meanwhile  # type: ignore[method-assign]
        succession = asyncio.create_task(supervisor.succeed(slot, slot.config, 1))
        await asyncio.sleep(0)
        engine.start = start  # type: ignore[method-assign]
        with pytest.raises(WorkerStartError, match="m/0#0 ended meanwhile"):
            await succession
        assert [worker.is_gone for worker in engine.started] == [True, False, True]

    supervise(engine, test)


def test_a_worker_that_is_asked_to_leave_while_its_successor_starts_is_replaced_once(supervise):
    engine = FakeEngine()

    async def test(supervisor: WorkerSupervisor, log: Log) -> None:
        await log.until("ready")
        slot = supervisor.slots[0]
        start, first = engine.start, engine.started[0]
        stop, may_end = first.stop, asyncio.Event()

        async def finish_first(grace_s: float) -> None:
            await may_end.wait()
            await stop(grace_s)

        first.stop = finish_first  # type: ignore[method-assign]

        async def ask_meanwhile(*arguments: object) -> object:
            engine.start = start  # type: ignore[method-assign]
            tasks.append(asyncio.create_task(supervisor.replace(slot, 1)))
            await asyncio.sleep(0)
            return await start(*arguments)

        tasks: list[asyncio.Task[bool]] = []
        engine.start = ask_meanwhile  # type: ignore[method-assign]
        succession = asyncio.create_task(supervisor.succeed(slot, slot.config, 1))
        await asyncio.sleep(0.01)
        may_end.set()
        with pytest.raises(WorkerStartError, match="m/0#0 ended meanwhile"):
            await asyncio.wait_for(succession, 5)
        assert await asyncio.wait_for(tasks[0], 5)
        assert [worker.is_gone for worker in engine.started] == [True, True, False]
        assert (slot.handle, slot.is_asked_to_leave) == (engine.started[2], False)

    supervise(engine, test)


class Loading(FakeEngine):
    """Its workers are made of one file, as it is when they start."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self.may_go_on = asyncio.Event()
        self.may_go_on.set()

    async def start(self, id, config, on_progress):
        mark = mark_of(str(self.path))
        worker = await super().start(id, config, on_progress)
        assert mark is not None
        worker.ready = msgspec.structs.replace(worker.ready, files=[mark])
        await self.may_go_on.wait()
        return worker


def test_replicas_that_start_while_a_file_changes_all_serve_with_the_same(
    supervise, tmp_path: Path
):
    path = tmp_path / "w"
    path.write_text("old")
    engine = Loading(path)
    engine.may_go_on.clear()

    async def test(supervisor: WorkerSupervisor, log: Log) -> None:
        while len(engine.started) < 2:  # noqa: ASYNC110  # the fake tells nobody
            await asyncio.sleep(0.001)
        path.write_text("newer")
        engine.may_go_on.set()
        await log.until("ready", 2)
        serving = [slot.handle.ready.files for slot in supervisor.slots if slot.handle]
        assert serving == [[mark_of(str(path))]] * 2
        assert all(worker.is_gone for worker in engine.started[:2])

    supervise(engine, test, num_workers=2)


def test_a_slot_is_not_given_up_for_the_sake_of_files_that_have_changed(supervise, tmp_path: Path):
    path = tmp_path / "w"
    path.write_text("old")
    engine = Loading(path)

    async def test(supervisor: WorkerSupervisor, log: Log) -> None:
        first, second = supervisor.slots
        await log.until("ready", 2)
        await supervisor._files.until_remembered()
        path.write_text("newer")
        second.was_ever_ready = False  # as one that had no luck so far
        engine.started[1].die()
        await log.until("down backoff", 6)
        assert second.cause == "files"
        assert first.handle is engine.started[0]
        path.write_text("old")
        assert await supervisor.replace(second, 1)

    supervise(engine, test, num_workers=2)


def test_a_file_that_changes_all_the_time_keeps_no_worker_from_serving(
    supervise, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    path = tmp_path / "w"
    path.write_text("")

    class Restless(Loading):
        async def start(self, id, config, on_progress):
            worker = await super().start(id, config, on_progress)
            path.write_text(path.read_text() + "x")
            return worker

    async def test(supervisor: WorkerSupervisor, log: Log) -> None:
        await log.until("ready", 2)
        assert "replicas may differ" in caplog.text
        assert log.events.count(("ready", "m/0#2")) == 1

    supervise(Restless(path), test, num_workers=2)


def test_a_file_that_changed_during_two_loads_is_judged_after_the_third(supervise, tmp_path: Path):
    path = tmp_path / "w"
    path.write_text("")

    class Deployed(Loading):
        async def start(self, id, config, on_progress):
            worker = await super().start(id, config, on_progress)
            if len(self.started) <= 2:
                path.write_text(path.read_text() + "x")
            return worker

    async def test(supervisor: WorkerSupervisor, log: Log) -> None:
        await log.until("ready")
        present = supervisor._files.present
        path.write_text("other")
        assert present is not None
        assert present.changed() == [str(path)]

    supervise(Deployed(path), test)


def test_workers_with_other_files_do_not_keep_the_present_ones_from_being_given_up(
    supervise, tmp_path: Path
):
    path = tmp_path / "w"
    path.write_text("old")
    engine = Loading(path)

    async def test(supervisor: WorkerSupervisor, log: Log) -> None:
        await log.until("ready", 2)
        supervisor.slots[1].generation = Generation([])  # as in the midst of a restart
        path.write_text("newer")
        engine.started[0].die()
        await log.until("ready", 3)
        assert supervisor.outdated() == [supervisor.slots[1]]

    supervise(engine, test, num_workers=2)
