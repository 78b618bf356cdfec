"""Replicas that are split over simulated devices, in real worker processes.

Devices order transfers as NCCL does: what waits for a circle there hangs here.
"""

from dataclasses import replace
from pathlib import Path

import pytest

from inferpool.models.spec import Placement
from inferpool.workers.host.engine import WorkerId
from inferpool.workers.host.local import LocalEngine
from inferpool.workers.host.local_worker import LocalWorker
from inferpool.workers.shared.errors import WorkerLostError
from tests.busy_stages import BUSY_S, MODEL
from tests.workers.contract import answers, config_of, is_gone, is_quick

pytestmark = pytest.mark.simulated

APART, SHARED, THREE = ("sim:0", "sim:1"), ("sim:0", "sim:0"), ("sim:0", "sim:1", "sim:2")


async def started(engine: LocalEngine, devices: tuple[str, ...], **changes: object) -> LocalWorker:
    config = config_of("tests.busy_stages:BusyStages", max_batch_size=4, **changes)
    placement = Placement(devices=devices, split="pipeline")
    config = replace(config, placement=placement, credit=1 + len(devices))
    return await engine.start(WorkerId(model="m", slot=0), config, lambda stage: None)


@pytest.mark.parametrize("devices", [APART, SHARED, THREE])
async def test_batches_and_pieces_in_flight_are_all_answered(
    engine: LocalEngine, put, devices: tuple[str, ...]
):
    worker = await started(engine, devices)
    batches = [worker.run([put({"n": 4 * n + i}) for i in range(4)]) for n in range(40)]
    for n, batch in enumerate(batches):
        assert answers(await batch) == [2 * (4 * n + i) for i in range(4)]
    await worker.stop(5)


@pytest.mark.slow
@pytest.mark.parametrize("devices", [SHARED, THREE])
async def test_device_at_work_holds_up_no_other_stage_nor_the_model_s_code(
    engine: LocalEngine, put, devices: tuple[str, ...], tmp_path: Path
):
    worker = await started(engine, devices, options={"folder": str(tmp_path)})
    for waiting in range(len(devices)):
        for freeing in (MODEL, *range(waiting)):
            first = worker.run([put({"n": 1, "do": "wait", "stage": waiting})])
            second = worker.run([put({"n": 2, "do": "free", "stage": freeing})])
            assert [answers(await batch) for batch in (first, second)] == [[2], [4]]
            (tmp_path / "freed").unlink()
    await worker.stop(5)


@pytest.mark.measures
async def test_own_time_is_that_of_all_stages_and_not_of_other_batches(engine: LocalEngine, put):
    worker = await started(engine, THREE)

    async def longest_own_s() -> float:
        batches = [worker.run([put({"n": n, "do": "busy"})]) for n in range(5)]
        own_s = [(await batch).compute_s for batch in batches]
        assert min(own_s) >= 0.99 * len(THREE) * BUSY_S
        return max(own_s)

    assert await is_quick(longest_own_s, 4.5 * BUSY_S)
    await worker.stop(5)


@pytest.mark.slow
@pytest.mark.parametrize("devices", [APART, SHARED])
@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize(("act", "reason"), [("kill", "SIGKILL"), ("lose", "device")])
async def test_end_of_a_rank_or_its_device_ends_all(
    engine: LocalEngine, put, devices: tuple[str, ...], stage: int, act: str, reason: str
):
    worker = await started(engine, devices)
    pids = [rank.pid for rank in worker.vitals().ranks]
    assert answers(await worker.run([put({"n": 2})])) == [4]
    with pytest.raises(WorkerLostError, match=reason) as lost:
        await worker.run([put({"n": 1, "do": act, "stage": stage})])
    assert f"rank {stage}" in str(lost.value)
    assert lost.value.started
    assert all(map(is_gone, pids))


@pytest.mark.slow
@pytest.mark.measures
@pytest.mark.parametrize("stage", [0, 1])
async def test_device_of_a_stage_that_stands_still_is_found_out(
    engine: LocalEngine, put, stage: int
):
    worker = await started(engine, APART, batch_timeout_s=2.0)
    pids = [rank.pid for rank in worker.vitals().ranks]
    hung = worker.run([put({"n": 1, "do": "hang", "stage": stage})])
    for batch in (hung, worker.run([put({"n": 2})])):
        with pytest.raises(WorkerLostError, match="hung: a batch ran for more than 2 s"):
            await batch
    assert all(map(is_gone, pids))
    assert (await worker.wait()).cause == "hang"
