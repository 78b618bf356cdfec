"""The framing of a request: chunks, extensions, trailers, spaces, hosts. Over real sockets."""

import asyncio
import contextlib

import httptools
import pytest

from inferpool.service.api.wire.incoming import MAX_TRAILER_BYTES, ChunkLimits
from tests.service.api.server import CHUNKED, POST, ROUTES, PredictServer, serve, until

TO_NOBODY = {"refused": POST.replace(b"/predict", b"/mounted/predict/nobody")}
CHUNKS = b"transfer-encoding: chunked\r\n\r\n"
TINY = b"2\r\nab\r\n"
MIB = 1 << 20


async def send_endlessly(
    server: PredictServer, head: bytes, piece: bytes, most: int
) -> tuple[int, bytes]:
    """Send a piece again and again until the server has had enough; what was sent and answered."""
    async with server.connect() as client:
        reader = client.reader
        client.send(head)
        await until(lambda: server.connections or reader._buffer)  # type: ignore[attr-defined]
        num_sent = 0
        with contextlib.suppress(ConnectionError):
            while num_sent < most and not reader.at_eof() and not reader._buffer:  # type: ignore[attr-defined]
                client.send(piece)
                num_sent += len(piece)
                await client.writer.drain()
                await asyncio.sleep(0)
        found = b""
        with contextlib.suppress(ConnectionError):
            found = await reader.read()
    return num_sent, found


@pytest.mark.parametrize("head", (ROUTES | TO_NOBODY).values(), ids=ROUTES | TO_NOBODY)
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
async def test_endless_trailers_are_cut_off_with_an_answer(
    head: bytes, before: bytes, piece: bytes
) -> None:
    async with serve() as server:
        num_sent, found = await send_endlessly(server, head + CHUNKS + before, piece, 64 * MIB)
        assert num_sent < 8 * MIB  # most of which is in the kernel's buffers
        assert not found or b" 431 " in found or b" 404 " in found
        assert await server.is_well()


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(
    ("trailer", "status"),
    [
        (b"x-checksum: %b\r\n\r\n" % (b"y" * 1000), 200),
        (b"x-priority: 77\r\n\r\n", 200),  # no header, and so no wrong one
        (b"x-checksum: %b\r\n\r\n" % (b"y" * (MAX_TRAILER_BYTES + 1)), 431),
    ],
    ids=["long", "like a header", "too long"],
)
async def test_trailers_are_dropped_and_too_long_ones_refused(
    route: str, trailer: bytes, status: int
) -> None:
    async with serve() as server, server.connect() as client:
        client.send(ROUTES[route] + CHUNKS + b"1\r\nx\r\n0\r\n")
        await asyncio.sleep(0.05)
        answer = await client.ask(trailer)
        assert answer.status == status
        if status == 431:
            assert answer.headers["connection"] == "close"
            assert "trailers" in answer.json["detail"]
            assert await client.is_closed()
    assert len(server.model.payloads) == (status == 200)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("num_at_once", [1, 30_000])
async def test_a_body_of_tiny_chunks_is_refused_soon(route: str, num_at_once: int) -> None:
    async with serve() as server:
        head = ROUTES[route] + CHUNKS
        num_sent, found = await send_endlessly(server, head, TINY * num_at_once, 16 * MIB)
        assert num_sent < 8 * MIB
        assert b" 400 " in found
        assert b"chunks of 64 bytes or more" in found
        assert await server.is_well()
    assert len(server.model.payloads) == 1


@pytest.mark.parametrize(
    ("size", "count"), [(2, 8000), (64, 50_000), (1000, 2000)], ids=["few", "small", "usual"]
)
async def test_chunks_of_a_usual_size_and_a_few_tiny_ones_are_taken(size: int, count: int) -> None:
    chunk = b"%x\r\n%b\r\n" % (size, b"x" * size)
    async with serve() as server, server.connect() as client:
        assert await client.status(CHUNKED + chunk * count + b"0\r\n\r\n") == 200
    assert server.model.bodies == [b"x" * size * count]


def test_the_work_for_a_read_of_tiny_chunks_is_bounded() -> None:
    """One read of the event loop brings 256 KB at most."""
    calls = 0

    class Parsed:
        def on_body(self, body: bytes) -> None:
            nonlocal calls
            calls += 1
            limits.take_chunk(len(body))

    limits = ChunkLimits()
    parser = httptools.HttpRequestParser(Parsed())
    parser.feed_data(CHUNKED)
    with pytest.raises(httptools.HttpParserCallbackError):
        parser.feed_data(TINY * 40_000)
    assert calls < 9000


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("space", [b"", b" ", b"\t", b" \t  "])
async def test_spaces_around_header_values_are_ignored(route: str, space: bytes) -> None:
    head = ROUTES[route].replace(b"image/png", b"image/png" + space)
    values = [(b"x-timeout-ms", b"5000"), (b"x-priority", b"3"), (b"accept", b"*/*")]
    for name, value in [*values, (b"x-request-id", b"mine"), (b"content-length", b"1")]:
        head += b"%b:%b%b%b\r\n" % (name, space, value, space)
    async with serve() as server:
        answer = await server.answer_to(head + b"\r\nx")
        assert (answer.status, answer.headers["x-request-id"]) == (200, "mine"), answer.body
        async with server.connect() as client:
            for _ in range(2):  # the second head is known
                call = head.replace(b"x-request-id", b"x-other") + b"\r\nx"
                assert await client.status(call) == 200
    assert [each.priority for each in server.model.refs] == [3] * 3


@pytest.mark.parametrize("path", [b"/predict", b"/predict%2ffake", b"/mounted/predict", b"/health"])
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
async def test_http_1_1_needs_one_host(
    path: bytes, version: bytes, hosts: bytes, is_taken: bool
) -> None:
    rest = b"content-type: image/png\r\ncontent-length: 1\r\n\r\nx"
    start = b"POST %b HTTP/%b\r\n" % (path, version)
    async with serve() as server:
        await server.answer_to(start + (hosts or b"host: a\r\n") + rest)  # it would be remembered
        for _ in range(2):
            answer = await server.answer_to(start + hosts + rest)
            assert (answer.status == 400) != is_taken
            assert is_taken or "Host" in answer.json["detail"]


async def test_thousands_of_headers_in_one_read_are_not_looked_at() -> None:
    async with serve() as server, server.connect() as client:
        assert await client.status(POST + b"a:\r\n" * 50_000) == 431
        assert all(len(each.headers) <= 100 for each in server.connections)
