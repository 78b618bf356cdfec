"""What only a real server and a real socket show: pieces, limits while reading, hanging up."""

import asyncio
import contextlib
import gc
import json
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
import uvicorn

from inferpool.service.api.auth import Guard
from inferpool.service.api.codecs.body import Limits
from inferpool.service.api.cors import Cors
from inferpool.service.api.wire.protocol import PredictProtocol
from inferpool.service.errors import InvalidInputError
from inferpool.service.settings.keys import read_keys
from inferpool.workers.arena import Arena
from tests.service.api.fakes import FakeModel, as_app, endpoint, in_front, result

Test = Callable[["Bench"], Awaitable[None]]
POST = b"POST /predict HTTP/1.1\r\nhost: h\r\ncontent-type: image/png\r\n"
CHUNKED = POST + b"transfer-encoding: chunked\r\n\r\n"


class Bench:
    """A server on a free port, and what it recorded."""

    is_direct = False
    """The calls come off the socket without ASGI."""
    is_front = False
    """Besides, the model is asked by pipes, as by a front."""

    def __init__(
        self,
        model: FakeModel,
        guard: Guard | None = None,
        cors: Cors | None = None,
        **limits: float,
    ) -> None:
        self.model = model
        self.statuses: list[int] = []
        predict = endpoint(
            in_front(model, Arena(1 << 22)) if self.is_front else model,
            guard=guard,
            cors=cors,
            limits=Limits(**limits),  # type: ignore[arg-type]  # bytes are whole numbers
            on_done=lambda _, status, __: self.statuses.append(status),
        )
        http = PredictProtocol.bound_to(predict) if self.is_direct else "httptools"
        config = uvicorn.Config(as_app(predict), port=0, log_config=None, lifespan="off", http=http)
        self.server = uvicorn.Server(config)

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        self.server.config.load()
        self.server.lifespan = self.server.config.lifespan_class(self.server.config)
        await self.server.startup()
        try:
            yield
        finally:
            self.server.force_exit = True
            await self.server.shutdown()

    @contextlib.asynccontextmanager
    async def connect(
        self, rcvbuf_bytes: int | None = None
    ) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        connection = socket.socket()
        if rcvbuf_bytes is not None:  # else the kernel makes it as large as it likes
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, rcvbuf_bytes)
        connection.connect(self.server.servers[0].sockets[0].getsockname())
        connection.setblocking(False)
        reader, writer = await asyncio.open_connection(sock=connection)
        try:
            yield reader, writer
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()


