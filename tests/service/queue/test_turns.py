"""Models that take turns at a device: real dispatchers, and workers that take what a test says."""

import asyncio
import random
from collections.abc import Callable, Iterator, Sequence

import pytest

from inferpool.models.spec import Placement
from inferpool.service.errors import UnavailableError
from inferpool.service.queue.instance import Instance
from inferpool.service.queue.turns.gate import DeviceGate, GateMember
from inferpool.workers.arena import Arena
from tests.fakes import FakeWorker, ref_to
from tests.service.pools import make_dispatcher
from tests.service.simulation import SimulatedWorker

pytestmark = pytest.mark.usefixtures("virtual_time")

CORE = Placement(devices=("cpu",))
GPU = Placement(devices=("cuda:0",), visible=("GPU-a",))
OTHER_GPU = Placement(devices=("cuda:0",), visible=("GPU-b",))
BOTH_GPUS = Placement(devices=("cuda:0", "cuda:1"), visible=("GPU-a", "GPU-b"), split="tensor")


class Contender:
    """A model whose workers take `item_s` for each instance of a batch."""

    def __init__(
        self,
        gate: DeviceGate,
        arena: Arena,
        item_s: float = 0.01,
        *,
        model: str = "m",
        share: float = 1.0,
        placements: Sequence[Placement] = (CORE, CORE),
        credit: int = 2,
    ) -> None:
        self.dispatcher = make_dispatcher(arena, max_queue_length=10_000)
        self.item_s = item_s
        self.latencies_s: list[float] = []
        self.num_failed = 0
        self.is_over = False
        self.workers = [self.attach(slot, credit) for slot in range(len(placements))]
        self.member: GateMember = gate.join(
            self.dispatcher.scheduler, model=model, share=share, placements=placements
        )

    def attach(self, slot: int, credit: int = 2) -> SimulatedWorker:
        worker = SimulatedWorker(lambda size: size * self.item_s, slot, 0.1)
        worker.credit = credit
        self.dispatcher.attach(worker)
        return worker

    @property
    def is_gated(self) -> bool:
        return self.dispatcher.scheduler.turns is not None

    @property
    def busy_s(self) -> float:
        """The time that its workers were computing what has been answered."""
        return len(self.latencies_s) * self.item_s

    @property
    def p99_s(self) -> float:
        return sorted(self.latencies_s)[int(0.99 * len(self.latencies_s))]

    def check_batches(self) -> None:
        assert all(0 not in worker.computed for worker in self.workers), "a batch was empty"

    def submit(self, timeout_s: float = 1000.0) -> Instance:
        instance = self.dispatcher.submit(ref_to(b"x", timeout_s), [b"x"])
        instance.add_done_callback(self._note)
        return instance

    def _note(self, instance: Instance) -> None:
        if instance.cancelled() or instance.exception():
            self.num_failed += 1
        else:
            self.latencies_s.append(asyncio.get_running_loop().time() - instance.arrived)

    def flood(self, num: int = 64) -> None:
        """Keep so many waiting until `is_over`."""

        def again(_: object) -> None:
            if not self.is_over:
                self.submit().add_done_callback(again)

        for _ in range(num):
            again(None)

    async def ask_at_random(self, rate: float, seconds: float) -> None:
        chance, loop = random.Random(1), asyncio.get_running_loop()
        end = loop.time() + seconds
        while loop.time() < end:
            await asyncio.sleep(chance.expovariate(rate))
            self.submit()


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


async def compete(*contenders: Contender, seconds: float = 10.0) -> None:
    """Let all be flooded for some time, and answer what is left."""
    for each in contenders:
        each.flood()
    await asyncio.sleep(seconds)
    await end(*contenders)


async def end(*contenders: Contender) -> None:
    for each in contenders:
        each.is_over = True
    figures = [list(each.latencies_s) for each in contenders]
    for each in contenders:
        await each.dispatcher.drain(10.0)
    for each, latencies_s in zip(contenders, figures, strict=True):
        each.latencies_s = latencies_s  # what came after the end does not count
        each.check_batches()


