"""Models that take turns at a device."""

import asyncio
import random
from collections.abc import Callable, Iterator

import pytest

from inferpool.models.spec import Placement
from inferpool.service.catalog.catalog import ModelVersion
from inferpool.service.errors import UnavailableError
from inferpool.service.parts.turns.gate import DeviceGate
from inferpool.service.queue.instance import BACKGROUND
from inferpool.service.settings.model import ModelSettings
from inferpool.workers.shared.arena import Arena
from tests.fakes import FakeEngine, FakeWorker, StreamingWorker, ref_to
from tests.service.parts.turns.contenders import (
    BOTH_GPUS,
    CORE,
    GPU,
    OTHER_GPU,
    Contender,
    compete,
    end,
)
from tests.service.pools import make_dispatcher, make_pool, until

pytestmark = pytest.mark.usefixtures("virtual_time")


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena(1 << 24)
    yield arena
    arena.close()


@pytest.fixture
def gate() -> DeviceGate:
    return DeviceGate(2)


@pytest.fixture
def model(gate, arena) -> Callable[..., Contender]:
    def make(item_s: float = 0.01, **changes) -> Contender:
        return Contender(gate, arena, item_s, **changes)

    return make


@pytest.fixture
def wakes(gate, monkeypatch) -> list[None]:
    """One for each time that a timer of the gate has fired."""
    found: list[None] = []
    on_timer = gate._on_timer

    def note() -> None:
        found.append(None)
        on_timer()

    monkeypatch.setattr(gate, "_on_timer", note)
    return found


@pytest.mark.parametrize("credit", [1, 2])
@pytest.mark.parametrize("placements", [(CORE, CORE), (GPU,)])
@pytest.mark.parametrize("item_s", [(0.01, 0.01), (0.03, 0.005), (0.0002, 0.0002)])
@pytest.mark.parametrize("share", [1.0, 3.0])
async def test_models_under_full_load_get_their_shares(model, share, item_s, placements, credit):
    favoured = model(item_s[0], model="a", share=share, placements=placements, credit=credit)
    other = model(item_s[1], model="b", placements=placements, credit=credit)
    seconds = 200 * max(item_s)
    await compete(favoured, other, seconds=seconds)
    assert favoured.busy_s / other.busy_s == pytest.approx(share, rel=0.1)
    assert favoured.busy_s + other.busy_s >= 0.9 * len(placements) * seconds


@pytest.mark.parametrize("flood_item_s", [0.002, 0.1])
@pytest.mark.parametrize("placements", [(CORE, CORE), (GPU,)])
async def test_a_flood_hardly_delays_a_quiet_model(model, placements, flood_item_s):
    rate = 0.2 * len(placements) / 0.01
    quiet = model(model="quiet", placements=placements)
    flooded = model(flood_item_s, model="flooded", placements=placements)
    await quiet.ask_at_random(rate, 5.0)
    alone_s = quiet.p99_s
    quiet.latencies_s.clear()
    flooded.flood()
    await quiet.ask_at_random(rate, 5.0)
    await end(flooded)
    assert quiet.p99_s <= 2 * alone_s + 4 * flood_item_s * 1.1
    # It gets what the other leaves.
    used_s = len(placements) * 5.0
    assert flooded.busy_s >= 0.9 * (used_s - quiet.busy_s)


@pytest.mark.parametrize("flood_item_s", [0.002, 0.1])
@pytest.mark.parametrize("placements", [(CORE, CORE), (GPU,)])
async def test_calls_wait_for_one_batch_of_the_jobs_of_another_model(
    model, placements, flood_item_s
):
    rate = 0.4 * len(placements) / 0.01
    quiet = model(model="quiet", placements=placements)
    jobs = model(flood_item_s, model="jobs", placements=placements, priority=BACKGROUND)
    await quiet.ask_at_random(rate, 5.0)
    alone_s = quiet.p99_s
    quiet.latencies_s.clear()
    jobs.flood()
    await quiet.ask_at_random(rate, 5.0)
    await end(jobs)
    assert quiet.p99_s <= 1.2 * alone_s + 4 * flood_item_s * 1.1
    assert jobs.busy_s >= 0.8 * (len(placements) * 5.0 - quiet.busy_s)


@pytest.mark.parametrize(("job_share", "least", "most"), [(0.0, 0.0, 0.02), (0.3, 0.25, 0.4)])
async def test_jobs_have_their_share_while_another_model_is_flooded(model, job_share, least, most):
    flooded = model(model="flooded")
    jobs = model(model="jobs", priority=BACKGROUND, job_share=job_share)
    await compete(flooded, jobs, seconds=20.0)
    assert least <= jobs.busy_s / (flooded.busy_s + jobs.busy_s) <= most


