import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import inferpool.workers.remote.link
from inferpool.workers.remote.joining import secured
from inferpool.workers.remote.link import HostLink, Mailbox
from inferpool.workers.remote.wire import (
    LENGTHS,
    MAX_HEAD_BYTES,
    Beat,
    FrameTooLargeError,
    Measure,
    Message,
    Refusal,
    ToAgent,
    Views,
    frame_start,
)
from tests.descriptors import num_open
from tests.workers.contract import until
from tests.workers.remote.conftest import Contexts

MOST_BODY = 1 << 22
CLOSED = "the other side closed the connection"


class Log:
    """Keeps what comes; bodies come into several pieces of memory."""

    def __init__(self) -> None:
        self.messages: list[tuple[Message, bytes]] = []
        self.ends: list[str] = []
        self.on_message_too: Callable[[], object] = lambda: None
        self.room: Callable[[int], Views] | None = None

    def room_for(self, message: Message, num_bytes: int) -> Views:
        if self.room is not None:
            return self.room(num_bytes)
        whole = memoryview(bytearray(num_bytes))
        cut = num_bytes // 3
        return [whole[:cut], whole[cut:cut], whole[cut:]]

    def on_message(self, message: Message, body: Views) -> None:
        self.messages.append((message, b"".join(body)))
        self.on_message_too()

    def on_closed(self, reason: str) -> None:
        self.ends.append(reason)


@contextlib.contextmanager
def changed(**constants: int) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in constants.items():
            patch.setattr(inferpool.workers.remote.link, name, value)
        yield


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        theirs, _ = server.accept()
    for sock in (ours, theirs):
        sock.setblocking(False)
    return ours, theirs


async def pair_of(tls: Contexts | None) -> tuple[socket.socket, socket.socket]:
    ours, theirs = tcp_pair()
    server, client = tls or (None, None)
    return await asyncio.gather(secured(ours, client, "127.0.0.1"), secured(theirs, server, None))


def link_of(sock: socket.socket) -> tuple[HostLink[ToAgent], Log]:
    log = Log()
    return HostLink(sock, ToAgent, log, max_body_bytes=MOST_BODY), log


@contextlib.asynccontextmanager
async def one_link(
    tls: Contexts | None = None,
) -> AsyncIterator[tuple[HostLink, Log, socket.socket]]:
    """Make a link, and a plain end of it."""
    theirs, ours = await pair_of(tls)
    link, log = link_of(ours)
    try:
        yield link, log, theirs
    finally:
        link.close()
        theirs.close()
        await asyncio.sleep(0)
        assert len(log.ends) == 1


@contextlib.asynccontextmanager
async def two_links(
    tls: Contexts | None = None,
) -> AsyncIterator[list[tuple[HostLink[ToAgent], Log]]]:
    both = [link_of(sock) for sock in await pair_of(tls)]
    try:
        yield both
    finally:
        for link, _ in both:
            link.close()
        await asyncio.sleep(0)
        assert [len(log.ends) for _, log in both] == [1, 1]


async def write(sock: socket.socket, data: bytes) -> None:
    left = memoryview(data)
    while left:
        try:
            left = left[sock.send(left) :]
        except (BlockingIOError, ssl.SSLWantWriteError):
            await asyncio.sleep(0.001)


def frame(message: Message, body: bytes = b"") -> bytes:
    return frame_start(message, len(body)) + body


def sized(size: int, number: int = 0) -> tuple[Message, bytes]:
    """Return a message with a body of that size."""
    return Measure(number, size), bytes([number % 251]) * size


SIZES = st.tuples(st.integers(0, 300), st.sampled_from([0, 0, 1, 40, 64, 65, 500]))


