import asyncio
import errno
import logging
import socket

import pytest

import inferpool.workers.remote.hosts
from inferpool.workers.host.engine import WorkerId
from inferpool.workers.remote.joining import RefusedError
from inferpool.workers.remote.wire import StartWorker
from inferpool.workers.shared.arena import Arena
from inferpool.workers.shared.errors import WorkerStartError
from tests.descriptors import num_open
from tests.workers.contract import config_of, until
from tests.workers.remote.cluster import OtherSide, facts_of, front

ID = WorkerId(model="m", slot=0)


async def test_host_is_known_from_its_joining_to_its_end(
    arena: Arena, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.INFO)
    async with front(arena) as (hosts, watcher):
        peer = OtherSide(facts_of("gpu-7"))
        host = await peer.join(hosts)
        assert watcher.joined == [host]
        assert (host.name, host.epoch, host.is_lost) == ("gpu-7", 1, False)
        assert host.address.startswith("127.0.0.1:")
        peer.link.close()
        await until(lambda: watcher.lost)
        assert watcher.lost == [("gpu-7", "the other side closed the connection")]
        assert not hosts.hosts
        assert host.is_lost
        assert f"host gpu-7 has joined from {host.address}" in caplog.text


async def test_worker_starts_on_the_host_of_its_config_or_not_at_all(arena: Arena):
    async with front(arena) as (hosts, _):
        peers = [OtherSide(facts_of(name)) for name in ("a", "b")]
        for peer in peers:
            await peer.join(hosts)
        start = asyncio.ensure_future(hosts.start(ID, config_of(host="b"), print))
        message = await peers[1].next()
        assert isinstance(message, StartWorker)
        assert message.config.model.source == config_of().model.source
        assert not peers[0].messages
        start.cancel()
        for name, text in (("c", "c is not connected"), ("", "no host is not connected")):
            with pytest.raises(WorkerStartError, match=text):
                await hosts.start(ID, config_of(host=name), print)


async def test_name_is_taken_only_from_the_same_agent(arena: Arena):
    async with front(arena) as (hosts, watcher):
        first = OtherSide(facts_of("h", instance="one"))
        host = await first.join(hosts)
        with pytest.raises(RefusedError, match=f"connected as h from {host.address}: give each"):
            await OtherSide(facts_of("h", instance="two")).join(hosts)
        assert hosts.hosts == {"h": host}
        again = OtherSide(facts_of("h", instance="one"))
        later = await again.join(hosts)
        assert hosts.hosts == {"h": later}
        assert watcher.joined == [host, later]
        assert watcher.lost == [("h", "its agent has joined anew")]
        assert later.epoch == host.epoch + 1
        await until(lambda: first.ends)


