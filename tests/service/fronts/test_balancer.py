import asyncio
import socket
from collections.abc import Iterator

import pytest

from inferpool.service.fronts.balancer import ConnectionBalancer


class FakeTaker:
    def __init__(self, *, takes: bool = True) -> None:
        self.num_open = 0
        self.takes = takes

    def give(self, connection: socket.socket) -> bool:
        assert connection.getpeername()
        self.num_open += self.takes
        return self.takes


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


async def connect(listener: socket.socket, num: int) -> list[socket.socket]:
    return [socket.create_connection(listener.getsockname()) for _ in range(num)]


async def until(claim) -> None:
    async with asyncio.timeout(10):
        while not claim():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


def test_a_burst_of_connections_is_shared_out_evenly(listener):
    async def go() -> None:
        takers = [FakeTaker(), FakeTaker(), FakeTaker()]
        takers[2].num_open = 10
        balancer = ConnectionBalancer(listener, lambda: takers)
        balancer.open()
        clients = await connect(listener, 20)
        await until(lambda: sum(taker.num_open for taker in takers) == 30)
        assert [taker.num_open for taker in takers] == [10, 10, 10]
        balancer.close()
        for client in clients:
            client.close()

    asyncio.run(go())


def test_what_a_front_does_not_take_another_gets(listener):
    async def go() -> None:
        takers = [FakeTaker(takes=False), FakeTaker()]
        balancer = ConnectionBalancer(listener, lambda: takers)
        balancer.open()
        clients = await connect(listener, 4)
        await until(lambda: takers[1].num_open == 4)
        balancer.close()
        for client in clients:
            client.close()

    asyncio.run(go())


def test_a_burst_waits_for_fronts_that_take_no_more_for_a_moment(listener):
    async def go() -> None:
        taker = FakeTaker(takes=False)
        balancer = ConnectionBalancer(listener, lambda: [taker])
        balancer.open()
        clients = await connect(listener, 20)
        await asyncio.sleep(0.1)
        taker.takes = True
        await until(lambda: taker.num_open == 20)
        taker.takes = False
        clients += await connect(listener, 1)
        await asyncio.sleep(0.1)
        balancer.close()
        with pytest.raises(ConnectionError):
            socket.create_connection(clients[0].getpeername())
        assert clients[-1].recv(1) == b""
        for client in clients:
            client.close()

    asyncio.run(go())


def test_connections_wait_while_nobody_is_there_and_none_is_lost(listener):
    async def go() -> None:
        takers: list[FakeTaker] = []
        balancer = ConnectionBalancer(listener, lambda: takers)
        balancer.open()
        clients = await connect(listener, 3)
        await asyncio.sleep(0.1)
        takers.append(FakeTaker())
        await until(lambda: takers[0].num_open == 3)
        clients += await connect(listener, 2)
        balancer.close()
        assert takers[0].num_open == 5
        with pytest.raises(ConnectionError):
            socket.create_connection(clients[0].getpeername())
        for client in clients:
            client.close()

    asyncio.run(go())


def test_the_last_are_seen_in_though_the_doorway_pauses(listener):
    async def go() -> None:
        taker = FakeTaker(takes=False)
        balancer = ConnectionBalancer(listener, lambda: [taker])
        balancer.open()
        clients = await connect(listener, 1)
        await until(lambda: not balancer._is_open)
        clients += await connect(listener, 99)
        taker.takes = True
        await balancer.accept_last()
        assert taker.num_open == 100
        with pytest.raises(ConnectionError):
            socket.create_connection(clients[0].getpeername())
        for client in clients:
            client.close()

    asyncio.run(go())