@pytest.mark.parametrize("is_tls", [False, True])
def test_messages_arrive_whole_however_the_bytes_are_cut(is_tls: bool, tls: Contexts):
    @settings(max_examples=30 if is_tls else 80)
    @given(sizes=st.lists(SIZES, max_size=6), cuts=st.lists(st.integers(1, 200), max_size=12))
    def check(sizes: Sequence[tuple[int, int]], cuts: Sequence[int]) -> None:
        content = bytes(range(256)) * 2
        sent = [(Refusal("x" * head), content[:body]) for head, body in sizes]
        data = b"".join(frame(*each) for each in sent)
        ends = [*accumulate(cuts)]

        async def send() -> list[tuple[Message, bytes]]:
            async with one_link(tls if is_tls else None) as (link, log, theirs):
                for start, end in zip([0, *ends], [*ends, len(data)], strict=True):
                    await write(theirs, data[start:end])
                    await asyncio.sleep(0)
                await until(lambda: link._num_read_bytes == len(data) or log.ends)
                assert not log.ends
                return log.messages

        with changed(_STAGING_BYTES=64):
            assert asyncio.run(send()) == sent

    check()


async def test_body_comes_straight_into_the_memory_that_its_receiver_has_given():
    memory = bytearray(100)
    async with one_link() as (_link, log, theirs):
        log.room = lambda size: [memoryview(memory)[90:95], memoryview(memory)[10:15]]
        await write(theirs, frame(Measure(1, 0), b"0123456789"))
        await until(lambda: log.messages)
        assert (memory[90:95], memory[10:15]) == (b"01234", b"56789")


@pytest.mark.parametrize("room", [9, 11])
async def test_body_that_does_not_fit_its_head_ends_the_link(room: int):
    async with one_link() as (_link, log, theirs):
        log.room = lambda size: [memoryview(bytearray(room))]
        await write(theirs, frame(Measure(1, 0), b"0123456789"))
        await until(lambda: log.ends)
        assert "a body of 10 bytes, which does not fit its head" in log.ends[0]
        assert not log.messages


async def test_long_head_is_taken_and_its_memory_is_given_back():
    long = Refusal("x" * 1_000_000)
    async with two_links() as ((ours, _), (theirs, log)):
        ours.send(long)
        ours.send(Beat(1.0))
        await until(lambda: len(log.messages) == 2)
        assert log.messages == [(long, b""), (Beat(1.0), b"")]
        ours.send(Beat(2.0))
        await until(lambda: len(log.messages) == 3)
        assert theirs._staging.nbytes == inferpool.workers.remote.link._STAGING_BYTES


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (LENGTHS.pack(MAX_HEAD_BYTES + 1, 0), f"{MAX_HEAD_BYTES + 1} and 0 bytes"),
        (LENGTHS.pack(10, MOST_BODY + 1), f"10 and {MOST_BODY + 1} bytes"),
        (LENGTHS.pack(0, 0), "makes no sense"),
        (LENGTHS.pack(5, 0) + b"\xc1\xc1\xc1\xc1\xc1", "makes no sense"),
        (LENGTHS.pack(3, 0) + b"\x93\xa1\xff", "makes no sense"),
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", "makes no sense"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\x00", "it speaks TLS, and this side does"),
        (frame(sized(3)[0])[:-1] + b"\xc0", "makes no sense"),
    ],
)
async def test_garbage_ends_the_link(data: bytes, reason: str):
    async with one_link() as (link, log, theirs):
        await write(theirs, data)
        await until(lambda: log.ends)
        assert reason in log.ends[0]
        assert link.is_closed
        assert not log.messages


async def test_largest_body_is_taken():
    async with two_links() as ((ours, _), (_theirs, log)):
        ours.send(Measure(1, 0), [memoryview(bytes(MOST_BODY))])
        await until(lambda: log.messages)
        assert len(log.messages[0][1]) == MOST_BODY


async def test_head_limit_of_a_stranger_holds_to_the_byte():
    whole = frame(Beat(1.0))
    for limit, is_taken in [
        (len(whole) - LENGTHS.size, True),
        (len(whole) - LENGTHS.size - 1, False),
    ]:
        async with one_link() as (link, log, theirs):
            link.max_head_bytes = limit
            await write(theirs, whole)
            await until(lambda: log.messages or log.ends)
            assert bool(log.messages) == is_taken


