"""Large bodies go into the arena as they come, and nobody can tell. Over real sockets."""

import asyncio
import contextlib
import random
import zlib
from collections.abc import AsyncIterator, Sequence

import pytest

from inferpool.models.spec import TensorSpec
from inferpool.service.errors import UnavailableError
from inferpool.service.queue.instance import (
    Buffer,
    Instance,
    InstanceSteps,
    SlotOwner,
    StreamReader,
)
from inferpool.workers.host.engine import OnParts
from inferpool.workers.shared.arena import Arena
from inferpool.workers.shared.messages import BatchDone, ItemRef
from tests.fakes import FakeWorker
from tests.service.api.fakes import FakeModel
from tests.service.api.server import POST, PredictServer, RawClient, serve, until
from tests.service.pools import make_dispatcher

KIB = 1024
pytestmark = pytest.mark.usefixtures("uvloop")


class SummingWorker(FakeWorker):
    """A worker that answers with the checksum of what lies in the arena."""

    def __init__(self, arena: Arena) -> None:
        super().__init__()
        self._arena = arena

    def run(
        self, items: Sequence[ItemRef], on_parts: OnParts | None = None
    ) -> asyncio.Future[BatchDone]:
        future = super().run(items, on_parts)
        sums = [zlib.crc32(self._arena.read(each.offset, each.num_bytes)) for each in items]
        asyncio.get_running_loop().call_soon(self.answer, [b"%d" % each for each in sums])
        return future


class StoredModel(FakeModel):
    """A model whose payloads go through a dispatcher into an arena."""

    def __init__(self, arena_bytes: int = 8 << 20) -> None:
        super().__init__()
        self.arena = Arena(arena_bytes)
        self.dispatcher = make_dispatcher(self.arena)
        self.dispatcher.attach(SummingWorker(self.arena))
        self.num_read_into_slots = 0
        self.refusal: UnavailableError | None = None

    def submit(
        self,
        ref: ItemRef,
        chunks: Sequence[Buffer],
        steps: InstanceSteps | None = None,
        owner: SlotOwner | None = None,
        reader: StreamReader | None = None,
    ) -> Instance:  # type: ignore[override]  # a real one, where the fake's callers need no more
        if self.refusal is not None:
            raise self.refusal
        self.num_read_into_slots += owner is not None
        return self.dispatcher.submit(ref, chunks, steps, owner, reader=reader)


@contextlib.asynccontextmanager
async def serve_stored(
    arena_bytes: int = 8 << 20,
) -> AsyncIterator[tuple[PredictServer, StoredModel]]:
    model = StoredModel(arena_bytes)
    async with serve(model) as server:
        server.protocol.predict.slots = model.arena
        yield server, model
        await until(lambda: not server.connections)
    assert (model.arena.used_bytes, model.arena.open_bytes) == (0, 0)
    model.arena.close()


def call(body: bytes) -> bytes:
    return POST + b"content-length: %d\r\n\r\n" % len(body) + body


async def ask(client: RawClient, body: bytes) -> None:
    answer = await client.ask(call(body))
    assert (answer.status, answer.json) == (200, {"predictions": [zlib.crc32(body)]})


async def warm(client: RawClient, body: bytes) -> None:
    """Make a head known, then how its body is read, and then have the next one read directly."""
    for _ in range(3):
        await ask(client, body)


async def send_part(client: RawClient, model: StoredModel, body: bytes, num_bytes: int) -> None:
    """Send a part of a call, and wait until it has a slot."""
    before = model.arena.open_bytes
    client.send(call(body)[: -len(body) + num_bytes])
    await until(lambda: model.arena.open_bytes > before)


@pytest.mark.parametrize("seed", range(6))
async def test_bodies_are_read_alike_however_their_bytes_come(seed: int) -> None:
    chance = random.Random(seed)
    sizes = (1, 3000, 70_000, 300_000, 999_990, 1_000_010)
    async with serve_stored() as (server, model), server.connect() as client:
        for size in sizes:
            await warm(client, chance.randbytes(size))
        for _ in range(12):
            bodies = [chance.randbytes(chance.choice(sizes)) for _ in range(chance.choice((1, 3)))]
            sending = asyncio.create_task(send_in_pieces(client, chance, bodies))
            for body in bodies:
                answer = await client.read_answer()
                assert (answer.status, answer.json) == (200, {"predictions": [zlib.crc32(body)]})
            await sending
        assert model.num_read_into_slots


