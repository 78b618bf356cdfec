import asyncio

from inferpool.service.tools.chaos.greed import UnreadConnections
from tests.service.tools.fake_service import serving


async def test_connections_send_all_that_goes_out_read_nothing_and_are_closed():
    received: list[int] = []
    reads_until = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            assert (await reader.readline()).startswith(b"GET / ")
            received.append(1)
            writer.write(b"x" * 10_000_000)
            await reads_until.wait()
            while await reader.read(1 << 16):
                pass
        except ConnectionError:
            received.append(-1)
        finally:
            writer.transport.abort()

    async with serving(serve) as address:
        await UnreadConnections(address=address, num_connections=3, held_s=0.2).open()
        reads_until.set()
        while sum(received):  # noqa: ASYNC110  # until each has noticed the end
            await asyncio.sleep(0.01)
    assert received.count(1) == received.count(-1) == 3
