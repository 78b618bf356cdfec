"""TLS connections before they are HTTP's: counted, timed, and handed on. Real sockets, uvloop."""

import asyncio
import contextlib
import shutil
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path

import pytest
import uvloop

from inferpool.service.api.wire.connections import EdgeLimits
from inferpool.service.api.wire.handshakes import TlsHandshake
from inferpool.service.api.wire.protocol import PredictProtocol
from tests.certificates import make_certificate
from tests.service.api.fakes import FakeModel, endpoint, result
from tests.service.api.test_predict_over_sockets import POST, read_answer, until
from tests.service.api.wire.test_protocol import Bench

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")

ONE = POST + b"content-length: 1\r\n\r\nx"
Test = Callable[[Bench], Awaitable[None]]


@pytest.fixture(scope="module")
def server_tls(tmp_path_factory: pytest.TempPathFactory) -> ssl.SSLContext:
    certificate, key = make_certificate(tmp_path_factory.mktemp("tls"))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(Path(certificate), Path(key))
    return context


def client_tls() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def run(
    test: Test, server_tls: ssl.SSLContext, *, model: FakeModel | None = None, **edge: float
) -> None:
    async def go() -> None:
        bench = Bench(model or FakeModel())
        http = PredictProtocol.bound_to(endpoint(bench.model), EdgeLimits(**edge))  # type: ignore[arg-type]  # numbers as they are asked for
        bench.server.config.http = partial(TlsHandshake, http, server_tls)  # type: ignore[assignment]  # as the service has it
        async with bench.serving():
            await test(bench)
            await until(lambda: not bench.server.server_state.connections)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(asyncio.wait_for(go(), 30))


@contextlib.asynccontextmanager
async def connect(
    bench: Bench, tls: ssl.SSLContext | None = None
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection, with a handshake if there is a context."""
    port = bench.server.servers[0].sockets[0].getsockname()[1]
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=tls, limit=1 << 26)
    try:
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError, ssl.SSLError):
            await writer.wait_closed()


def connections(bench: Bench) -> list[object]:
    return list(bench.server.server_state.connections)


def test_calls_are_answered_and_what_comes_with_the_handshake_is_not_lost(
    server_tls: ssl.SSLContext,
) -> None:
    async def test(bench: Bench) -> None:
        for _ in range(20):
            async with connect(bench, client_tls()) as (reader, writer):
                for _ in range(2):
                    writer.write(ONE)
                    assert (await read_answer(reader))[0] == 200

    run(test, server_tls)


def test_a_request_right_behind_the_handshake_is_read(server_tls: ssl.SSLContext) -> None:
    """In one packet with the end of the handshake, as TLS 1.3 allows it."""

    async def test(bench: Bench) -> None:
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        client = client_tls().wrap_bio(incoming, outgoing)
        async with connect(bench) as (reader, writer):
            while True:
                try:
                    client.do_handshake()
                    break
                except ssl.SSLWantReadError:
                    writer.write(outgoing.read())
                    incoming.write(await reader.read(65536))
            client.write(ONE)
            writer.write(outgoing.read())  # its last message and the request
            await until(lambda: bench.model.payloads)

    run(test, server_tls)


def test_a_handshake_that_does_not_end_is_ended_and_counts_until_then(
    server_tls: ssl.SSLContext,
) -> None:
    async def test(bench: Bench) -> None:
        for hello in (b"", b"\x16\x03\x01\x02\x00\x01\x00"):
            async with connect(bench) as (reader, writer):
                writer.write(hello)
                await until(lambda: len(connections(bench)) == 1)
                assert await reader.read() == b""
                await until(lambda: not connections(bench))

    run(test, server_tls, head_timeout_s=0.3)


@pytest.mark.parametrize("said", [b"", b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01"])
def test_who_leaves_or_speaks_no_tls_is_forgotten(server_tls: ssl.SSLContext, said: bytes) -> None:
    async def test(bench: Bench) -> None:
        async with connect(bench) as (_, writer):
            writer.write(said)
        await until(lambda: not connections(bench))
        async with connect(bench, client_tls()) as (reader, writer):
            writer.write(ONE)
            assert (await read_answer(reader))[0] == 200

    run(test, server_tls)


def test_silent_connections_make_room_for_a_client_that_speaks(server_tls: ssl.SSLContext) -> None:
    async def test(bench: Bench) -> None:
        async with contextlib.AsyncExitStack() as stack:
            silent = [await stack.enter_async_context(connect(bench)) for _ in range(20)]
            await until(lambda: len(connections(bench)) == 5)
            await asyncio.sleep(1.1)  # as long as any may take to begin
            async with connect(bench, client_tls()) as (reader, writer):
                writer.write(ONE)
                assert (await read_answer(reader))[0] == 200
                assert len(connections(bench)) <= 5
            assert sum(reader.at_eof() for reader, _ in silent) > 15

    run(test, server_tls, max_connections=5, head_timeout_s=60)


def test_a_shutdown_does_not_wait_for_handshakes(server_tls: ssl.SSLContext) -> None:
    async def test(bench: Bench) -> None:
        async with connect(bench) as (reader, _):
            await until(lambda: connections(bench))
            for each in connections(bench):
                each.shutdown()  # type: ignore[attr-defined]  # as uvicorn does
            assert await reader.read() == b""

    run(test, server_tls, head_timeout_s=60)


def test_answers_that_are_not_read_count_under_tls_too(server_tls: ssl.SSLContext) -> None:
    """uvloop's TLS takes all that is written to it before it says that nobody reads."""
    num_bytes = 12 << 20

    async def test(bench: Bench) -> None:
        unread = bench.server.config.http.args[0].others.unread  # type: ignore[union-attr]  # a partial
        async with connect(bench, client_tls()) as (reader, writer):
            writer.transport.pause_reading()  # type: ignore[attr-defined]  # it is a transport
            writer.write(ONE)
            await until(lambda: unread.num_bytes > num_bytes)
            writer.transport.resume_reading()  # type: ignore[attr-defined]  # as above
            assert len((await read_answer(reader))[2]) > num_bytes
            await until(lambda: not unread.num_bytes)

    large = result(b'"%b"' % (b"x" * num_bytes))
    run(test, server_tls, model=FakeModel(lambda _: large))


def test_large_answers_of_other_routes_count_under_tls_too(server_tls: ssl.SSLContext) -> None:
    num_bytes = 12 << 20
    request = ONE.replace(b"/predict", b"/mounted/predict")

    async def test(bench: Bench) -> None:
        unread = bench.server.config.http.args[0].others.unread  # type: ignore[union-attr]  # a partial
        async with connect(bench, client_tls()) as (reader, writer):
            writer.transport.pause_reading()  # type: ignore[attr-defined]  # it is a transport
            writer.write(request)
            await until(lambda: unread.num_bytes > num_bytes)
            writer.transport.resume_reading()  # type: ignore[attr-defined]  # as above
            assert len((await read_answer(reader))[2]) == num_bytes + len('{"predictions":[""]}')
            await until(lambda: not unread.num_bytes)
            writer.write(request)
            assert (await read_answer(reader))[0] == 200

    large = result(b'"%b"' % (b"x" * num_bytes))
    run(test, server_tls, model=FakeModel(lambda _: large))
