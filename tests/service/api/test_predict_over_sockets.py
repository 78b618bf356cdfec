"""Calls over real sockets: bodies in pieces, limits while they come, clients that hang up."""

import asyncio
import gc
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from functools import partial

import pytest

from inferpool.service.api.auth import Guard
from inferpool.service.api.cors import Cors
from inferpool.service.errors import InvalidInputError
from inferpool.service.settings.draft import read_keys
from tests.service.api.fakes import FakeModel, result
from tests.service.api.server import (
    CHUNKED,
    GET,
    NOBODY,
    ONE,
    POST,
    ROUTES,
    WAYS,
    PredictServer,
    Way,
    silent_model,
    until,
)
from tests.service.api.server import serve as serve_one_way

Serve = Callable[..., AbstractAsyncContextManager[PredictServer]]
JSON_POST = POST.replace(b"image/png", b"application/json")


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> Way:
    """Everything here holds for each way to the endpoint."""
    return request.param


@pytest.fixture
def serve(way: Way) -> Serve:
    return partial(serve_one_way, way=way)


async def test_a_body_in_pieces_is_passed_on_as_pieces(serve: Serve, way: Way) -> None:
    async with serve() as server, server.connect() as client:
        client.send(CHUNKED + b"3\r\nabc\r\n")
        await until(lambda: server.connections)
        await asyncio.sleep(0.05)
        assert await client.status(b"2\r\nde\r\n0\r\n\r\n") == 200
    assert server.model.bodies == [b"abcde"]
    assert way == "front" or len(server.model.payloads[0].chunks) > 1


async def test_a_connection_serves_on_after_a_short_refused_body(serve: Serve) -> None:
    async with serve() as server, server.connect() as client:
        for index in range(3):
            assert (await client.ask(ONE)).json == {"predictions": [index]}
        refused = await client.ask(NOBODY + b"content-length: 3\r\n\r\nabc")
        assert (refused.status, refused.headers.get("connection")) == (404, None)
        assert await client.status(ONE) == 200


@pytest.mark.parametrize(
    "pieces",
    [
        [POST + b"content-length: 200000\r\n\r\n"],
        [CHUNKED + b"258\r\n" + b"x" * 0x258 + b"\r\n", b"258\r\n" + b"x" * 0x258 + b"\r\n"],
        [CHUNKED + b"4b0\r\n" + b"x" * 0x4B0 + b"\r\n0\r\n\r\n"],
    ],
    ids=["before it comes", "as soon as it passes the limit", "whole"],
)
async def test_a_body_over_the_limit_is_refused(serve: Serve, pieces: list[bytes]) -> None:
    async with serve(max_body_bytes=1000) as server, server.connect() as client:
        for piece in pieces:
            client.send(piece)
            await asyncio.sleep(0.05)
        answer = await client.read_answer()
        assert (answer.status, answer.headers["connection"]) == (413, "close")
        assert "limit of 1000 bytes" in answer.json["detail"]
        assert await client.is_closed()
    assert server.statuses == [413]
    assert not server.model.payloads


async def test_a_call_without_a_key_is_refused_before_its_body(serve: Serve) -> None:
    key = "k" * 20
    async with serve(guard=Guard(predict=read_keys(key))) as server:
        for head in (b"", b"x-api-key: \xc3\xa9\r\n", b"authorization: Bearer x\r\n"):
            answer = await server.answer_to(POST + head + b"content-length: 900000\r\n\r\n")
            assert (answer.status, answer.headers["connection"]) == (401, "close")
            assert answer.headers["www-authenticate"].startswith("Bearer")
        async with server.connect() as client:
            for name in (b"x-api-key: ", b"authorization: Bearer "):
                line = name + key.encode() + b"\r\n"
                assert await client.status(POST + line + b"content-length: 1\r\n\r\nx") == 200
    assert server.statuses == [401, 401, 401, 200, 200]


