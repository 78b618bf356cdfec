"""Connections whose client still sends behind its last answer."""

import asyncio
from typing import Any

import pytest

from inferpool.service.api.wire.incoming import (
    MAX_LINGER_BYTES,
    MAX_LINGER_S,
    Lingering,
)
from tests.service.api.server import NOBODY, ROUTES, serve, until
from tests.virtual_time import run_in_virtual_time

MIB = 1 << 20
BODY = bytes(8 * MIB)
LENGTH = b"content-length: %d\r\n" % len(BODY)


def crashing(app: Any) -> Any:
    async def answer(scope: Any, receive: Any, send: Any) -> None:
        raise RuntimeError("on purpose")

    return answer


@pytest.mark.parametrize("line", [b"", b"connection: close\r\n"], ids=["kept", "closing"])
async def test_a_crash_of_the_application_reaches_a_client_that_sends_on(line: bytes) -> None:
    async with serve(around=crashing) as server, server.connect() as client:
        client.send(ROUTES["asgi"] + line + LENGTH + b"\r\n" + BODY)
        await client.writer.drain()
        assert (await client.read_head())[0] == 500


@pytest.mark.parametrize("head", [NOBODY, NOBODY.replace(b"/predict", b"/mounted/predict")])
async def test_a_lingering_connection_is_the_first_to_make_room(head: bytes) -> None:
    async with serve(max_connections=1) as server, server.connect() as lingering:
        lingering.send(head + LENGTH + b"\r\nabc")
        assert (await lingering.read_answer()).headers["connection"] == "close"
        server.connections[0].idle_since -= 1  # younger ones may be about to call
        assert await server.is_well()
        await until(lambda: not server.connections)
        assert await lingering.is_closed()


def test_a_client_that_sends_on_is_dropped_after_a_number_of_bytes() -> None:
    async def main() -> None:
        closed = []
        lingering = Lingering(lambda: closed.append(1))
        for _ in range(MAX_LINGER_BYTES // MIB):
            lingering.take(MIB)
        assert closed == []
        lingering.take(1)
        assert closed == [1]

    run_in_virtual_time(main(), 60)


@pytest.mark.parametrize(("sends", "most_s"), [(True, MAX_LINGER_S), (False, 2.0)])
def test_a_client_is_dropped_after_a_time_and_sooner_if_it_is_silent(
    sends: bool, most_s: float
) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        closed = loop.create_future()
        began = loop.time()
        lingering = Lingering(lambda: closed.set_result(None))
        while not closed.done():
            if sends:
                lingering.take(1)
            await asyncio.sleep(0.1)
        assert most_s <= loop.time() - began <= most_s + 0.2

    run_in_virtual_time(main(), 60)
