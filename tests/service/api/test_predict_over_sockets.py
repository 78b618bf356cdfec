"""What only a real server and a real socket show: pieces, limits while reading, hanging up."""

import asyncio
import contextlib
import gc
import json
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
import uvicorn

from service.api.body import Limits
from service.errors import InvalidInputError
from tests.service.api.fakes import FakeModel, endpoint, result

Test = Callable[["Bench"], Awaitable[None]]
POST = b"POST /predict HTTP/1.1\r\nhost: h\r\ncontent-type: image/png\r\n"
CHUNKED = POST + b"transfer-encoding: chunked\r\n\r\n"


class Bench:
    """A server on a free port, and what it recorded."""

    def __init__(self, model: FakeModel, **limits: float) -> None:
        self.model = model
        self.statuses: list[int] = []
        predict = endpoint(
            model,
            limits=Limits(**limits),  # type: ignore[arg-type]  # bytes are whole numbers
            on_done=lambda _, status, __: self.statuses.append(status),
        )
        config = uvicorn.Config(predict, port=0, log_config=None, lifespan="off")
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
    async def connect(self) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        port = self.server.servers[0].sockets[0].getsockname()[1]
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            yield reader, writer
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()


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
            await asyncio.sleep(0.05)
            writer.write(b"2\r\nde\r\n0\r\n\r\n")
            status, _, _ = await read_answer(reader)
            assert status == 200
        assert bench.model.bodies == [b"abcde"]
        assert len(bench.model.payloads[0].chunks) > 1

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


def test_a_body_that_trickles_in_past_the_deadline_is_given_up() -> None:
    async def test(bench: Bench) -> None:
        async with bench.connect() as (reader, writer):
            writer.write(POST + b"x-timeout-ms: 60\r\ncontent-length: 9\r\n\r\nabc")
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
            await asyncio.sleep(0.05)
        await until(lambda: bench.statuses)
        assert not bench.model.payloads

    assert run(lambda: Bench(FakeModel()), test).statuses == [499]


def test_an_answer_that_takes_long_still_arrives_and_the_connection_lives_on() -> None:
    async def test(bench: Bench) -> None:
        async with bench.connect() as (reader, writer):
            for _ in range(2):
                writer.write(POST + b"content-length: 1\r\n\r\nx")
                await asyncio.sleep(0.2)
                bench.model.futures[-1].set_result(result(b"7"))
                assert json.loads((await read_answer(reader))[2]) == {"predictions": [7]}

    assert run(lambda: Bench(FakeModel(lambda _: None)), test).statuses == [200, 200]


def test_a_call_that_the_server_cuts_off_cancels_its_instances() -> None:
    async def test(bench: Bench) -> None:
        async with bench.connect() as (_, writer):
            writer.write(POST + b"content-length: 1\r\n\r\nx")
            await until(lambda: bench.model.futures)
            for task in bench.server.server_state.tasks:
                task.cancel()
            await until(lambda: bench.model.futures[0].cancelled())

    run(lambda: Bench(FakeModel(lambda _: None)), test)