@pytest.mark.parametrize("credit", [1, 2])
@pytest.mark.parametrize("placements", [(CORE, CORE), (GPU,)])
@pytest.mark.parametrize("item_s", [(0.01, 0.01), (0.03, 0.005), (0.0002, 0.0002)])
@pytest.mark.parametrize("share", [1.0, 3.0])
async def test_models_under_full_load_get_their_shares(model, share, item_s, placements, credit):
    favoured = model(item_s[0], model="a", share=share, placements=placements, credit=credit)
    other = model(item_s[1], model="b", placements=placements, credit=credit)
    seconds = 500 * max(item_s)
    await compete(favoured, other, seconds=seconds)
    assert favoured.busy_s / other.busy_s == pytest.approx(share, rel=0.1)
    assert favoured.busy_s + other.busy_s >= 0.9 * len(placements) * seconds


@pytest.mark.parametrize("flood_item_s", [0.002, 0.01, 0.1])
@pytest.mark.parametrize("placements", [(CORE, CORE), (GPU,)])
async def test_a_flood_hardly_delays_a_quiet_model(model, placements, flood_item_s):
    rate = 0.2 * len(placements) / 0.01
    quiet = model(model="quiet", placements=placements)
    flooded = model(flood_item_s, model="flooded", placements=placements)
    await quiet.ask_at_random(rate, 10.0)
    alone_s = quiet.p99_s
    quiet.latencies_s.clear()
    flooded.flood()
    await quiet.ask_at_random(rate, 10.0)
    await end(flooded)
    assert quiet.p99_s <= 2 * alone_s + 4 * flood_item_s * 1.1
    # It gets what the other leaves.
    used_s = len(placements) * 10.0
    assert flooded.busy_s >= 0.9 * (used_s - quiet.busy_s)


async def test_a_model_has_all_while_the_other_is_idle(model):
    busy = model(model="busy")
    model(model="idle", share=100.0)
    await compete(busy)
    assert busy.busy_s >= 0.95 * 2 * 10.0


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


async def test_a_lost_worker_gives_its_turn_back(model):
    doomed, other = model(model="a", placements=(GPU,)), model(model="b", placements=(GPU,))
    doomed.submit()
    await asyncio.sleep(0.001)
    instance = other.submit()
    doomed.dispatcher.detach(doomed.workers[0])
    doomed.workers[0].die(started=False)
    await asyncio.wait_for(instance, 0.05)
    doomed.attach(0)
    await doomed.dispatcher.drain(1.0)
    await asyncio.sleep(0.001)  # the answer is noted in a later turn of the loop
    assert (len(doomed.latencies_s), doomed.num_failed) == (1, 0)


async def test_a_hung_worker_does_not_keep_the_others_waiting(model):
    hung, other = model(model="a", placements=(GPU,)), model(model="b", placements=(GPU,))
    await compete(hung, other, seconds=1.0)
    hung.dispatcher._admission.is_draining = other.dispatcher._admission.is_draining = False
    hung.item_s = 1e6
    hung.submit()
    await asyncio.sleep(0.001)
    await asyncio.wait_for(asyncio.gather(*(other.submit() for _ in range(20))), 1.0)
    hung.dispatcher.abandon(lambda: UnavailableError("over"))


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


async def test_a_cancelled_wish_keeps_nobody_waiting(model):
    first, second = model(model="a", placements=(GPU,)), model(model="b", placements=(GPU,))
    busy = first.submit()
    await asyncio.sleep(0.001)
    given_up = [second.submit() for _ in range(3)]
    await asyncio.sleep(0.001)
    for instance in given_up:
        instance.cancel()
    await busy
    await asyncio.wait_for(first.submit(), 0.1)
    await asyncio.wait_for(second.submit(), 0.1)


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


async def test_a_worker_is_sent_nothing_ahead_while_another_model_is_busy(model):
    workers, contenders = [], []
    for name in ("a", "b"):
        each = model(model=name, placements=(GPU,))
        each.dispatcher.detach(each.workers[0])
        workers.append(FakeWorker())
        each.dispatcher.attach(workers[-1])
        each.dispatcher.scheduler.lanes.open[0].costs.note(4, 0.1, was_idle=True)
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