async def test_a_body_that_trickles_is_given_up_before_its_deadline(serve: Serve) -> None:
    async with serve(body_gap_s=0.2) as server, server.connect() as client:
        reading = asyncio.ensure_future(client.read_answer())
        client.send(POST + b"content-length: 10000\r\n\r\n")
        while not reading.done():
            client.send(b"x")
            await asyncio.sleep(0.02)
        answer = await reading
        assert (answer.status, answer.headers["connection"]) == (408, "close")
        assert "too slowly" in answer.json["detail"]
    assert server.statuses == [408]


async def test_a_body_that_keeps_coming_is_waited_for(serve: Serve) -> None:
    async with serve(body_gap_s=0.5) as server, server.connect() as client:
        client.send(POST + b"content-length: 81920\r\n\r\n")
        for _ in range(10):
            began = time.monotonic()
            client.send(b"x" * 8192)
            await asyncio.sleep(0.1)
            if time.monotonic() - began > 0.4:
                return  # it was held back
        assert (await client.read_answer()).status == 200


async def test_the_bodies_of_a_connection_are_each_held_to_the_limit(serve: Serve) -> None:
    length = b"content-length: 400\r\n\r\n"
    others = ROUTES["asgi"]
    async with serve(max_body_bytes=1000) as server, server.connect() as client:
        for head in [POST + b"x-request-id: a\r\n"] * 4 + [others] * 2 + [POST] * 4:
            assert await client.status(head + length + b"x" * 400) == 200
        client.send(others + length)
        await asyncio.sleep(0)
        assert await client.status(b"x" * 400) == 200


@pytest.mark.parametrize("before", [b"", ONE], ids=["first", "pipelined"])
@pytest.mark.parametrize("begun", [b"", b"abc"])
async def test_a_body_is_given_up_at_its_deadline(
    serve: Serve, before: bytes, begun: bytes
) -> None:
    async with serve() as server, server.connect() as client:
        client.send(before + POST + b"x-timeout-ms: 60\r\ncontent-length: 9\r\n\r\n" + begun)
        answers = [await client.read_answer() for _ in range(1 + bool(before))]
        assert answers[-1].json["code"] == "slow_body"
    assert server.statuses == [*[200] * bool(before), 408]


@pytest.mark.parametrize("instances", [b"[1]", b"[1,2,3]"])
async def test_a_client_that_hangs_up_cancels_its_instances(serve: Serve, instances: bytes) -> None:
    body = b'{"instances":%s}' % instances
    async with serve(silent_model()) as server:
        async with server.connect() as client:
            client.send(JSON_POST + b"content-length: %d\r\n\r\n" % len(body) + body)
            await until(lambda: server.model.futures)
        await until(lambda: server.statuses)
        assert all(future.cancelled() for future in server.model.futures)
    assert server.statuses == [499]


async def test_a_client_that_closes_its_sending_half_counts_as_gone(serve: Serve) -> None:
    """Its FIN looks like that of a client that has closed the connection and waits for nothing."""
    async with serve(silent_model()) as server, server.connect() as client:
        client.send(ONE)
        await until(lambda: server.model.futures)
        client.writer.write_eof()
        assert await client.is_closed()
        await until(lambda: server.statuses and server.model.futures[0].cancelled())
    assert server.statuses == [499]


