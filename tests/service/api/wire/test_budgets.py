"""What all connections may keep together: bodies that are on their way, answers not yet read."""

import asyncio
import contextlib
import json
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from inferpool.service.api.codecs.body import add_piece
from inferpool.service.api.exchange import Exchange
from inferpool.service.api.wire.budgets import UnfinishedRequests, UnreadAnswers
from inferpool.service.api.wire.connections import EdgeLimits
from inferpool.service.api.wire.protocol import PredictProtocol
from tests.service.api.fakes import FakeModel, as_app, endpoint, result
from tests.service.api.test_predict_over_sockets import POST, read_answer, until
from tests.service.api.wire.test_protocol import Bench, is_well

KIB, MIB = 1 << 10, 1 << 20
MAX_BYTES = 300 * KIB
ROUTES = {
    "straight": POST,
    "asgi": POST.replace(b"/predict", b"/mounted/predict"),
}
"""Calls that the protocol answers itself, and those that uvicorn's cycle answers."""
CHUNKED = b"transfer-encoding: chunked\r\n\r\n"
LENGTH = b"content-length: 250000\r\n\r\n"
Test = Callable[[Bench], Awaitable[None]]


def run(test: Test, model: FakeModel | None = None, **limits: int) -> Bench:
    """Try something on a server with these limits; afterwards nothing may be counted any more."""

    async def go() -> Bench:
        bench = Bench(model or FakeModel())
        predict = endpoint(bench.model, unfinished=UnfinishedRequests(MAX_BYTES))
        bench.server.config.http = PredictProtocol.bound_to(predict, EdgeLimits(**limits))  # type: ignore[arg-type]  # as uvicorn takes it
        bench.server.config.app = as_app(predict)
        async with bench.serving():
            await test(bench)
            await until(lambda: not bench.server.server_state.connections)
            assert use(bench)[::3] == (0, 0)
        return bench

    return asyncio.run(asyncio.wait_for(go(), 30))


def use(bench: Bench) -> tuple[int, ...]:
    http = bench.server.config.http
    assert issubclass(http, PredictProtocol)  # type: ignore[arg-type]  # it is a class
    found = http.others.use()  # type: ignore[union-attr]  # as above
    return (
        *(found.unfinished_bytes, found.max_unfinished_bytes, found.num_refused),
        *(found.unread_bytes, found.max_unread_bytes, found.num_cut),
    )


def num_unfinished(bench: Bench) -> int:
    return use(bench)[0]


def num_unread(bench: Bench) -> int:
    return use(bench)[3]


@contextlib.asynccontextmanager
async def half_a_body(
    bench: Bench, head: bytes, num_bytes: int, before: int | None = None
) -> AsyncIterator[None]:
    """A client that has sent so much of its body, all of which is counted."""
    before = num_unfinished(bench) if before is None else before
    async with bench.connect() as (_, writer):
        writer.write(head + b"x" * num_bytes)
        await until(lambda: num_unfinished(bench) == before + num_bytes)
        yield


@pytest.mark.parametrize("route", ROUTES)
def test_bodies_on_their_way_are_refused_where_there_is_no_room_for_them(route: str) -> None:
    head = ROUTES[route] + LENGTH

    async def test(bench: Bench) -> None:
        async with half_a_body(bench, head, 100 * KIB), half_a_body(bench, head, 150 * KIB):
            async with bench.connect() as (reader, writer):
                writer.write(head + b"x" * 100 * KIB)
                status, headers, body = await read_answer(reader)
                assert (status, headers["retry-after"]) == (429, "1")
                assert headers["connection"] == "close"
                problem = json.loads(body)
                assert problem["code"] == "overloaded"
                assert "max_unfinished_bytes" in problem["detail"]
                assert await reader.read() == b""
            assert num_unfinished(bench) == 250 * KIB
            await is_well(bench)
        await until(lambda: not num_unfinished(bench))
        async with half_a_body(bench, head, 200 * KIB):
            pass
        assert use(bench)[2] == 1

    run(test)


