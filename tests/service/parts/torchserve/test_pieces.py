"""Answers of handlers in parts, over real sockets: raw chunks, as TorchServe sends them."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from inferpool.service.api.optional_calls import CALLS_BY_SETTING
from inferpool.service.errors import ModelFailedError, StreamBrokenError
from tests.service.api.fakes import FakeInstance, result
from tests.service.api.server import PredictServer, RawClient, Way, serve, until
from tests.service.parts.torchserve.fake_archives import (
    OPTIONAL,
    archive,
    part,
    parts_of,
)

WAYS = ("asgi", "protocol")
BODY = b"\x00\xff\r\n"


def ask(version: str = "1.1") -> bytes:
    return (
        f"POST /predictions/fake HTTP/{version}\r\nhost: h\r\ncontent-length: 1\r\n\r\nx".encode()
    )


class Handler:
    """A handler that gives the parts that a test says."""

    def __init__(self, server: PredictServer) -> None:
        self.model = server.model

    async def begun(self, num: int = 1) -> None:
        await until(lambda: len(self.model.futures) >= num)

    def give(self, *parts: bytes) -> None:
        reader = self.model.readers[-1]
        assert reader is not None
        reader.on_parts(parts)

    @property
    def instance(self) -> FakeInstance:
        return self.model.futures[-1]

    def end(self, error: Exception | None = None) -> None:
        if error is None:
            self.instance.set_result(result(b"[]"))
        else:
            self.instance.set_exception(error)


@contextlib.asynccontextmanager
async def streaming(
    way: Way = "protocol", **options: Any
) -> AsyncIterator[tuple[PredictServer, Handler]]:
    model = archive(streams=True, reply=lambda _: None)
    async with serve(model, way, **options) as server:
        server.protocol.predict.optional = OPTIONAL
        yield server, Handler(server)


async def read_chunk(client: RawClient) -> bytes:
    size = int(await client.reader.readuntil(b"\r\n"), 16)
    return (await client.reader.readexactly(size + 2))[:-2]


@pytest.mark.parametrize("way", WAYS)
async def test_parts_are_chunks_as_the_handler_sent_them(way: Way) -> None:
    async with streaming(way) as (server, handler), server.connect() as client:
        for num in range(2):  # the connection goes on
            client.send(ask())
            await handler.begun(num + 1)
            assert parts_of(handler.model) == [("body", b"x", "bytes", "")]
            handler.give(part(BODY, status=201, headers=[["x-a", "b"]]))
            status, headers = await client.read_head()
            assert (status, headers["x-a"]) == (201, "b")
            assert headers["transfer-encoding"] == "chunked"
            assert "content-type" not in headers
            assert headers["x-request-id"]
            assert await read_chunk(client) == BODY
            handler.give(part(b"b"), part(b""), part(b"c"))
            assert await read_chunk(client) == b"bc"
            handler.end()
            assert await read_chunk(client) == b""
        assert server.statuses == [201, 201]


async def test_a_call_of_sagemakers_is_answered_in_parts_too() -> None:
    async with streaming() as (server, handler), server.connect() as client:
        predict = server.protocol.predict
        predict.optional, predict.default = [CALLS_BY_SETTING["sagemaker"]], "fake"
        client.send(ask().replace(b"/predictions/fake", b"/invocations"))
        await handler.begun()
        handler.give(part(b"a", status=201))
        assert (await client.read_head())[0] == 201
        handler.give(part(b"b"))
        handler.end()
        assert await client.reader.readuntil(b"0\r\n\r\n") == b"1\r\na\r\n1\r\nb\r\n0\r\n\r\n"


@pytest.mark.parametrize("way", WAYS)
async def test_a_failure_after_some_parts_cuts_the_answer(way: Way) -> None:
    async with streaming(way) as (server, handler), server.connect() as client:
        client.send(ask())
        await handler.begun()
        handler.give(part(b"a"))
        assert (await client.read_head())[0] == 200
        handler.end(StreamBrokenError("died"))
        assert await client.reader.read() == b"1\r\na\r\n"  # and no end
        assert server.statuses == [500]


@pytest.mark.parametrize("way", WAYS)
async def test_a_failure_before_the_first_part_has_its_status(way: Way) -> None:
    async with streaming(way) as (server, handler), server.connect() as client:
        client.send(ask())
        await handler.begun()
        handler.end(ModelFailedError("no"))
        answer = await client.read_answer()
        assert (answer.status, answer.json["message"]) == (503, "Prediction failed")
        assert server.statuses == [503]


@pytest.mark.parametrize(
    "wrong", [b"{}", b'{"b64":"!"}', b'{"b64":"/////w=="}', part(b"a", status=204)]
)
async def test_a_first_part_that_cannot_be_sent_fails_the_call(wrong: bytes) -> None:
    async with streaming() as (server, handler), server.connect() as client:
        client.send(ask())
        await handler.begun()
        handler.give(wrong, part(b"b"))
        handler.give(part(b"c"))
        answer = await client.read_answer()
        assert (answer.status, answer.json["message"]) == (503, "Prediction failed")
        assert isinstance(handler.instance.exception(), ModelFailedError)
        assert server.statuses == [503]


@pytest.mark.parametrize("wrong", [b"{}", part(b"", error="no", status=507)])
async def test_a_later_part_that_cannot_be_sent_cuts_the_answer(wrong: bytes) -> None:
    async with streaming() as (server, handler), server.connect() as client:
        client.send(ask())
        await handler.begun()
        handler.give(part(b"a"))
        await client.read_head()
        handler.give(wrong)
        handler.end()  # in the same step
        assert await client.reader.read() == b"1\r\na\r\n"
        assert len(server.statuses) == 1


async def test_a_stream_without_any_part_is_a_failure() -> None:
    async with streaming() as (server, handler), server.connect() as client:
        client.send(ask())
        await handler.begun()
        handler.end()
        answer = await client.read_answer()
        assert (answer.status, answer.json["message"]) == (503, "Prediction failed")


async def test_http_1_0_gets_parts_until_the_connection_closes() -> None:
    async with streaming() as (server, handler), server.connect() as client:
        client.send(ask("1.0"))
        await handler.begun()
        handler.give(part(b"a"), part(b"b"))
        handler.end()
        _, headers = await client.read_head()
        assert headers["connection"] == "close"
        assert await client.reader.read() == b"ab"


@pytest.mark.parametrize("way", WAYS)
async def test_a_hangup_cancels_the_instance(way: Way) -> None:
    async with streaming(way) as (server, handler):
        async with server.connect() as client:
            client.send(ask())
            await handler.begun()
            handler.give(part(b"a"))
            await client.read_head()
        await until(lambda: handler.instance.cancelled())
        await until(lambda: server.statuses)
        assert server.statuses == [499]


async def test_a_reader_that_reads_nothing_loses_its_stream() -> None:
    async with streaming(stream_buffer_parts=3) as (server, handler):
        async with server.connect(rcvbuf_bytes=4096) as slow:
            slow.stop_reading()
            slow.send(ask())
            await handler.begun()
            handler.give(part(b"a"))
            while not handler.instance.done():
                handler.give(part(b"a" * 100_000))
                await asyncio.sleep(0)
            assert "stream_buffer_parts" in str(handler.instance.exception())
            await until(lambda: not server.connections)
        await until(lambda: server.use.unread_bytes == 0)
        assert server.statuses == [408]