async def test_only_models_that_contend_for_a_device_meet_the_gate(model):
    first = model(model="a", placements=(CORE,))
    second = model(model="b", placements=(CORE,))
    assert not first.is_gated, "two cores are enough for two workers"
    assert not second.is_gated
    third = model(model="c", placements=(CORE, GPU))
    fourth = model(model="d", placements=(OTHER_GPU,))
    assert [each.is_gated for each in (first, second, third, fourth)] == [True, True, True, False]
    second.member.leave()
    second.member.leave()
    assert second.is_gated is False
    third.member.leave()
    assert first.is_gated is False


async def test_versions_of_a_model_have_one_share_together(model):
    versions = [model(model="a"), model(model="a")]
    assert not any(each.is_gated for each in versions)
    other = model(model="b")
    await compete(*versions, other)
    both_s = sum(each.busy_s for each in versions)
    assert both_s / other.busy_s == pytest.approx(1.0, rel=0.1)
    assert versions[0].busy_s / versions[1].busy_s == pytest.approx(1.0, rel=0.1)


async def test_a_version_that_is_unloaded_takes_its_share_with_it(model):
    serving, refused = model(model="a"), model(model="a", share=5.0)
    other = model(model="b")
    refused.member.leave()
    await compete(serving, other)
    assert serving.busy_s / other.busy_s == pytest.approx(1.0, rel=0.1)


async def test_a_model_that_was_idle_has_saved_nothing(model):
    first, second = model(model="a"), model(model="b")
    await compete(first, seconds=10.0)
    first.latencies_s.clear()
    first.is_over = False
    first.dispatcher._admission.is_draining = False
    await compete(first, second, seconds=10.0)
    assert first.busy_s / second.busy_s == pytest.approx(1.0, rel=0.1)


async def test_nobody_makes_up_for_a_long_batch_that_kept_nobody_waiting(model):
    slow, other = (model(model=name, placements=(GPU,)) for name in "ab")
    await compete(slow, other, seconds=1.0)
    for each in (slow, other):
        each.dispatcher._admission.is_draining = each.is_over = False
    slow.item_s = 5.0
    await slow.submit()
    await asyncio.sleep(1.0)
    slow.item_s = other.item_s
    slow.latencies_s.clear()
    other.latencies_s.clear()
    await compete(other, slow, seconds=2.0)
    assert slow.busy_s / other.busy_s == pytest.approx(1.0, rel=0.2)


async def test_accounts_tell_the_time_that_batches_took(gate, model):
    """While all are busy, levels neither drift apart nor from what each model has had."""
    models = [
        model(0.01, model="a", share=3.0),
        model(0.003, model="b"),
        model(0.0007, model="c", share=0.5, credit=3),
    ]
    for each in models:
        each.flood()
    device = gate._devices["cpu"]
    accounts = [device.accounts[name] for name in "abc"]
    had_s = [[] for _ in models]
    for _ in range(4):
        await asyncio.sleep(2.0)
        levels_s = [device.lag_s(account) for account in accounts]
        assert max(levels_s) - min(levels_s) <= 0.2, "one has had more than its share"
        for had, each, account in zip(had_s, models, accounts, strict=True):
            had.append((account.share * account.level_s, each.busy_s))
    await end(*models)
    for had in had_s:
        (charged_s, busy_s), (charged_at_end_s, busy_at_end_s) = had[0], had[-1]
        assert charged_at_end_s - charged_s == pytest.approx(busy_at_end_s - busy_s, rel=0.02)


async def test_a_split_model_and_those_on_its_devices_all_get_turns(model):
    split = model(model="split", placements=(BOTH_GPUS,))
    ones = [
        model(0.02, model="a", placements=(GPU,)),
        model(0.005, model="b", placements=(OTHER_GPU,)),
    ]
    await compete(split, *ones)
    for each in (split, *ones):
        assert 3.5 <= each.busy_s <= 6.5


async def test_a_pool_on_two_devices_is_fair_on_each(model):
    wide = model(model="wide", placements=(GPU, OTHER_GPU))
    narrow = model(model="narrow", placements=(GPU,))
    await compete(wide, narrow)
    assert narrow.busy_s == pytest.approx(5.0, rel=0.1)
    assert wide.busy_s == pytest.approx(15.0, rel=0.1)


async def test_a_hung_worker_does_not_keep_the_others_waiting(model):
    hung, other = model(model="a", placements=(GPU,)), model(model="b", placements=(GPU,))
    await compete(hung, other, seconds=1.0)
    hung.dispatcher._admission.is_draining = other.dispatcher._admission.is_draining = False
    hung.item_s = 1e6
    hung.submit()
    await asyncio.sleep(0.001)
    await asyncio.wait_for(asyncio.gather(*(other.submit() for _ in range(20))), 1.0)
    hung.dispatcher.abandon(lambda: UnavailableError("over"))


