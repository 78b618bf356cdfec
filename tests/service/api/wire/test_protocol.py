"""What a hostile or broken client meets: heads, garbage, slowness, crowds. Over real sockets."""

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from inferpool.service.api.wire.connections import EdgeLimits
from inferpool.service.api.wire.protocol import PredictProtocol
from tests.service.api import test_predict_over_sockets as sockets
from tests.service.api.fakes import FakeModel, result
from tests.service.api.test_predict_over_sockets import POST, read_answer, until

ONE = POST + b"content-length: 1\r\n\r\nx"
CHUNKED = POST + b"transfer-encoding: chunked\r\n\r\n"
Test = Callable[["Bench"], Awaitable[None]]


class Bench(sockets.Bench):
    is_direct = True


@pytest.fixture(autouse=True)
def way() -> None:
    """The edge is the protocol's alone."""


def run(test: Test, *, model: FakeModel | None = None, **edge: float) -> Bench:
    async def go() -> Bench:
        bench = Bench(model or FakeModel())
        config = bench.server.config
        config.http = PredictProtocol.bound_to(config.http.predict, EdgeLimits(**edge))  # type: ignore
        async with bench.serving():
            await test(bench)
        return bench

    return asyncio.run(asyncio.wait_for(go(), 30))


async def ask(bench: Bench, data: bytes) -> list[tuple[int, dict[str, str], bytes]]:
    """Send, and read whole answers until the server closes."""
    answers = []
    async with bench.connect() as (reader, writer):
        writer.write(data)
        with contextlib.suppress(asyncio.IncompleteReadError):
            while True:
                answers.append(await asyncio.wait_for(read_answer(reader), 15))
    return answers


async def is_well(bench: Bench) -> None:
    """Another client is served."""
    async with bench.connect() as (reader, writer):
        writer.write(ONE)
        assert (await read_answer(reader))[0] == 200


@pytest.mark.parametrize(
    ("head", "status", "code"),
    [
        (b"POST /predict?%b HTTP/1.1\r\nhost: h\r\n\r\n" % (b"a" * 8200), 414, "url_too_long"),
        (b"GET /%b HTTP/1.1\r\nhost: h\r\n\r\n" % (b"a" * 8200), 414, "url_too_long"),
        (POST + b"x: y\r\n" * 101 + b"\r\n", 431, "head_too_large"),
        (POST + b"x: %b\r\n\r\n" % (b"y" * 66_000), 431, "head_too_large"),
        (POST + b"x: %b\r\n" % (b"y" * 66_000), 431, "head_too_large"),
        (
            b"GET /health HTTP/1.1\r\nhost: h\r\n" + b"x: y\r\n" * 101 + b"\r\n",
            431,
            "head_too_large",
        ),
        (b"CONNECT h:1 HTTP/1.1\r\nhost: h\r\n\r\n", 400, "bad_request"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400, "bad_request"),
        (b"\r\n\r\n\0", 400, "bad_request"),
    ],
)
def test_a_head_beyond_the_limits_is_refused_as_a_problem(
    head: bytes, status: int, code: str
) -> None:
    async def test(bench: Bench) -> None:
        ((found, headers, body),) = await ask(bench, head)
        assert (found, headers["content-type"]) == (status, "application/problem+json")
        assert headers["connection"] == "close"
        problem = json.loads(body)
        assert (problem["code"], problem["status"]) == (code, status)
        assert headers["x-request-id"] == problem["request_id"]
        await is_well(bench)

    assert run(test).statuses == [status, 200]


def test_the_largest_allowed_head_is_taken() -> None:
    async def test(bench: Bench) -> None:
        many = POST.replace(b"/predict", b"/predict?a=" + b"1" * 250) + b"x: y\r\n" * 97
        for head in (many, POST + b"x: %b\r\n" % (b"y" * 65_000)):
            async with bench.connect() as (reader, writer):
                writer.write(head + b"content-length: 1\r\n\r\nx")
                assert (await read_answer(reader))[0] == 200

    run(test)


