"""TLS connections before they are HTTP's: counted, timed, and handed on. Real sockets, uvloop."""

import asyncio
import contextlib
import shutil
import ssl
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path

import pytest

from inferpool.service.api.wire.budgets import UnfinishedRequests
from tests.certificates import make_certificate
from tests.service.api.fakes import FakeModel, result
from tests.service.api.server import ONE, PredictServer, serve, silent_model, until

pytestmark = [
    pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl"),
    pytest.mark.usefixtures("uvloop"),
]
Serve = Callable[..., AbstractAsyncContextManager[PredictServer]]


@pytest.fixture(scope="module")
def serve_tls(tmp_path_factory: pytest.TempPathFactory) -> Serve:
    certificate, key = make_certificate(tmp_path_factory.mktemp("tls"))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(Path(certificate), Path(key))
    return partial(serve, tls=context)


def client_tls() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


connect_tls = partial(
    PredictServer.connect, ssl=client_tls(), server_hostname="localhost", limit=1 << 26
)


async def test_bytes_that_come_with_the_handshake_are_not_lost(serve_tls: Serve) -> None:
    async with serve_tls() as server:
        for _ in range(20):
            async with connect_tls(server) as client:
                for _ in range(2):
                    assert await client.status(ONE) == 200
        await until(lambda: not server.connections)


async def test_a_request_right_behind_the_handshake_is_read(serve_tls: Serve) -> None:
    """In one packet with the end of the handshake, as TLS 1.3 allows it."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = client_tls().wrap_bio(incoming, outgoing)
    async with serve_tls() as server, server.connect() as client:
        while True:
            try:
                tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                client.send(outgoing.read())
                incoming.write(await client.reader.read(65536))
        tls.write(ONE)
        client.send(outgoing.read())  # its last message and the request
        await until(lambda: server.model.payloads)


@pytest.mark.parametrize("hello", [b"", b"\x16\x03\x01\x02\x00\x01\x00"])
async def test_endless_handshake_counts_until_it_is_ended(serve_tls: Serve, hello: bytes) -> None:
    async with serve_tls() as server, server.connect() as client:
        client.send(hello)
        await until(lambda: len(server.connections) == 1)
    async with serve_tls(head_timeout_s=0.3) as server, server.connect() as client:
        client.send(hello)
        assert await client.is_closed()
        await until(lambda: not server.connections)


@pytest.mark.parametrize("said", [b"", b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01"])
async def test_client_that_leaves_or_lacks_tls_is_forgotten(serve_tls: Serve, said: bytes) -> None:
    async with serve_tls() as server:
        async with server.connect() as client:
            client.send(said)
        await until(lambda: not server.connections)
        async with connect_tls(server) as client:
            assert await client.status(ONE) == 200


async def test_silent_connections_make_room_for_a_client_that_speaks(serve_tls: Serve) -> None:
    async with serve_tls(max_connections=5) as server:
        async with contextlib.AsyncExitStack() as stack:
            silent = [await stack.enter_async_context(server.connect()) for _ in range(20)]
            await until(lambda: len(server.connections) == 5)
            await asyncio.sleep(1.1)  # as long as any may take to begin
            async with connect_tls(server) as client:
                assert await client.status(ONE) == 200
                assert len(server.connections) <= 5
            await until(lambda: sum(each.reader.at_eof() for each in silent) > 15)
        await until(lambda: not server.connections)


async def test_a_connection_keeps_the_place_of_its_handshake(serve_tls: Serve) -> None:
    """An address that has two of eight places may have one more while another one has four."""
    limits = {"unfinished": UnfinishedRequests(2**20, share=0.75), "max_connections": 8}
    async with (
        serve_tls(silent_model(), **limits) as server,
        contextlib.AsyncExitStack() as stack,
    ):
        for number, source in enumerate(["127.0.0.2"] * 4 + ["127.0.0.3"] * 3, 1):
            _, writer = await asyncio.open_connection(
                *server.listener.getsockname(),
                local_addr=(source, 0),
                ssl=client_tls(),
                server_hostname="localhost",
            )
            stack.callback(writer.close)
            writer.write(ONE)
            await until(lambda number=number: len(server.model.futures) == number)
        for future in server.model.futures:
            future.set_result(result())


async def test_a_shutdown_does_not_wait_for_handshakes(serve_tls: Serve) -> None:
    async with serve_tls() as server, server.connect() as client:
        await until(lambda: server.connections)
        server.shut_connections_down()
        assert await client.is_closed()


@pytest.mark.parametrize("path", [b"/predict", b"/mounted/predict"], ids=["straight", "asgi"])
async def test_answers_that_are_not_read_count_under_tls_too(serve_tls: Serve, path: bytes) -> None:
    """uvloop's TLS takes all that is written to it before it says that nobody reads."""
    num_bytes = 12 << 20
    request = ONE.replace(b"/predict", path)
    large = result(b'"%b"' % (b"x" * num_bytes))
    async with (
        serve_tls(FakeModel(lambda _: large)) as server,
        connect_tls(server) as client,
    ):
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]  # it is a transport
        client.send(request)
        await until(lambda: server.use.unread_bytes > num_bytes)
        client.writer.transport.resume_reading()  # type: ignore[attr-defined]  # as above
        answer = await client.read_answer()
        assert len(answer.body) == num_bytes + len('{"predictions":[""]}')
        await until(lambda: not server.use.unread_bytes)
        assert await client.status(request) == 200
