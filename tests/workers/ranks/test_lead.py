"""The lead of a pipeline has several batches under way at once, in real processes."""

import asyncio
import math
import time
from dataclasses import replace

import pytest

from inferpool.models.spec import Placement
from inferpool.workers.host.engine import WorkerId
from inferpool.workers.host.local import LocalEngine
from inferpool.workers.host.local_worker import LocalWorker
from inferpool.workers.shared.config import WorkerConfig
from inferpool.workers.shared.errors import WorkerLostError
from tests.acting_stages import STAGE_S
from tests.workers.contract import answers, config_of, is_quick

pytestmark = pytest.mark.measures


async def started(engine: LocalEngine, **changes: object) -> LocalWorker:
    return await serving(config_of("tests.acting_stages:ActingStages", **changes), 2, engine)


async def serving(config: WorkerConfig, num_ranks: int, engine: LocalEngine) -> LocalWorker:
    placement = Placement(devices=("cpu",) * num_ranks, split="pipeline")
    config = replace(config, placement=placement, credit=1 + num_ranks)
    return await engine.start(WorkerId(model="m", slot=0), config, lambda stage: None)


async def test_stages_work_on_several_batches_at_once(engine: LocalEngine, put):
    worker = await started(engine)

    async def ten_batches() -> float:
        began = time.monotonic()
        batches = [worker.run([put({"n": n, "do": "sleep", "stage": -1})]) for n in range(10)]
        assert [answers(await batch) for batch in batches] == [[2 * n] for n in range(10)]
        return time.monotonic() - began

    assert await is_quick(ten_batches, 18 * STAGE_S)  # 11 overlapping, 20 in turn
    await worker.stop(5)


async def test_error_of_a_stage_is_that_of_its_own_batch(engine: LocalEngine, put):
    worker = await started(engine)
    for stage in (0, 1):
        bad = {"n": 7, "do": "raise", "stage": stage}
        batches = [
            worker.run([put({"n": n}), put(bad if n % 3 else {"n": 7}), put({"n": n + 1})])
            for n in range(12)
        ]
        for n, batch in enumerate(batches):
            middle = "model_error" if n % 3 else 14
            assert answers(await batch) == [2 * n, middle, 2 * n + 2]
    assert worker.vitals().num_batches == 24
    await worker.stop(5)


async def test_sentinel_comes_after_all_that_is_under_way(engine: LocalEngine, put):
    worker = await started(engine)
    batches = [worker.run([put({"n": n, "do": "sleep", "stage": -1})]) for n in range(3)]
    await worker.stop(10)
    assert [answers(await batch) for batch in batches] == [[0], [2], [4]]
    assert (await worker.wait()).reason == "stopped"


@pytest.mark.parametrize(("act", "reason"), [("kill", "SIGKILL"), ("hang", "hung: a batch")])
async def test_death_loses_each_batch_that_is_under_way_once(
    engine: LocalEngine, put, act: str, reason: str
):
    worker = await started(engine, batch_timeout_s=2.0)
    batches = [
        worker.run([put({"n": 1, "do": "sleep", "stage": 1})]),
        worker.run([put({"n": 2, "do": act, "stage": 1})]),
        worker.run([put({"n": 3})]),
    ]
    try:
        assert answers(await batches[0]) == [2]
    except WorkerLostError:  # the answer was on its way between the ranks
        assert act == "kill"
    for batch in batches[1:]:
        with pytest.raises(WorkerLostError, match=reason) as lost:
            await batch
        # The lead may not have come to the last one when the other rank is killed.
        assert lost.value.started or (act == "kill" and batch is batches[2])
    assert (await worker.wait()).was_at_work


async def test_waits_for_other_batches_are_not_a_batch_s_own_time(engine: LocalEngine, put):
    limit_s = 14 * STAGE_S
    config = config_of("tests.acting_stages:ActingStages", batch_timeout_s=limit_s)
    long = {"n": 3, "do": "sleep", "stage": 1, "calls": 6}

    async def longest_own_s() -> float:
        worker = await serving(config, 3, engine)
        began = time.monotonic()
        batches = [worker.run([put(long)]) for _ in range(3)]
        try:
            done = [await batch for batch in batches]
        except WorkerLostError:  # a stage took longer than it sleeps, and so all its batches did
            await worker.wait()
            return math.inf
        assert time.monotonic() - began > 18 * STAGE_S
        for each in done:
            assert answers(each) == [6]
            assert each.compute_s >= 6 * STAGE_S
            assert began + 6 * STAGE_S <= each.compute_began + each.compute_s <= time.monotonic()
        await worker.stop(5)
        return max(each.compute_s for each in done)

    assert await is_quick(longest_own_s, limit_s)


async def test_batch_that_lets_others_pass_for_ever_hangs(engine: LocalEngine, put):
    worker = await started(engine, batch_timeout_s=5 * STAGE_S)
    endless = worker.run([put({"n": 1, "do": "sleep", "stage": 1, "calls": 10_000})])
    num_answered = 0
    while not endless.done():
        try:
            done = await worker.run([put({"n": 2, "do": "sleep", "stage": 1})])
        except WorkerLostError:
            break
        assert answers(done) == [4]
        num_answered += 1
    with pytest.raises(WorkerLostError, match="hung: a batch"):
        await endless
    assert num_answered


async def test_canary_that_is_due_while_idle_is_answered(engine: LocalEngine, put):
    worker = await started(engine)
    assert worker.vitals().last_answer_age_s > 0
    await asyncio.sleep(0)
    worker.carrier.give_canary(5.0)
    assert answers(await worker.run([put({"n": 4})])) == [8]
    assert not worker.carrier.held
    await worker.stop(5)
