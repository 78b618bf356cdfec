"""The last connections of a listening socket, with the kernel's own backlog."""

import asyncio
import ctypes
import socket
import struct
import sys
from collections.abc import Iterator
from contextlib import ExitStack, suppress

import pytest

from inferpool.service.api.wire import backlog

SO_ATTACH_FILTER, SO_DETACH_FILTER = 26, 27
LONG_S = 600.0
linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells and filters")


class AcceptingServer:
    """A listening socket, those who connect to it, and those of them whom it accepted."""

    def __init__(self, host: str) -> None:
        self.host = host
        self.opened = ExitStack()
        self.listener = self._socket(host)
        self.listener.bind((host, 0))
        self.listener.listen(64)
        self.accepted: list[socket.socket] = []

    def _socket(self, host: str) -> socket.socket:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        opened = self.opened.enter_context(socket.socket(family))
        opened.setblocking(False)
        return opened

    def connect(self, *, hears: bool = True) -> socket.socket:
        """Begin to connect; one that hears nothing leaves its handshake half done."""
        address = "127.0.0.1" if self.host == "::" else self.host
        client = self._socket(address)
        if not hears:
            code = ctypes.create_string_buffer(struct.pack("=HBBI", 0x06, 0, 0, 0))  # drop all
            about = struct.pack("@HP", 1, ctypes.addressof(code))
            client.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, about)
        client.connect_ex((address, self.listener.getsockname()[1]))
        return client

    def accept(self) -> None:
        with suppress(BlockingIOError):
            while True:
                self.accepted.append(self.opened.enter_context(self.listener.accept()[0]))


@pytest.fixture(params=["127.0.0.1", "::1", "::"])
def server(request: pytest.FixtureRequest) -> Iterator[AcceptingServer]:
    server = AcceptingServer(request.param)
    with server.opened:
        yield server


def is_connected(client: socket.socket) -> bool:
    try:
        client.getpeername()
    except OSError:
        return False
    return True


@linux
async def test_only_handshakes_that_have_begun_are_accepted(server: AcceptingServer):
    early = [server.connect() for _ in range(3)]
    late = server.connect(hears=False)
    assert backlog._num_half_open(server.listener) == 1
    # The kernel asks the late one again after a second or three.
    taking = asyncio.create_task(
        backlog.take_last(server.listener, server.accept, last_in_s=LONG_S)
    )
    await asyncio.sleep(0)
    assert len(server.accepted) == len(early)
    assert not taking.done()  # for the sake of the late one
    newcomer = server.connect()
    late.setsockopt(socket.SOL_SOCKET, SO_DETACH_FILTER, 0)
    await taking
    server.listener.close()
    assert len(server.accepted) == 4
    assert all(map(is_connected, [*early, late]))
    assert not is_connected(newcomer)


@linux
async def test_a_handshake_that_ends_meanwhile_is_accepted(
    server: AcceptingServer, monkeypatch: pytest.MonkeyPatch
):
    looks = []

    def none_half_open(listener: socket.socket) -> int:
        if not looks:
            listener.setsockopt(socket.SOL_SOCKET, SO_DETACH_FILTER, 0)
            server.connect()
        looks.append(listener)
        return 0

    monkeypatch.setattr(backlog, "_num_half_open", none_half_open)
    await backlog.take_last(server.listener, server.accept, last_in_s=LONG_S)
    assert len(server.accepted) == 1


@linux
async def test_an_endless_handshake_is_not_waited_for(server: AcceptingServer):
    server.connect(hears=False)
    await backlog.take_last(server.listener, lambda: None, last_in_s=0.1)
