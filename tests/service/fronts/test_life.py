"""A front's life, with a real process that never says anything."""

import asyncio
import os
import signal
import socket
import time
from collections.abc import Awaitable, Callable
from multiprocessing import Pipe, get_context

import pytest

import inferpool.service.fronts.life
from inferpool.service.api.wire.connections import EdgeLimits
from inferpool.service.fronts.desk import Part
from inferpool.service.fronts.life import Life
from inferpool.service.fronts.messages import Job
from inferpool.workers.arena import Arena
from inferpool.workers.errors import WorkerStartError
from inferpool.workers.host.endings import OomKills
from inferpool.workers.host.engine import Ending, WorkerId
from tests.service.fronts.test_fronts import SETTINGS


@pytest.fixture
def live(monkeypatch: pytest.MonkeyPatch):
    theirs: list[object] = []
    """Ends that the front would hold open."""

    def launch(*_: object):
        from_front, to_main = Pipe(duplex=False)
        from_main, to_front = Pipe(duplex=False)
        channel, their_channel = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        theirs.append((to_main, from_main))
        their_channel.close()
        process = get_context("spawn").Process(target=time.sleep, args=(60,))
        process.start()
        return process, channel, from_front, to_front

    monkeypatch.setattr(inferpool.service.fronts.life, "_launch", launch)

    def live(test: Callable[[Life], Awaitable[None]]) -> None:
        async def go() -> None:
            arena = Arena(1 << 16)
            (where,) = arena.give_away(1)
            part = Part(arena.memory.map, where)
            job = Job(
                name="front/0", main_pid=os.getpid(), settings=SETTINGS, limits=EdgeLimits(),
                part=where, held={}, relay_path="", family=0, log_level=0,
            )  # fmt: skip
            id = WorkerId(model="front", slot=0)
            life = Life(id, job, arena.memory.writable, part, [], OomKills(), print)
            await test(life)
            assert life.is_gone
            part.close()
            arena.close()

        asyncio.run(asyncio.wait_for(go(), 20))

    return live


def test_a_front_that_does_not_come_up_in_time_is_ended(live):
    async def test(life: Life) -> None:
        with pytest.raises(WorkerStartError, match="it was not up within"):
            await life.until_up(0.01)

    live(test)


def test_a_front_whose_start_nobody_waits_for_any_more_is_ended(live):
    async def test(life: Life) -> None:
        start = asyncio.create_task(life.until_up(60))
        await asyncio.sleep(0)
        start.cancel()
        with pytest.raises(asyncio.CancelledError):
            await start

    live(test)


def test_a_front_that_comes_up_just_as_nobody_waits_for_it_any_more_is_ended(live):
    async def test(life: Life) -> None:
        start = asyncio.create_task(life.until_up(60))
        await asyncio.sleep(0)
        life.desk.is_up.set_result(None)
        start.cancel()
        with pytest.raises(asyncio.CancelledError):
            await start

    live(test)


def test_a_front_that_is_killed_ends_for_the_reason_it_was_killed_for(live):
    async def test(life: Life) -> None:
        life.kill("hang", "it says nothing")
        assert await life.wait() == Ending(cause="hang", reason="it says nothing")

    live(test)


def test_the_signal_that_ended_a_front_is_told(live):
    async def test(life: Life) -> None:
        os.kill(life.process.pid, signal.SIGTERM)
        assert await life.wait() == Ending(cause="signal", reason="SIGTERM")

    live(test)
