"""Hostile and broken clients: heads, garbage, slowness, crowds. Over real sockets."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.service.api.fakes import FakeModel, result
from tests.service.api.server import (
    CHUNKED,
    GET,
    NOBODY,
    ONE,
    POST,
    PredictServer,
    RawClient,
    serve,
    silent_model,
    until,
)

HEALTH = b"GET /health HTTP/1.1\r\nhost: h\r\n"


@pytest.mark.parametrize(
    ("head", "status", "code"),
    [
        (b"POST /predict?%b HTTP/1.1\r\nhost: h\r\n\r\n" % (b"a" * 8200), 414, "url_too_long"),
        (b"GET /%b HTTP/1.1\r\nhost: h\r\n\r\n" % (b"a" * 8200), 414, "url_too_long"),
        (POST + b"x: y\r\n" * 101 + b"\r\n", 431, "head_too_large"),
        (POST + b"x: %b\r\n\r\n" % (b"y" * 66_000), 431, "head_too_large"),
        (POST + b"x: %b\r\n" % (b"y" * 66_000), 431, "head_too_large"),
        (HEALTH + b"x: y\r\n" * 101 + b"\r\n", 431, "head_too_large"),
        (b"CONNECT h:1 HTTP/1.1\r\nhost: h\r\n\r\n", 400, "bad_request"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400, "bad_request"),
        (b"\r\n\r\n\0", 400, "bad_request"),
    ],
)
async def test_a_head_beyond_the_limits_is_refused(head: bytes, status: int, code: str) -> None:
    async with serve() as server:
        async with server.connect() as client:
            client.send(head)
            (answer,) = await client.read_all()
        assert answer.status == status
        assert answer.headers["content-type"] == "application/problem+json"
        assert answer.headers["connection"] == "close"
        assert (answer.json["code"], answer.json["status"]) == (code, status)
        assert answer.headers["x-request-id"] == answer.json["request_id"]
        assert await server.is_well()
    assert server.statuses == [status, 200]


async def test_the_largest_allowed_head_is_taken() -> None:
    many = POST.replace(b"/predict", b"/predict?a=" + b"1" * 250) + b"x: y\r\n" * 97
    async with serve() as server:
        for head in (many, POST + b"x: %b\r\n" % (b"y" * 65_000)):
            assert (await server.answer_to(head + b"content-length: 1\r\n\r\nx")).status == 200


@pytest.mark.parametrize(
    ("first", "num"),
    [(POST + b"content-length: 100000\r\n\r\n" + b"x" * 100_000, 1), (ONE * 900, 900)],
)
@pytest.mark.parametrize("size", [1, 66_000])
async def test_bytes_before_a_head_do_not_count_for_it(first: bytes, num: int, size: int) -> None:
    head = POST + b"x: %b\r\ncontent-length: 1\r\n\r\n" % (b"y" * size)
    async with serve() as server, server.connect() as client:
        client.send(first + head[:-4])
        assert await client.read_statuses(num) == [200] * num
        assert await client.status(head[-4:] + b"x") == (200 if size == 1 else 431)


SMUGGLED = b"GET /smuggled HTTP/1.1\r\nhost: h\r\n\r\n"
END = b"\r\n\r\n0\r\n\r\n"
AMBIGUOUS = {
    "two lengths": POST + b"content-length: 1\r\ncontent-length: 2\r\n\r\nx",
    "two equal lengths": POST + b"content-length: 1\r\ncontent-length: 1\r\n\r\nx",
    "a list of lengths": POST + b"content-length: 1, 1\r\n\r\nx",
    "length and chunked": POST + b"content-length: 5\r\ntransfer-encoding: chunked" + END,
    "chunked and length": POST + b"transfer-encoding: chunked\r\ncontent-length: 5" + END,
    "plus": POST + b"content-length: +1\r\n\r\nx",
    "minus": POST + b"content-length: -1\r\n\r\nx",
    "hex": POST + b"content-length: 0x1\r\n\r\nx",
    "empty length": POST + b"content-length:\r\n\r\n",
    "huge length": POST + b"content-length: 99999999999999999999999\r\n\r\n",
    "xchunked": POST + b"transfer-encoding: xchunked" + END,
    "chunked, not last": POST + b"transfer-encoding: chunked, gzip" + END,
    "chunked twice": POST + b"transfer-encoding: chunked, chunked" + END,
    "two encodings": CHUNKED[:-2] + b"transfer-encoding: identity" + END,
    "space before colon": POST + b"content-length : 1\r\n\r\nx",
    "tab before colon": POST + b"transfer-encoding\t: chunked" + END,
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
    "CONNECT without a host": b"CONNECT h:1 HTTP/1.1\r\n\r\n",
    "two hosts": POST + b"host: h\r\ncontent-length: 0\r\n\r\n",
    "bad chunk": CHUNKED + b"zz\r\nabc\r\n0\r\n\r\n",
    "negative chunk": CHUNKED + b"-1\r\nabc\r\n0\r\n\r\n",
    "huge chunk": CHUNKED + b"fffffffffffffffff\r\nabc",
    "chunk too long": CHUNKED + b"3\r\nabcdef\r\n0\r\n\r\n",
    "chunk with bare LF": CHUNKED + b"3\nabc\n0\n\n",
}


@pytest.mark.parametrize("name", AMBIGUOUS)
async def test_an_ambiguous_request_is_refused_and_nothing_after_it_is_read(name: str) -> None:
    mistakes: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, about: mistakes.append(about))
    paths = []

    def recording(app: Any) -> Any:
        async def call(scope: Any, receive: Any, send: Any) -> None:
            paths.append(scope["path"])
            await app(scope, receive, send)

        return call

    async with serve(around=recording) as server:
        async with server.connect() as client:
            client.send(AMBIGUOUS[name] + SMUGGLED + ONE)
            (answer,) = await client.read_all()
        assert answer.status in (400, 413)
        assert answer.headers["content-type"] == "application/problem+json"
        assert await server.is_well()
    assert len(server.model.payloads) == 1
    assert server.statuses == [answer.status, 200]
    assert (paths, mistakes) == ([], [])


async def test_garbage_is_answered_after_the_calls_before_it() -> None:
    async with serve(silent_model()) as server, server.connect() as client:
        client.send(ONE + b"\x00garbage\r\n\r\n" + ONE)
        await until(lambda: server.model.futures)
        await asyncio.sleep(0.05)
        server.model.futures[0].set_result(result(b"7"))
        assert (await client.read_answer()).json == {"predictions": [7]}
        assert (await client.read_answer()).status == 400
        assert await client.is_closed()
    assert server.statuses == [200, 400]


async def test_garbage_at_any_place_is_an_answer_or_an_end_and_never_a_failure() -> None:
    request = CHUNKED + b"1\r\nx\r\n0\r\n\r\n"
    async with serve() as server:
        for place in range(len(request)):
            for byte in (b"\x00", b"\n", b"\xff", b" "):
                data = request[:place] + byte + request[place + 1 :]
                async with server.connect() as client:
                    client.send(data)
                    client.writer.write_eof()
                    with contextlib.suppress(asyncio.IncompleteReadError):
                        answer = await client.read_answer()
                        assert answer.status < 500, data
        assert await server.is_well()
    assert all(status < 500 for status in server.statuses)


async def test_half_a_head_is_not_waited_for() -> None:
    async with serve(head_timeout_s=0.2) as server:
        async with server.connect() as client:
            for byte in POST:
                client.send(bytes([byte]))
                await asyncio.sleep(0.02)
                if client.reader.at_eof() or client.writer.is_closing():
                    break
            with contextlib.suppress(ConnectionResetError):  # by a byte that came after the end
                assert await client.is_closed()
        assert await server.is_well()


async def test_endless_headers_are_cut_off() -> None:
    async with serve() as server:
        async with server.connect() as client:
            client.send(POST)
            with contextlib.suppress(ConnectionError):
                for _ in range(200):
                    client.send(b"x-long: %b\r\n" % (b"x" * 4000))
                    await client.writer.drain()
            with contextlib.suppress(ConnectionError):
                assert b" 431 " in await client.reader.read()
        assert not server.model.payloads


async def test_a_silent_connection_is_closed() -> None:
    async with serve(keep_alive_s=0.2) as server, server.connect() as client:
        assert await client.is_closed()


@pytest.mark.parametrize("pieces", [1, 2])
async def test_a_wish_for_another_protocol_leaves_the_body_to_the_call(pieces: int) -> None:
    upgrade = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AA\r\n"
    head = POST + upgrade + b"content-length: %d\r\n\r\n" % len(GET)
    async with serve() as server, server.connect() as client:
        for part in (head + GET,) if pieces == 1 else (head, GET):
            client.send(part)
            await asyncio.sleep(0.05)
        assert (await client.read_answer()).status == 200
        assert await client.status(ONE) == 200
    assert server.model.bodies == [GET, b"x"]


async def test_thousands_of_wishes_for_another_protocol_in_one_read_are_read_one_by_one() -> None:
    async with serve() as server:
        async with server.connect() as client:
            client.send((GET[:-2] + b"connection: upgrade\r\nupgrade: h2c\r\n\r\n") * 1700)
            assert set(await client.read_statuses(1700)) == {405}
        assert await server.is_well()


async def test_a_client_that_never_reads_is_cut_off() -> None:
    large = result(b'"%s"' % (b"x" * (16 << 20)))
    async with (
        serve(FakeModel(lambda _: large), write_timeout_s=0.3) as server,
        server.connect() as client,
    ):
        client.stop_reading()
        client.send(ONE)
        await until(lambda: server.statuses)
        await until(lambda: not server.connections)


@contextlib.asynccontextmanager
async def connect_narrowly(server: PredictServer) -> AsyncIterator[RawClient]:
    """A client that reads nothing until `resume_reading`, with buffers for a few answers."""
    server.listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    async with server.connect(rcvbuf_bytes=4096, limit=2048) as client:
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]  # it is asyncio's
        try:
            yield client
        finally:
            client.writer.transport.abort()


async def test_a_body_in_line_is_not_read_while_answers_before_it_are_not() -> None:
    async with serve() as server, connect_narrowly(server) as client:
        client.send(GET * 400 + CHUNKED)
        await asyncio.sleep(0.1)
        client.send(b"1000000\r\n" + b"x" * (1 << 24) + b"\r\n0\r\n\r\n")
        await asyncio.sleep(0.3)
        assert client.writer.transport.get_write_buffer_size() > 1 << 23
        client.writer.transport.resume_reading()  # type: ignore[attr-defined]  # as above
        assert await client.read_statuses(401) == [405] * 400 + [200]


@pytest.mark.parametrize("first", [ONE, GET])
async def test_calls_behind_unread_answers_are_answered_in_order(first: bytes) -> None:
    refused = NOBODY + b"content-length: 1\r\n\r\nx"
    async with serve(silent_model()) as server, connect_narrowly(server) as client:
        client.send(refused * 400 + first + refused)
        await asyncio.sleep(0.1)
        client.writer.transport.resume_reading()  # type: ignore[attr-defined]  # as above
        statuses = await client.read_statuses(400)
        if first == ONE:
            await until(lambda: server.model.futures)
            await asyncio.sleep(0.03)  # in which the next must not be answered
            server.model.futures[0].set_result(result())
        statuses += await client.read_statuses(2)
    assert statuses == [404] * 400 + [200 if first == ONE else 405, 404]


async def test_a_thousand_calls_may_wait_in_line_and_no_more() -> None:
    model = FakeModel(lambda index: result(b"1") if index else None)
    last, beyond = (POST + b"content-length: 1\r\n\r\n" + body for body in (b"l", b"b"))
    async with serve(model) as server, server.connect() as client:
        client.send(ONE + (NOBODY + b"content-length: 0\r\n\r\n") * 1023 + last + beyond * 2000)
        await until(lambda: server.model.futures)
        await asyncio.sleep(0.1)
        server.model.futures[0].set_result(result(b"1"))
        answers = await client.read_all()
        assert [each.status for each in answers] == [200] + [404] * 1023 + [200]
        assert answers[-1].headers["connection"] == "close"
    assert server.model.bodies == [b"x", b"l"]


async def test_a_call_that_comes_later_than_a_refused_head_is_not_read() -> None:
    async with serve() as server, server.connect() as client:
        assert await client.status(ONE) == 200  # so its head is known from now on
        assert await client.status(AMBIGUOUS["two hosts"]) == 400
        client.send(ONE)
        assert await server.is_well()
    assert len(server.model.payloads) == 2


async def test_a_refused_client_that_goes_on_sending_can_read_why() -> None:
    async with serve() as server, server.connect() as client:
        client.send(POST + b"content-length: 99000000\r\n\r\n")
        for _ in range(50):
            client.send(b"x" * 65536)
            await asyncio.sleep(0)
        assert (await client.read_answer()).status == 413


async def test_beyond_the_limit_the_longest_idle_connection_makes_room() -> None:
    async with (
        serve(max_connections=2) as server,
        server.connect() as first,
        server.connect() as second,
    ):
        await asyncio.sleep(1.1)
        assert await server.is_well()
        assert await first.is_closed()
        assert not second.reader.at_eof()


async def test_beyond_the_limit_a_newcomer_is_turned_away_while_all_others_are_at_work() -> None:
    async with serve(silent_model(), max_connections=1) as server, server.connect() as client:
        client.send(ONE)
        await until(lambda: server.model.futures)
        for _ in range(3):
            async with server.connect() as newcomer:
                answer = await newcomer.read_answer()
                assert (answer.status, answer.headers["retry-after"]) == (503, "1")
                assert {"traceparent", "server-timing"} <= set(answer.headers)
                assert answer.json["code"] == "unavailable"
                assert answer.json["request_id"] == answer.headers["x-request-id"]
                assert await newcomer.is_closed()
        server.model.futures[0].set_result(result(b"1"))
        assert (await client.read_answer()).status == 200


async def test_a_pipelined_call_that_is_refused_while_its_body_comes_is_over() -> None:
    mistakes: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, about: mistakes.append(about))
    async with serve() as server, server.connect() as client:
        late = b"x-timeout-ms: bad\r\ncontent-length: 100000\r\n\r\nthe beginning"
        client.send(ONE + POST + late)
        assert await client.read_statuses(2) == [200, 400]
        assert await client.is_closed()
        assert await server.is_well()
    assert mistakes == []


async def test_half_a_body_at_the_shutdown_is_answered() -> None:
    async with serve() as server, server.connect() as client:
        client.send(POST + b"content-length: 9\r\n\r\nabc")
        await until(lambda: server.use.unfinished_bytes)
        server.shut_connections_down()
        answer = await client.read_answer()
        assert (answer.status, answer.headers["connection"]) == (503, "close")


async def test_a_client_that_has_just_hung_up_does_not_hold_up_the_shutdown() -> None:
    async with serve() as server:
        with socket.create_connection(server.listener.getsockname()) as client:
            client.sendall(POST + b"content-length: 9\r\n\r\nabc")
            await until(lambda: server.use.unfinished_bytes)
        server.shut_connections_down()
        await until(lambda: not server.connections)