async def test_end_at_any_point_is_told_once_and_only_whole_messages_count():
    data = frame(*sized(40))
    for cut in range(len(data) + 1):
        async with one_link() as (_link, log, theirs):
            await write(theirs, data[:cut])
            theirs.close()
            await until(lambda: log.ends)
            assert log.ends == [CLOSED]
            assert len(log.messages) == (cut == len(data))


@pytest.mark.parametrize("is_tls", [False, True])
async def test_other_side_that_reads_slowly_gets_everything_in_order(is_tls: bool, tls: Contexts):
    async with one_link(tls if is_tls else None) as (link, _log, theirs):
        sent = [sized(100_000, number) for number in range(200)]
        num_bytes = sum(len(frame(*each)) for each in sent)
        for message, body in sent:
            link.send(message, [memoryview(body)[:7], memoryview(body)[7:7], memoryview(body)[7:]])
        await asyncio.sleep(0.05)
        assert 0 < link.num_unsent_bytes < num_bytes
        got = bytearray()
        while len(got) < num_bytes:
            await asyncio.sleep(0)
            with contextlib.suppress(BlockingIOError, ssl.SSLWantReadError):
                got += theirs.recv(1 << 16)
        assert got == b"".join(frame(*each) for each in sent)
        assert link.num_unsent_bytes == 0
        assert not asyncio.get_running_loop().remove_writer(link._fd)


async def exchange(tls: Contexts | None) -> None:
    """Send thousands of messages both ways at once."""
    async with two_links(tls) as both:
        sent = [sized(0 if number % 3 else 17 * number % 20_000, number) for number in range(3000)]
        for start in range(0, len(sent), 100):
            for link, _ in both:
                for message, body in sent[start : start + 100]:
                    link.send(message, [memoryview(body)])
            await asyncio.sleep(0)
        await until(lambda: all(len(log.messages) == len(sent) for _, log in both))
        assert all(log.messages == sent for _, log in both)


@pytest.mark.parametrize("is_tls", [False, True])
async def test_thousands_of_messages_cross(is_tls: bool, tls: Contexts):
    await exchange(tls if is_tls else None)


@pytest.mark.parametrize("is_tls", [False, True])
async def test_thousands_of_messages_cross_in_the_loop_of_the_service(
    is_tls: bool, tls: Contexts, uvloop: None
):
    await exchange(tls if is_tls else None)


@pytest.mark.parametrize("is_tls", [False, True])
async def test_turns_of_few_bytes_leave_nothing_behind(is_tls: bool, tls: Contexts):
    with changed(_MOST_AT_ONCE=1, _PIECE_BYTES=1000, _STAGING_BYTES=64):
        async with two_links(tls if is_tls else None) as ((ours, _), (_, log)):
            sent = [sized(number * 1000, number) for number in range(40)]
            for message, body in sent:
                ours.send(message, [memoryview(body)])
            await until(lambda: len(log.messages) == len(sent))
            assert log.messages == sent
            ours.send(Refusal("x" * 200))  # in one record, of which one turn reads a part
            await until(lambda: log.messages[-1][0] == Refusal("x" * 200))


async def test_what_comes_with_the_handshake_is_read(tls: Contexts):
    theirs, ours = await pair_of(tls)
    await write(theirs, frame(Beat(1.0)) + frame(Beat(2.0)))
    first = b""
    while not first:
        with contextlib.suppress(ssl.SSLWantReadError):
            first = ours.recv(1)  # OpenSSL has the rest, and the socket has nothing to announce
        await asyncio.sleep(0)
    link, log = link_of(ours)
    link._staging[0], link._end = first[0], 1
    await until(lambda: len(log.messages) == 2)
    link.close()
    theirs.close()


async def test_link_may_be_closed_by_the_receiver_of_a_message():
    async with one_link() as (link, log, theirs):
        log.on_message_too = lambda: link.close("enough")
        await write(theirs, frame(*sized(10)) * 3)
        await until(lambda: log.ends)
        assert len(log.messages) == 1
        link.send(Beat(1.0))
        link.close("again")
        await asyncio.sleep(0)
        assert log.ends == ["enough"]
        assert link.num_unsent_bytes == 0


