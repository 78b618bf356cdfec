"""Memory that all connections share: requests on their way, and answers not yet read."""

import asyncio
import contextlib
import tracemalloc
from collections.abc import AsyncIterator
from functools import partial

import pytest

from inferpool.service.api.codecs.body import add_piece
from inferpool.service.api.exchange import Exchange
from inferpool.service.api.wire.budgets import Refusals, UnfinishedRequests, UnreadAnswers
from inferpool.service.errors import OverloadedError
from tests.service.api.fakes import FakeModel, NoWire, endpoint, result
from tests.service.api.server import (
    ONE,
    POST,
    ROUTES,
    WAYS,
    PredictServer,
    RawClient,
    Way,
    serve,
    silent_model,
    until,
)

KIB, MIB = 1 << 10, 1 << 20
MAX_BYTES = 300 * KIB
CHUNKED = b"transfer-encoding: chunked\r\n\r\n"
LENGTH = b"content-length: 250000\r\n\r\n"


class Clock:
    """Stands still until a test sets it, so that clients are as old as it says."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@contextlib.asynccontextmanager
async def serving(
    model: FakeModel | None = None, clock: Clock | None = None, **limits: int
) -> AsyncIterator[PredictServer]:
    """Serve with these limits; afterwards nothing may be counted any more."""
    unfinished = UnfinishedRequests(MAX_BYTES, clock or Clock())
    async with serve(model, unfinished=unfinished, **limits) as server:
        yield server
        await until(lambda: not server.connections)
        assert (server.use.unfinished_bytes, server.use.unread_bytes) == (0, 0)


@contextlib.asynccontextmanager
async def half_a_body(
    server: PredictServer, head: bytes, num_bytes: int, before: int | None = None
) -> AsyncIterator[RawClient]:
    """A client that has sent so much of its body, all of which is counted."""
    before = server.use.unfinished_bytes if before is None else before
    async with server.connect() as client:
        client.send(head + b"x" * num_bytes)
        await until(lambda: server.use.unfinished_bytes == before + num_bytes)
        yield client


@pytest.mark.parametrize("route", ROUTES)
async def test_bodies_on_their_way_are_refused_where_there_is_no_room_for_them(route: str) -> None:
    head = ROUTES[route] + LENGTH
    async with serving() as server:
        async with half_a_body(server, head, 100 * KIB), half_a_body(server, head, 150 * KIB):
            async with server.connect() as client:
                answer = await client.ask(head + b"x" * 100 * KIB)
                assert (answer.status, answer.headers["retry-after"]) == (429, "1")
                assert answer.headers["connection"] == "close"
                assert answer.json["code"] == "overloaded"
                assert "max_unfinished_bytes" in answer.json["detail"]
                assert await client.is_closed()
            assert server.use.unfinished_bytes == 250 * KIB
            assert await server.is_well()
        await until(lambda: not server.use.unfinished_bytes)
        async with half_a_body(server, head, 200 * KIB):
            pass
        assert server.use.unfinished_refused == 1


@pytest.mark.parametrize("route", ROUTES)
async def test_the_slowest_body_makes_room_for_a_new_one(route: str) -> None:
    head, clock = ROUTES[route] + LENGTH, Clock()
    async with serving(clock=clock) as server:
        async with server.connect() as slow, server.connect() as fast, server.connect() as middle:
            slow.send(head + b"x" * 60 * KIB)
            fast.send(head + b"x" * 120 * KIB)
            middle.send(head + b"x" * 110 * KIB)
            await until(lambda: server.use.unfinished_bytes == 290 * KIB)
            clock.now += 1
            async with server.connect() as client:
                client.send(ROUTES[route] + b"content-length: 100000\r\n\r\n" + b"x" * 50_000)
                answer = await slow.read_answer()
                assert (answer.status, answer.headers["connection"]) == (429, "close")
                assert "the slowest are refused" in answer.json["detail"]
                assert await client.status(b"x" * 50_000) == 200
            assert (await middle.read_answer()).status == 429  # there is some room to spare
            assert server.use.unfinished_bytes == 120 * KIB
            assert server.use.unfinished_refused == 2
            assert await server.is_well()
        await until(lambda: not server.use.unfinished_bytes)


async def test_a_head_and_calls_in_line_make_room_when_they_are_slow() -> None:
    clock = Clock()
    async with serving(silent_model(), clock) as server:
        async with server.connect() as in_head, server.connect() as in_line:
            in_head.send(POST + b"x: %b" % (b"y" * 50_000))
            in_line.send(ONE + POST + b"content-length: 50000\r\n\r\n" + b"x" * 50_000)
            await until(lambda: server.use.unfinished_bytes > 100_000)
            clock.now += 1
            async with half_a_body(server, POST + LENGTH, 240_000, before=0):
                assert (await in_head.read_answer()).status == 429
                assert server.use.unfinished_refused == 2
        server.model.futures[0].set_result(result())  # only then is what follows looked at


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("is_known", [False, True])
@pytest.mark.parametrize("head", [LENGTH, CHUNKED], ids=["length", "chunked"])
async def test_a_body_counts_until_it_is_whole(route: str, head: bytes, is_known: bool) -> None:
    head = ROUTES[route] + head
    body = b"3d090\r\n" + b"x" * 250_000 + b"\r\n0\r\n\r\n" if CHUNKED in head else b"x" * 250_000
    async with serving() as server:
        async with server.connect() as client:
            for _ in range(2 if is_known else 1):
                client.send(head + body[:1000])
                await until(lambda: server.use.unfinished_bytes)
                for place in range(1000, len(body), 50_000):
                    client.send(body[place : place + 50_000])
                    await asyncio.sleep(0)
                assert (await client.read_answer()).status == 200
                assert not server.use.unfinished_bytes
        assert {len(each) for each in server.model.bodies} == {250_000}


@pytest.mark.parametrize("route", ROUTES)
async def test_calls_that_wait_in_line_count_and_are_refused_in_their_order(route: str) -> None:
    one = ROUTES[route] + b"content-length: 9000\r\n\r\n" + b"x" * 9000
    async with serving(silent_model()) as server, server.connect() as early:
        early.send(ONE + one)
        await until(lambda: 13_000 < server.use.unfinished_bytes < 14_000)
        async with (
            half_a_body(server, POST + LENGTH, 240_000),
            half_a_body(server, POST + LENGTH, 50_000),
            server.connect() as late,
        ):
            late.send(ONE + one + ONE)
            await until(lambda: server.use.unfinished_refused)
            for future in server.model.futures:
                future.set_result(result())
            assert await early.read_statuses(1) == await late.read_statuses(1) == [200]
            answer = await late.read_answer()
            assert (answer.status, answer.headers["connection"]) == (429, "close")
            await until(lambda: len(server.model.futures) == 3)
            server.model.futures[2].set_result(result())
            assert (await early.read_answer()).status == 200
            assert server.use.unfinished_bytes == 290_000


async def test_a_thousand_calls_in_line_count_for_what_they_take() -> None:
    calls = ONE + b"GET /health/live HTTP/1.1\r\nhost: h\r\n\r\n" * 70
    async with serving(silent_model()) as server, server.connect() as early:
        early.send(calls)
        await until(lambda: server.use.unfinished_bytes > 70 * 4096)
        async with server.connect() as late:
            late.send(calls)
            await until(lambda: server.use.unfinished_refused)
            for future in server.model.futures:
                future.set_result(result())
            assert await late.read_statuses(2) == [200, 429]
            assert await late.is_closed()
        assert await early.read_statuses(71) == [200, *[405] * 70]


async def test_heads_that_are_not_whole_count_until_they_are() -> None:
    head = POST + b"x: %b" % (b"y" * 60_000)
    async with serving() as server, contextlib.AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(server.connect()) for _ in range(6)]
        for client in clients[:5]:
            client.send(head)
        await until(lambda: server.use.unfinished_bytes == 5 * len(head))
        assert await clients[5].status(head) == 429
        assert await clients[0].status(b"\r\ncontent-length: 1\r\n\r\nx") == 200
        await until(lambda: server.use.unfinished_bytes == 4 * len(head))


@pytest.mark.parametrize("route", ROUTES)
async def test_a_client_that_hangs_up_gives_back_what_was_counted(route: str) -> None:
    async with serving(silent_model()) as server:
        for length in (LENGTH, CHUNKED + b"fffff\r\n"):
            async with half_a_body(server, ROUTES[route] + length, 100 * KIB):
                pass
            await until(lambda: not server.use.unfinished_bytes)
        async with server.connect() as client:
            client.send(ONE + POST + LENGTH + b"x" * KIB)
            await until(lambda: server.use.unfinished_bytes)
        server.model.futures[0].set_result(result())  # nothing is read before, not even the end


async def test_a_body_that_is_whole_at_once_is_not_counted() -> None:
    async with serve(unfinished=UnfinishedRequests(0)) as server:
        for head in ROUTES.values():
            for _ in range(2):
                call = head + b"content-length: 1\r\n\r\nx"
                assert (await server.answer_to(call)).status == 200


@pytest.mark.parametrize("size", [1, 2, 100, 5000])
def test_a_body_in_small_pieces_costs_about_as_much_as_it_is_long(size: int) -> None:
    exchange = Exchange(None, None, None)  # type: ignore[arg-type]  # of which it asks nothing
    pieces: list[bytes | bytearray | memoryview] = []
    count = 5000
    tracemalloc.start()
    try:
        for _ in range(count):
            exchange.feed(bytes(size))
            add_piece(pieces, bytes(size))
        num_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert num_bytes < 2 * 1.3 * size * count
    assert sum(map(len, pieces)) == size * count


class Reader:
    """A connection with so much to be read."""

    def __init__(self, num_unread_bytes: int, of: str = "") -> None:
        self.num_unread_bytes = num_unread_bytes
        self.of = of
        self.is_cut_off = False

    def owner(self) -> str:
        return self.of

    def cut_off(self) -> None:
        self.is_cut_off = True


def test_the_slowest_readers_make_room() -> None:
    clock = Clock()
    answers = UnreadAnswers(8000, clock)
    readers = [Reader(1000) for _ in range(8)]
    for reader in readers:
        answers.take(reader, 1000)
        clock.now += 0.01
    clock.now += 1
    for number, reader in enumerate(readers):
        reader.num_unread_bytes -= 100 * (number % 4)
    late = Reader(900)
    answers.take(late, 900)
    assert [each.is_cut_off for each in readers] == [True, *[False] * 3, True, *[False] * 3]
    assert not late.is_cut_off
    assert answers.num_bytes == 6900
    assert answers.num_cut == 2
    for reader in (*readers, late):
        answers.give_back(reader)
    assert answers.num_bytes == 0


def test_the_only_reader_may_have_an_answer_of_any_size() -> None:
    answers = UnreadAnswers(1000, Clock())
    one = Reader(5000)
    answers.take(one, 5000)
    assert not one.is_cut_off
    answers.take(Reader(10), 10)
    assert one.is_cut_off or answers.num_bytes <= 5010


LARGE = 6 * MIB
WHOLE = LARGE + len('{"predictions":[""]}')
large_model = partial(FakeModel, lambda _: result(b'"%b"' % (b"x" * LARGE)))


@contextlib.asynccontextmanager
async def unread(server: PredictServer) -> AsyncIterator[RawClient]:
    """A client that has asked for a large answer and reads nothing of it."""
    num_asked = len(server.model.payloads)
    async with server.connect() as client:
        client.stop_reading()
        client.send(ONE)
        await until(lambda: len(server.model.payloads) > num_asked)
        yield client


async def test_clients_that_read_nothing_are_cut_off_when_their_answers_take_too_much() -> None:
    most = 4 * LARGE + MIB
    async with (
        serving(large_model(), max_unread_bytes=most) as server,
        contextlib.AsyncExitStack() as stack,
    ):
        clients = [await stack.enter_async_context(unread(server)) for _ in range(8)]
        await until(lambda: server.use.readers_cut >= 4)
        assert server.use.unread_bytes <= most
        answer = await server.answer_to(ONE)
        assert (answer.status, len(answer.body)) == (200, WHOLE)
        num_cut = 0
        for client in clients:
            client.read_on()
            try:
                await client.read_answer()
            except (ConnectionError, asyncio.IncompleteReadError):
                num_cut += 1
        assert num_cut == server.use.readers_cut < 8


async def test_an_answer_counts_as_a_whole_until_its_last_byte_is_read() -> None:
    async with serving(large_model()) as server, unread(server) as client:
        await until(lambda: server.use.unread_bytes > LARGE)
        client.read_on(64 * KIB)
        await client.read_head()
        num_left = WHOLE
        while num_left:
            num_left -= len(await client.reader.read(min(num_left, 64 * KIB)))
            assert server.use.unread_bytes > LARGE or num_left < LARGE * 7 // 8
        await until(lambda: not server.use.unread_bytes)
        assert await client.status(ONE) == 200


@pytest.mark.parametrize("line", [b"connection: close\r\n", b""])
async def test_the_end_of_a_connection_cuts_no_large_unread_answer(line: bytes) -> None:
    async with serving(large_model()) as server, server.connect() as client:
        client.stop_reading()
        client.send(POST + line + b"content-length: 1\r\n\r\nx")
        await until(lambda: server.use.unread_bytes)
        server.shut_connections_down()
        client.read_on()
        assert len((await client.read_answer()).body) > LARGE
        assert await client.is_closed()


async def test_refusals_are_bounded_in_each_iteration_and_go_in_order() -> None:
    refusals, refused = Refusals(), list[int]()
    for _ in range(2):
        refused.clear()
        for number in range(40):
            refusals.add(partial(refused.append, number))
        most = len(refused)
        assert most == 16
        await asyncio.sleep(0)
        assert len(refused) == 2 * most
        refusals.add(partial(refused.append, 40))  # behind those that came before
        await asyncio.sleep(0)
        assert refused == list(range(41))
        await asyncio.sleep(0)


async def test_one_refusal_that_fails_keeps_none_from_going_on() -> None:
    refusals, refused = Refusals(), list[int]()
    with pytest.raises(ZeroDivisionError):
        refusals.add(lambda: 1 // 0)  # type: ignore[arg-type,return-value]  # it never returns
    for number in range(40):
        refusals.add(partial(refused.append, number))
    for _ in range(3):
        await asyncio.sleep(0)
    assert len(refused) == 40


@pytest.mark.parametrize("way", WAYS)
async def test_a_call_comes_in_between_a_flood_of_refusals(way: Way) -> None:
    """Each is answered once, but for the one that hangs up before that."""
    num = 120
    model = FakeModel(refusals=[OverloadedError("full", retry_after_s=1)] * num)
    async with serve(model, way) as server, contextlib.AsyncExitStack() as stack:
        flood = [await stack.enter_async_context(server.connect()) for _ in range(num)]
        other = await stack.enter_async_context(server.connect())
        await until(lambda: len(server.connections) == num + 1)
        for client in flood:
            client.send(ONE)
        other.send(ONE)
        gone = flood.pop()
        gone.writer.close()
        assert (await other.read_answer()).status == 200
        num_before = server.statuses.count(429)
        answers = await asyncio.gather(*(client.read_answer() for client in flood))
        assert [answer.status for answer in answers] == [429] * (num - 1)
        assert {answer.headers["retry-after"] for answer in answers} == {"1"}
        assert num_before < num - 20  # some 16 in each iteration of the loop
        await until(lambda: len(server.statuses) == num + 1)
    assert server.statuses.count(429) >= num - 1


async def test_a_call_that_waits_for_its_refusal_keeps_no_body() -> None:
    num, size = 100, 100_000
    statuses: list[int] = []
    model = FakeModel(refusals=[OverloadedError("full", retry_after_s=1) for _ in range(num)])
    predict = endpoint(model, on_done=lambda _, status, __: statuses.append(status))
    headers = [(b"content-type", b"image/png")]
    tracemalloc.start()
    try:
        for _ in range(num):
            exchange = Exchange.open(NoWire(), predict, "POST", "/predict", b"", headers)
            exchange.start()
            exchange.take(bytes(size))
        num_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert num_bytes < num * size / 5
    assert len(statuses) < num / 2
    for _ in range(num):
        await asyncio.sleep(0)
    assert statuses == [429] * num


@pytest.mark.parametrize("route", ROUTES)
async def test_a_large_answer_arrives_whole(route: str) -> None:
    large = "".join(f"{number:07}" for number in range(200_000))
    async with serving(FakeModel(lambda _: result(b'"%b"' % large.encode()))) as server:
        answer = await server.answer_to(ROUTES[route] + b"content-length: 1\r\n\r\nx")
    assert answer.json == {"predictions": [large]}


async def test_an_address_whose_connections_are_all_at_work_leaves_some_to_others() -> None:
    unfinished = UnfinishedRequests(2**20, share=0.75)
    async with (
        serve(silent_model(), unfinished=unfinished, max_connections=8) as server,
        contextlib.AsyncExitStack() as stack,
    ):
        address = server.listener.getsockname()

        async def ask(source: str) -> asyncio.StreamReader:
            reader, writer = await asyncio.open_connection(*address, local_addr=(source, 0))
            stack.callback(writer.close)
            writer.write(ONE)
            return reader

        greedy = [await ask("127.0.0.2") for _ in range(8)]
        await until(lambda: len(server.model.futures) == 6)
        for refused in greedy[6:]:
            assert await refused.read(12) == b"HTTP/1.1 503"
        other = await ask("127.0.0.3")
        await until(lambda: len(server.model.futures) == 7)
        for future in server.model.futures:
            future.set_result(result())
        for answered in (*greedy[:6], other):
            assert await answered.read(12) == b"HTTP/1.1 200"
