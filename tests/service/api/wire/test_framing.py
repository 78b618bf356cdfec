"""What a client may put around a body: chunks, extensions, trailers, spaces, hosts."""

import asyncio
import contextlib
import json

import httptools
import pytest

from inferpool.service.api.wire.framing import MAX_TRAILER_BYTES, ChunkLimits
from tests.service.api.test_predict_over_sockets import POST, read_answer, until
from tests.service.api.wire.test_protocol import Bench, is_well, run

ROUTES = {
    "straight": POST,
    "asgi": POST.replace(b"/predict", b"/mounted/predict"),
    "refused": POST.replace(b"/predict", b"/mounted/predict/nobody"),
}
"""Calls that the protocol answers itself, and those that uvicorn's cycle answers."""
CHUNKED = b"transfer-encoding: chunked\r\n\r\n"
TINY = b"2\r\nab\r\n"
MIB = 1 << 20


@pytest.fixture(autouse=True)
def way() -> None:
    """The protocol's alone: the other way has a server of its own before it."""


async def send_endlessly(bench: Bench, head: bytes, piece: bytes, most: int) -> tuple[int, bytes]:
    """Send a piece again and again until the server has had enough; what was sent and answered."""
    async with bench.connect() as (reader, writer):
        writer.write(head)
        await until(lambda: bench.server.server_state.connections or reader._buffer)  # type: ignore[attr-defined]
        num_sent = 0
        with contextlib.suppress(ConnectionError):
            while num_sent < most and not reader.at_eof() and not reader._buffer:  # type: ignore[attr-defined]
                writer.write(piece)
                num_sent += len(piece)
                await writer.drain()
                await asyncio.sleep(0)
        found = b""
        with contextlib.suppress(ConnectionError):
            found = await asyncio.wait_for(reader.read(), 15)
    return num_sent, found


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(
    ("before", "piece"),
    [
        (b"0\r\n", b"x-a: %b\r\n" % (b"y" * 4000)),
        (b"0\r\nx-a: ", b"y" * 4000),
        (b"0\r\n", b"y" * 4000),
        (b"2;", b"y" * 4000),
    ],
    ids=["trailers", "an endless value", "an endless name", "an endless extension"],
)
@pytest.mark.measures
def test_trailers_that_do_not_end_are_cut_off_with_an_answer(
    route: str, before: bytes, piece: bytes
) -> None:
    async def test(bench: Bench) -> None:
        head = ROUTES[route] + CHUNKED + before
        num_sent, found = await send_endlessly(bench, head, piece, 64 * MIB)
        assert num_sent < 8 * MIB  # most of which is in the kernel's buffers
        assert not found or b" 431 " in found or b" 404 " in found
        await is_well(bench)

    run(test)


@pytest.mark.parametrize("route", ["straight", "asgi"])
def test_who_is_cut_off_for_its_trailers_is_told(route: str) -> None:
    async def test(bench: Bench) -> None:
        for num, expected in ((1000, 200), (MAX_TRAILER_BYTES + 1, 431)):
            async with bench.connect() as (reader, writer):
                writer.write(ROUTES[route] + CHUNKED + b"1\r\nx\r\n0\r\n")
                await asyncio.sleep(0.05)
                writer.write(b"x-checksum: %b\r\n\r\n" % (b"y" * num))
                status, headers, body = await read_answer(reader)
                assert status == expected
                if status == 431:
                    assert headers["connection"] == "close"
                    assert "trailers" in json.loads(body)["detail"]
                    assert await reader.read() == b""

    assert len(run(test).model.payloads) == 1


def test_trailers_are_not_taken_for_headers() -> None:
    async def test(bench: Bench) -> None:
        async with bench.connect() as (reader, writer):
            for route in ("straight", "asgi"):
                writer.write(ROUTES[route] + CHUNKED + b"1\r\nx\r\n0\r\nx-priority: 77\r\n\r\n")
                assert (await read_answer(reader))[0] == 200

    run(test)


@pytest.mark.parametrize("route", ["straight", "asgi"])
@pytest.mark.parametrize("num_at_once", [1, 30_000])
def test_a_body_of_tiny_chunks_is_refused_soon(route: str, num_at_once: int) -> None:
    async def test(bench: Bench) -> None:
        head = ROUTES[route] + CHUNKED
        num_sent, found = await send_endlessly(bench, head, TINY * num_at_once, 16 * MIB)
        assert num_sent < 8 * MIB
        assert b" 400 " in found
        assert b"chunks of 64 bytes or more" in found
        await is_well(bench)

    assert len(run(test).model.payloads) == 1


