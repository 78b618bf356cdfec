import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from inferpool.models.files.opened import mark_of
from inferpool.workers.host.engine import WorkerHandle
from inferpool.workers.host.replica_files import ModelFiles, ReplicaFiles
from inferpool.workers.host.restart_policy import RestartPolicy
from inferpool.workers.host.slots import WorkerSlot
from inferpool.workers.host.supervisor import WorkerSupervisor
from inferpool.workers.shared.errors import WorkerStartError
from tests.fakes import FakeEngine, FakeWorker
from tests.workers.contract import config_of


class RecordingWatcher:
    """A watcher that keeps what it is told, and can be waited for."""

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

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.events]

    async def until(self, event: str, times: int = 1) -> None:
        while self.names.count(event) < times:
            self._changed.clear()
            await asyncio.wait_for(self._changed.wait(), 60)

    def _note(self, event: str, slot: WorkerSlot) -> None:
        self.events.append((event, str(slot.id)))
        self._changed.set()


def unlucky() -> WorkerStartError:
    return WorkerStartError("no luck", permanent=False)


LONG_S = 1000.0


@contextlib.asynccontextmanager
async def supervised(
    engine: FakeEngine, num_workers: int = 1, first_pause_s: float = 0.01
) -> AsyncIterator[tuple[WorkerSupervisor, RecordingWatcher]]:
    """Supervise workers, and stop them at the end of the block."""
    watcher = RecordingWatcher()
    supervisor = WorkerSupervisor(
        lambda *arguments: engine.start(*arguments),  # which tests replace
        watcher,
        RestartPolicy(max_restarts=3, first_pause_s=first_pause_s, stable_s=10.0),
        ReplicaFiles(lambda worker: worker.ready.files),
    )
    supervisor.start("m", [config_of()] * num_workers)
    yield supervisor, watcher
    await supervisor.stop(1)
    assert {slot.state for slot in supervisor.slots} <= {"stopped", "failed"}


async def test_every_worker_starts_and_a_dead_one_is_replaced_while_the_others_go_on():
    engine = FakeEngine()
    async with supervised(engine, num_workers=2) as (supervisor, watcher):
        first, second = supervisor.slots
        await watcher.until("ready", 2)
        assert [first.state, second.state] == ["ready", "ready"]
        assert ("progress", "m/1#0") in watcher.events
        assert first.ended_at is None
        engine.started[0].die()
        await watcher.until("ready", 3)
        assert first.ended_at is not None
        assert watcher.events[-1] == ("ready", "m/0#1")
        assert watcher.names.index("gone") < watcher.names.index("down backoff")
        assert (first.num_restarts, first.cause, second.num_restarts) == (1, "signal", 0)


async def test_failed_starts_are_tried_again():
    async with supervised(FakeEngine([unlucky(), unlucky()])) as (_, watcher):
        await watcher.until("ready")
        assert watcher.names == ["down backoff", "down backoff", "progress", "ready"]


async def test_an_error_of_a_model_is_logged_once_until_it_raises_another(
    caplog: pytest.LogCaptureFixture,
):
    def raised(text: str, number: int) -> WorkerStartError:
        trace = f"at {number:#x}\n{text}"
        return WorkerStartError(f"{text} {number}", permanent=False, traceback=trace)

    errors = [raised("no disk", 1), raised("no disk", 23), raised("no net", 1)]
    async with supervised(FakeEngine(errors)) as (_, watcher):
        await watcher.until("ready")
    assert [(each.getMessage(), each.exc_text or "") for each in caplog.records] == [
        ("m/0#0 cannot load its model", "at 0x1\nno disk"),
        ("m/0#0 did not start: no disk 1", ""),
        ("m/0#1 did not start, as m/0#0 did not: no disk 23", ""),
        ("m/0#2 cannot load its model", "at 0x1\nno net"),
        ("m/0#2 did not start: no net 1", ""),
    ]


@pytest.mark.parametrize(
    ("errors", "reason"),
    [
        ([WorkerStartError("wrong weights", permanent=True)], "wrong weights"),
        ([unlucky() for _ in range(9)], "no luck (4 times in a row: given up)"),
        ([ZeroDivisionError("a mistake")], "a mistake of the service; its log has more"),
    ],
)
async def test_worker_that_cannot_start_is_given_up(errors: list[WorkerStartError], reason: str):
    async with supervised(FakeEngine(errors)) as (supervisor, watcher):
        await watcher.until("down failed")
        assert supervisor.slots[0].reason == reason