@pytest.mark.parametrize(
    ("first", "num"),
    [(POST + b"content-length: 100000\r\n\r\n" + b"x" * 100_000, 1), (ONE * 900, 900)],
)
@pytest.mark.parametrize("size", [1, 66_000])
def test_what_comes_before_a_head_is_not_counted_as_part_of_it(
    first: bytes, num: int, size: int
) -> None:
    head = POST + b"x: %b\r\ncontent-length: 1\r\n\r\n" % (b"y" * size)

    async def test(bench: Bench) -> None:
        async with bench.connect() as (reader, writer):
            writer.write(first + head[:-4])
            assert [(await read_answer(reader))[0] for _ in range(num)] == [200] * num
            writer.write(head[-4:] + b"x")
            assert (await read_answer(reader))[0] == (200 if size == 1 else 431)

    run(test)


SMUGGLED = b"GET /smuggled HTTP/1.1\r\nhost: h\r\n\r\n"
AMBIGUOUS = {
    "two lengths": POST + b"content-length: 1\r\ncontent-length: 2\r\n\r\nx",
    "two equal lengths": POST + b"content-length: 1\r\ncontent-length: 1\r\n\r\nx",
    "a list of lengths": POST + b"content-length: 1, 1\r\n\r\nx",
    "length and chunked": POST
    + b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "chunked and length": POST
    + b"transfer-encoding: chunked\r\ncontent-length: 5\r\n\r\n0\r\n\r\n",
    "plus": POST + b"content-length: +1\r\n\r\nx",
    "minus": POST + b"content-length: -1\r\n\r\nx",
    "hex": POST + b"content-length: 0x1\r\n\r\nx",
    "empty length": POST + b"content-length:\r\n\r\n",
    "huge length": POST + b"content-length: 99999999999999999999999\r\n\r\n",
    "xchunked": POST + b"transfer-encoding: xchunked\r\n\r\n0\r\n\r\n",
    "chunked, not last": POST + b"transfer-encoding: chunked, gzip\r\n\r\n0\r\n\r\n",
    "chunked twice": POST + b"transfer-encoding: chunked, chunked\r\n\r\n0\r\n\r\n",
    "two encodings": POST
    + b"transfer-encoding: chunked\r\ntransfer-encoding: identity\r\n\r\n0\r\n\r\n",
    "space before colon": POST + b"content-length : 1\r\n\r\nx",
    "tab before colon": POST + b"transfer-encoding\t: chunked\r\n\r\n0\r\n\r\n",
    "bare LF": ONE.replace(b"\r\n", b"\n"),
    "bare CR": POST + b"x: y\rcontent-length: 1\r\n\r\nx",
    "folded": POST + b"x: y\r\n content-length: 1\r\n\r\nx",
    "folded first": b"POST /predict HTTP/1.1\r\nhost: h\r\n x: y\r\ncontent-length: 0\r\n\r\n",
    "NUL in a name": POST + b"x\0: y\r\n\r\n",
    "NUL in a value": POST + b"x: \0\r\n\r\n",
    "no name": POST + b": y\r\n\r\n",
    "no colon": POST + b"xy\r\n\r\n",
    "HTTP/3.7": ONE.replace(b"1.1", b"3.7"),
    "HTTP/1.10": ONE.replace(b"1.1", b"1.10"),
    "two spaces": ONE.replace(b" /predict ", b"  /predict  x "),
    "bad chunk": CHUNKED + b"zz\r\nabc\r\n0\r\n\r\n",
    "negative chunk": CHUNKED + b"-1\r\nabc\r\n0\r\n\r\n",
    "huge chunk": CHUNKED + b"fffffffffffffffff\r\nabc",
    "chunk too long": CHUNKED + b"3\r\nabcdef\r\n0\r\n\r\n",
    "chunk with bare LF": CHUNKED + b"3\nabc\n0\n\n",
}


@pytest.mark.parametrize("name", AMBIGUOUS)
def test_what_could_be_read_in_two_ways_is_refused_and_nothing_after_it_is_read(name: str) -> None:
    async def test(bench: Bench) -> None:
        answers = await ask(bench, AMBIGUOUS[name] + SMUGGLED)
        assert [status for status, _, _ in answers] in ([400], [413])
        assert answers[0][1]["content-type"] == "application/problem+json"
        await is_well(bench)

    assert len(run(test).model.payloads) == 1


