import asyncio
import contextlib
import logging
import random
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace

import pytest

import inferpool.workers.remote.agent
from inferpool.workers.host.engine import WorkerId
from inferpool.workers.remote.agent import Agent, Dialing
from inferpool.workers.remote.host import RemoteWorker
from inferpool.workers.remote.hosts import RemoteHosts
from inferpool.workers.shared.arena import Arena
from inferpool.workers.shared.config import WorkerConfig
from inferpool.workers.shared.errors import WorkerLostError, WorkerStartError
from inferpool.workers.shared.messages import BatchDone, ItemRef
from tests.workers.contract import Put, config_of, until
from tests.workers.remote.cluster import (
    PATIENCE_S,
    LoadedWorker,
    LoadingEngine,
    front,
    make_agent,
    running,
)
from tests.workers.remote.conftest import Contexts

ID = WorkerId(model="m", slot=0)
QUICK = Dialing(first_pause_s=0.02, most_pause_s=0.02, refused_pause_s=0.02, patience_s=PATIENCE_S)
"""Tries again soon."""


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Have agents make no pauses, and note how long they would be at most."""
    noted: list[float] = []

    def uniform(low: float, high: float) -> float:
        assert (low, high) == (0.8, 1.2)
        return 1.0

    async def sleep(delay_s: float) -> None:
        noted.append(delay_s)
        await real_sleep(0.001)

    real_sleep = asyncio.sleep
    monkeypatch.setattr(inferpool.workers.remote.agent.random, "uniform", uniform)
    monkeypatch.setattr(inferpool.workers.remote.agent, "asyncio", _Asyncio(sleep))
    return noted


class _Asyncio:
    """The module asyncio with another `sleep`."""

    def __init__(self, sleep: Callable[..., object]) -> None:
        self.sleep = sleep

    def __getattr__(self, name: str) -> object:
        return getattr(asyncio, name)


def nobody() -> tuple[str, int]:
    """Return an address at which nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()


async def started(hosts: RemoteHosts) -> RemoteWorker:
    return await hosts.hosts["h"].start(ID, config_of(), lambda _: None)


async def test_addresses_are_tried_in_turn_and_the_last_one_first(
    arena: Arena, pauses: list[float]
):
    async with front(arena) as (first, _), front(arena) as (second, _):
        addresses = [nobody(), first.address, second.address]
        agent = make_agent(addresses, engine=LoadingEngine())
        async with running(agent):
            await until(lambda: first.hosts)
            assert not pauses
            await first.close()
            await until(lambda: agent.term == second.term)
            assert agent._addresses[0] == second.address
            assert sorted(agent._addresses) == sorted(addresses)
            second.hosts["h"].close("again")
            await until(lambda: second.hosts and second.hosts["h"].epoch == 2)


async def test_a_silent_front_end_does_not_keep_an_agent_from_the_other_one(
    arena: Arena,
):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        async with front(arena) as (hosts, _):
            addresses = [silent.getsockname(), hosts.address]
            agent = make_agent(addresses, engine=LoadingEngine(), dialing=Dialing())
            async with running(agent):
                await until(lambda: hosts.hosts)


async def test_patience_with_each_of_several_front_ends_grows(arena: Arena):
    dialing = replace(QUICK, patience_s=1e-6)
    async with front(arena) as (hosts, _):
        addresses = [nobody(), hosts.address]
        agent = make_agent(addresses, engine=LoadingEngine(), dialing=dialing)
        async with running(agent):
            await until(lambda: hosts.hosts)


async def test_agent_that_two_front_ends_refuse_asks_soon_again(arena: Arena, pauses: list[float]):
    async with front(arena) as (first, _), front(arena) as (second, _):
        for hosts in (first, second):
            hosts.stand_by("the other one serves")
        agent = make_agent([first.address, second.address], engine=LoadingEngine())
        async with running(agent):
            await until(lambda: len(pauses) >= 3)
            assert max(pauses) <= 1.0
            second.take_over()
            await until(lambda: second.hosts)


async def test_pauses_grow_to_a_bound_and_each_failure_is_logged_once(
    pauses: list[float], caplog: pytest.LogCaptureFixture
):
    address = nobody()
    agent = make_agent(address, engine=LoadingEngine())
    async with running(agent):
        await until(lambda: len(pauses) > 8)
    assert pauses[:4] == [0.1, 0.2, 0.4, 0.8]
    assert set(pauses[4:]) == {1.0}
    told = f"127.0.0.1:{address[1]} cannot be joined: Connect call failed"
    assert caplog.text.count("cannot be joined") == 1
    assert told in caplog.text or "Connection refused" in caplog.text


async def test_agent_that_was_refused_waits_longer_and_says_why_once(
    arena: Arena, pauses: list[float], caplog: pytest.LogCaptureFixture
):
    async with front(arena) as (hosts, _):
        agent = make_agent(hosts.address, key=b"another key of some length", engine=LoadingEngine())
        async with running(agent):
            await until(lambda: len(pauses) >= 3)
    assert set(pauses) == {5.0}
    told = [each.getMessage() for each in caplog.records if each.name.endswith("remote.agent")]
    assert len(told) == 1
    assert "refused: it does not know the key of this front end (cluster_keys)" in told[0]