@pytest.mark.parametrize("kind", ["has worked", "at work", "idle"])
async def test_worker_that_was_ready_once_is_started_again_after_every_death(kind: str):
    engine = FakeEngine()
    async with supervised(engine) as (supervisor, watcher):
        for life in range(6):
            await watcher.until("ready", life + 1)
            worker = engine.started[-1]
            worker.has_worked = kind == "has worked"
            if kind == "at work":
                worker.run([])
            worker.die()
        await watcher.until("ready", 7)
        assert supervisor.slots[0].num_failures == (6 if kind == "idle" else 0)


@pytest.mark.usefixtures("virtual_time")
@pytest.mark.parametrize(("ready_s", "num_failures"), [(9.9, 2), (10.1, 0)])
async def test_worker_that_was_ready_for_long_counts_as_healthy(ready_s: float, num_failures: int):
    engine = FakeEngine()
    async with supervised(engine) as (supervisor, watcher):
        await watcher.until("ready")
        engine.started[0].die()
        await watcher.until("ready", 2)
        await asyncio.sleep(ready_s)
        engine.started[1].die()
        await watcher.until("ready", 3)
        assert supervisor.slots[0].num_failures == num_failures


async def test_worker_that_was_ready_once_is_tried_again_even_if_its_model_cannot_be_loaded():
    engine = FakeEngine()
    async with supervised(engine) as (_, watcher):
        await watcher.until("ready")
        engine.failures = [WorkerStartError("SyntaxError", permanent=True) for _ in range(6)]
        engine.started[0].die()
        await watcher.until("ready", 2)
        assert "down failed" not in watcher.names


@pytest.mark.usefixtures("virtual_time")
async def test_worker_that_dies_of_all_its_work_waits_before_it_starts_again():
    engine = FakeEngine()
    async with supervised(engine, first_pause_s=LONG_S) as (supervisor, watcher):
        for life in range(3):
            await watcher.until("ready", life + 1)
            engine.started[-1].run([])
            engine.started[-1].die()
        await watcher.until("down backoff", 3)
        assert supervisor.slots[0].due - asyncio.get_running_loop().time() > 20


async def test_an_answer_between_deaths_at_work_starts_the_count_anew():
    engine = FakeEngine()
    async with supervised(engine, first_pause_s=LONG_S) as (_, watcher):
        for life in range(5):
            await watcher.until("ready", life + 1)
            worker = engine.started[-1]
            if life == 2:
                worker.run([])
                worker.answer([b"1"])
            worker.run([])
            worker.die()
        await watcher.until("ready", 6)


@pytest.mark.parametrize("is_asked_to_start", [True, False])
async def test_pause_before_a_start_ends_with_a_stop_or_when_a_start_is_asked_for(
    is_asked_to_start: bool,
):
    engine = FakeEngine([unlucky(), unlucky()])
    async with supervised(engine, first_pause_s=LONG_S) as (supervisor, watcher):
        await watcher.until("down backoff", 2)
        if is_asked_to_start:
            assert await asyncio.wait_for(supervisor.replace(supervisor.slots[0], 1), 60)


async def test_worker_that_becomes_ready_during_the_stop_is_stopped():
    is_starting = asyncio.Event()

    class SlowEngine(FakeEngine):
        async def start(self, id, config, on_progress):
            is_starting.set()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(1)
            return await super().start(id, config, on_progress)

    engine = SlowEngine()
    async with supervised(engine):
        await is_starting.wait()
    assert [worker.is_gone for worker in engine.started] == [True]


async def test_a_worker_that_is_replaced_finishes_first_and_counts_no_failure():
    engine = FakeEngine()
    async with supervised(engine, num_workers=2) as (supervisor, watcher):
        await watcher.until("ready", 2)
        first, second = supervisor.slots
        for _ in range(5):  # more often than failures would be allowed
            assert await supervisor.replace(first, 1)
        assert (first.id.incarnation, first.state, first.num_failures) == (5, "ready", 0)
        assert first.cause == "asked"
        assert (second.id.incarnation, second.state) == (0, "ready")
        gone = watcher.events.index(("gone", "m/0#0"))
        assert gone < watcher.events.index(("ready", "m/0#1"))
        engine.failures = [unlucky()]
        assert not await supervisor.replace(first, 1)
        await watcher.until("ready", 8)