@pytest.mark.parametrize(
    ("size", "count"), [(2, 8000), (64, 50_000), (1000, 2000)], ids=["few", "small", "usual"]
)
def test_chunks_of_a_usual_size_are_taken_and_so_are_a_few_tiny_ones(size: int, count: int) -> None:
    async def test(bench: Bench) -> None:
        async with bench.connect() as (reader, writer):
            writer.write(POST + CHUNKED)
            chunk = b"%x\r\n%b\r\n" % (size, b"x" * size)
            writer.write(chunk * count + b"0\r\n\r\n")
            assert (await asyncio.wait_for(read_answer(reader), 15))[0] == 200
        assert bench.model.bodies == [b"x" * size * count]

    run(test)


def test_the_work_for_a_read_of_tiny_chunks_is_bounded() -> None:
    """One read of the event loop brings 256 KB at most."""
    calls = 0

    class Parsed:
        def on_body(self, body: bytes) -> None:
            nonlocal calls
            calls += 1
            framing.take_chunk(len(body))

    framing = ChunkLimits()
    parser = httptools.HttpRequestParser(Parsed())
    parser.feed_data(POST + CHUNKED)
    with pytest.raises(httptools.HttpParserCallbackError):
        parser.feed_data(TINY * 40_000)
    assert calls < 9000


def test_spaces_around_values_of_headers_are_no_part_of_them() -> None:
    async def test(bench: Bench) -> None:
        for route in ("straight", "asgi"):
            for space in (b"", b" ", b"\t", b" \t  "):
                head = ROUTES[route].replace(b"image/png", b"image/png" + space)
                values = [(b"x-timeout-ms", b"5000"), (b"x-priority", b"3"), (b"accept", b"*/*")]
                for name, value in [*values, (b"x-request-id", b"mine"), (b"content-length", b"1")]:
                    head += b"%b:%b%b%b\r\n" % (name, space, value, space)
                for _ in range(2):  # the second head is known
                    async with bench.connect() as (reader, writer):
                        writer.write(head + b"\r\nx")
                        status, headers, body = await read_answer(reader)
                        assert (status, headers["x-request-id"]) == (200, "mine"), (space, body)
                async with bench.connect() as (reader, writer):
                    without_id = head.replace(b"x-request-id", b"x-other")
                    for _ in range(2):
                        writer.write(without_id + b"\r\nx")
                        assert (await read_answer(reader))[0] == 200

    refs = run(test).model.refs
    assert {each.priority for each in refs} == {3}
    assert len(refs) == 2 * 4 * 4


@pytest.mark.parametrize(
    "path", ["/predict", "/predict%2ffake", "/mounted/predict", "/health/live"]
)
@pytest.mark.parametrize(
    ("version", "hosts", "is_taken"),
    [
        (b"1.1", b"", False),
        (b"1.1", b"host: a\r\nhost: a\r\n", False),
        (b"1.0", b"host: a\r\nHost: b\r\n", False),
        (b"1.1", b"Host:\r\n", True),
        (b"1.0", b"", True),
        (b"1.0", b"host: a\r\n", True),
    ],
)
def test_a_request_has_one_host_but_in_http_1_0(
    path: str, version: bytes, hosts: bytes, is_taken: bool
) -> None:
    request = b"POST %b HTTP/%b\r\n%bcontent-type: image/png\r\ncontent-length: 1\r\n\r\nx" % (
        path.encode(),
        version,
        hosts,
    )

    async def test(bench: Bench) -> None:
        async with bench.connect() as (reader, writer):  # whose head would be remembered
            writer.write(request.replace(hosts or b"\r\n", hosts or b"\r\nhost: a\r\n", 1))
            await read_answer(reader)
        for _ in range(2):
            async with bench.connect() as (reader, writer):
                writer.write(request)
                status, _, body = await read_answer(reader)
                assert (status == 400) != is_taken
                assert is_taken or "Host" in json.loads(body)["detail"]

    run(test)


def test_thousands_of_headers_in_one_read_are_not_looked_at() -> None:
    async def test(bench: Bench) -> None:
        async with bench.connect() as (reader, writer):
            writer.write(POST + b"a:\r\n" * 50_000)
            assert (await read_answer(reader))[0] == 431
        assert all(len(each.headers) <= 100 for each in bench.server.server_state.connections)

    run(test)
