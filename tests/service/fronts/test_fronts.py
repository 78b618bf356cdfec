import asyncio
import socket
from collections.abc import Awaitable, Callable

import pytest

import inferpool.service.fronts.fronts
import inferpool.workers.host.supervisor
from inferpool.service.api.wire.connections import EdgeLimits
from inferpool.service.fronts.fronts import Fronts
from inferpool.service.settings.model import ModelSettings
from inferpool.service.settings.settings import Settings
from inferpool.service.telemetry.metrics import Metrics
from inferpool.workers.arena import Arena
from inferpool.workers.errors import WorkerStartError
from inferpool.workers.host.engine import Cause, Ending, WorkerId

SETTINGS = Settings(models={"echo": ModelSettings(source="echo")}, default_model="echo")


class FakeDesk:
    def take_sign_of_life(self) -> bool:
        return False

    def count(self) -> "asyncio.Future[None]":
        return asyncio.get_running_loop().create_future()


class FakeProcess:
    pid = 1

    def look(self) -> None:
        pass


class FakeLife:
    """A front that takes connections at once, and never says anything more."""

    has_worked = False
    num_open = 0
    fails = False

    def __init__(self, id: WorkerId, *told: object) -> None:
        if self.fails:
            raise OSError("no process is to be had")
        self.id = id
        self.desk = FakeDesk()
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

    def kill(self, cause: Cause, reason: str) -> None:
        if not self.is_gone:
            self.ending.set_result(Ending(cause=cause, reason=reason))


@pytest.fixture
def keep(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(inferpool.workers.host.supervisor, "_FIRST_BACKOFF_S", 0.01)
    monkeypatch.setattr(inferpool.service.fronts.fronts, "_COUNT_EVERY_S", 0.001)
    monkeypatch.setattr(inferpool.service.fronts.fronts, "Life", FakeLife)

    def keep(test: Callable[[Fronts, list[str]], Awaitable[None]]) -> None:
        async def go() -> None:
            lost: list[str] = []
            arena = Arena(1 << 16)
            fronts = Fronts(
                num=2,
                settings=SETTINGS,
                limits=EdgeLimits(),
                listener=socket.create_server(("127.0.0.1", 0)),
                relay_path="",
                arena=arena,
                models={},
                metrics=Metrics({}, {}),
                on_lost=lambda: lost.append("lost"),
            )
            fronts.start()
            await test(fronts, lost)
            await fronts.stop()
            arena.close()

        asyncio.run(asyncio.wait_for(go(), 20))

    return keep


async def until(is_true: Callable[[], bool]) -> None:
    while not is_true():  # noqa: ASYNC110  # what changes it tells nobody
        await asyncio.sleep(0.001)


def states(fronts: Fronts) -> list[str]:
    return [front.state for front in fronts.health()]


def test_a_front_that_does_not_come_up_is_tried_again(keep):
    async def test(fronts: Fronts, lost: list[str]) -> None:
        await fronts.until_up()
        await until(lambda: states(fronts) == ["up", "up"])
        assert [front.restarts for front in fronts.health()] == [0, 2]
        assert not lost

    keep(test)


def test_a_front_that_says_nothing_is_replaced(keep):
    async def test(fronts: Fronts, lost: list[str]) -> None:
        await until(lambda: fronts.health()[0].restarts == 1)

    keep(test)


def test_fronts_that_never_come_up_are_given_up_and_it_is_said_once(
    keep, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(FakeLife, "fails", True)

    async def test(fronts: Fronts, lost: list[str]) -> None:
        await until(lambda: bool(lost))
        assert states(fronts) == ["stopped", "stopped"]
        assert [front.restarts for front in fronts.health()] == [4, 4]
        assert "no process is to be had" in fronts.health()[0].reason
        assert lost == ["lost"]

    keep(test)
