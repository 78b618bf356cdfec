"""Many connections at once on one listening socket, with the event loop that serves use."""

import asyncio
import contextlib
import gc
import shutil
import socket
import ssl
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from inferpool.service.api.wire.server import NUM_HANDLES
from tests.certificates import make_certificate
from tests.service.api.fakes import result
from tests.service.api.server import (
    GET,
    ONE,
    POST,
    ROUTES,
    PredictServer,
    serve,
    silent_model,
    until,
)

pytestmark = pytest.mark.usefixtures("uvloop")
NUM_CLIENTS = 5 * NUM_HANDLES
LAST = POST + b"connection: close\r\ncontent-length: 1\r\n\r\nx"
_OF_THE_SERVER = {
    "app", "access_logger", "app_state", "config", "connections", "logger", "loop",
    "server_state", "tasks",
}  # fmt: skip
"""Fields of uvicorn that connections may share though they change."""


@contextlib.contextmanager
def waiting(server: PredictServer, num: int, request: bytes = b"") -> Iterator[list[socket.socket]]:
    """Clients that the kernel has accepted, and the server has not yet."""
    with contextlib.ExitStack() as stack:
        address = server.listener.getsockname()
        clients = [stack.enter_context(socket.create_connection(address)) for _ in range(num)]
        for client in clients:
            client.sendall(request)
            client.setblocking(False)
        assert not server.connections
        yield clients


async def read_all(client: socket.socket) -> bytes:
    """Read to the end; a reset ends it too."""
    data = b""
    with contextlib.suppress(ConnectionError):
        while piece := await asyncio.get_running_loop().sock_recv(client, 65536):
            data += piece
    return data


async def test_many_connections_are_accepted_in_one_iteration() -> None:
    async with serve() as server:
        with waiting(server, NUM_CLIENTS):
            num_iterations = 0
            while len(server.connections) < NUM_CLIENTS:
                await asyncio.sleep(0)
                num_iterations += 1
                assert num_iterations < NUM_CLIENTS / 2


async def test_burst_larger_than_one_iteration_accepts_is_answered() -> None:
    async with serve() as server:
        with waiting(server, NUM_CLIENTS, LAST) as clients:
            answers = await asyncio.gather(*map(read_all, clients))
        assert {answer[:12] for answer in answers} == {b"HTTP/1.1 200"}
        assert server.statuses == [200] * NUM_CLIENTS
        await until(lambda: not server.connections)


async def test_limit_of_connections_holds_under_a_burst() -> None:
    async with serve(silent_model(), max_connections=NUM_HANDLES // 2) as server:
        with waiting(server, NUM_CLIENTS, LAST) as clients:
            reading = asyncio.gather(*map(read_all, clients))
            await until(lambda: len(server.model.futures) == NUM_HANDLES // 2)
            await until(lambda: len(server.connections) == NUM_HANDLES // 2)
            for future in server.model.futures:
                future.set_result(result())
            starts = [answer[:12] for answer in await reading]
        assert starts.count(b"HTTP/1.1 200") == NUM_HANDLES // 2
        # A client that has sent a request may be reset before it reads why it is turned away.
        assert set(starts) <= {b"HTTP/1.1 200", b"HTTP/1.1 503", b""}


async def test_those_that_wait_to_be_accepted_are_answered_at_the_end() -> None:
    async with serve() as server:
        with waiting(server, NUM_CLIENTS, ONE) as clients:
            reading = asyncio.gather(*map(read_all, clients))
            address = server.listener.getsockname()
            await server.server.move_clients_away()
            answers = await reading
        assert {answer[:12] for answer in answers} == {b"HTTP/1.1 200"}
        assert all(b"\r\nconnection: close\r\n" in answer for answer in answers)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")
async def test_burst_over_tls_is_answered(tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(Path(certificate), Path(key))
    theirs = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    theirs.check_hostname, theirs.verify_mode = False, ssl.CERT_NONE
    async with serve(tls=context) as server:
        with waiting(server, NUM_CLIENTS) as clients:

            async def ask(client: socket.socket) -> bytes:
                reader, writer = await asyncio.open_connection(
                    sock=client, ssl=theirs, server_hostname="localhost"
                )
                writer.write(LAST)
                answer = await reader.read()
                writer.close()
                await writer.wait_closed()
                return answer

            answers = await asyncio.gather(*map(ask, clients))
        assert {answer[:12] for answer in answers} == {b"HTTP/1.1 200"}


async def test_connections_have_what_uvicorn_gives_each_and_share_nothing_of_their_own() -> None:
    async with serve() as server, server.connect(), server.connect(), server.connect():
        await until(lambda: len(server.connections) == 3)
        config, state = server.server.config, server.server.server_state
        theirs = vars(HttpToolsProtocol(config, state, {}))
        first, second, third = map(vars, server.connections)
        for one, other in ((first, second), (second, third)):
            assert theirs.keys() <= one.keys()
            shared = {name for name in one if one[name] is other[name] and _can_change(one[name])}
            assert shared <= _OF_THE_SERVER


def _can_change(value: Any) -> bool:
    return not (value is None or isinstance(value, (str, bytes, int, float, tuple, type)))


@pytest.mark.parametrize(
    "request_",
    [LAST, GET, LAST[:-9], POST + b"content-length: 2\r\n\r\nx"],
    ids=["whole", "refused", "half a head", "half a body"],
)
async def test_closed_connection_is_freed_without_the_collector(request_: bytes) -> None:
    async with serve() as server:
        gc.collect()
        gc.disable()
        try:
            async with server.connect() as client:
                await until(lambda: server.connections)
                alive = weakref.WeakSet(server.connections)
                client.send(request_)
                await until(lambda: server.statuses or server.use.unfinished_bytes)
            await until(lambda: not alive)
        finally:
            gc.enable()


async def test_application_is_told_the_addresses_of_its_caller() -> None:
    scopes: list[Any] = []

    def around(app: Any) -> Any:
        async def noting(scope: Any, receive: Any, send: Any) -> None:
            scopes.append(scope)
            await app(scope, receive, send)

        return noting

    call = ROUTES["asgi"] + b"connection: close\r\ncontent-length: 1\r\n\r\nx"
    async with serve(around=around) as server:
        with waiting(server, 1, call) as (client,):
            assert b" 200 " in await read_all(client)
            (scope,) = scopes
            assert scope["server"] == server.listener.getsockname()
            assert scope["client"] == client.getsockname()
            assert scope["scheme"] == "http"