async def test_front_end_that_ends_each_connection_is_not_stormed(
    arena: Arena, pauses: list[float]
):
    async with front(arena) as (hosts, watcher):
        watcher.on_joined = lambda host: host.close("go away")  # type: ignore[method-assign]
        dialing = Dialing(most_pause_s=3600.0)  # so each connection is a short one
        async with running(make_agent(hosts.address, engine=LoadingEngine(), dialing=dialing)):
            await until(lambda: len(pauses) >= 4)
    assert pauses[:4] == [0.1, 0.2, 0.4, 0.8]


async def test_name_that_cannot_be_looked_up_is_no_end(
    pauses: list[float], caplog: pytest.LogCaptureFixture
):
    async with running(make_agent(("a..b", 1), engine=LoadingEngine())):
        await until(lambda: len(pauses) >= 2)
    assert "a..b:1 cannot be joined" in caplog.text


async def test_connections_are_logged(arena: Arena, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO)
    async with (
        front(arena) as (hosts, _),
        running(make_agent(hosts.address, engine=LoadingEngine(), dialing=QUICK)),
    ):
        await until(lambda: hosts.hosts)
        hosts.hosts["h"].refuse("enough")
        await until(lambda: hosts.hosts and hosts.hosts["h"].epoch == 2)
    port = hosts.address[1]
    assert caplog.text.count(f"joined the front end at 127.0.0.1:{port} as h") == 2
    assert f"the front end at 127.0.0.1:{port} is lost: enough" in caplog.text
    assert caplog.text.count("has left: its agent was told to stop") == 1  # by the front end


async def test_agent_for_one_connection_ends_with_it(arena: Arena):
    async with front(arena) as (hosts, _):
        for is_refused in (False, True):
            key = b"another key of some length" if is_refused else b"a key of 16 bytes or more"
            engine = LoadingEngine()
            dialing = replace(QUICK, once=True)
            agent = make_agent(hosts.address, key=key, engine=engine, dialing=dialing)
            running_agent = asyncio.ensure_future(agent.run())
            if not is_refused:
                await until(lambda: hosts.hosts)
                hosts.hosts["h"].close("enough")
            assert await running_agent == is_refused
            assert engine.is_closed


@pytest.mark.parametrize("is_joined", [False, True])
async def test_agent_that_is_told_to_stop_ends_well(arena: Arena, is_joined: bool):
    async with front(arena) as (hosts, watcher):
        engine = LoadingEngine()
        address = hosts.address if is_joined else nobody()
        agent = make_agent(address, engine=engine, dialing=QUICK)
        task = asyncio.ensure_future(agent.run())
        if is_joined:
            await until(lambda: hosts.hosts)
            worker = await started(hosts)
            batch = worker.run([ItemRef("bytes", 0, 3, 0.0)])
            await until(lambda: engine.started[0].batches)
            agent.stop()
            assert (await batch).outcomes == [b"0"]
            await until(lambda: watcher.lost)
            assert watcher.lost == [("h", "its agent was told to stop")]
        agent.stop()
        assert await task == 0
        assert engine.is_closed


async def test_second_word_ends_an_agent_that_leaves_slowly(arena: Arena):
    async with front(arena) as (hosts, _):
        engine = LoadingEngine()
        agent = make_agent(hosts.address, engine=engine)
        agent._grace_s = 3600.0
        task = asyncio.ensure_future(agent.run())
        await until(lambda: hosts.hosts)
        worker = await started(hosts)
        batch = worker.run([ItemRef("bytes", 0, 3, 0.0)])
        real_stop, is_stopping = engine.started[0].stop, asyncio.Event()

        async def stop(grace_s: float) -> None:
            is_stopping.set()
            await asyncio.sleep(grace_s)
            await real_stop(grace_s)

        engine.started[0].stop = stop  # type: ignore[method-assign]
        await until(lambda: engine.started[0].batches)
        agent.stop()
        await is_stopping.wait()
        assert not task.done()
        agent.stop(at_once=True)
        assert await task == 0
        assert engine.started[0].is_gone
        with pytest.raises(WorkerLostError):
            await batch


async def test_agents_join_with_tls(arena: Arena, tls: Contexts, put: Put):
    async with front(arena, tls=tls[0]) as (hosts, _):
        engine = LoadingEngine()
        async with running(make_agent(hosts.address, tls=tls[1], engine=engine)):
            await until(lambda: hosts.hosts)
            worker = await started(hosts)
            batch = worker.run([put({"n": 1})])
            await until(lambda: engine.started[0].batches)
            engine.started[0].answer()
            assert len((await batch).outcomes) == 1


