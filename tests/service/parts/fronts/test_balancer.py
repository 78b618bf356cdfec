import asyncio
import contextlib
import socket
from collections.abc import Iterator

import pytest

from inferpool.service.parts.fronts.balancer import ConnectionBalancer
from tests.service.api.server import until


class FakeTaker:
    def __init__(self, *, takes: bool = True) -> None:
        self.num_open = 0
        self.takes = takes

    def give(self, connection: socket.socket) -> bool:
        assert connection.getpeername()
        self.num_open += self.takes
        return self.takes


class ConnectedClients:
    """A listening socket, and those that connect to it."""

    def __init__(self) -> None:
        self.opened = contextlib.ExitStack()
        self.listener = self.opened.enter_context(socket.create_server(("127.0.0.1", 0)))
        self.address = self.listener.getsockname()

    def connect(self, num: int = 1) -> socket.socket:
        """Connect several; returns the last."""
        for _ in range(num):
            client = self.opened.enter_context(socket.create_connection(self.address))
        return client

    def balance(self, *takers: FakeTaker) -> ConnectionBalancer:
        balancer = ConnectionBalancer(self.listener, lambda: takers)
        balancer.open()
        return balancer


@pytest.fixture
def clients() -> Iterator[ConnectedClients]:
    clients = ConnectedClients()
    with clients.opened:
        yield clients


async def test_a_burst_is_shared_out_evenly_among_those_who_take_it(clients: ConnectedClients):
    takers = [FakeTaker(takes=False), FakeTaker(), FakeTaker(), FakeTaker()]
    takers[3].num_open = 10
    balancer = clients.balance(*takers)
    clients.connect(20)
    await until(lambda: sum(taker.num_open for taker in takers) == 30)
    assert [taker.num_open for taker in takers] == [0, 10, 10, 10]
    balancer.close()


async def test_a_burst_waits_for_fronts_that_take_no_more_for_a_moment(clients: ConnectedClients):
    taker = FakeTaker(takes=False)
    balancer = clients.balance(taker)
    clients.connect(20)
    await asyncio.sleep(0.1)
    taker.takes = True
    await until(lambda: taker.num_open == 20)
    taker.takes = False
    last = clients.connect()
    await asyncio.sleep(0.1)
    balancer.close()
    with pytest.raises(ConnectionError):
        clients.connect()
    assert last.recv(1) == b""


async def test_a_connection_in_hand_needs_no_later_one_to_be_given_out(clients: ConnectedClients):
    taker = FakeTaker(takes=False)
    balancer = clients.balance(taker)
    clients.connect()
    await until(lambda: balancer._in_hand is not None)
    taker.takes = True
    async with asyncio.timeout(60):
        await until(lambda: taker.num_open)
    balancer.close()


async def test_connections_wait_while_there_is_no_front_and_none_is_lost(clients: ConnectedClients):
    takers: list[FakeTaker] = []
    balancer = ConnectionBalancer(clients.listener, lambda: takers)
    balancer.open()
    clients.connect(3)
    await asyncio.sleep(0.1)
    takers.append(FakeTaker())
    await until(lambda: takers[0].num_open == 3)
    clients.connect(2)
    balancer.close()
    assert takers[0].num_open == 5
    with pytest.raises(ConnectionError):
        clients.connect()


async def test_the_last_connections_are_accepted_even_in_a_pause(clients: ConnectedClients):
    taker = FakeTaker(takes=False)
    balancer = clients.balance(taker)
    clients.connect()
    await until(lambda: not balancer._is_open)
    clients.connect(99)
    taker.takes = True
    await balancer.accept_last()
    assert taker.num_open == 100
    with pytest.raises(ConnectionError):
        clients.connect()