def test_garbage_is_answered_in_its_turn() -> None:
    async def test(bench: Bench) -> None:
        async with bench.connect() as (reader, writer):
            writer.write(ONE + b"\x00garbage\r\n\r\n" + ONE)
            await until(lambda: bench.model.futures)
            await asyncio.sleep(0.05)
            bench.model.futures[0].set_result(result(b"7"))
            status, _, body = await read_answer(reader)
            assert (status, json.loads(body)) == (200, {"predictions": [7]})
            assert (await read_answer(reader))[0] == 400
            assert await reader.read() == b""

    assert run(test, model=FakeModel(lambda _: None)).statuses == [200, 400]


def test_garbage_at_any_place_is_an_answer_or_an_end_and_never_a_failure() -> None:
    request = POST + b"transfer-encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n\r\n"

    async def test(bench: Bench) -> None:
        for place in range(len(request)):
            for byte in (b"\x00", b"\n", b"\xff", b" "):
                data = request[:place] + byte + request[place + 1 :]
                async with bench.connect() as (reader, writer):
                    writer.write(data)
                    writer.write_eof()
                    with contextlib.suppress(asyncio.IncompleteReadError):
                        status, _, _ = await asyncio.wait_for(read_answer(reader), 15)
                        assert status < 500, data
        await is_well(bench)

    assert all(status < 500 for status in run(test).statuses)


@pytest.mark.measures
def test_half_a_head_is_not_waited_for() -> None:
    async def test(bench: Bench) -> None:
        async with bench.connect() as (reader, writer):
            for byte in POST:
                writer.write(bytes([byte]))
                await asyncio.sleep(0.02)
                if reader.at_eof() or writer.is_closing():
                    break
            with contextlib.suppress(ConnectionResetError):  # by a byte that came after the end
                assert await reader.read() == b""
        await is_well(bench)

    began = time.monotonic()
    run(test, head_timeout_s=0.2)
    assert time.monotonic() - began < 15


def test_a_client_that_never_reads_is_cut_off() -> None:
    large = result(b'"%s"' % (b"x" * (16 << 20)))

    async def test(bench: Bench) -> None:
        async with bench.connect() as (reader, writer):
            reader._limit = 1  # type: ignore[attr-defined]  # stop reading after a few bytes
            writer.write(ONE)
            await until(lambda: bench.statuses)
            await until(lambda: not bench.server.server_state.connections)

    run(test, model=FakeModel(lambda _: large), write_timeout_s=0.3)


GET = b"GET /predict HTTP/1.1\r\nhost: h\r\n\r\n"


