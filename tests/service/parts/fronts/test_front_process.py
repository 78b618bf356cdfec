"""A front's front, with a real process that never says anything."""

import asyncio
import contextlib
import os
import signal
import socket
import time
from collections.abc import AsyncIterator
from multiprocessing import Pipe, get_context
from multiprocessing.connection import Connection

import pytest

import inferpool.service.parts.fronts.front_process
from inferpool.service.api.wire.budgets import EdgeLimits, EdgeUse
from inferpool.service.parts.fronts.front_process import FrontProcess
from inferpool.service.parts.fronts.main_side import ArenaPart
from inferpool.service.parts.fronts.messages import FrontConfig, FrontCounts
from inferpool.workers.host.engine import Ending, WorkerId
from inferpool.workers.host.observed import OomKills
from inferpool.workers.shared.arena import Arena
from inferpool.workers.shared.errors import WorkerStartError
from tests.service.api.fakes import Models
from tests.service.parts.fronts.test_fronts import SETTINGS


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch):
    theirs: list[Connection] = []
    """Ends that the front would hold open."""

    def launch(*_: object):
        from_front, to_main = Pipe(duplex=False)
        from_main, to_front = Pipe(duplex=False)
        channel, their_channel = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        theirs.extend((to_main, from_main))
        their_channel.close()
        process = get_context("spawn").Process(target=time.sleep, args=(120,))
        process.start()
        return process, channel, from_front, to_front

    monkeypatch.setattr(inferpool.service.parts.fronts.front_process, "_launch", launch)

    @contextlib.asynccontextmanager
    async def start() -> AsyncIterator[tuple[FrontProcess, list[Connection]]]:
        arena = Arena(1 << 16)
        (where,) = arena.give_away(1)
        part = ArenaPart(arena.memory.map, where)
        config = FrontConfig(
            name="front/0", main_pid=os.getpid(), settings=SETTINGS, limits=EdgeLimits(),
            part=where, held={}, forwarding_path="", family=0, log_level=0,
        )  # fmt: skip
        id = WorkerId(model="front", slot=0)
        front = FrontProcess(id, config, arena.memory.writable, part, Models(), OomKills(), print)
        yield front, theirs
        await front.wait()
        part.close()
        arena.close()

    return start


async def test_a_front_that_does_not_come_up_in_time_is_ended(start):
    async with start() as (front, _):
        with pytest.raises(WorkerStartError, match="it was not up within"):
            await front.until_up(0.01)


@pytest.mark.parametrize("is_just_up", [False, True])
async def test_a_front_whose_start_nobody_waits_for_any_more_is_ended(start, is_just_up: bool):
    async with start() as (front, _):
        coming = asyncio.create_task(front.until_up(60))
        await asyncio.sleep(0)
        if is_just_up:
            front.main_side.is_up.set_result(None)
        coming.cancel()
        with pytest.raises(asyncio.CancelledError):
            await coming


async def test_a_front_that_is_killed_ends_for_the_reason_it_was_killed_for(start):
    async with start() as (front, _):
        front.kill("hang", "it says nothing")
        assert await front.wait() == Ending(cause="hang", reason="it says nothing")


async def test_the_signal_that_ended_a_front_is_told(start):
    async with start() as (front, _):
        os.kill(front.process.pid, signal.SIGTERM)
        assert await front.wait() == Ending(cause="signal", reason="SIGTERM")


async def test_a_front_whose_pipe_is_closed_is_ended(start):
    async with start() as (front, theirs):
        for end in theirs:
            end.close()
        assert await front.wait() == Ending(cause="exit", reason="its pipe is closed")


async def test_a_front_that_does_not_leave_is_ended(start):
    async with start() as (front, _):
        await front.stop(0.0)
        assert await front.wait() == Ending(cause="asked", reason="it was told to leave")


async def test_connections_count_from_the_moment_that_they_are_given_to_a_front(start):
    async with start() as (front, _):
        with socket.socket() as connection:
            assert not front.give(connection)  # it has closed its channel
        assert front.num_open == 0
        front._num_given = 5
        front._take_counts(FrontCounts(0, [], [], [], [], 3, 2, EdgeUse(), (0, 0)))
        assert front.num_open == 4
        front.kill("asked", "enough")