async def test_a_worker_that_is_paused_stays_away_until_it_is_resumed():
    async with supervised(engine := FakeEngine(), num_workers=2) as (supervisor, watcher):
        await watcher.until("ready", 2)
        first, second = supervisor.slots
        await supervisor.pause(second, 1)
        assert (second.state, second.handle, first.state) == ("stopped", None, "ready")
        assert watcher.events[-1] == ("gone", "m/1#0")
        assert "down backoff" not in watcher.names
        assert len(engine.started) == 2
        supervisor.resume(second)
        await watcher.until("ready", 3)
        assert watcher.events[-1] == ("ready", "m/1#1")


@pytest.mark.parametrize("state", ["starting", "backoff"])
async def test_a_worker_that_is_not_ready_is_paused_too(state: str):
    engine = FakeEngine([unlucky()] * 9 if state == "backoff" else [])
    if state == "starting":
        engine.start = lambda *arguments: asyncio.sleep(1000)  # type: ignore[assignment,method-assign,return-value]
    async with supervised(engine, first_pause_s=LONG_S) as (supervisor, _):
        (slot,) = supervisor.slots
        while slot.state != state or slot.num_failures < 2 * (state == "backoff"):  # noqa: ASYNC110
            await asyncio.sleep(0)
        await supervisor.pause(slot, 1)
        assert slot.state == "stopped"


async def test_workers_that_begin_paused_start_when_they_are_resumed():
    async with supervised(engine := FakeEngine(), num_workers=0) as (supervisor, watcher):
        supervisor.start("m", [config_of()] * 3, paused=True)
        await asyncio.sleep(0)
        assert [slot.state for slot in supervisor.slots] == ["stopped"] * 3
        supervisor.resume(supervisor.slots[1])
        await watcher.until("ready")
        assert [str(worker.id) for worker in engine.started] == ["m/1#0"]


async def test_a_successor_takes_over_before_the_old_worker_leaves_and_is_supervised():
    engine = FakeEngine()
    async with supervised(engine) as (supervisor, watcher):
        await watcher.until("ready")
        slot = supervisor.slots[0]
        for _ in range(2):
            await supervisor.succeed(slot, slot.config, 1)
        assert (slot.id.incarnation, slot.state, slot.handle) == (2, "ready", engine.started[2])
        assert [worker.is_gone for worker in engine.started] == [True, True, False]
        assert watcher.events.index(("ready", "m/0#1")) < watcher.events.index(("gone", "m/0#0"))
        engine.started[2].die()
        await watcher.until("ready", 4)
        assert slot.id.incarnation == 3


async def test_a_worker_leaves_in_order_though_its_succession_is_cancelled():
    engine = FakeEngine()
    async with supervised(engine) as (supervisor, watcher):
        await watcher.until("ready")
        slot, first = supervisor.slots[0], engine.started[0]
        first.may_stop.clear()
        succession = asyncio.create_task(supervisor.succeed(slot, slot.config, 1))
        await watcher.until("ready", 2)
        succession.cancel()
        await asyncio.gather(succession, return_exceptions=True)
        assert slot.handle is engine.started[1]
        first.may_stop.set()
        await asyncio.wait_for(first.wait(), 60)
        engine.started[1].die()
        await watcher.until("ready", 3)


async def test_a_worker_stays_if_its_successor_does_not_start():
    engine = FakeEngine()
    async with supervised(engine) as (supervisor, watcher):
        await watcher.until("ready")
        slot = supervisor.slots[0]
        engine.failures = [unlucky()]
        with pytest.raises(WorkerStartError, match="no luck"):
            await supervisor.succeed(slot, config_of(), 1)
        assert (slot.handle, slot.state) == (engine.started[0], "ready")
        assert ("gone", "m/0#0") not in watcher.events


async def test_a_successor_leaves_again_if_the_worker_ended_meanwhile():
    engine = FakeEngine()

    async with supervised(engine) as (supervisor, watcher):
        await watcher.until("ready")
        slot = supervisor.slots[0]
        start = engine.start

        async def die_meanwhile(*arguments: object) -> object:
            engine.started[0].die()
            await watcher.until("ready", 2)
            return await start(*arguments)

        engine.start = die_meanwhile  # type: ignore[method-assign]
        succession = asyncio.create_task(supervisor.succeed(slot, slot.config, 1))
        await asyncio.sleep(0)
        engine.start = start  # type: ignore[method-assign]
        with pytest.raises(WorkerStartError, match="m/0#0 ended meanwhile"):
            await succession
        assert [worker.is_gone for worker in engine.started] == [True, False, True]