@contextlib.asynccontextmanager
async def connect_narrowly(
    bench: Bench,
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A client that reads nothing until `resume_reading`, with buffers for a few answers."""
    listener = bench.server.servers[0].sockets[0]
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.setblocking(False)
    await asyncio.get_running_loop().sock_connect(client, listener.getsockname())
    reader, writer = await asyncio.open_connection(sock=client, limit=2048)
    writer.transport.pause_reading()  # type: ignore[attr-defined]  # it is a transport of asyncio
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


def test_a_body_in_line_is_not_read_while_answers_before_it_are_not() -> None:
    async def test(bench: Bench) -> None:
        async with connect_narrowly(bench) as (reader, writer):
            writer.write(GET * 400 + CHUNKED)
            await asyncio.sleep(0.1)
            writer.write(b"1000000\r\n" + b"x" * (1 << 24) + b"\r\n0\r\n\r\n")
            await asyncio.sleep(0.3)
            assert writer.transport.get_write_buffer_size() > 1 << 23
            writer.transport.resume_reading()  # type: ignore[attr-defined]  # as above
            statuses = [(await read_answer(reader))[0] for _ in range(401)]
        assert statuses == [405] * 400 + [200]

    run(test)


@pytest.mark.parametrize("first", [ONE, GET])
def test_calls_behind_answers_that_are_not_read_are_answered_in_their_order(first: bytes) -> None:
    refused = POST.replace(b"/predict", b"/predict/nobody") + b"content-length: 1\r\n\r\nx"

    async def test(bench: Bench) -> None:
        async with connect_narrowly(bench) as (reader, writer):
            writer.write(refused * 400 + first + refused)
            await asyncio.sleep(0.1)
            writer.transport.resume_reading()  # type: ignore[attr-defined]  # as above
            statuses = [(await read_answer(reader))[0] for _ in range(400)]
            if first == ONE:
                await until(lambda: bench.model.futures)
                await asyncio.sleep(0.03)  # in which the next must not be answered
                bench.model.futures[0].set_result(result())
            statuses += [(await read_answer(reader))[0] for _ in range(2)]
        assert statuses == [404] * 400 + [200 if first == ONE else 405, 404]

    run(test, model=FakeModel(lambda _: None))


def test_a_thousand_calls_may_wait_in_line_and_no_more() -> None:
    async def test(bench: Bench) -> None:
        async with bench.connect() as (reader, writer):
            none = b"POST /predict/none HTTP/1.1\r\nhost: h\r\ncontent-length: 0\r\n\r\n"
            writer.write(ONE + none * 3000)
            await until(lambda: bench.model.futures)
            await asyncio.sleep(0.1)
            bench.model.futures[0].set_result(result(b"1"))
            statuses = []
            with contextlib.suppress(asyncio.IncompleteReadError):
                while True:
                    status, headers, _ = await read_answer(reader)
                    statuses.append(status)
            assert statuses == [200] + [404] * 1024
            assert headers["connection"] == "close"

    run(test, model=FakeModel(lambda _: None))


def test_thousands_of_wishes_for_another_protocol_in_one_read_are_read_one_by_one() -> None:
    upgrade = b"GET /predict HTTP/1.1\r\nhost: h\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n"

    async def test(bench: Bench) -> None:
        answers = await ask(bench, upgrade * 1700)
        assert {status for status, _, _ in answers} == {405}
        await is_well(bench)

    run(test)


def test_a_refused_client_that_goes_on_sending_can_read_why() -> None:
    async def test(bench: Bench) -> None:
        async with bench.connect() as (reader, writer):
            writer.write(POST + b"content-length: 99000000\r\n\r\n")
            for _ in range(50):
                writer.write(b"x" * 65536)
                await asyncio.sleep(0)
            assert (await read_answer(reader))[0] == 413

    run(test)


def test_beyond_the_limit_the_longest_idle_connection_makes_room() -> None:
    async def test(bench: Bench) -> None:
        async with bench.connect() as (first, _), bench.connect() as (second, _):
            await asyncio.sleep(1.1)
            await is_well(bench)
            assert await asyncio.wait_for(first.read(), 15) == b""
            assert not second.at_eof()

    run(test, max_connections=2)


def test_beyond_the_limit_a_newcomer_is_turned_away_while_all_others_are_at_work() -> None:
    async def test(bench: Bench) -> None:
        async with bench.connect() as (one, writer):
            writer.write(ONE)
            await until(lambda: bench.model.futures)
            for _ in range(3):
                async with bench.connect() as (reader, _):
                    status, headers, body = await read_answer(reader)
                    assert (status, headers["retry-after"]) == (503, "1")
                    assert {"traceparent", "server-timing"} <= set(headers)
                    problem = json.loads(body)
                    assert problem["code"] == "unavailable"
                    assert problem["request_id"] == headers["x-request-id"]
                    assert await reader.read() == b""
            bench.model.futures[0].set_result(result(b"1"))
            assert (await read_answer(one))[0] == 200

    run(test, model=FakeModel(lambda _: None), max_connections=1)


def test_a_pipelined_call_that_is_refused_while_its_body_comes_is_over() -> None:
    late = POST + b"x-timeout-ms: bad\r\ncontent-length: 100000\r\n\r\nthe beginning"
    mistakes: list[dict[str, object]] = []

    async def test(bench: Bench) -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, about: mistakes.append(about))
        async with bench.connect() as (reader, writer):
            writer.write(ONE + late)
            assert (await read_answer(reader))[0] == 200
            assert (await read_answer(reader))[0] == 400
            assert await reader.read() == b""
            await is_well(bench)

    run(test)
    assert mistakes == []
