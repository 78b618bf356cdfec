"""Large outputs pass from a worker to the front end through shared memory."""

import asyncio
import math
import os
import signal
from collections.abc import Iterator

import pytest

from inferpool.models.spec import TensorHeader
from inferpool.workers.host.engine import WorkerId
from inferpool.workers.host.local import LocalEngine, start_forkserver
from inferpool.workers.host.local_worker import LocalWorker
from inferpool.workers.shared.arena import Arena
from inferpool.workers.shared.messages import BatchDone, ItemRef, Outcome, Stored, TensorBlob
from inferpool.workers.shared.outputs import (
    MIN_STORED_BYTES,
    OutputRegion,
    OutputStore,
    StoredError,
)
from tests.workers.contract import config_of, pid_of

LARGE = 4 << 20


@pytest.fixture
def region() -> Iterator[OutputRegion]:
    region = OutputRegion()
    yield region
    region.close()


def outputs_of(done: BatchDone) -> list[bytes]:
    return [outcome[0].buffer for outcome in done.outcomes if isinstance(outcome, list)]


def stored(region: OutputRegion, *places: bytes | Stored) -> list[bytes]:
    """Return the outputs that the front end finds at these places."""
    outcomes: list[Outcome] = [[TensorBlob("y", "uint8", (1,), place)] for place in places]
    return outputs_of(region.find(BatchDone(1, outcomes, 0.0, 0.0, 1)))


def test_large_output_lies_in_the_region_until_its_last_view_is_gone(region: OutputRegion):
    store = OutputStore(region.memory.map)
    data = os.urandom(LARGE)
    place = store.keep(memoryview(data))
    assert isinstance(place, Stored)
    assert store.num_stored == 1
    (view,) = stored(region, place)
    part = view[10:20]
    assert view == data
    del view
    assert region.num_taken == LARGE >> 16
    assert part == data[10:20]
    del part
    assert region.num_taken == 0


def test_small_output_is_sent_inline(region: OutputRegion):
    store = OutputStore(region.memory.map)
    small = os.urandom(MIN_STORED_BYTES - 1)
    assert store.keep(memoryview(small)) == small
    assert store.num_stored == 0


def test_outputs_are_sent_inline_while_the_region_is_full(region: OutputRegion):
    store = OutputStore(region.memory.map)
    data = memoryview(bytes(20 << 20))
    kept = [store.keep(data) for _ in range(7)]
    assert [isinstance(each, Stored) for each in kept] == [True] * 6 + [False]
    views = stored(region, *kept)
    assert all(view == data for view in views)
    del views[2]
    again = store.keep(data)
    assert again == kept[2]


def test_invalid_place_of_an_output_is_an_error(region: OutputRegion):
    for first, num_bytes in ((-1, 5), (0, 0), (0, -5), (2046, 1 << 17), (1 << 40, 1), (0, 1 << 40)):
        with pytest.raises(StoredError):
            stored(region, Stored(first, num_bytes))


def test_views_outlive_the_region(region: OutputRegion):
    other = OutputRegion()
    place = OutputStore(other.memory.map).keep(memoryview(b"y" * LARGE))
    (view,) = stored(other, place)
    other.close()
    del other
    assert view == b"y" * LARGE


@pytest.fixture(scope="module")
def arena() -> Iterator[Arena]:
    start_forkserver()
    arena = Arena(64 << 20)
    yield arena
    arena.close()


async def test_worker_answers_with_4_mib_per_instance_time_and_again_and_leaves_nothing(
    arena: Arena,
):
    data = os.urandom(LARGE)
    offset = arena.put([data], LARGE)
    assert offset is not None
    header = TensorHeader("x", "float32", (LARGE // 4,), 0)
    ref = ItemRef("tensors", offset, LARGE, math.inf, True, (header,))

    config = config_of(source="echo", max_batch_size=8)
    id = WorkerId(model="m", slot=0)
    worker = await LocalEngine(arena).start(id, config, lambda stage: None)
    assert isinstance(worker, LocalWorker)
    try:
        for num in (8, 1, 8, 8):
            done = await worker.run([ref] * num)
            assert worker.outputs.num_taken == num * (LARGE >> 16)
            assert outputs_of(done) == [data] * num
            del done
            await asyncio.sleep(0)  # the future that it came by is in use until then
            assert worker.outputs.num_taken == 0
        done = await worker.run([ref, ref])
    finally:
        os.kill(pid_of(worker), signal.SIGKILL)
        await worker.wait()
    assert outputs_of(done) == [data, data]
    arena.free(offset)