@pytest.mark.parametrize("route", ROUTES)
def test_the_slowest_body_makes_room_for_a_new_one(route: str) -> None:
    head = ROUTES[route] + LENGTH

    async def test(bench: Bench) -> None:
        async with contextlib.AsyncExitStack() as stack:
            clients = []
            for num_bytes in (60 * KIB, 120 * KIB, 110 * KIB):
                client = await stack.enter_async_context(bench.connect())
                client[1].write(head + b"x" * num_bytes)
                clients.append(client)
            await until(lambda: num_unfinished(bench) == 290 * KIB)
            await asyncio.sleep(1.05)
            async with bench.connect() as (reader, writer):
                writer.write(ROUTES[route] + b"content-length: 100000\r\n\r\n" + b"x" * 50_000)
                status, headers, body = await read_answer(clients[0][0])
                assert (status, headers["connection"]) == (429, "close")
                assert "the slowest are refused" in json.loads(body)["detail"]
                writer.write(b"x" * 50_000)
                assert (await read_answer(reader))[0] == 200
            assert (await read_answer(clients[2][0]))[0] == 429  # there is some room to spare
            assert num_unfinished(bench) == 120 * KIB
            assert use(bench)[2] == 2
            await is_well(bench)
        await until(lambda: not num_unfinished(bench))

    run(test)


def test_a_head_and_calls_in_line_make_room_when_they_are_slow() -> None:
    one = POST + b"content-length: 1\r\n\r\nx"

    async def test(bench: Bench) -> None:
        async with bench.connect() as (reader, writer), bench.connect() as (_, in_line):
            writer.write(POST + b"x: %b" % (b"y" * 50_000))
            in_line.write(one + POST + b"content-length: 50000\r\n\r\n" + b"x" * 50_000)
            await until(lambda: num_unfinished(bench) > 100_000)
            await asyncio.sleep(1.05)
            async with half_a_body(bench, POST + LENGTH, 240_000, before=0):
                assert (await read_answer(reader))[0] == 429
                assert use(bench)[2] == 2
        bench.model.futures[0].set_result(result())  # only then is what follows looked at

    run(test, FakeModel(lambda _: None))


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("is_known", [False, True])
@pytest.mark.parametrize("head", [LENGTH, CHUNKED], ids=["length", "chunked"])
def test_a_body_counts_until_it_is_whole(route: str, head: bytes, is_known: bool) -> None:
    head = ROUTES[route] + head
    body = b"3d090\r\n" + b"x" * 250_000 + b"\r\n0\r\n\r\n" if CHUNKED in head else b"x" * 250_000

    async def test(bench: Bench) -> None:
        async with bench.connect() as (reader, writer):
            for _ in range(2 if is_known else 1):
                writer.write(head + body[:1000])
                await until(lambda: num_unfinished(bench))
                for place in range(1000, len(body), 50_000):
                    writer.write(body[place : place + 50_000])
                    await asyncio.sleep(0)
                assert (await read_answer(reader))[0] == 200
                assert not num_unfinished(bench)
        assert {len(each) for each in bench.model.bodies} == {250_000}

    run(test)


@pytest.mark.parametrize("route", ROUTES)
def test_calls_that_wait_in_line_count_and_are_refused_in_their_turn(route: str) -> None:
    first = POST + b"content-length: 1\r\n\r\nx"
    one = ROUTES[route] + b"content-length: 9000\r\n\r\n" + b"x" * 9000

    async def test(bench: Bench) -> None:
        async with bench.connect() as (reader, writer):
            writer.write(first + one)
            await until(lambda: 13_000 < num_unfinished(bench) < 14_000)
            async with (
                half_a_body(bench, POST + LENGTH, 240_000),
                half_a_body(bench, POST + LENGTH, 50_000),
                bench.connect() as (late_reader, late_writer),
            ):
                late_writer.write(first + one + first)
                await until(lambda: use(bench)[2])
                for future in bench.model.futures:
                    future.set_result(result())
                assert (await read_answer(reader))[0] == 200
                assert (await read_answer(late_reader))[0] == 200
                status, headers, _ = await read_answer(late_reader)
                assert (status, headers["connection"]) == (429, "close")
                await until(lambda: len(bench.model.futures) == 3)
                bench.model.futures[2].set_result(result())
                assert (await read_answer(reader))[0] == 200
                assert num_unfinished(bench) == 290_000

    run(test, FakeModel(lambda _: None))


