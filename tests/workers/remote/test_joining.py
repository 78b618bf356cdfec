import asyncio
import socket
import ssl
from collections.abc import Callable

import msgspec
import pytest

from inferpool.workers.remote import joining
from inferpool.workers.remote.host import RemoteHost
from inferpool.workers.remote.hosts import RemoteHosts
from inferpool.workers.remote.joining import Dialer, RefusedError, is_private
from inferpool.workers.remote.link import HostLink, Mailbox
from inferpool.workers.remote.wire import (
    MAX_BODY_BYTES,
    MAX_STRANGER_BYTES,
    PROTOCOL,
    Beat,
    Challenge,
    Hello,
    Refusal,
    StopWorker,
    ToAgent,
    Welcome,
    frame_start,
)
from inferpool.workers.shared.arena import Arena
from tests.descriptors import num_open
from tests.workers.contract import until
from tests.workers.remote.cluster import KEY, PATIENCE_S, OtherSide, facts_of, front
from tests.workers.remote.conftest import Contexts

OTHER_KEY = b"another key of some length"
Address = tuple[str, int]


async def join(
    address: Address,
    key: bytes = KEY,
    tls: ssl.SSLContext | None = None,
    term: int = 0,
    join_s: float = PATIENCE_S,
) -> tuple[HostLink[ToAgent], Mailbox[ToAgent], joining.Joined]:
    dialer = Dialer(key, tls, facts_of("h"), join_s=join_s)
    return await dialer.join(address, role="agent", term=term)


class Stranger:
    """A connection of somebody who has not proved anything."""

    def __init__(self) -> None:
        self.mailbox: Mailbox[ToAgent] = Mailbox()
        self.link: HostLink[ToAgent]

    async def connect(self, address: Address) -> "Stranger":
        sock = socket.create_connection(address)
        self.link = HostLink(sock, ToAgent, self.mailbox, max_body_bytes=MAX_BODY_BYTES)
        return self

    async def hello(self, key: bytes = KEY, **changes: object) -> Hello:
        """Return the right answer to the challenge, but for some changes."""
        first = await self.mailbox.get()
        assert isinstance(first, Challenge)
        hello = Hello(PROTOCOL, "agent", b"n" * 32, b"", 0, facts_of("h"))
        proof = joining._of_agent(key, first.nonce, hello)
        return msgspec.structs.replace(hello, **{"proof": proof, **changes})

    async def refusal(self) -> str:
        """Return why the front end refuses."""
        answer = await self.mailbox.get()
        assert isinstance(answer, Refusal)
        return answer.reason