@pytest.mark.usefixtures("virtual_time")
async def test_a_worker_that_is_asked_to_leave_while_its_successor_starts_is_replaced_once():
    engine = FakeEngine()

    async with supervised(engine) as (supervisor, watcher):
        await watcher.until("ready")
        slot = supervisor.slots[0]
        start, first = engine.start, engine.started[0]
        first.may_stop.clear()

        async def ask_meanwhile(*arguments: object) -> object:
            engine.start = start  # type: ignore[method-assign]
            tasks.append(asyncio.create_task(supervisor.replace(slot, 1)))
            await asyncio.sleep(0)
            return await start(*arguments)

        tasks: list[asyncio.Task[bool]] = []
        engine.start = ask_meanwhile  # type: ignore[method-assign]
        succession = asyncio.create_task(supervisor.succeed(slot, slot.config, 1))
        await asyncio.sleep(0.01)
        first.may_stop.set()
        with pytest.raises(WorkerStartError, match="m/0#0 ended meanwhile"):
            await asyncio.wait_for(succession, 60)
        assert await asyncio.wait_for(tasks[0], 60)
        assert [worker.is_gone for worker in engine.started] == [True, True, False]
        assert (slot.handle, slot.is_asked_to_leave) == (engine.started[2], False)


class FileLoadingEngine(FakeEngine):
    """An engine whose workers load one file, which changes after the first loads."""

    def __init__(self, path: Path, num_changes: int = 0) -> None:
        super().__init__()
        self.path = path
        self.num_changes = num_changes
        self.may_go_on = asyncio.Event()
        self.may_go_on.set()

    async def start(self, id, config, on_progress):
        mark = mark_of(str(self.path))
        worker = await super().start(id, config, on_progress)
        assert mark is not None
        worker.ready = msgspec.structs.replace(worker.ready, files=[mark])
        await self.may_go_on.wait()
        if len(self.started) <= self.num_changes:
            self.path.write_text(self.path.read_text() + "x")
        return worker


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "weights"
    path.write_text("old")
    return path


async def test_replicas_that_start_while_a_file_changes_all_serve_the_same(path: Path):
    engine = FileLoadingEngine(path)
    engine.may_go_on.clear()
    async with supervised(engine, num_workers=2) as (supervisor, watcher):
        while len(engine.started) < 2:  # noqa: ASYNC110  # the fake tells nobody
            await asyncio.sleep(0.001)
        path.write_text("newer")
        engine.may_go_on.set()
        await watcher.until("ready", 2)
        serving = [slot.handle.ready.files for slot in supervisor.slots if slot.handle]
        assert serving == [[mark_of(str(path))]] * 2
        assert all(worker.is_gone for worker in engine.started[:2])


async def test_a_worker_is_not_given_up_because_files_have_changed(path: Path):
    engine = FileLoadingEngine(path)
    async with supervised(engine, num_workers=2) as (supervisor, watcher):
        first, second = supervisor.slots
        await watcher.until("ready", 2)
        await supervisor._files.until_remembered()
        path.write_text("newer")
        second.was_ever_ready = False  # like one that has never started
        engine.started[1].die()
        await watcher.until("down backoff", 6)
        assert second.cause == "files"
        assert first.handle is engine.started[0]
        path.write_text("old")
        assert await supervisor.replace(second, 1)


async def test_a_file_that_changes_all_the_time_keeps_no_worker_from_serving(
    path: Path, caplog: pytest.LogCaptureFixture
):
    engine = FileLoadingEngine(path, num_changes=100)
    async with supervised(engine, num_workers=2) as (_, watcher):
        await watcher.until("ready", 2)
        assert "replicas may differ" in caplog.text
        assert watcher.events.count(("ready", "m/0#2")) == 1


async def test_a_file_that_changed_during_two_loads_is_judged_after_the_third(path: Path):
    async with supervised(FileLoadingEngine(path, num_changes=2)) as (supervisor, watcher):
        await watcher.until("ready")
        present = supervisor._files.present
        path.write_text("other")
        assert present is not None
        assert present.changed() == [str(path)]


async def test_workers_with_other_files_do_not_keep_the_present_ones_in_force(path: Path):
    engine = FileLoadingEngine(path)
    async with supervised(engine, num_workers=2) as (supervisor, watcher):
        await watcher.until("ready", 2)
        supervisor.slots[1].files = ModelFiles([])  # as halfway through a restart
        path.write_text("newer")
        engine.started[0].die()
        await watcher.until("ready", 3)
        assert supervisor.outdated() == [supervisor.slots[1]]