async def send_in_pieces(client: RawClient, chance: random.Random, bodies: list[bytes]) -> None:
    stream, start = b"".join(map(call, bodies)), 0
    while start < len(stream):
        end = start + chance.choice((1, 700, 2048, 66_000, 400_000))
        client.send(stream[start:end])
        start = end
        await client.writer.drain()
        await asyncio.sleep(chance.choice((0, 0, 0.001)))


async def test_a_body_of_a_known_head_goes_into_its_slot_as_it_comes() -> None:
    body = random.Random(0).randbytes(300_000)
    async with serve_stored() as (server, model), server.connect() as client:
        await warm(client, body)
        num = model.num_read_into_slots
        await send_part(client, model, body, 100_000)
        client.send(body[100_000:])
        answer = await client.read_answer()
        assert answer.json == {"predictions": [zlib.crc32(body)]}
        assert model.num_read_into_slots == num + 1
        await ask(client, b"small")
        await ask(client, body)
        assert server.statuses == [200] * 6


async def test_calls_behind_a_large_body_are_answered_in_order() -> None:
    bodies = [random.Random(number).randbytes(260_000 + number) for number in range(6)]
    async with serve_stored() as (server, _), server.connect() as client:
        for body in bodies:
            await warm(client, body)
        client.send(b"".join(map(call, bodies)) + call(b"x"))
        for body in (*bodies, b"x"):
            assert (await client.read_answer()).json == {"predictions": [zlib.crc32(body)]}


async def test_a_client_that_hangs_up_leaves_its_slot() -> None:
    body = bytes(300_000)
    async with serve_stored() as (server, model):
        async with server.connect() as client:
            await warm(client, body)
            await send_part(client, model, body, 50_000)
        await until(lambda: not model.arena.used_bytes)
        assert server.statuses == [200, 200, 200, 499]


async def test_half_a_body_is_refused_when_the_server_stops_and_leaves_its_slot() -> None:
    body = bytes(300_000)
    async with serve_stored() as (server, model), server.connect() as client:
        await warm(client, body)
        await send_part(client, model, body, 50_000)
        server.shut_connections_down()
        assert (await client.read_answer()).status == 503
        assert not model.arena.used_bytes
        client.send(body[50_000:])  # is read and dropped


async def test_a_refused_body_leaves_its_slot_and_the_connection_goes_on() -> None:
    body = bytes(300_000)
    async with serve_stored() as (server, model), server.connect() as client:
        await warm(client, body)
        model.refusal = UnavailableError("not now", retry_after_s=1)
        await send_part(client, model, body, 50_000)
        assert await client.status(body[50_000:]) == 503
        assert not model.arena.used_bytes
        model.refusal = None
        await warm(client, body)


async def test_a_body_in_a_slot_is_decoded_anew_if_its_model_has_learnt_its_inputs() -> None:
    body = random.Random(0).randbytes(300_000)
    async with serve_stored() as (server, model), server.connect() as client:
        await warm(client, body)
        await send_part(client, model, body, 50_000)
        model.inputs = [TensorSpec(name="x", dtype="uint8", shape=(-1,))]
        client.send(body[50_000:])
        assert (await client.read_answer()).json == {"predictions": [zlib.crc32(body)]}


async def test_slow_clients_hold_a_part_of_the_arena_and_others_go_on() -> None:
    body, large = bytes(300_000), bytes(1_000_000)
    async with serve_stored(4 << 20) as (server, model), contextlib.AsyncExitStack() as stack:
        slow = [await stack.enter_async_context(server.connect()) for _ in range(16)]
        for client in slow:
            await warm(client, body)
        for client in slow:
            client.send(call(body)[:-100_000])
        half = 16 * (len(body) - 100_000)
        await until(lambda: server.use.unfinished_bytes >= half)
        assert model.arena.open_bytes == 2 * 512 * KIB
        async with server.connect() as other:
            await warm(other, large)
        for client in slow:
            answer = await client.ask(body[-100_000:])
            assert answer.json == {"predictions": [zlib.crc32(body)]}


@pytest.mark.parametrize("num_bytes", [0, 100_000])
async def test_a_whole_body_gets_the_room_of_slots_that_are_not_whole(num_bytes: int) -> None:
    slow, large = random.Random(0).randbytes(300_000), bytes(1_200_000)
    async with serve_stored(2 << 20) as (server, model), server.connect() as client:
        await warm(client, slow)
        await send_part(client, model, slow, num_bytes)
        async with server.connect() as other:
            await ask(other, large)  # takes all of the arena
        assert model.arena.open_bytes == 0
        client.send(slow[num_bytes:])
        assert (await client.read_answer()).json == {"predictions": [zlib.crc32(slow)]}
        await warm(client, slow)
