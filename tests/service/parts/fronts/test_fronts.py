import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator

import pytest

import inferpool.service.parts.fronts.fronts
from inferpool.service.api.wire.budgets import EdgeLimits
from inferpool.service.api.wire.held import held_bytes, place_of
from inferpool.service.parts.fronts.fronts import Fronts
from inferpool.service.settings.model import ModelSettings
from inferpool.service.settings.settings import Settings
from inferpool.service.telemetry.metrics import Metrics
from inferpool.workers.host.engine import Cause, Ending, WorkerId
from inferpool.workers.shared.arena import Arena
from inferpool.workers.shared.errors import WorkerStartError
from tests.service.api.fakes import Models
from tests.service.api.server import until

pytestmark = pytest.mark.usefixtures("virtual_time")

SETTINGS = Settings(models={"echo": ModelSettings(source="echo")}, default_model="echo")


class FakeMainSide:
    def __init__(self) -> None:
        self.num_told = 0
        self.knows: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def tell_models(self) -> None:
        self.num_told += 1

    def until_known(self) -> "asyncio.Future[None]":
        return self.knows

    def has_been_heard(self) -> bool:
        return False

    def count(self) -> "asyncio.Future[None]":
        return asyncio.get_running_loop().create_future()


class FakeProcess:
    pid = 1

    def look(self) -> None:
        pass


class FakeFrontProcess:
    """A front that takes connections at once, and never says anything more."""

    has_worked = False
    is_hurried = is_moving = False
    num_open = 0
    fails = False

    def __init__(self, id: WorkerId, *told: object) -> None:
        if self.fails:
            raise OSError("no process is to be had")
        self.id = id
        self.main_side = FakeMainSide()
        self.process = FakeProcess()
        self.ending: asyncio.Future[Ending] = asyncio.get_running_loop().create_future()

    @property
    def is_gone(self) -> bool:
        return self.ending.done()

    async def until_up(self, timeout_s: float) -> None:
        if self.id.slot == 1 and self.id.incarnation < 2:
            raise WorkerStartError("no luck", permanent=False)

    async def wait(self) -> Ending:
        return await asyncio.shield(self.ending)

    async def stop(self, grace_s: float) -> None:
        self.kill("asked", "")

    async def move_clients_away(self) -> None:
        self.is_moving = True
        await self.wait()

    def hurry(self) -> None:
        self.is_hurried = True

    def kill(self, cause: Cause, reason: str) -> None:
        if not self.is_gone:
            self.ending.set_result(Ending(cause=cause, reason=reason))