async def impostor(answer: Callable[[], ToAgent]) -> asyncio.Server:
    """Serve what calls itself a front end, and gives that answer to a greeting."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(frame_start(Challenge(b"c" * 32), 0))
        await reader.read(100)
        writer.write(frame_start(answer(), 0))
        await reader.read()
        writer.close()

    return await asyncio.start_server(serve, "127.0.0.1", 0)


def is_empty(hosts: RemoteHosts) -> bool:
    return not hosts.hosts and not hosts._joining


async def test_both_sides_that_know_the_key_join(arena: Arena):
    async with front(arena, keys=(OTHER_KEY, KEY)) as (hosts, _):
        link, _, joined = await join(hosts.address, term=5)
        assert joined.term == hosts.term
        assert joined.epoch == 1
        assert not joined.is_standing_by
        link.close()
        link, _, joined = await join(hosts.address, OTHER_KEY)
        assert joined.epoch == 2
        link.close()


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (lambda: Welcome(b"x" * 32, 9, 1), "the front end does not know the key"),
        (lambda: Welcome(b"", 9, 1), "the front end does not know the key"),
        (lambda: Beat(1.0), "that is not the cluster port of a front end"),
        (lambda: Refusal("not today"), "not today"),
        (lambda: Refusal("a\nb" + "c" * 1_000_000), "^a bc{497}$"),
    ],
)
async def test_agent_works_for_no_impostor(answer: Callable[[], ToAgent], reason: str):
    async with await impostor(answer) as server:
        with pytest.raises(RefusedError, match=reason):
            await join(server.sockets[0].getsockname())


async def test_proof_for_one_challenge_is_none_for_the_next(arena: Arena):
    async with front(arena) as (hosts, _):
        first = await Stranger().connect(hosts.address)
        seen = await first.hello()
        second = await Stranger().connect(hosts.address)
        await second.mailbox.get()
        second.link.send(seen)
        assert "does not know the key" in await second.refusal()
        first.link.send(seen)
        assert isinstance(await first.mailbox.get(), Welcome)
        first.link.close()
        second.link.close()


def test_proofs_are_of_one_key_one_meeting_and_one_side():
    hello = Hello(PROTOCOL, "agent", b"n" * 32, b"", 0, facts_of("h"))
    other = msgspec.structs.replace(hello, nonce=b"m" * 32)
    meetings = [
        (KEY, b"c", hello),
        (OTHER_KEY, b"c", hello),
        (KEY, b"d", hello),
        (KEY, b"c", other),
    ]
    proofs = [joining._of_agent(*each) for each in meetings]
    proofs += [joining._of_front_end(key, nonce, each.nonce) for key, nonce, each in meetings]
    assert len(set(proofs)) == 8


async def test_long_messages_are_for_those_who_have_joined(arena: Arena):
    async with front(arena) as (hosts, watcher):
        peer = OtherSide(facts_of("h"))
        await peer.join(hosts)
        long = "x" * (MAX_STRANGER_BYTES + 1)
        peer.link.send(Refusal(long))
        await until(lambda: watcher.lost == [("h", long)])


async def test_whoever_says_nothing_is_left_after_a_while(
    arena: Arena, caplog: pytest.LogCaptureFixture
):
    async with front(arena, join_s=0.1) as (hosts, _):
        stranger = await Stranger().connect(hosts.address)
        await stranger.mailbox.get()
        with pytest.raises(ConnectionError):
            await stranger.mailbox.get()
        await until(lambda: is_empty(hosts))
        assert "it did not join: it took too long" in caplog.text


async def test_agent_gives_up_a_front_end_that_says_nothing():
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(TimeoutError):
        await join(silent.getsockname(), join_s=0.1)


@pytest.mark.parametrize("excess", [0, 1])
async def test_greeting_of_a_stranger_is_bounded(
    arena: Arena, caplog: pytest.LogCaptureFixture, excess: int
):
    async with front(arena) as (hosts, _):
        stranger = await Stranger().connect(hosts.address)
        hello = await stranger.hello()
        size = len(msgspec.msgpack.encode(hello))
        padding = MAX_STRANGER_BYTES - size - 4 + excess  # a longer string has a longer head
        facts = msgspec.structs.replace(hello.facts, torch="2" + "x" * padding)
        hello = msgspec.structs.replace(hello, facts=facts)
        assert len(msgspec.msgpack.encode(hello)) == MAX_STRANGER_BYTES + excess
        stranger.link.send(hello)
        if excess:
            with pytest.raises(ConnectionError):
                await stranger.mailbox.get()
            assert "it sent what makes no sense: a message of" in caplog.text
        else:
            assert isinstance(await stranger.mailbox.get(), Welcome)
        stranger.link.close()


async def test_nothing_that_a_stranger_says_is_logged(
    arena: Arena, caplog: pytest.LogCaptureFixture
):
    async with front(arena) as (hosts, _):
        stranger = await Stranger().connect(hosts.address)
        stranger.link.send(Refusal("all is well\nWARNING all is lost"))
        assert isinstance(await stranger.mailbox.get(), Challenge)
        assert await stranger.refusal() == "it did not say who it is"
        await until(lambda: is_empty(hosts) and "it did not say who it is" in caplog.text)
        assert "lost" not in caplog.text


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"protocol": PROTOCOL + 1},
            f"it speaks protocol {PROTOCOL + 1}, and the front end {PROTOCOL}",
        ),
        ({"proof": b""}, "does not know the key"),
        (
            {"facts": facts_of("h", version="0.9")},
            "h has inferpool 0.9, and the front end 1: install the same version on all hosts",
        ),
        ({"facts": facts_of("")}, "its name is not one of letters"),
        ({"facts": facts_of("a\nb")}, "its name is not one of letters"),
    ],
)
async def test_agent_that_does_not_fit_is_told_why(
    arena: Arena, changes: dict[str, object], reason: str
):
    async with front(arena) as (hosts, watcher):
        stranger = await Stranger().connect(hosts.address)
        stranger.link.send(await stranger.hello(**changes))
        assert reason in await stranger.refusal()
        with pytest.raises(ConnectionError):
            await stranger.mailbox.get()
        await until(lambda: is_empty(hosts))
        assert not watcher.joined


async def test_agent_follows_no_front_end_of_an_earlier_term(arena: Arena):
    async with front(arena) as (hosts, _):
        link, _, joined = await join(hosts.address, term=hosts.term + 7)
        assert joined.term == hosts.term  # it began later, and its clock is behind
        with pytest.raises(RefusedError, match="another front end has taken over"):
            await join(hosts.address, term=hosts.term + 1)
        link.close()
    async with await impostor(lambda: Welcome(b"", 7, 1)) as server:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(joining, "_of_front_end", lambda *_: b"")
            address = server.sockets[0].getsockname()
            with pytest.raises(RefusedError, match="another front end has taken over from it"):
                await join(address, term=8)
            link, _, joined = await join(address, term=7)
            assert joined.term == 7
            link.close()


async def test_strangers_leave_nothing_behind(arena: Arena):
    async with front(arena) as (hosts, watcher):
        await OtherSide(facts_of("h")).join(hosts)
        num_fds, num_tasks = num_open(), len(asyncio.all_tasks())
        for said in (
            b"",
            b"\0",
            b"GET / HTTP/1.1\r\n\r\n",
            b"\x16\x03\x01" * 200,
            b"\xff" * 70_000,
        ):
            for _ in range(5):
                with socket.create_connection(hosts.address) as sock:
                    sock.sendall(said)
                    await asyncio.sleep(0)
        await until(lambda: not hosts._joining)
        await until(lambda: num_open() == num_fds)
        assert len(asyncio.all_tasks()) == num_tasks
        assert list(hosts.hosts) == ["h"]
        assert not watcher.lost


async def test_agent_without_a_certificate_is_refused(
    arena: Arena, tls: Contexts, certificates, caplog: pytest.LogCaptureFixture
):
    without = ssl.create_default_context(cafile=certificates[2])
    async with front(arena, tls=tls[0]) as (hosts, watcher):
        with pytest.raises(OSError, match=r"(?i)certificate required"):
            await join(hosts.address, tls=without)
        await until(lambda: is_empty(hosts))
        assert "did not return a certificate" in caplog.text
        assert not watcher.joined


async def test_front_end_with_a_certificate_of_somebody_else_is_refused(
    arena: Arena, tls: Contexts
):
    doubtful = ssl.create_default_context()
    async with front(arena, tls=tls[0]) as (hosts, _):
        with pytest.raises(ssl.SSLCertVerificationError):
            await join(hosts.address, tls=doubtful)
        with socket.create_connection(hosts.address) as sock:
            sock.setblocking(False)
            with pytest.raises(ssl.SSLCertVerificationError, match=r"not valid for '127.0.0.2'"):
                await joining.secured(sock, tls[1], "127.0.0.2")


async def test_clear_text_and_tls_do_not_meet(
    arena: Arena, tls: Contexts, caplog: pytest.LogCaptureFixture
):
    async with front(arena) as (hosts, _):
        with pytest.raises(ssl.SSLError, match="WRONG_VERSION_NUMBER"):
            await join(hosts.address, tls=tls[1])
        await until(lambda: is_empty(hosts))
        assert "it speaks TLS, and this side does not" in caplog.text
    async with front(arena, tls=tls[0], join_s=0.2) as (hosts, _):
        with pytest.raises((TimeoutError, ConnectionError)):
            await join(hosts.address)
        await until(lambda: is_empty(hosts))


async def test_address_that_is_not_private_needs_tls_or_a_word():
    with pytest.raises(RefusedError, match=r"192.0.32.7 is not a private address: use TLS"):
        await join(("192.0.32.7", 1))


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        *((each, True) for each in ("127.0.0.1", "10.1.2.3", "192.168.0.1", "172.16.0.1", "::1")),
        *((each, True) for each in ("fd00::1", "fe80::1%eth0")),
        *((each, False) for each in ("8.8.8.8", "0.0.0.0", "::", "2600::1", "172.32.0.1")),
    ],
)
def test_private_addresses_are_known(address: str, expected: bool):
    assert is_private(address) == expected


async def test_all_addresses_of_a_name_are_tried(arena: Arena, monkeypatch: pytest.MonkeyPatch):
    async with front(arena) as (hosts, _):
        loop = asyncio.get_running_loop()
        with socket.create_server(("127.0.0.1", 0)) as server:
            nobody = server.getsockname()
        found = [
            (socket.AF_INET, socket.SOCK_STREAM, 0, "", address)
            for address in (nobody, hosts.address)
        ]

        async def getaddrinfo(*_: object, **__: object) -> object:
            return found

        monkeypatch.setattr(loop, "getaddrinfo", getaddrinfo)
        link, _, _ = await join(("gpu.example", 1))
        link.close()
        del found[1]
        with pytest.raises(ConnectionRefusedError):
            await join(("gpu.example", 1))


async def test_many_orders_may_come_with_the_welcome(arena: Arena):
    peer = OtherSide(facts_of("h"))
    async with front(arena) as (hosts, watcher):
        sent = 500

        def start_many(host: RemoteHost) -> None:
            for number in range(sent):
                host.order(StopWorker(number, 0.0))

        watcher.on_joined = start_many  # type: ignore[method-assign]
        await peer.join(hosts)
        await until(lambda: len(peer.messages) == sent)
        assert not peer.ends
        peer.link.close()