async def test_an_instance_that_failed_before_its_client_hung_up_is_not_complained_of(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    failed = InvalidInputError("no")
    async with serve(FakeModel(lambda index: None if index else failed)) as server:
        async with server.connect() as client:
            body = b'{"instances":[1,2]}'
            client.send(JSON_POST + b"content-length: %d\r\n\r\n" % len(body) + body)
            await until(lambda: server.model.futures and server.model.futures[0].done())
        await until(lambda: server.statuses)
    server.model.futures.clear()
    gc.collect()
    assert "never retrieved" not in caplog.text


async def test_a_client_that_hangs_up_in_the_middle_of_its_body_is_forgotten(serve: Serve) -> None:
    async with serve() as server:
        async with server.connect() as client:
            client.send(POST + b"content-length: 9\r\n\r\nabc")
            await until(lambda: server.connections)
            await asyncio.sleep(0.05)  # in which the body begins
        await until(lambda: server.statuses)
    assert not server.model.payloads
    assert server.statuses == [499]


async def test_a_late_answer_still_arrives_and_the_connection_lives_on(serve: Serve) -> None:
    async with serve(silent_model()) as server, server.connect() as client:
        for number in range(2):
            client.send(ONE)
            await until(lambda number=number: len(server.model.futures) > number)
            await asyncio.sleep(0.2)
            server.model.futures[-1].set_result(result(b"7"))
            assert (await client.read_answer()).json == {"predictions": [7]}
    assert server.statuses == [200, 200]


async def test_a_call_that_the_server_cuts_off_cancels_its_instances() -> None:
    """Only ASGI's calls have a task that could be cut off."""
    async with serve_one_way(silent_model(), way="asgi") as server, server.connect() as client:
        client.send(ONE)
        await until(lambda: server.model.futures)
        for task in server.server.server_state.tasks:
            task.cancel()
        await until(lambda: server.model.futures[0].cancelled())


@pytest.mark.parametrize(
    "calls",
    [
        [ONE, NOBODY + b"content-length: 1\r\n\r\nx", ONE, ONE],
        [ONE, GET, ONE, GET],
        [ONE, *[NOBODY + b"content-length: 0\r\n\r\n"] * 1000, ONE],
    ],
    ids=["refusals of the model", "both kinds", "a thousand refusals"],
)
async def test_pipelined_calls_are_answered_in_order(serve: Serve, calls: list[bytes]) -> None:
    async with serve() as server, server.connect() as client:
        client.send(b"".join(calls))
        answers = [await client.read_answer() for _ in calls]
        wanted = {ONE: 200, GET: 405}
        assert [each.status for each in answers] == [wanted.get(call, 404) for call in calls]
        right = [each.json for each in answers if each.status == 200]
        assert right == [{"predictions": [index]} for index in range(calls.count(ONE))]
        assert await client.status(ONE) == 200
    assert len(server.model.payloads) == calls.count(ONE) + 1


async def test_http_1_0_gets_an_answer_and_the_end_of_the_connection(serve: Serve) -> None:
    async with serve() as server, server.connect() as client:
        answer = await client.ask(ONE.replace(b"1.1", b"1.0"))
        assert answer.status == 200
        assert answer.headers.get("connection", "close") == "close"  # which goes without saying
        assert await client.is_closed()


async def test_a_client_that_asks_to_go_on_is_told_to(serve: Serve) -> None:
    head = POST + b"expect: 100-continue\r\n"
    async with serve(max_body_bytes=1000) as server, server.connect() as client:
        client.send(head + b"content-length: 3\r\n\r\n")
        assert (await client.read_head())[0] == 100
        assert await client.status(b"abc") == 200
        assert await client.status(head + b"content-length: 99999\r\n\r\n") == 413


async def test_an_idle_connection_is_closed(serve: Serve) -> None:
    async with serve(keep_alive_s=0.4) as server, server.connect() as client:
        for _ in range(3):
            began = time.monotonic()
            assert await client.status(ONE) == 200
            await asyncio.sleep(0.2)
            if time.monotonic() - began > 0.35:
                break  # it may be closed by now
        assert await client.is_closed()


@pytest.mark.measures
async def test_a_head_that_has_begun_is_not_idle(serve: Serve) -> None:
    async with serve(keep_alive_s=0.2) as server, server.connect() as client:
        for _ in range(2):
            client.send(POST)
            await asyncio.sleep(0.3)
            assert await client.status(b"content-length: 1\r\n\r\nx") == 200
        assert await client.is_closed()


async def test_a_client_that_does_not_read_is_not_served_on(serve: Serve) -> None:
    large = result(b'"%s"' % (b"x" * (1 << 20)))
    async with (
        serve(FakeModel(lambda _: large)) as server,
        server.connect(rcvbuf_bytes=1 << 16) as client,
    ):
        for _ in range(60):
            client.send(ONE)
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.2)
        assert len(server.model.payloads) < 40
        assert await client.read_statuses(60) == [200] * 60


