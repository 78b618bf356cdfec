"""Workers, in processes of their own, whose models answer in parts."""

import asyncio
import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from inferpool.models.spec import Placement
from inferpool.workers.host.engine import WorkerHandle
from inferpool.workers.host.local import LocalEngine
from inferpool.workers.shared.errors import WorkerLostError
from inferpool.workers.shared.messages import BatchDone, ItemError, StreamPart
from tests.workers.contract import HANGS_AFTER_S, hurried, started, until
from tests.workers.streams.driven import counted


class Parts:
    """What comes of the streams of one batch."""

    def __init__(self) -> None:
        self.of: dict[int, list[Any]] = defaultdict(list)
        self.ends: dict[int, ItemError | None] = {}

    def __call__(self, parts: Sequence[StreamPart]) -> None:
        for part in parts:
            if isinstance(part.value, bytes):
                self.of[part.index].append(json.loads(part.value))
            else:
                self.ends[part.index] = part.value


async def start(engine: LocalEngine, kind: str, **changes: object) -> WorkerHandle:
    return await started(engine, source=f"tests.streaming_model:{kind}", **changes)


def run(worker: WorkerHandle, *items: Any) -> tuple[Parts, "asyncio.Future[BatchDone]"]:
    parts = Parts()
    return parts, worker.run(items, parts)


@pytest.mark.parametrize("kind", ["CountingStream", "AsyncCountingStream", "CountingBatches"])
async def test_streams_of_a_process_come_complete_and_in_order(engine: LocalEngine, put, kind: str):
    worker = await start(engine, kind)
    assert worker.ready.interface.streams
    for _ in range(5):
        first, second = run(worker, put(counted(5, 100))), run(worker, put(counted(7, 3)))
        await asyncio.gather(first[1], second[1])
        assert first[0].of == {0: list(range(5, 105))}
        assert second[0].of == {0: [7, 8, 9]}
        assert first[0].ends == second[0].ends == {0: None}
    parts, done = run(worker, put(counted(5, 3, do="raise", at=1)))
    await done
    assert parts.of == {0: [5]}
    assert isinstance(parts.ends[0], ItemError)
    await worker.stop(60)


async def test_streams_join_in_a_process_and_are_dropped(engine: LocalEngine, put, tmp_path: Path):
    closed = tmp_path / "closed"
    worker = await start(
        engine, "JoiningStream", options={"closed": str(closed)}, max_batch_size=64
    )
    assert worker.credit == 64
    runs = [run(worker, put(counted(1000 * n, 30))) for n in range(20)]
    endless, done = run(worker, put(counted(10**6, 10**6)))
    await asyncio.gather(*(done for _, done in runs))
    for number, (parts, _) in enumerate(runs):
        assert parts.of == {0: list(range(1000 * number, 1000 * number + 30))}
    worker.drop(done, [0])
    await done
    assert endless.of[0] == list(range(10**6, 10**6 + len(endless.of[0])))
    assert "1000000\n" in closed.read_text(), "the model did not hear of its last stream"
    await worker.stop(60)


@pytest.mark.parametrize("deed", ["kill", "exit"])
async def test_stream_whose_worker_dies_is_lost_with_its_parts_so_far(
    engine: LocalEngine, put, deed: str
):
    worker = await start(engine, "CountingStream")
    parts, done = run(worker, put(counted(5, 9, do=deed, at=4)))
    with pytest.raises(WorkerLostError) as lost:
        await done
    assert lost.value.started
    assert parts.of == {0: [5, 6, 7, 8]}
    assert (await worker.wait()).was_at_work


async def test_lost_device_ends_the_worker(engine: LocalEngine, put):
    worker = await start(engine, "CountingBatches")
    parts, done = run(worker, put(counted(5, 9)), put(counted(6, 9, do="device", at=2)))
    with pytest.raises(WorkerLostError):
        await done
    assert parts.of == {0: [5, 6], 1: [6, 7]}
    assert (await worker.wait()).cause == "device"


@pytest.mark.simulated
@pytest.mark.parametrize("kind", ["CountingStream", "JoiningStream", "CountingBatches"])
async def test_streams_of_an_accelerator_are_the_same(engine: LocalEngine, put, kind: str):
    worker = await start(engine, kind, placement=Placement(devices=("sim:0",)))
    assert worker.ready.is_accelerated
    runs = [run(worker, put(counted(100 * n, 10))) for n in range(5)]
    await asyncio.gather(*(done for _, done in runs))
    assert [parts.of for parts, _ in runs] == [
        {0: list(range(100 * n, 100 * n + 10))} for n in range(5)
    ]
    await worker.stop(60)


@pytest.mark.measures
async def test_long_stream_is_no_hang_but_a_step_that_never_ends_is(engine: LocalEngine, put):
    worker = await hurried(engine, source="tests.streaming_model:CountingStream")
    parts, done = run(worker, put(counted(5, 20, delay_s=HANGS_AFTER_S / 5)))
    await done
    assert len(parts.of[0]) == 20
    parts, done = run(worker, put(counted(5, 9, do="hang", at=2)))
    with pytest.raises(WorkerLostError):
        await done
    assert parts.of == {0: [5, 6]}
    assert (await worker.wait()).cause == "hang"


async def test_process_leaves_once_its_streams_are_over(engine: LocalEngine, put):
    worker = await start(engine, "JoiningStream")
    parts, done = run(worker, put(counted(5, 50)))
    await until(lambda: parts.of[0])
    await worker.stop(60)
    assert (await done).outcomes == [b""]
    assert parts.of[0] == list(range(5, 55))
    assert (await worker.wait()).reason == "stopped"


async def test_other_models_import_nothing_of_streams(engine: LocalEngine, put):
    worker = await started(engine, source="tests.workers.streams.plain_model:Imports")
    done = await worker.run([put(1)])
    (found,) = done.outcomes
    assert isinstance(found, bytes)
    assert [name for name in json.loads(found) if "stream" in name] == []
    await worker.stop(60)