async def test_a_long_stream_keeps_no_other_model_waiting_and_pays_for_its_time(gate, arena, model):
    streams = make_dispatcher(arena)
    worker = StreamingWorker(joins=True, credit=4)
    streams.attach(worker)
    gate.join(streams.scheduler, model="a", share=1.0, placements=(GPU,))
    other = model(model="b", placements=(GPU,))
    long = [streams.submit(ref_to(b"x"), [b"x"]) for _ in range(2)]
    await asyncio.sleep(0.1)
    assert len(worker.batches) == 2
    worker.give(b"1")
    for _ in range(10):
        await asyncio.wait_for(asyncio.gather(*(other.submit() for _ in range(5))), 1.0)
        worker.give(b"2")
    long.append(streams.submit(ref_to(b"x"), [b"x"]))
    await asyncio.sleep(1.0)
    assert len(worker.batches) == 3, "a stream begins while the other model is busy"
    (device,) = (each for each in gate._devices.values() if each.places == 1)
    before_s = device.accounts["a"].level_s
    for batch in range(3):
        worker.give(None, batch=batch)
        worker.give_back(batch)
    await asyncio.sleep(0.1)
    assert all(stream.result() for stream in long)
    assert device.accounts["a"].level_s > before_s


async def test_a_model_does_not_pay_for_the_time_in_which_a_lost_worker_hung(model):
    hung, other = model(model="a", placements=(GPU,)), model(model="b", placements=(GPU,))
    for each in (hung, other):
        each.flood()
    await asyncio.sleep(1.0)
    hung.item_s = 1e6
    await asyncio.sleep(10.0)
    hung.item_s = other.item_s
    hung.dispatcher.detach(hung.workers[0])
    hung.workers[0].die(started=False)
    hung.workers.append(hung.attach(0))
    await asyncio.sleep(2.5)  # it has saved a second, and no more
    for each in (hung, other):
        each.latencies_s.clear()
    await asyncio.sleep(5.0)
    await end(hung, other)
    assert hung.busy_s / other.busy_s == pytest.approx(1.0, rel=0.1)


async def test_the_load_of_a_worker_is_no_wait_for_a_turn(model):
    """Else its model would seem slow, and refuse what it could answer."""
    doomed, other = model(model="a"), model(model="b")
    for each in (doomed, other):
        each.flood()
    await asyncio.sleep(1.0)
    doomed.dispatcher.detach(doomed.workers[0])
    doomed.workers[0].die(started=False)
    await asyncio.sleep(5.0)
    doomed.workers.append(doomed.attach(0))
    await asyncio.sleep(0.5)
    recent = doomed.dispatcher._admission.rate._recent[0]
    await end(doomed, other)
    assert max(took_s for _, _, took_s in recent) < 1.0


async def test_nothing_wakes_for_a_worker_that_is_late(model, wakes):
    """It may hang. Whoever waits for it hears of its answer, or of its end."""
    hung = model(0.0006, model="a", placements=(GPU,), credit=3)
    other = model(model="b", placements=(GPU,))
    await compete(hung, other, seconds=1.0)
    for each in (hung, other):
        each.dispatcher._admission.is_draining = each.is_over = False
        each.flood()
    await asyncio.sleep(1.0)
    hung.item_s = 1e6
    await asyncio.sleep(1.0)
    wakes.clear()
    num_before = len(other.workers[0].computed)
    await asyncio.sleep(10.0)
    num_batches = len(other.workers[0].computed) - num_before
    hung.is_over = True
    hung.dispatcher.abandon(lambda: UnavailableError("over"))
    await end(other)
    assert num_batches > 200
    assert len(wakes) <= 2 * num_batches


async def test_timers_fire_no_more_often_than_batches_end(model, wakes):
    models = [model(0.005, model=name) for name in "abc"]
    await asyncio.sleep(10.0)
    assert not wakes
    await compete(*models)
    num_batches = sum(len(worker.computed) for each in models for worker in each.workers)
    assert len(wakes) <= 2 * num_batches
    wakes.clear()
    await asyncio.sleep(10.0)
    assert not wakes