async def test_a_worker_that_was_lost_with_its_host_is_forgotten_until_the_host_is_back():
    engine = FakeEngine()
    async with supervised(engine, num_workers=2) as (supervisor, watcher):
        await watcher.until("ready", 2)
        first, second = supervisor.slots
        engine.started[0].die()
        supervisor.remove(first, "the host is gone")
        supervisor.remove(first, "told twice")
        assert supervisor.slots == [second]
        assert (first.state, first.cause, first.reason) == ("stopped", "host", "the host is gone")
        assert watcher.events[-2:] == [("gone", "m/0#0"), ("down stopped", "m/0#0")]
        supervisor.resume(first)  # by somebody who does not know yet
        await asyncio.wait_for(supervisor.pause(first, 1), 60)
        supervisor.start("m", [first.config] * 2, numbers=[0, 2])
        await watcher.until("ready", 4)
        assert [str(slot.id) for slot in supervisor.slots] == ["m/1#0", "m/0#1", "m/2#0"]


async def test_a_worker_that_was_ready_before_its_host_was_lost_is_never_given_up_there():
    engine = FakeEngine()
    async with supervised(engine) as (supervisor, watcher):
        await watcher.until("ready")
        (slot,) = supervisor.slots
        supervisor.remove(slot, "the host is gone")
        engine.failures = [unlucky() for _ in range(5)]
        supervisor.start("m", [slot.config])
        await watcher.until("ready", 2)


async def test_workers_of_a_host_bear_its_name_in_the_log(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO)
    engine = FakeEngine()
    async with supervised(engine) as (supervisor, watcher):
        await watcher.until("ready")
        supervisor.start("m", [config_of()], numbers=[1], host="far")
        await watcher.until("ready", 2)
        for worker in engine.started[:2]:
            worker.die()
        await watcher.until("ready", 4)
    ended = [record for record in caplog.records if " ended: " in record.getMessage()]
    hosts = {record.getMessage()[:3]: vars(record).get("host") for record in ended}
    assert hosts == {"m/0": None, "m/1": "far"}


async def test_a_restart_ends_when_the_host_of_the_worker_is_lost():
    engine = FakeEngine()
    async with supervised(engine, num_workers=2, first_pause_s=LONG_S) as (supervisor, watcher):
        await watcher.until("ready", 2)
        lost, starting = supervisor.slots
        engine.failures = [unlucky()]
        engine.started[1].die()
        await watcher.until("down backoff")
        held_up, goes_on, start = asyncio.Event(), asyncio.Event(), engine.start

        async def slow_start(*arguments: Any) -> FakeWorker:
            held_up.set()
            await goes_on.wait()
            return await start(*arguments)

        engine.start = slow_start  # type: ignore[method-assign]
        restarts = [
            asyncio.create_task(supervisor.replace(lost, 1)),
            asyncio.create_task(supervisor.succeed(lost, lost.config, 1)),
            asyncio.create_task(supervisor.replace(starting, 1)),
        ]
        await asyncio.wait_for(held_up.wait(), 60)
        for slot in (lost, starting):
            supervisor.remove(slot, "the host is gone")
        goes_on.set()
        results = await asyncio.wait_for(asyncio.gather(*restarts, return_exceptions=True), 60)
        assert [results[0], results[2]] == [False, False]
        assert isinstance(results[1], WorkerStartError)
        assert not await supervisor.replace(lost, 1)


@pytest.mark.usefixtures("virtual_time")
async def test_a_worker_that_ended_as_its_host_leaves_is_not_started_again_there(
    caplog: pytest.LogCaptureFixture,
):
    engine = FakeEngine()
    async with supervised(engine) as (supervisor, watcher):
        await watcher.until("ready")
        engine.started[0].lose_host()
        await watcher.until("down backoff")
        (slot,) = supervisor.slots
        assert (slot.cause, slot.num_failures) == ("host", 0)
        assert slot.due > asyncio.get_running_loop().time() + 50
        supervisor.remove(slot, "the host has left")
        assert watcher.names[-1] == "down backoff"  # its end is not told twice
    assert not [each for each in caplog.records if each.levelname != "INFO"]


async def test_a_stop_waits_for_a_start_that_was_cancelled_as_its_host_was_lost():
    engine = FakeEngine()
    begun, is_over = asyncio.Event(), False

    async def start_that_ends_slowly(*_: object) -> FakeWorker:
        nonlocal is_over
        begun.set()
        try:
            return await asyncio.Future[FakeWorker]()
        finally:
            await asyncio.sleep(0.05)
            is_over = True

    engine.start = start_that_ends_slowly  # type: ignore[method-assign]
    async with supervised(engine) as (supervisor, _):
        await begun.wait()
        supervisor.remove(supervisor.slots[0], "the host is gone")
    assert is_over