@pytest.fixture(autouse=True, params=["asgi", "protocol", "front"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything here holds for each way to the endpoint."""
    monkeypatch.setattr(Bench, "is_direct", request.param != "asgi")
    monkeypatch.setattr(Bench, "is_front", request.param == "front")


async def until(is_true: Callable[[], object]) -> None:
    while not is_true():  # noqa: ASYNC110  # what it looks at cannot call back
        await asyncio.sleep(0.005)


async def read_answer(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], bytes]:
    lines = (await reader.readuntil(b"\r\n\r\n")).decode().splitlines()
    headers = dict(line.split(": ", 1) for line in lines[1:] if line)
    return (
        int(lines[0].split()[1]),
        headers,
        await reader.readexactly(int(headers["content-length"])),
    )


def run(bench: Callable[[], Bench], test: Test) -> Bench:
    async def go() -> Bench:
        made = bench()
        async with made.serving():
            await test(made)
        return made

    return asyncio.run(asyncio.wait_for(go(), 20))


def test_a_body_in_pieces_is_passed_on_as_pieces() -> None:
    async def test(bench: Bench) -> None:
        async with bench.connect() as (reader, writer):
            writer.write(CHUNKED + b"3\r\nabc\r\n")
            await until(lambda: bench.server.server_state.connections)
            await asyncio.sleep(0.05)
            writer.write(b"2\r\nde\r\n0\r\n\r\n")
            status, _, _ = await read_answer(reader)
            assert status == 200
        assert bench.model.bodies == [b"abcde"]
        assert bench.is_front or len(bench.model.payloads[0].chunks) > 1

    run(lambda: Bench(FakeModel()), test)


def test_a_connection_serves_one_call_after_another() -> None:
    async def test(bench: Bench) -> None:
        async with bench.connect() as (reader, writer):
            for index in range(3):
                writer.write(POST + b"content-length: 1\r\n\r\nx")
                _, _, body = await read_answer(reader)
                assert json.loads(body) == {"predictions": [index]}

    run(lambda: Bench(FakeModel()), test)


def test_a_declared_length_over_the_limit_is_refused_before_the_body() -> None:
    async def test(bench: Bench) -> None:
        async with bench.connect() as (reader, writer):
            writer.write(POST + b"content-length: 200000\r\n\r\n")
            status, headers, body = await read_answer(reader)
            assert (status, headers["connection"]) == (413, "close")
            assert "more than 1000 bytes" in json.loads(body)["detail"]
            assert await reader.read() == b""

    assert run(lambda: Bench(FakeModel(), max_body_bytes=1000), test).statuses == [413]


def test_a_call_without_a_key_is_refused_before_its_body() -> None:
    key = "k" * 20

    async def test(bench: Bench) -> None:
        for head in (b"", b"x-api-key: \xc3\xa9\r\n", b"authorization: Bearer x\r\n"):
            async with bench.connect() as (reader, writer):
                writer.write(POST + head + b"content-length: 900000\r\n\r\n")
                status, headers, _ = await read_answer(reader)
                assert (status, headers["connection"]) == (401, "close")
                assert headers["www-authenticate"].startswith("Bearer")
        async with bench.connect() as (reader, writer):
            for name in (b"x-api-key: ", b"authorization: Bearer "):
                writer.write(POST + name + key.encode() + b"\r\ncontent-length: 1\r\n\r\nx")
                assert (await read_answer(reader))[0] == 200

    guard = Guard(predict=read_keys(key))
    assert run(lambda: Bench(FakeModel(), guard), test).statuses == [401, 401, 401, 200, 200]


def test_a_body_that_trickles_is_given_up_before_its_deadline() -> None:
    async def test(bench: Bench) -> None:
        async with bench.connect() as (reader, writer):
            answer = asyncio.ensure_future(read_answer(reader))
            writer.write(POST + b"content-length: 10000\r\n\r\n")
            while not answer.done():
                writer.write(b"x")
                await asyncio.sleep(0.02)
            status, headers, body = await answer
            assert (status, headers["connection"]) == (408, "close")
            assert "too slowly" in json.loads(body)["detail"]

    assert run(lambda: Bench(FakeModel(), body_gap_s=0.2), test).statuses == [408]


def test_a_body_that_keeps_coming_is_waited_for() -> None:
    async def test(bench: Bench) -> None:
        async with bench.connect() as (reader, writer):
            writer.write(POST + b"content-length: 81920\r\n\r\n")
            for _ in range(10):
                began = time.monotonic()
                writer.write(b"x" * 8192)
                await asyncio.sleep(0.1)
                if time.monotonic() - began > 0.4:
                    return  # it was held back
            assert (await read_answer(reader))[0] == 200

    run(lambda: Bench(FakeModel(), body_gap_s=0.5), test)


def test_a_chunked_body_is_refused_as_soon_as_it_passes_the_limit() -> None:
    async def test(bench: Bench) -> None:
        async with bench.connect() as (reader, writer):
            writer.write(CHUNKED + b"258\r\n" + b"x" * 0x258 + b"\r\n")
            await asyncio.sleep(0.05)
            writer.write(b"258\r\n" + b"x" * 0x258 + b"\r\n")
            status, headers, _ = await read_answer(reader)
            assert (status, headers["connection"]) == (413, "close")
            assert await reader.read() == b""

    assert run(lambda: Bench(FakeModel(), max_body_bytes=1000), test).statuses == [413]


def test_a_chunked_body_over_the_limit_that_comes_at_once_is_not_submitted() -> None:
    async def test(bench: Bench) -> None:
        async with bench.connect() as (reader, writer):
            writer.write(CHUNKED + b"4b0\r\n" + b"x" * 0x4B0 + b"\r\n0\r\n\r\n")
            assert (await read_answer(reader))[0] == 413
        assert not bench.model.payloads

    assert run(lambda: Bench(FakeModel(), max_body_bytes=1000), test).statuses == [413]


def test_the_bodies_of_a_connection_are_each_held_to_the_limit() -> None:
    length = b"content-length: 400\r\n\r\n"
    others = POST.replace(b"/predict", b"/mounted/predict")

    async def test(bench: Bench) -> None:
        async with bench.connect() as (reader, writer):
            for head in [POST + b"x-request-id: a\r\n"] * 4 + [others] * 2 + [POST] * 4:
                writer.write(head + length + b"x" * 400)
                assert (await read_answer(reader))[0] == 200
            writer.write(others + length)
            await asyncio.sleep(0)
            writer.write(b"x" * 400)
            assert (await read_answer(reader))[0] == 200

    run(lambda: Bench(FakeModel(), max_body_bytes=1000), test)


def test_the_connection_lives_on_after_a_short_refused_body() -> None:
    async def test(bench: Bench) -> None:
        async with bench.connect() as (reader, writer):
            wrong = POST.replace(b"/predict", b"/predict/none")
            writer.write(wrong + b"content-length: 3\r\n\r\nabc")
            status, headers, _ = await read_answer(reader)
            assert (status, headers.get("connection")) == (404, None)
            writer.write(POST + b"content-length: 1\r\n\r\nx")
            assert (await read_answer(reader))[0] == 200

    run(lambda: Bench(FakeModel()), test)


@pytest.mark.parametrize("begun", [b"", b"abc"])
def test_a_body_that_is_not_whole_at_the_deadline_is_given_up(begun: bytes) -> None:
    async def test(bench: Bench) -> None:
        async with bench.connect() as (reader, writer):
            writer.write(POST + b"x-timeout-ms: 60\r\ncontent-length: 9\r\n\r\n" + begun)
            status, _, body = await read_answer(reader)
            assert (status, json.loads(body)["code"]) == (408, "slow_body")

    assert run(lambda: Bench(FakeModel()), test).statuses == [408]


@pytest.mark.parametrize("instances", [b"[1]", b"[1,2,3]"])
def test_a_client_that_hangs_up_cancels_its_instances(instances: bytes) -> None:
    async def test(bench: Bench) -> None:
        body = b'{"instances":%s}' % instances
        json_post = POST.replace(b"image/png", b"application/json")
        async with bench.connect() as (_, writer):
            writer.write(json_post + b"content-length: %d\r\n\r\n" % len(body) + body)
            await until(lambda: bench.model.futures)
        await until(lambda: bench.statuses)
        assert all(future.cancelled() for future in bench.model.futures)

    assert run(lambda: Bench(FakeModel(lambda _: None)), test).statuses == [499]


def test_a_client_that_closes_its_sending_half_counts_as_gone() -> None:
    """Its FIN looks like that of a client that has closed the connection and waits for nothing."""

    async def test(bench: Bench) -> None:
        async with bench.connect() as (reader, writer):
            writer.write(POST + b"content-length: 1\r\n\r\nx")
            await until(lambda: bench.model.futures)
            writer.write_eof()
            assert await reader.read() == b""
            await until(lambda: bench.statuses and bench.model.futures[0].cancelled())

    assert run(lambda: Bench(FakeModel(lambda _: None)), test).statuses == [499]


def test_an_instance_that_failed_before_its_client_hung_up_is_not_complained_of(
    caplog: pytest.LogCaptureFixture,
) -> None:

    async def test(bench: Bench) -> None:
        body = b'{"instances":[1,2]}'
        json_post = POST.replace(b"image/png", b"application/json")
        async with bench.connect() as (_, writer):
            writer.write(json_post + b"content-length: %d\r\n\r\n" % len(body) + body)
            await until(lambda: bench.model.futures and bench.model.futures[0].done())
        await until(lambda: bench.statuses)

    failed = InvalidInputError("no")
    run(lambda: Bench(FakeModel(lambda index: None if index else failed)), test)
    gc.collect()
    assert "never retrieved" not in caplog.text


def test_a_client_that_hangs_up_in_the_middle_of_its_body_is_forgotten() -> None:
    async def test(bench: Bench) -> None:
        async with bench.connect() as (_, writer):
            writer.write(POST + b"content-length: 9\r\n\r\nabc")
            await until(lambda: bench.server.server_state.connections)
            await asyncio.sleep(0.05)
        await until(lambda: bench.statuses)
        assert not bench.model.payloads

    assert run(lambda: Bench(FakeModel()), test).statuses == [499]


def test_an_answer_that_takes_long_still_arrives_and_the_connection_lives_on() -> None:
    async def test(bench: Bench) -> None:
        async with bench.connect() as (reader, writer):
            for number in range(2):
                writer.write(POST + b"content-length: 1\r\n\r\nx")
                await until(lambda number=number: len(bench.model.futures) > number)
                await asyncio.sleep(0.2)
                bench.model.futures[-1].set_result(result(b"7"))
                assert json.loads((await read_answer(reader))[2]) == {"predictions": [7]}

    assert run(lambda: Bench(FakeModel(lambda _: None)), test).statuses == [200, 200]


def test_a_call_that_the_server_cuts_off_cancels_its_instances() -> None:
    if Bench.is_direct:
        return  # it has no task that could be cut off

    async def test(bench: Bench) -> None:
        async with bench.connect() as (_, writer):
            writer.write(POST + b"content-length: 1\r\n\r\nx")
            await until(lambda: bench.model.futures)
            for task in bench.server.server_state.tasks:
                task.cancel()
            await until(lambda: bench.model.futures[0].cancelled())

    run(lambda: Bench(FakeModel(lambda _: None)), test)


def test_pipelined_calls_are_answered_in_order() -> None:
    async def test(bench: Bench) -> None:
        async with bench.connect() as (reader, writer):
            one = POST + b"content-length: 1\r\n\r\nx"
            none = POST.replace(b"/predict", b"/predict/none") + b"content-length: 1\r\n\r\nx"
            writer.write(one + none + one + one)
            answers = [await read_answer(reader) for _ in range(4)]
            assert [status for status, _, _ in answers] == [200, 404, 200, 200]
            right = [json.loads(body) for status, _, body in answers if status == 200]
            assert right == [{"predictions": [n]} for n in range(3)]
            writer.write(one)
            assert (await read_answer(reader))[0] == 200
        assert len(bench.model.payloads) == 4

    run(lambda: Bench(FakeModel()), test)


def test_a_thousand_pipelined_refusals_are_all_answered() -> None:
    async def test(bench: Bench) -> None:
        async with bench.connect() as (reader, writer):
            one = POST + b"content-length: 1\r\n\r\nx"
            none = b"POST /predict/none HTTP/1.1\r\nhost: h\r\ncontent-length: 0\r\n\r\n"
            writer.write(one + none * 1000 + one)
            statuses = [(await read_answer(reader))[0] for _ in range(1002)]
            assert statuses == [200, *[404] * 1000, 200]

    run(lambda: Bench(FakeModel()), test)


def test_pipelined_calls_of_both_kinds_take_turns() -> None:
    async def test(bench: Bench) -> None:
        async with bench.connect() as (reader, writer):
            one = POST + b"content-length: 1\r\n\r\nx"
            get = b"GET /predict HTTP/1.1\r\nhost: h\r\n\r\n"
            writer.write(one + get + one + get)
            statuses = [(await read_answer(reader))[0] for _ in range(4)]
            assert statuses == [200, 405, 200, 405]

    run(lambda: Bench(FakeModel()), test)


def test_a_pipelined_body_that_never_comes_is_given_up() -> None:
    async def test(bench: Bench) -> None:
        async with bench.connect() as (reader, writer):
            one = POST + b"content-length: 1\r\n\r\nx"
            half = POST + b"x-timeout-ms: 100\r\ncontent-length: 9\r\n\r\nabc"
            writer.write(one + half)
            assert [(await read_answer(reader))[0] for _ in range(2)] == [200, 408]

    run(lambda: Bench(FakeModel()), test)


def test_http_1_0_gets_an_answer_and_the_end_of_the_connection() -> None:
    async def test(bench: Bench) -> None:
        async with bench.connect() as (reader, writer):
            writer.write(POST.replace(b"1.1", b"1.0") + b"content-length: 1\r\n\r\nx")
            status, headers, _ = await read_answer(reader)
            assert status == 200
            assert headers.get("connection", "close") == "close"  # which goes without saying
            assert await reader.read() == b""

    run(lambda: Bench(FakeModel()), test)


def test_a_client_that_asks_to_go_on_is_told_to() -> None:
    async def test(bench: Bench) -> None:
        async with bench.connect() as (reader, writer):
            writer.write(POST + b"expect: 100-continue\r\ncontent-length: 3\r\n\r\n")
            assert b"100 Continue" in await reader.readuntil(b"\r\n\r\n")
            writer.write(b"abc")
            assert (await read_answer(reader))[0] == 200
            writer.write(POST + b"expect: 100-continue\r\ncontent-length: 99999\r\n\r\n")
            assert (await read_answer(reader))[0] == 413

    run(lambda: Bench(FakeModel(), max_body_bytes=1000), test)


def test_an_idle_connection_is_closed() -> None:
    async def test(bench: Bench) -> None:
        bench.server.config.timeout_keep_alive = 0.4  # type: ignore[assignment]
        async with bench.connect() as (reader, writer):
            for _ in range(3):
                began = time.monotonic()
                writer.write(POST + b"content-length: 1\r\n\r\nx")
                assert (await read_answer(reader))[0] == 200
                await asyncio.sleep(0.2)
                if time.monotonic() - began > 0.35:
                    break  # it may be closed by now
            assert await asyncio.wait_for(reader.read(), 15) == b""

    run(lambda: Bench(FakeModel()), test)


def test_a_client_that_does_not_read_is_not_served_on() -> None:
    large = result(b'"%s"' % (b"x" * (1 << 20)))

    async def test(bench: Bench) -> None:
        async with bench.connect(rcvbuf_bytes=1 << 16) as (reader, writer):
            one = POST + b"content-length: 1\r\n\r\nx"
            for _ in range(60):
                writer.write(one)
                await asyncio.sleep(0.005)
            await asyncio.sleep(0.2)
            assert len(bench.model.payloads) < 40
            for _ in range(60):
                assert (await read_answer(reader))[0] == 200

    run(lambda: Bench(FakeModel(lambda _: large)), test)


def test_garbage_is_refused_and_the_connection_closed() -> None:
    async def test(bench: Bench) -> None:
        async with bench.connect() as (reader, writer):
            writer.write(b"\x16\x03\x01 not HTTP at all\r\n\r\n")
            assert b" 400 " in await reader.read()

    run(lambda: Bench(FakeModel()), test)


def test_both_ways_give_the_same_answer_but_for_ids_and_times() -> None:
    calls = [
        POST + b"content-length: 1\r\n\r\nx",
        POST.replace(b"image/png", b"application/json") + b"content-length: 2\r\n\r\n{}",
        POST + b"x-request-id: mine\r\naccept: application/x-npy\r\ncontent-length: 1\r\n\r\nx",
        POST + b"accept: text/plain\r\ncontent-length: 1\r\n\r\nx",
        POST + b"x-priority: 12\r\ncontent-length: 1\r\n\r\nx",
        POST.replace(b"/predict", b"/predict/") + b"content-length: 1\r\n\r\nx",
        POST.replace(b"/predict", b"/predict/none?a=1") + b"content-length: 1\r\n\r\nx",
        POST.replace(b"image/png", b"text/html") + b"content-length: 1\r\n\r\nx",
        POST.replace(b"content-type: image/png\r\n", b"") + b"content-length: 0\r\n\r\n",
    ]
    found: list[list[object]] = []

    async def test(bench: Bench) -> None:
        answers: list[object] = []
        async with bench.connect() as (reader, writer):
            for each in calls:
                writer.write(each)
                status, headers, body = await read_answer(reader)
                if status != 200:
                    value = json.loads(body)
                    value.pop("request_id")
                else:
                    value = body
                names = [n for n in headers if n != "date"]
                answers.append((status, names, value))
        found.append(answers)

    for is_direct in (False, True):
        Bench.is_direct = is_direct
        run(lambda: Bench(FakeModel()), test)
    assert found[0] == found[1]


@pytest.mark.parametrize("pieces", [1, 2])
def test_a_wish_for_another_protocol_is_ignored_and_the_body_is_the_calls_own(pieces: int) -> None:
    if not Bench.is_direct:
        pytest.skip("uvicorn alone takes the body of such a call for a request of its own")

    async def test(bench: Bench) -> None:
        upgrade = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AA\r\n"
        body = b"GET /predict HTTP/1.1\r\nhost: h\r\n\r\n"
        head = POST + upgrade + b"content-length: %d\r\n\r\n" % len(body)
        async with bench.connect() as (reader, writer):
            for part in (head + body,) if pieces == 1 else (head, body):
                writer.write(part)
                await asyncio.sleep(0.05)
            assert (await read_answer(reader))[0] == 200
            writer.write(POST + b"content-length: 1\r\n\r\nx")
            assert (await read_answer(reader))[0] == 200
        assert bench.model.bodies == [body, b"x"]

    run(lambda: Bench(FakeModel()), test)


def test_a_silent_connection_is_closed() -> None:
    if not Bench.is_direct:
        pytest.skip("uvicorn alone waits for ever")

    async def test(bench: Bench) -> None:
        bench.server.config.timeout_keep_alive = 0.2  # type: ignore[assignment]
        async with bench.connect() as (reader, _):
            assert await asyncio.wait_for(reader.read(), 15) == b""

    run(lambda: Bench(FakeModel()), test)


@pytest.mark.measures
def test_a_head_that_has_begun_is_not_idle() -> None:
    async def test(bench: Bench) -> None:
        bench.server.config.timeout_keep_alive = 0.2  # type: ignore[assignment]
        async with bench.connect() as (reader, writer):
            for _ in range(2):
                writer.write(POST)
                await asyncio.sleep(0.3)
                writer.write(b"content-length: 1\r\n\r\nx")
                assert (await read_answer(reader))[0] == 200
            assert await asyncio.wait_for(reader.read(), 15) == b""

    run(lambda: Bench(FakeModel()), test)


def test_endless_headers_are_cut_off() -> None:
    if not Bench.is_direct:
        pytest.skip("uvicorn alone has no limit")

    async def test(bench: Bench) -> None:
        async with bench.connect() as (reader, writer):
            writer.write(POST)
            with contextlib.suppress(ConnectionError):
                for _ in range(200):
                    writer.write(b"x-long: %b\r\n" % (b"x" * 4000))
                    await writer.drain()
            with contextlib.suppress(ConnectionError):
                assert b" 431 " in await reader.read()
        assert not bench.model.payloads

    run(lambda: Bench(FakeModel()), test)


def test_half_a_body_at_the_shutdown_is_answered() -> None:
    if not Bench.is_direct:
        pytest.skip("uvicorn alone waits for it")

    async def test(bench: Bench) -> None:
        async with bench.connect() as (reader, writer):
            writer.write(POST + b"content-length: 9\r\n\r\nabc")
            await until(lambda: bench.server.server_state.connections)
            await asyncio.sleep(0.05)
            for connection in list(bench.server.server_state.connections):
                connection.shutdown()
            status, headers, _ = await read_answer(reader)
            assert (status, headers["connection"]) == (503, "close")

    run(lambda: Bench(FakeModel()), test)


def test_a_client_that_has_just_hung_up_does_not_hold_up_the_shutdown() -> None:
    if not Bench.is_direct:
        pytest.skip("uvicorn alone waits for it")

    async def test(bench: Bench) -> None:
        port = bench.server.servers[0].sockets[0].getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.sendall(POST + b"content-length: 9\r\n\r\nabc")
            await until(lambda: bench.server.server_state.connections)
            await asyncio.sleep(0.05)
        for connection in list(bench.server.server_state.connections):
            connection.shutdown()
        await until(lambda: not bench.server.server_state.connections)

    run(lambda: Bench(FakeModel()), test)


def test_a_page_may_read_its_answers_if_its_origin_is_allowed() -> None:
    async def test(bench: Bench) -> None:
        async with bench.connect() as (reader, writer):

            async def ask(origin: bytes, body: bytes = b"content-length: 1\r\n\r\nx") -> None:
                writer.write(POST + b"origin: " + origin + b"\r\n" + body)

            for body in (b"content-length: 1\r\n\r\nx",) * 3 + (b"x-priority: 0\r\n\r\n",):
                await ask(b"https://app.example", body)
                status, headers, _ = await read_answer(reader)
                assert status == (400 if b"priority" in body else 200)
                assert headers["access-control-allow-origin"] == "https://app.example"
                assert "X-Request-ID" in headers["access-control-expose-headers"]
                assert headers["vary"] == "Origin"
            await ask(b"https://other.example")
            _, headers, _ = await read_answer(reader)
            assert headers["vary"] == "Origin"
            assert not [name for name in headers if name.startswith("access-control")]
            for origin, allowed in ((b"https://app.example", 5), (b"https://other.example", 0)):
                writer.write(
                    b"OPTIONS /predict HTTP/1.1\r\nhost: h\r\norigin: %b\r\n"
                    b"access-control-request-method: POST\r\n\r\n" % origin
                )
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                assert head.startswith("http/1.1 204")
                assert head.count("access-control-") == allowed
                assert all(
                    head.count(f"\r\n{name}: ") == 1
                    for name in ("x-request-id", "traceparent", "server-timing")
                )
                assert "credentials" not in head

    cors = Cors(["https://app.example"])
    key = read_keys("k" * 20)
    run(lambda: Bench(FakeModel(), cors=cors), test)

    async def refused(bench: Bench) -> None:
        async with bench.connect() as (reader, writer):
            writer.write(POST + b"origin: https://any.example\r\ncontent-length: 0\r\n\r\n")
            status, headers, _ = await read_answer(reader)
            assert (status, headers["access-control-allow-origin"]) == (401, "*")

    run(lambda: Bench(FakeModel(), guard=Guard(predict=key), cors=Cors(["*"])), refused)


def test_pages_of_other_origins_are_not_answered_for_unless_that_is_set() -> None:
    async def test(bench: Bench) -> None:
        async with bench.connect() as (reader, writer):
            writer.write(POST + b"origin: https://app.example\r\ncontent-length: 1\r\n\r\nx")
            _, headers, _ = await read_answer(reader)
            assert not [name for name in headers if name.startswith(("access-control", "vary"))]
            writer.write(
                b"OPTIONS /predict HTTP/1.1\r\nhost: h\r\norigin: https://app.example\r\n"
                b"access-control-request-method: POST\r\n\r\n"
            )
            assert (await read_answer(reader))[0] == 405

    run(lambda: Bench(FakeModel()), test)


def test_an_answer_to_head_has_no_body_and_the_connection_serves_on() -> None:
    async def test(bench: Bench) -> None:
        async with bench.connect() as (reader, writer):
            writer.write(b"HEAD /predict HTTP/1.1\r\nhost: h\r\n\r\n")
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 405 ")
            assert b"allow: POST\r\n" in head
            writer.write(POST + b"content-length: 1\r\n\r\nx")
            assert (await read_answer(reader))[0] == 200

    run(lambda: Bench(FakeModel()), test)