def test_a_thousand_calls_in_line_count_for_what_they_take() -> None:
    get = b"GET /health/live HTTP/1.1\r\nhost: h\r\n\r\n"

    async def test(bench: Bench) -> None:
        async with bench.connect() as (reader, writer):
            writer.write(POST + b"content-length: 1\r\n\r\nx" + get * 70)
            await until(lambda: num_unfinished(bench) > 70 * 4096)
            async with bench.connect() as (late_reader, late_writer):
                late_writer.write(POST + b"content-length: 1\r\n\r\nx" + get * 70)
                await until(lambda: use(bench)[2])
                for future in bench.model.futures:
                    future.set_result(result())
                statuses = [(await read_answer(late_reader))[0] for _ in range(2)]
                assert statuses == [200, 429]
                assert await late_reader.read() == b""
            statuses = [(await read_answer(reader))[0] for _ in range(71)]
            assert statuses == [200, *[405] * 70]

    run(test, FakeModel(lambda _: None))


def test_heads_that_are_not_whole_count_until_they_are() -> None:
    async def test(bench: Bench) -> None:
        async with contextlib.AsyncExitStack() as stack:
            clients = [await stack.enter_async_context(bench.connect()) for _ in range(6)]
            head = POST + b"x: %b" % (b"y" * 60_000)
            for _, writer in clients[:5]:
                writer.write(head)
            await until(lambda: num_unfinished(bench) == 5 * len(head))
            clients[5][1].write(head)
            assert (await read_answer(clients[5][0]))[0] == 429
            clients[0][1].write(b"\r\ncontent-length: 1\r\n\r\nx")
            assert (await read_answer(clients[0][0]))[0] == 200
            await until(lambda: num_unfinished(bench) == 4 * len(head))

    run(test)


@pytest.mark.parametrize("route", ROUTES)
def test_who_hangs_up_gives_back_what_was_counted(route: str) -> None:
    async def test(bench: Bench) -> None:
        for length in (LENGTH, CHUNKED + b"fffff\r\n"):
            async with half_a_body(bench, ROUTES[route] + length, 100 * KIB):
                pass
            await until(lambda: not num_unfinished(bench))
        one = POST + b"content-length: 1\r\n\r\nx"
        async with bench.connect() as (_, writer):
            writer.write(one + POST + LENGTH + b"x" * KIB)
            await until(lambda: num_unfinished(bench))
        bench.model.futures[0].set_result(result())  # nothing is read before its turn, not even EOF

    run(test, FakeModel(lambda _: None))


def test_a_body_that_is_whole_at_once_is_not_counted() -> None:
    unfinished = UnfinishedRequests(0)
    predict = endpoint(FakeModel(), unfinished=unfinished)

    async def test(bench: Bench) -> None:
        bench.server.config.http = PredictProtocol.bound_to(predict)
        for head in ROUTES.values():
            for _ in range(2):
                async with bench.connect() as (reader, writer):
                    writer.write(head + b"content-length: 1\r\n\r\nx")
                    assert (await read_answer(reader))[0] == 200

    run(test)


@pytest.mark.parametrize("size", [1, 2, 100, 5000])
def test_a_body_in_small_pieces_costs_about_as_much_as_it_is_long(size: int) -> None:
    exchange = Exchange(None, None, None)  # type: ignore[arg-type]  # of which it asks nothing
    pieces: list[bytes | bytearray | memoryview] = []
    count = 20_000
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

    def __init__(self, num_unread_bytes: int) -> None:
        self.num_unread_bytes = num_unread_bytes
        self.is_cut_off = False

    def cut_off(self) -> None:
        self.is_cut_off = True


