"""The last connections of a listening socket, with the kernel's own backlog."""

import asyncio
import ctypes
import socket
import struct
import sys
from collections.abc import Iterator

import pytest

from service import backlog

SO_ATTACH_FILTER, SO_DETACH_FILTER = 26, 27
linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells and filters")


@pytest.fixture(params=["127.0.0.1", "::1", "::"])
def listener(request: pytest.FixtureRequest) -> Iterator[socket.socket]:
    family = socket.AF_INET6 if ":" in request.param else socket.AF_INET
    with socket.socket(family) as listener:
        listener.bind((request.param, 0))
        listener.listen(64)
        listener.setblocking(False)
        yield listener


def connect(listener: socket.socket, *, hears: bool = True) -> socket.socket:
    """Begin to connect; one that hears nothing leaves its handshake half done."""
    address = {"::": "127.0.0.1"}.get(listener.getsockname()[0], listener.getsockname()[0])
    client = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    client.setblocking(False)
    if not hears:
        code = ctypes.create_string_buffer(struct.pack("=HBBI", 0x06, 0, 0, 0))  # drop all
        about = struct.pack("@HP", 1, ctypes.addressof(code))
        client.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, about)
    client.connect_ex((address, listener.getsockname()[1]))
    return client


def is_connected(client: socket.socket) -> bool:
    try:
        client.getpeername()
    except OSError:
        return False
    return True


@linux
def test_all_are_accepted_whose_handshake_has_begun_and_nobody_else(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(backlog, "_LAST_IN_S", 30)  # the kernel asks again after a second or three
    accepted: list[socket.socket] = []
    newcomers: list[socket.socket] = []

    def accept() -> None:
        while True:
            try:
                accepted.append(listener.accept()[0])
            except BlockingIOError:
                return

    async def test() -> None:
        early = [connect(listener) for _ in range(3)]
        late = connect(listener, hears=False)
        assert backlog._num_half_open(listener) == 1
        taking = asyncio.create_task(backlog.take_last(listener, accept))
        await asyncio.sleep(0)
        assert len(accepted) == len(early)
        assert not taking.done()  # for the sake of the late one
        newcomers.append(connect(listener))
        late.setsockopt(socket.SOL_SOCKET, SO_DETACH_FILTER, 0)
        await taking
        listener.close()
        assert len(accepted) == 4
        assert all(map(is_connected, [*early, late]))
        assert not is_connected(newcomers[0])
        for each in [*early, late]:
            each.close()

    asyncio.run(test())
    for each in accepted + newcomers:
        each.close()


@linux
def test_a_handshake_that_never_ends_is_not_waited_for_long(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(backlog, "_LAST_IN_S", 0.1)
    with connect(listener, hears=False):
        asyncio.run(asyncio.wait_for(backlog.take_last(listener, lambda: None), 10))