async def test_all_ways_give_the_same_answer_but_for_ids_and_times() -> None:
    calls = [
        ONE,
        JSON_POST + b"content-length: 2\r\n\r\n{}",
        POST + b"x-request-id: mine\r\naccept: application/x-npy\r\ncontent-length: 1\r\n\r\nx",
        POST + b"accept: text/plain\r\ncontent-length: 1\r\n\r\nx",
        POST + b"x-priority: 12\r\ncontent-length: 1\r\n\r\nx",
        ONE.replace(b"/predict", b"/predict/"),
        ONE.replace(b"/predict", b"/predict/none?a=1"),
        ONE.replace(b"image/png", b"text/html"),
        POST.replace(b"content-type: image/png\r\n", b"") + b"content-length: 0\r\n\r\n",
    ]
    found: list[list[object]] = []
    for way in WAYS[:2]:
        found.append([])
        async with serve_one_way(way=way) as server, server.connect() as client:
            for each in calls:
                answer = await client.ask(each)
                value = answer.json
                value.pop("request_id", None)
                found[-1].append(
                    (answer.status, [name for name in answer.headers if name != "date"], value)
                )
    assert found[0] == found[1]


PREFLIGHT = (
    b"OPTIONS /predict HTTP/1.1\r\nhost: h\r\norigin: %b\r\n"
    b"access-control-request-method: POST\r\n\r\n"
)
APP, OTHER = b"https://app.example", b"https://other.example"


async def test_a_page_may_read_its_answers_if_its_origin_is_allowed(serve: Serve) -> None:
    async with serve(cors=Cors([APP.decode()])) as server, server.connect() as client:
        own = POST + b"origin: %b\r\n" % APP
        for line, status in ((b"content-length: 1\r\n\r\nx", 200), (b"x-priority: 0\r\n\r\n", 400)):
            for _ in range(3):  # the second head is known
                answer = await client.ask(own + line)
                assert answer.status == status
                assert answer.headers["access-control-allow-origin"] == APP.decode()
                assert "X-Request-ID" in answer.headers["access-control-expose-headers"]
                assert answer.headers["vary"] == "Origin"
        answer = await client.ask(POST + b"origin: %b\r\ncontent-length: 1\r\n\r\nx" % OTHER)
        assert answer.headers["vary"] == "Origin"
        assert not [name for name in answer.headers if name.startswith("access-control")]
        for origin, allowed in ((APP, 5), (OTHER, 0)):
            client.send(PREFLIGHT % origin)
            head = (await client.reader.readuntil(b"\r\n\r\n")).decode().lower()
            assert head.startswith("http/1.1 204")
            assert head.count("access-control-") == allowed
            for name in ("x-request-id", "traceparent", "server-timing"):
                assert head.count(f"\r\n{name}: ") == 1
            assert "credentials" not in head
    guard = Guard(predict=read_keys("k" * 20))
    async with serve(guard=guard, cors=Cors(["*"])) as server:
        answer = await server.answer_to(
            POST + b"origin: https://any.example\r\ncontent-length: 0\r\n\r\n"
        )
        assert (answer.status, answer.headers["access-control-allow-origin"]) == (401, "*")


async def test_pages_of_other_origins_are_not_answered_for_unless_that_is_set(serve: Serve) -> None:
    async with serve() as server, server.connect() as client:
        answer = await client.ask(POST + b"origin: %b\r\ncontent-length: 1\r\n\r\nx" % APP)
        assert not [name for name in answer.headers if name.startswith(("access-control", "vary"))]
        assert await client.status(PREFLIGHT % APP) == 405


async def test_an_answer_to_head_has_no_body_and_the_connection_serves_on(serve: Serve) -> None:
    async with serve() as server, server.connect() as client:
        client.send(GET.replace(b"GET", b"HEAD"))
        status, headers = await client.read_head()
        assert (status, headers["allow"]) == (405, "POST")
        assert await client.status(ONE) == 200