class EchoWorker(LoadedWorker):
    """Answers each payload with itself, a little later, as it lies in the arena then."""

    def __init__(self, id: WorkerId, arena: Arena, chance: random.Random) -> None:
        super().__init__(id)
        self._arena = arena
        self._chance = chance

    def run(self, items: Sequence[ItemRef]) -> "asyncio.Future[BatchDone]":
        future = super().run(items)
        loop = asyncio.get_running_loop()
        loop.call_later(self._chance.random() / 100, self._echo)
        return future

    def answer(self, *_: object, **__: object) -> None:
        items, _future = self.batches[0]
        super().answer([self._arena.read(item.offset, item.num_bytes) for item in items])

    def _echo(self) -> None:
        if self.batches:
            if self._chance.random() < 0.01:
                self.die()
            else:
                self.answer()


class EchoEngine(LoadingEngine):
    """Starts such workers."""

    def __init__(self, arena: Arena, chance: random.Random) -> None:
        super().__init__()
        self._arena = arena
        self._chance = chance

    async def start(
        self, id: WorkerId, config: WorkerConfig, on_progress: Callable[[str], None]
    ) -> LoadedWorker:
        await asyncio.sleep(self._chance.random() / 50)
        self.started.append(EchoWorker(id, self._arena, self._chance))
        return self.started[-1]


class Life:
    """One life of a front end with two hosts whose connections are cut again and again."""

    def __init__(self, arena: Arena, hosts: RemoteHosts, chance: random.Random) -> None:
        self.arena = arena
        self.hosts = hosts
        self.chance = chance
        self.num_settled = self.num_answered = self.num_sent = 0

    async def use(self, name: str) -> None:
        """Give batches to workers of one host, and start them when there is none."""
        while True:
            try:
                config = replace(config_of(), host=name)
                worker = await self.hosts.start(ID, config, lambda _: None)
            except WorkerStartError:
                await asyncio.sleep(0.005)
                continue
            gone = asyncio.ensure_future(worker.wait())
            while not gone.done():
                if self.num_sent - self.num_settled < 12:
                    self.send(worker)
                await asyncio.sleep(self.chance.random() / 300)

    def send(self, worker: RemoteWorker) -> None:
        chance = self.chance
        sizes = chance.choices([0, 9, 5000], k=chance.choice([1, 3]))
        payloads = [chance.randbytes(size) for size in sizes]
        offsets = [self.arena.put([payload], len(payload)) for payload in payloads]
        items = [
            ItemRef("bytes", offset, len(payload), 1e12)  # type: ignore[arg-type]
            for offset, payload in zip(offsets, payloads, strict=True)
        ]
        self.num_sent += 1

        def on_done(future: "asyncio.Future[BatchDone]") -> None:
            self.num_settled += 1
            for offset in offsets:
                self.arena.free(offset)  # type: ignore[arg-type]
            if isinstance(future.exception(), WorkerLostError):
                return
            assert future.result().outcomes == payloads
            self.num_answered += 1

        worker.run(items).add_done_callback(on_done)

    def cut(self, agent: Agent) -> None:
        """Cut one connection in one of several ways."""
        host = self.hosts.hosts.get(agent._dialer.facts.name)
        session = agent._session
        if host is None or session is None:
            return
        way = self.chance.randrange(4)
        if way == 0:
            host.close("cut")
        elif way == 1:
            session._link.close("cut")
        elif way == 2:
            session._link._sock.shutdown(socket.SHUT_RDWR)
        else:
            with contextlib.suppress(OSError):
                host._link._sock.send(b"\xff" * 20)  # within whatever is on its way


@contextlib.asynccontextmanager
async def watched() -> AsyncIterator[list[dict[str, object]]]:
    """Note errors that nobody handles meanwhile."""
    errors: list[dict[str, object]] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: errors.append(context))
    yield errors
    await asyncio.sleep(0)
    loop.set_exception_handler(None)


@pytest.mark.parametrize("seed", range(20))
async def test_each_batch_has_one_end_while_connections_are_cut(seed: int):
    chance = random.Random(seed)
    ours, theirs = Arena(1 << 20), [Arena(1 << 15) for _ in range(2)]
    async with watched() as errors, front(ours) as (hosts, _):
        life = Life(ours, hosts, chance)
        agents = [
            make_agent(
                hosts.address,
                name,
                arena=arena,
                engine=EchoEngine(arena, chance),
                dialing=QUICK,
                burst_s=0.0,
            )
            for name, arena in zip("ab", theirs, strict=True)
        ]
        async with running(*agents):
            users = [asyncio.ensure_future(life.use(name)) for name in "ab"]
            for _ in range(6):
                await asyncio.sleep(chance.random() / 8)
                life.cut(chance.choice(agents))
            before = life.num_answered
            await until(lambda: life.num_answered > before + 20)
            for user in users:
                user.cancel()
            await asyncio.gather(*users, return_exceptions=True)
            await until(lambda: life.num_settled == life.num_sent)
        assert life.num_settled == life.num_sent
    assert [arena.used_bytes for arena in (ours, *theirs)] == [0, 0, 0]
    assert not errors
