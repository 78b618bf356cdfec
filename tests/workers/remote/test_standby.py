import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator

import pytest

from inferpool.workers.host.engine import WorkerId
from inferpool.workers.remote.joining import Dialer
from inferpool.workers.remote.standby import Standby
from inferpool.workers.shared.arena import Arena
from tests.workers.contract import answers, config_of, pid_of, until
from tests.workers.remote.cluster import (
    KEY,
    PATIENCE_S,
    facts_of,
    make_agent,
    open_front,
    running,
)
from tests.workers.remote.conftest import Contexts

Address = tuple[str, int]
ID = WorkerId(model="m", slot=0)


class FrontEnd:
    """The hosts of a front end, which may watch another one."""

    def __init__(self, arena: Arena, port: int = 0, *, tls: ssl.SSLContext | None = None) -> None:
        self.hosts, _ = open_front(arena, port=port, tls=tls)
        self.standby: Standby | None = None

    def watch(
        self,
        other: Address,
        *,
        tls: ssl.SSLContext | None = None,
        never_seen_s: float = PATIENCE_S,
    ) -> None:
        dialer = Dialer(KEY, tls, facts_of("standby"), join_s=PATIENCE_S)
        self.standby = Standby(self.hosts, other, dialer, never_seen_s=never_seen_s, refused_s=0.05)
        self.standby.start()

    async def end(self) -> None:
        if self.standby is not None:
            await self.standby.stop()
        await self.hosts.close()


@contextlib.asynccontextmanager
async def ending(*fronts: FrontEnd) -> AsyncIterator[None]:
    try:
        yield
    finally:
        for front in fronts:
            await front.end()


async def test_standby_takes_over_with_loaded_workers_and_the_first_one_then_stands_by(
    arena: Arena, put, no_process_left: None
):
    first, second = FrontEnd(arena), FrontEnd(arena)
    second.watch(first.hosts.address)
    agent = make_agent([second.hosts.address, first.hosts.address])
    async with ending(second), running(agent):
        await until(lambda: "h" in first.hosts.hosts)
        assert not second.hosts.hosts
        worker = await first.hosts.start(ID, config_of(host="h"), print)
        await first.end()
        await until(lambda: "h" in second.hosts.hosts and agent.term == second.hosts.term)
        assert second.hosts.term > first.hosts.term
        same = await second.hosts.start(ID, config_of(host="h"), print)
        assert pid_of(same) == pid_of(worker)
        assert answers(await same.run([put({"n": 4})])) == [8]

        again = FrontEnd(arena, first.hosts.address[1])
        again.watch(second.hosts.address)
        async with ending(again):
            await until(lambda: again.standby and again.standby._others_term)  # it has judged
            assert again.hosts.standby_reason
            assert "h" in second.hosts.hosts
        await same.stop(5)


async def test_of_two_that_stand_by_for_each_other_the_earlier_one_serves(arena: Arena):
    first, second = FrontEnd(arena), FrontEnd(arena)
    first.watch(second.hosts.address)
    second.watch(first.hosts.address)
    async with ending(first, second):
        await until(lambda: not first.hosts.standby_reason)
        assert second.hosts.standby_reason


async def test_standby_waits_for_one_that_has_never_answered(
    arena: Arena, caplog: pytest.LogCaptureFixture
):
    gone = FrontEnd(arena)
    await gone.end()
    second = FrontEnd(arena)
    second.watch(gone.hosts.address, never_seen_s=3600.0)
    async with ending(second):
        await until(lambda: "it cannot be reached" in caplog.text)
        assert second.hosts.standby_reason


async def test_front_end_of_the_later_term_goes_on_serving(arena: Arena):
    first, second = FrontEnd(arena), FrontEnd(arena)
    first.watch(second.hosts.address)
    first.hosts.take_over(second.hosts.term)
    async with ending(first, second):
        await until(lambda: first.standby and first.standby._others_term)
        assert not first.hosts.standby_reason


@pytest.mark.parametrize("name", ["127.0.0.1", f"{'a' * 64}.example"], ids=["gone", "no name"])
async def test_standby_serves_if_the_other_front_end_never_answers(arena: Arena, name: str):
    gone = FrontEnd(arena)
    await gone.end()
    second = FrontEnd(arena)
    second.watch((name, gone.hosts.address[1]), never_seen_s=0.3)
    async with ending(second):
        await until(lambda: not second.hosts.standby_reason)


async def test_standby_waits_for_a_front_end_whose_certificate_it_does_not_trust(
    arena: Arena, tls: Contexts, caplog: pytest.LogCaptureFixture
):
    first, second = FrontEnd(arena, tls=tls[0]), FrontEnd(arena)
    second.watch(first.hosts.address, tls=ssl.create_default_context(), never_seen_s=0.0)
    async with ending(second):
        await until(lambda: "certificate verify failed" in caplog.text)
        assert second.hosts.standby_reason
        await first.end()
        await until(lambda: not second.hosts.standby_reason)


async def test_front_end_that_is_told_to_watch_itself_serves_and_says_so(
    arena: Arena, caplog: pytest.LogCaptureFixture
):
    front_end = FrontEnd(arena)
    front_end.watch(front_end.hosts.address, never_seen_s=0.1)
    async with ending(front_end):
        await until(lambda: not front_end.hosts.standby_reason)
    assert "it is this front end itself (standby_of)" in caplog.text


async def test_front_end_whose_hosts_follow_another_one_gets_none_of_them_back(arena: Arena):
    first, second = FrontEnd(arena), FrontEnd(arena)
    agent = make_agent([first.hosts.address, second.hosts.address])
    async with ending(first, second), running(agent):
        await until(lambda: "h" in first.hosts.hosts)
        second.hosts.take_over(first.hosts.term)
        agent.term = second.hosts.term
        first.hosts.hosts["h"].close("cut")
        await until(lambda: "h" in second.hosts.hosts)
        assert not first.hosts.hosts


async def test_front_end_stands_by_once_it_hears_of_a_later_term(arena: Arena):
    first, second = FrontEnd(arena), FrontEnd(arena)
    first.watch(second.hosts.address)
    async with ending(first, second):
        await asyncio.sleep(0)
        first.hosts.take_over()
        second.hosts.take_over(first.hosts.term)
        await until(lambda: first.hosts.standby_reason)
