"""Workers that compute on the simulated accelerator, and launch batches ahead of time."""

import asyncio

import msgspec
import pytest

from inferpool.models.spec import Placement
from inferpool.workers.decoders.ring import DecodingPlan
from inferpool.workers.host.engine import WorkerHandle
from inferpool.workers.host.local import LocalEngine
from inferpool.workers.shared.errors import WorkerLostError
from inferpool.workers.shared.messages import BatchDone
from tests.workers.contract import Put, answers, started

pytestmark = pytest.mark.simulated


async def start(
    engine: LocalEngine,
    batch_timeout_s: float = 60.0,
    model: str = "AheadModel",
    decoders: int = 0,
    **options: object,
) -> WorkerHandle:
    return await started(
        engine,
        source=f"tests.ahead_model:{model}",
        placement=Placement(devices=("sim:0",)),
        batch_timeout_s=batch_timeout_s,
        decoders=decoders,
        options=options,
    )


async def check_answers(worker: WorkerHandle, put: Put, num: int) -> None:
    """Check that as many batches as a worker may hold at once are all answered right."""
    arrived: list[int] = []
    held = asyncio.Semaphore(worker.credit)

    async def run(number: int) -> None:
        async with held:
            values = range(number * 10, number * 10 + 1 + number % 7)
            done = await worker.run([put({"n": n}) for n in values])
            arrived.append(number)
            assert answers(done) == [2 * n for n in values]

    await asyncio.gather(*map(run, range(num)))
    assert arrived == list(range(num))


@pytest.mark.parametrize("busy_us", [0, 3000])
async def test_thousands_of_answers_come_each_once_and_in_order(
    engine: LocalEngine, put, busy_us: int
):
    worker = await start(engine, busy_us=busy_us)
    assert worker.ready.is_accelerated
    await check_answers(worker, put, 150 if busy_us else 400)
    await worker.stop(5)


async def test_decoders_have_slots_for_all_batches_that_are_under_way(engine: LocalEngine, put):
    worker = await start(engine, model="ApartAheadModel", decoders=2, busy_us=3000)
    plan = msgspec.msgpack.decode(worker.ready.plans["decoders"], type=DecodingPlan)
    assert plan.num_slots > worker.credit * 64
    await check_answers(worker, put, 100)
    await worker.stop(5)


@pytest.mark.measures
async def test_next_batch_is_computed_while_the_one_before_is_answered(engine: LocalEngine, put):
    worker = await start(engine, busy_us=30_000)
    for _ in range(3):
        await worker.run([put({"n": 1})])
    first, second = worker.run([put({"n": 1})]), worker.run([put({"n": 2})])
    done = await asyncio.gather(first, second)
    assert [answers(each) for each in done] == [[2], [4]]
    assert all(0.03 <= each.compute_s < 0.06 for each in done)
    await worker.stop(5)


@pytest.mark.parametrize("act", ["lose", "fault"])
async def test_device_that_is_lost_loses_both_batches_that_it_has(
    engine: LocalEngine, put, act: str
):
    worker = await start(engine, busy_us=20_000)
    for _ in range(2):
        await worker.run([put({"n": 1})])
    batches = [worker.run([put({"n": 1})]), worker.run([put({"n": 2, "do": act})])]
    found = await asyncio.gather(*batches, return_exceptions=True)
    assert isinstance(found[1], WorkerLostError)
    assert found[1].started
    assert isinstance(found[0], WorkerLostError) or answers(found[0]) == [2]
    ending = await worker.wait()
    assert ending.cause == "device"
    assert ending.was_at_work


@pytest.mark.measures
@pytest.mark.parametrize("act", ["hang", "hang early"])
@pytest.mark.parametrize("hung", [0, 1])
async def test_device_that_stands_still_loses_all_that_it_has_in_time(
    engine: LocalEngine, put, hung: int, act: str
):
    worker = await start(engine, batch_timeout_s=2.0, busy_us=20_000)
    for _ in range(2):
        await worker.run([put({"n": 1})])
    batches = [worker.run([put({"n": n, "do": act if n == hung else "ok"})]) for n in range(3)]
    found = await asyncio.gather(*batches, return_exceptions=True)
    for each in found[:hung]:
        assert isinstance(each, BatchDone)
        assert answers(each) == [0]
    lost = found[hung]
    assert isinstance(lost, WorkerLostError)
    assert lost.started
    assert [str(each) for each in found[hung:]] == [str(lost)] * (3 - hung)
    ending = await worker.wait()
    assert (ending.cause, ending.was_at_work) == ("hang", True)
    assert ending.reason == "hung: a batch ran for more than 2 s"


async def test_sentinel_comes_after_all_that_is_launched(engine: LocalEngine, put):
    worker = await start(engine, busy_us=20_000)
    await worker.run([put({"n": 1})])
    batches = [worker.run([put({"n": n})]) for n in (1, 2)]
    await worker.stop(60)
    assert [answers(await each) for each in batches] == [[2], [4]]