@pytest.mark.parametrize("seed", range(20))
async def test_whatever_comes_and_goes_everything_is_answered(gate, arena, seed):
    """Models join, leave, lose workers and get them back, while calls come in bursts."""
    chance = random.Random(seed)
    kinds = [(CORE,), (CORE, CORE), (GPU,), (OTHER_GPU,), (GPU, OTHER_GPU), (BOTH_GPUS,)]
    kinds.append((Placement(devices=("cpu", "cpu"), num_threads=2, split="tensor"),))
    kinds.append((GPU, CORE))
    contenders: list[Contender] = []
    num_asked = 0

    def joins() -> None:
        contenders.append(
            Contender(
                gate,
                arena,
                chance.choice([0.0001, 0.001, 0.01, 0.1]),
                model=chance.choice("abcd"),
                share=chance.choice([0.1, 1.0, 3.0]),
                placements=chance.choice(kinds),
                credit=chance.choice([1, 2, 3]),
            )
        )

    joins()
    for _ in range(200):
        await asyncio.sleep(chance.choice([0.0, 0.001, 0.01, 0.1]))
        contender = chance.choice(contenders)
        what = chance.random()
        if what < 0.05:
            joins()
        elif what < 0.08:
            contender.member.leave()
        elif what < 0.12 and (worker := chance.choice(contender.workers)) and not worker.is_gone:
            contender.dispatcher.detach(worker)
            worker.die(started=False)
            slot = worker.id.slot
            asyncio.get_running_loop().call_later(
                chance.random(), lambda c=contender, s=slot: c.workers.append(c.attach(s))
            )
        elif what < 0.2:
            contender.submit().cancel()
        else:
            num = chance.choice([1, 1, 3, 10])
            num_asked += num
            for _ in range(num):
                contender.submit()
    await asyncio.sleep(1.0)
    await asyncio.gather(*(each.dispatcher.drain(500.0) for each in contenders))
    assert sum(len(each.latencies_s) for each in contenders) == num_asked
    for each in contenders:
        each.check_batches()
    gate.give()
    check_nothing_is_held(gate)
    for each in contenders:
        each.member.leave()
        assert not each.member._held
    assert not any(device.accounts for device in gate._devices.values())


def check_nothing_is_held(gate: DeviceGate) -> None:
    assert not gate._waiting
    assert not gate._ahead
    for device in gate._devices.values():
        assert not device.turns
        for account in device.accounts.values():
            assert (account.num_turns, account.num_waiting) == (0, 0)


async def test_a_worker_is_sent_nothing_ahead_while_another_model_is_busy(model):
    workers, contenders = [], []
    for name in ("a", "b"):
        each = model(model=name, placements=(GPU,))
        each.dispatcher.detach(each.workers[0])
        workers.append(FakeWorker())
        each.dispatcher.attach(workers[-1])
        each.dispatcher.scheduler.lanes.open[0].costs.learn(4, 0.1, was_idle=True)
        contenders.append(each)
    first, second = contenders

    async def sent(seconds: float) -> list[list[int]]:
        await asyncio.sleep(seconds)
        return [worker.sizes for worker in workers]

    for _ in range(4):
        second.submit()
    assert await sent(0.0) == [[], [4]]
    for _ in range(12):
        first.submit()
    assert await sent(0.05) == [[], [4]]
    assert await sent(0.05) == [[4], [4]], "the second should be about to end"
    workers[1].answer()
    for _ in range(4):
        second.submit()
    assert await sent(0.05) == [[4], []], "the first has a batch that it could send ahead"
    assert await sent(0.05) == [[4], [4]]
    for each in contenders:
        each.dispatcher.abandon(lambda: UnavailableError("over"))


async def test_a_model_with_nothing_left_to_send_keeps_no_place_for_its_next_batch(model):
    favoured = model(model="a", share=100.0, placements=(GPU,))
    other = model(model="b", placements=(GPU,), priority=BACKGROUND)
    workers = [FakeWorker(credit=1), FakeWorker(credit=1)]
    for each, worker in zip((favoured, other), workers, strict=True):
        each.dispatcher.detach(each.workers[0])
        each.dispatcher.attach(worker)
        each.dispatcher.scheduler.lanes.open[0].costs.learn(1, 0.1, was_idle=True)

    favoured.dispatcher.scheduler.prepare_s = 0.01  # so it would be sent one sooner

    async def sent(seconds: float) -> list[list[int]]:
        await asyncio.sleep(seconds)
        return [worker.sizes for worker in workers]

    other.submit()
    favoured.submit()
    assert await sent(0.1) == [[1], [1]]
    workers[1].answer()
    other.submit()
    assert await sent(0.05) == [[1], []]
    assert await sent(0.05) == [[1], [1]], "the first should be about to end"
    for each in (favoured, other):
        each.dispatcher.abandon(lambda: UnavailableError("over"))


async def test_a_pool_whose_stop_is_cancelled_leaves_the_device_to_others(arena):
    gate, engine = DeviceGate(1), FakeEngine()
    pools = [make_pool(engine, arena, name=name) for name in "ab"]
    for pool in pools:
        gate.add(ModelVersion(ModelSettings(source="echo"), pool))
        pool.start()
    await until(lambda: all(pool.is_ready for pool in pools))
    assert pools[1].dispatcher.scheduler.policies
    stop = asyncio.create_task(pools[0].stop(0))
    await asyncio.sleep(0)
    stop.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stop
    assert not pools[1].dispatcher.scheduler.policies
    await pools[0].stop(0)
    await pools[1].stop(0)