@pytest.fixture
def keep(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(inferpool.service.parts.fronts.fronts, "FrontProcess", FakeFrontProcess)

    @contextlib.asynccontextmanager
    async def keep() -> AsyncIterator[tuple[Fronts, list[str]]]:
        lost: list[str] = []
        arena = Arena(1 << 16)
        fronts = Fronts(
            num=2,
            settings=SETTINGS,
            limits=EdgeLimits(),
            listener=socket.create_server(("127.0.0.1", 0)),
            arena=arena,
            models=Models(),
            metrics=Metrics({}, {}),
            on_lost=lambda: lost.append("lost"),
        )
        fronts.start()
        yield fronts, lost
        await fronts.stop()
        arena.close()

    return keep


def states(fronts: Fronts) -> list[str]:
    return [front.state for front in fronts.health()]


async def test_a_front_is_replaced_that_does_not_come_up_or_says_nothing(keep):
    began = asyncio.get_running_loop().time()
    async with keep() as (fronts, lost):
        await fronts.until_up()
        await until(lambda: states(fronts) == ["up", "up"])
        assert [front.restarts for front in fronts.health()] == [0, 2]
        assert not lost
        await until(lambda: fronts.health()[0].restarts == 1)
        loop = asyncio.get_running_loop()
        assert 10.0 < loop.time() - began < 12.0


async def test_a_front_that_dies_gives_back_what_it_kept_for_its_clients(
    keep, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(FakeMainSide, "has_been_heard", lambda _: True)
    async with keep() as (fronts, _):
        await until(lambda: states(fronts) == ["up", "up"])
        counted = [held_bytes(fronts._counted.map, number) for number in range(2)]
        for kinds in counted:
            for held in kinds:
                held.add(place_of("a client"), 100)
        fronts._open()[0].kill("signal", "SIGKILL")
        await until(lambda: fronts.health()[0].restarts == 1)
        assert [held.total for held in counted[1]] == [100, 100]
        del counted, kinds, held  # they keep the memory mapped


async def test_a_front_that_speaks_now_and_then_is_not_replaced(
    keep, monkeypatch: pytest.MonkeyPatch
):
    loop = asyncio.get_running_loop()
    monkeypatch.setattr(FakeMainSide, "has_been_heard", lambda _: int(loop.time()) % 9 == 0)
    async with keep() as (fronts, _):
        await until(lambda: states(fronts) == ["up", "up"])
        await asyncio.sleep(30.0)
        assert [front.restarts for front in fronts.health()] == [0, 2]


async def test_a_front_that_says_nothing_is_waited_for_only_for_a_moment(keep):
    async with keep() as (fronts, _):
        await fronts.until_up()
        loop = asyncio.get_running_loop()
        began = loop.time()
        await fronts.count()
        assert loop.time() - began == pytest.approx(0.5, abs=0.1)
        await fronts.until_known()
        assert loop.time() - began == pytest.approx(10.5, abs=0.1)


async def test_a_front_that_ends_as_clients_are_moved_away_is_not_started_again(
    keep, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(FakeMainSide, "has_been_heard", lambda _: True)
    async with keep() as (fronts, _):
        await until(lambda: states(fronts) == ["up", "up"])
        open_fronts = fronts._open()
        moving = asyncio.create_task(fronts.move_clients_away())
        await until(lambda: all(front.is_moving for front in open_fronts))
        open_fronts[0].kill("signal", "SIGKILL")
        await until(lambda: states(fronts) != ["up", "up"])
        assert states(fronts) == ["stopped", "up"]
        assert "front/0#0 ended: SIGKILL" in caplog.text
        open_fronts[1].kill("signal", "SIGKILL")
        await moving
        assert [front.restarts for front in fronts.health()] == [0, 2]


async def test_a_front_that_is_not_up_yet_is_told_of_the_models_and_waited_for(
    keep, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(FakeMainSide, "has_been_heard", lambda _: True)
    gates: list[tuple[FakeFrontProcess, asyncio.Event]] = []

    async def until_up(front: FakeFrontProcess, timeout_s: float) -> None:
        gates.append((front, asyncio.Event()))
        await gates[-1][1].wait()

    monkeypatch.setattr(FakeFrontProcess, "until_up", until_up)
    async with keep() as (fronts, _):
        await until(lambda: len(gates) == 2)
        (first, is_up), (second, is_second_up) = gates
        is_up.set()
        await fronts.until_up()
        fronts.tell_models()
        assert [first.main_side.num_told, second.main_side.num_told] == [1, 1]
        knowing = asyncio.create_task(fronts.until_known())
        first.main_side.knows.set_result(None)
        await asyncio.wait([knowing], timeout=9.0)
        assert not knowing.done()
        second.main_side.knows.set_result(None)
        await knowing
        is_second_up.set()
        first.kill("signal", "SIGKILL")
        fronts.tell_models()
        assert [first.main_side.num_told, second.main_side.num_told] == [1, 2]


async def test_a_front_that_comes_up_after_a_second_signal_is_hurried_as_well(keep):
    async with keep() as (fronts, _):
        fronts.hurry()
        await until(lambda: states(fronts) == ["up", "up"])
        assert all(front.is_hurried for front in fronts._open())


async def test_fronts_that_never_come_up_are_given_up_and_it_is_said_once(
    keep, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(FakeFrontProcess, "fails", True)
    async with keep() as (fronts, lost):
        await until(lambda: bool(lost))
        assert states(fronts) == ["stopped", "stopped"]
        assert [front.restarts for front in fronts.health()] == [4, 4]
        assert "no process is to be had" in fronts.health()[0].reason
        assert lost == ["lost"]
        for name in ("front/0", "front/1"):
            assert caplog.text.count(f"{name} is given up: it could not be started: no proc") == 1