async def test_strangers_who_dawdle_make_way_for_an_agent(
    arena: Arena, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(inferpool.workers.remote.hosts, "_MOST_JOINING", 8)
    async with front(arena) as (hosts, _):
        strangers = [socket.create_connection(hosts.address) for _ in range(8)]
        await until(lambda: len(hosts._joining) == 8)
        await OtherSide(facts_of("h")).join(hosts)
        await until(lambda: len(hosts._joining) == 7)
        for stranger in strangers:
            stranger.close()
        await until(lambda: not hosts._joining)


async def test_many_agents_may_come_back_at_once(arena: Arena):
    async with front(arena) as (hosts, watcher):
        peers = [OtherSide(facts_of(f"h{number}")) for number in range(100)]

        async def come(peer: OtherSide) -> None:
            while True:
                try:
                    await peer.join(hosts)
                except ConnectionError:  # too many at once
                    await asyncio.sleep(0.05)
                else:
                    return

        await asyncio.gather(*map(come, peers))
        assert len(hosts.hosts) == len(watcher.joined) == 100
        for peer in peers:
            peer.link.close()
        await until(lambda: not hosts.hosts)


async def test_mistakes_of_the_watcher_harm_no_other_host(
    arena: Arena, caplog: pytest.LogCaptureFixture
):
    async with front(arena) as (hosts, watcher):
        good = await OtherSide(facts_of("good")).join(hosts)

        def fail(*_: object) -> None:
            raise RuntimeError("a mistake")

        watcher.on_joined = fail  # type: ignore[method-assign]
        peer = OtherSide(facts_of("bad"))
        watcher.on_lost = fail  # type: ignore[method-assign]
        _, mailbox, _ = await peer._dialer.join(hosts.address, role="agent", term=0)
        refusal = await mailbox.get()
        assert "the front end has made a mistake" in refusal.reason  # type: ignore[union-attr]
        await until(lambda: hosts.hosts == {"good": good})
        assert "host bad could not be taken on" in caplog.text
        assert "the loss of host bad could not be handled" in caplog.text
        assert not good.is_lost


async def test_closing_ends_all_connections_and_leaves_nothing(arena: Arena):
    num_fds = num_open()
    async with front(arena) as (hosts, watcher):
        peers = [OtherSide(facts_of(name)) for name in ("a", "b")]
        for peer in peers:
            await peer.join(hosts)
        stranger = socket.create_connection(hosts.address)
        late = socket.create_connection(hosts.address)
        await until(lambda: hosts._joining)
        await hosts.close()
        assert {name for name, _ in watcher.lost} == {"a", "b"}
        assert not hosts.hosts
        await until(lambda: all(peer.ends for peer in peers))
        with pytest.raises(ConnectionRefusedError):
            await OtherSide(facts_of("c")).join(hosts)
        stranger.close()
        late.close()
    assert num_open() == num_fds


async def test_connection_that_is_accepted_while_the_front_end_ends_is_closed(arena: Arena):
    async with front(arena) as (hosts, _):
        with socket.create_connection(hosts.address) as stranger:
            hosts._accept()  # its task has not begun
            await hosts.close()
            assert stranger.recv(1) == b""


async def test_front_end_without_descriptors_rests_and_then_accepts_again(
    arena: Arena, caplog: pytest.LogCaptureFixture
):
    async with front(arena) as (hosts, _):
        real = hosts._listener

        class Exhausted:
            is_over = False

            def __init__(self) -> None:
                self.were_open: list[bool] = []
                """For each failure: the front end still listens after it."""

            def accept(self) -> object:
                if not self.is_over:
                    loop = asyncio.get_running_loop()
                    loop.call_soon(lambda: self.were_open.append(loop.remove_reader(real.fileno())))
                    raise OSError(errno.EMFILE, "Too many open files")
                return real.accept()

            def __getattr__(self, name: str) -> object:
                return getattr(real, name)

        hosts._listener = exhausted = Exhausted()  # type: ignore[assignment]
        hosts.open()
        joining = asyncio.ensure_future(OtherSide(facts_of("h")).join(hosts))
        await until(lambda: len(exhausted.were_open) > 1)
        assert not any(exhausted.were_open)
        exhausted.is_over = True
        await joining
        assert "no agent can be accepted now: Too many open files" in caplog.text


async def test_refusal_is_logged_once_for_each_address_and_reason(
    arena: Arena, caplog: pytest.LogCaptureFixture
):
    async with front(arena) as (hosts, _):
        old = OtherSide(facts_of("h", version="0.9"))
        for _ in range(3):
            with pytest.raises(RefusedError):
                await old.join(hosts)
        assert caplog.text.count("was refused") == 1
        await OtherSide(facts_of("h")).join(hosts)
        with pytest.raises(RefusedError):
            await old.join(hosts)
        assert caplog.text.count("was refused") == 2
        for number in range(1000):
            hosts._note_refusal(f"10.0.0.{number}:1", "no")
        assert len(hosts._told_refusals) <= inferpool.workers.remote.hosts._MOST_JOINING


async def test_hosts_with_other_versions_of_torch_are_named(
    arena: Arena, caplog: pytest.LogCaptureFixture
):
    async with front(arena) as (hosts, _):
        await OtherSide(facts_of("a")).join(hosts)
        await OtherSide(facts_of("b")).join(hosts)
        assert "answers may differ" not in caplog.text
        await OtherSide(facts_of("c", torch="3")).join(hosts)
        assert "host c has torch 3 and Python 3, and a has 2 and 3: answers may differ" in (
            caplog.text
        )


async def test_host_that_does_not_read_delays_no_other(arena: Arena):
    async with front(arena) as (hosts, _):
        slow, quick = OtherSide(facts_of("slow")), OtherSide(facts_of("quick"))
        stuck, other = await slow.join(hosts), await quick.join(hosts)
        asyncio.get_running_loop().remove_reader(slow.link._fd)
        measuring = asyncio.ensure_future(stuck.measure(32 << 20))
        await until(lambda: len(quick.beats) >= 3 and not other.is_silent)
        assert stuck._link.num_unsent_bytes > 1 << 20
        stuck.close("enough")
        with pytest.raises(ConnectionError, match="slow was lost: enough"):
            await measuring
        slow.link.close()