def test_the_slowest_readers_make_room() -> None:
    async def go() -> None:
        answers = UnreadAnswers(8000)
        readers = [Reader(1000) for _ in range(8)]
        for reader in readers:
            answers.take(reader, 1000)
            await asyncio.sleep(0.01)
        await asyncio.sleep(1.1)
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

    asyncio.run(go())


def test_the_only_reader_may_have_an_answer_of_any_size() -> None:
    async def go() -> None:
        answers = UnreadAnswers(1000)
        one = Reader(5000)
        answers.take(one, 5000)
        assert not one.is_cut_off
        answers.take(Reader(10), 10)
        assert one.is_cut_off or answers.num_bytes <= 5010

    asyncio.run(go())


LARGE = 6 * MIB


@contextlib.asynccontextmanager
async def unread(bench: Bench) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A client that has asked for a large answer and reads nothing of it."""
    num_asked = len(bench.model.payloads)
    async with bench.connect() as (reader, writer):
        reader._limit = 1  # type: ignore[attr-defined]  # stop reading after a few bytes
        writer.write(POST + b"content-length: 1\r\n\r\nx")
        await until(lambda: len(bench.model.payloads) > num_asked)
        yield reader, writer


def test_clients_that_read_nothing_are_cut_off_when_their_answers_take_too_much() -> None:
    async def test(bench: Bench) -> None:
        async with contextlib.AsyncExitStack() as stack:
            clients = [await stack.enter_async_context(unread(bench)) for _ in range(8)]
            await until(lambda: use(bench)[5] >= 4)
            assert num_unread(bench) <= 4 * LARGE + MIB
            async with bench.connect() as (reader, writer):
                writer.write(POST + b"content-length: 1\r\n\r\nx")
                status, _, body = await read_answer(reader)
                assert (status, len(body)) == (200, LARGE + len('{"predictions":[""]}'))
            num_cut = 0
            for reader, _ in clients:
                reader._limit = MIB  # type: ignore[attr-defined]  # read on
                reader._maybe_resume_transport()  # type: ignore[attr-defined]
                try:
                    await asyncio.wait_for(read_answer(reader), 20)
                except (ConnectionError, asyncio.IncompleteReadError):
                    num_cut += 1
            assert num_cut == use(bench)[5] < 8

    large = result(b'"%b"' % (b"x" * LARGE))
    run(test, FakeModel(lambda _: large), max_unread_bytes=4 * LARGE + MIB)


def test_an_answer_counts_as_a_whole_until_its_last_byte_is_read() -> None:
    async def test(bench: Bench) -> None:
        async with unread(bench) as (reader, writer):
            await until(lambda: num_unread(bench) > LARGE)
            reader._limit = 64 * KIB  # type: ignore[attr-defined]  # read on
            await reader.readuntil(b"\r\n\r\n")
            num_left = LARGE + len('{"predictions":[""]}')
            while num_left:
                num_left -= len(await reader.read(min(num_left, 64 * KIB)))
                assert num_unread(bench) > LARGE or num_left < LARGE * 7 // 8
            await until(lambda: not num_unread(bench))
            writer.write(POST + b"content-length: 1\r\n\r\nx")
            assert (await read_answer(reader))[0] == 200

    large = result(b'"%b"' % (b"x" * LARGE))
    run(test, FakeModel(lambda _: large))


def test_a_large_answer_that_is_not_read_is_not_cut_by_the_end_of_its_connection() -> None:
    large = result(b'"%b"' % (b"x" * LARGE))
    for last in (b"connection: close\r\n", b""):

        async def test(bench: Bench, last: bytes = last) -> None:
            async with bench.connect() as (reader, writer):
                reader._limit = 1  # type: ignore[attr-defined]  # stop reading after a few bytes
                writer.write(POST + last + b"content-length: 1\r\n\r\nx")
                await until(lambda: num_unread(bench))
                for connection in list(bench.server.server_state.connections):
                    connection.shutdown()
                reader._limit = MIB  # type: ignore[attr-defined]  # read on
                assert len((await read_answer(reader))[2]) > LARGE
                assert await reader.read() == b""

        run(test, FakeModel(lambda _: large))