async def test_mistake_of_the_receiver_ends_the_link_and_not_the_loop(
    caplog: pytest.LogCaptureFixture,
):
    async with one_link() as (_link, log, theirs):
        log.on_message_too = lambda: {}["x"]
        await write(theirs, frame(Beat(1.0)) * 3)
        await until(lambda: log.ends)
        assert log.ends == ["a message could not be handled: KeyError('x')"]
        assert len(log.messages) == 1
        assert "a message of a host could not be handled" in caplog.text


async def test_message_that_is_too_large_is_not_sent_and_harms_nothing():
    async with two_links() as ((ours, _), (_, log)):
        with pytest.raises(FrameTooLargeError):
            ours.send(Refusal("x" * (MAX_HEAD_BYTES + 1)))
        with pytest.raises(TypeError):
            ours.send(object())  # type: ignore[arg-type]
        ours.send(Beat(1.0))
        await until(lambda: log.messages == [(Beat(1.0), b"")])


async def test_bytes_within_a_long_message_are_signs_of_life():
    async with one_link() as (link, log, theirs):
        data = frame(*sized(2000))
        await write(theirs, data[:1000])
        await until(lambda: link._num_read_bytes == 1000)
        before = link.heard_at
        await write(theirs, data[1000:-1])
        await until(lambda: link.heard_at > before)
        assert not log.messages


async def test_reset_is_told_with_its_reason():
    async with one_link() as (_link, log, theirs):
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        theirs.close()
        await until(lambda: log.ends)
        assert log.ends == ["the connection broke: Connection reset by peer"]


async def test_closed_links_leave_no_descriptor_behind(tls: Contexts):
    await exchange(tls)
    before = num_open()
    for _ in range(3):
        async with two_links(tls), two_links(), one_link() as (_, log, theirs):
            await write(theirs, b"no frame at all")
            await until(lambda: log.ends)
    assert num_open() == before


class TestMailbox:
    async def test_messages_and_the_end_come_to_whoever_waits(self):
        async with one_link() as (link, log, theirs):
            mailbox: Mailbox[ToAgent] = Mailbox()
            link.listener = mailbox
            waiting = asyncio.ensure_future(mailbox.get())
            await write(theirs, frame(Beat(1.0)) + frame(Beat(2.0)))
            assert [await waiting, await mailbox.get()] == [Beat(1.0), Beat(2.0)]
            theirs.close()
            with pytest.raises(ConnectionError, match=CLOSED):
                await mailbox.get()
            mailbox.hand_over(link, log)  # which hears of the end, although it came before

    async def test_stranger_may_send_no_body_and_not_many_messages(self):
        for data, reason in [
            (frame(*sized(1)), "a body, from a stranger"),
            (frame(Beat(1.0)) * 65, "too many messages at once"),
        ]:
            async with one_link() as (link, log, theirs):
                mailbox: Mailbox[ToAgent] = Mailbox()
                link.listener = mailbox
                await write(theirs, data)
                await until(lambda: link.is_closed)
                link.listener = log
                await asyncio.sleep(0)
                assert reason in (log.ends or [mailbox._closed_reason])[0]
                if not log.ends:
                    log.ends.append("")

    async def test_listener_that_follows_gets_what_has_come_and_ends_the_link_if_it_is_senseless(
        self,
    ):
        async with one_link() as (link, log, theirs):
            mailbox: Mailbox[ToAgent] = Mailbox()
            link.listener = mailbox
            await write(theirs, frame(Beat(1.0)) + frame(Beat(2.0)))
            await until(lambda: len(mailbox._messages) == 2)

            def complain() -> None:
                raise ValueError("not now")

            log.on_message_too = complain
            mailbox.hand_over(link, log)
            await until(lambda: log.ends)
            assert log.messages == [(Beat(1.0), b"")]
            assert log.ends == ["it sent what makes no sense: not now"]
