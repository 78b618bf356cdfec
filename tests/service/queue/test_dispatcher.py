import asyncio
import time
from collections.abc import Awaitable, Callable
from copy import copy
from functools import partial
from types import SimpleNamespace

import msgspec
import pytest
import uvloop

from inferpool.service.errors import (
    DeadlineExceededError,
    InvalidInputError,
    ModelFailedError,
    OverloadedError,
    QuarantinedError,
    UnavailableError,
    WorkerCrashedError,
)
from inferpool.service.parts.objective import Objective
from inferpool.service.queue.dispatcher import MAX_HOSTS_LOST
from inferpool.service.queue.instance import Instance, Result
from inferpool.service.queue.ledger import TICK_S
from inferpool.service.telemetry.distribution import Distribution
from inferpool.service.telemetry.metrics import ModelMetrics
from inferpool.workers.shared.arena import Arena
from inferpool.workers.shared.messages import ItemError
from tests.fakes import FakeWorker, ref_to
from tests.service.pools import make_dispatcher

pytestmark = pytest.mark.usefixtures("virtual_time")


class DispatcherBench:
    """A dispatcher, its metrics, and what to push into it."""

    def __init__(self, arena: Arena, **changes: float) -> None:
        self.arena = arena
        self.metrics = ModelMetrics("m")
        self.dispatcher = make_dispatcher(arena, self.metrics, **changes)  # type: ignore[arg-type]

    def worker(self, credit: int = 2) -> FakeWorker:
        worker = FakeWorker(credit=credit)
        self.dispatcher.attach(worker)
        return worker

    def submit(self, timeout_s: float = 30.0, priority: int = 5, payload: bytes = b"x") -> Instance:
        return self.dispatcher.submit(ref_to(payload, timeout_s, priority), [payload])

    async def send(self, num: int = 1) -> list[Instance]:
        """Submit several, and have them sent to the workers that can take them."""
        instances = [self.submit() for _ in range(num)]
        await turn()
        return instances

    async def replace(self, worker: FakeWorker, *, started: bool = True) -> FakeWorker:
        """Let a worker die, and give what it held to a new one."""
        worker.die(started=started)
        worker = self.worker(credit=1)
        await turn()
        return worker

    async def replace_until_done(self, poison: Instance) -> FakeWorker:
        """Let workers die until an instance is given up; return the next worker."""
        worker = self.worker(credit=1)
        await turn()
        while not poison.done():
            worker = await self.replace(worker)
        return worker

    def check_books(self) -> None:
        """Check that nothing is in flight, and that the arena is empty."""
        assert self.metrics.in_flight == self.dispatcher.num_queued == self.arena.used_bytes == 0


async def turn() -> None:
    """Let the loop do what it has been asked to."""
    for _ in range(5):
        await asyncio.sleep(0)


async def answer(*workers: FakeWorker) -> None:
    """Have each worker return its oldest batch."""
    for worker in workers:
        worker.answer()
    await turn()


@pytest.fixture
def bench(arena: Arena) -> Callable[..., DispatcherBench]:
    return partial(DispatcherBench, arena)


def one_by_one(bench: Callable[..., DispatcherBench]) -> tuple[DispatcherBench, FakeWorker]:
    """Return a dispatcher, and its only worker, which computes one instance at a time."""
    b = bench(max_batch_size=1)
    return b, b.worker(credit=1)


async def have(
    b: DispatcherBench, workers: list[FakeWorker], num: int, took_s: float
) -> list[list[int]]:
    """Have so many instances answered by batches that take so long; return how they went out."""
    await b.send(num)
    sizes = [worker.sizes for worker in workers]
    await asyncio.sleep(took_s)
    for worker in workers:
        if worker.batches:
            worker.answer(compute_s=took_s / 2)
    await turn()
    return sizes


@pytest.mark.parametrize(("is_accelerated", "grows"), [(True, True), (False, False)])
async def test_batches_of_some_milliseconds_grow_on_accelerators_alone(
    bench, is_accelerated, grows
):
    b, worker = bench(max_batch_size=None), FakeWorker(credit=1)
    worker.ready = msgspec.structs.replace(worker.ready, is_accelerated=is_accelerated)
    b.dispatcher.attach(worker)
    sizes = set()
    for _ in range(40):
        sizes.add(b.dispatcher.max_batch_size)
        await b.send(b.dispatcher.max_batch_size)
        worker.answer(compute_s=0.005)
        await turn()
    assert (16 in sizes) == grows
    b.check_books()


@pytest.mark.parametrize(
    ("took_s", "num", "shares"),
    [
        (20e-6, 4, [[4], []]),
        (0.002, 4, [[2], [2]]),
        (0.00012, 9, [[5], [4]]),  # although the second alone would soon be done
    ],
)
async def test_idle_workers_share_a_queue_that_one_cannot_soon_finish(bench, took_s, num, shares):
    b = bench(max_batch_size=16)
    workers = [b.worker(), b.worker()]
    await have(b, workers, 1, took_s)
    assert await have(b, workers, num, took_s) == shares
    b.check_books()


async def test_a_light_batch_does_not_put_all_heavy_instances_on_one_worker(bench):
    b = bench(max_batch_size=32)
    workers = [b.worker() for _ in range(4)]
    await have(b, workers, 8, 0.001)
    await have(b, workers, 1, 20e-6)
    assert await have(b, workers, 32, 0.004) == [[8]] * 4
    b.check_books()


async def test_a_lone_instance_goes_to_the_idle_worker_and_not_behind_a_quick_one(bench):
    b = bench()
    workers = [b.worker(), b.worker()]
    await have(b, workers, 1, 20e-6)
    await b.send(3)
    assert await have(b, workers, 1, 20e-6) == [[3], [1]]
    b.check_books()


async def test_idle_worker_starts_at_once_and_a_busy_one_gets_a_full_batch_in_advance(bench):
    b = bench(max_batch_size=4)
    worker = b.worker()
    for num, sizes in [(1, [1]), (3, [1]), (1, [1, 4]), (1, [1, 4])]:
        await b.send(num)
        assert worker.sizes == sizes
    for sizes in ([4], [1], []):
        await answer(worker)
        assert worker.sizes == sizes
    b.check_books()


async def test_partial_batch_is_sent_just_before_the_running_one_ends(bench):
    b = bench(max_batch_size=4)
    worker = b.worker()
    await b.send()
    await asyncio.sleep(0.1)
    await answer(worker)
    await b.send()
    await b.send()
    assert worker.sizes == [1]
    await asyncio.sleep(0.12)
    assert worker.sizes == [1, 1]


async def test_batch_wait_holds_an_idle_worker_until_the_batch_is_full_or_time_is_up(bench):
    b = bench(max_batch_size=2, batch_wait_ms=30)
    worker = b.worker()
    await b.send()
    assert worker.sizes == []
    await b.send()
    assert worker.sizes == [2]
    await answer(worker)
    b.submit()
    await asyncio.sleep(0.06)
    assert worker.sizes == [1]


def test_wake_ups_within_a_millisecond_are_kept_apart(bench):
    async def go():
        b = bench()
        for delay_s in (0.0003, 0.0002, 0.0004):  # to uvloop, which counts milliseconds: at once
            b.dispatcher.scheduler.wake_in(delay_s)
        await turn()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(go())


async def test_deadline_that_cannot_be_met_is_refused_at_once(bench):
    b, worker = one_by_one(bench)
    for _ in range(4):
        await b.send()
        await asyncio.sleep(0.05)
        await answer(worker)
    for _ in range(10):
        b.submit()
    b.submit(timeout_s=0.9)  # which goes first
    b.submit(timeout_s=0.3)
    await turn()
    with pytest.raises(OverloadedError, match="deadline cannot be met"):
        b.submit(timeout_s=0.1)


async def test_deadline_in_the_queue_is_answered_on_time_and_never_sent(bench):
    b, worker = one_by_one(bench)
    await b.send()
    began = time.monotonic()
    with pytest.raises(DeadlineExceededError, match="in the queue"):
        await b.submit(timeout_s=0.1)
    assert 0.099 < time.monotonic() - began < 0.101 + TICK_S
    await answer(worker)
    assert worker.sizes == []
    b.check_books()
    assert b.metrics.expired == 1


async def test_the_owner_of_a_payload_in_the_arena_gets_the_slot_back(bench):
    freed = []
    b = bench(max_batch_size=1)
    worker, owner = b.worker(credit=1), SimpleNamespace(free=freed.append)
    futures = []
    for offset in (4096, 8192, 1024):
        ref = ref_to(b"x")
        ref.offset = offset
        futures.append(b.dispatcher.submit(ref, [b"x"], owner=owner))
    await turn()
    assert b.arena.used_bytes == 0
    futures[1].cancel()
    futures[0].cancel()
    assert freed == [8192]  # what a worker holds is still the worker's
    await answer(worker)
    await answer(worker)
    assert futures[2].result().value == b"1024"
    assert freed == [8192, 4096, 1024]
    b.check_books()


async def test_a_dead_workers_instances_are_sent_again_alone(bench):
    b = bench(max_batch_size=4)
    first = b.worker()
    futures = await b.send(4)
    assert first.sizes == [4]
    second = await b.replace(first)
    for _ in range(4):
        assert second.sizes == [1]
        await answer(second)
    results = await asyncio.gather(*futures)
    assert [int(r.value) for r in results] == [f.ref.offset for f in futures]
    b.check_books()
    assert b.metrics.retried == 4


async def test_a_suspect_input_is_sent_to_no_worker_that_holds_another_batch(bench):
    b = bench(max_batch_size=1)
    first = b.worker(credit=1)
    (suspect,) = await b.send()
    busy = b.worker(credit=2)
    (innocent,) = await b.send()
    first.die()
    await turn()
    assert busy.sizes == [1]
    await answer(busy)
    assert (innocent.done(), suspect.done(), busy.sizes) == (True, False, [1])
    await answer(busy)
    await suspect
    b.check_books()


async def test_batch_that_never_started_costs_no_retry_and_stays_together(bench):
    b = bench(max_batch_size=2)
    worker = b.worker()
    futures = await b.send(2)
    for _ in range(5):
        assert worker.sizes == [2]
        worker = await b.replace(worker, started=False)
    worker.answer()
    await asyncio.gather(*futures)
    b.check_books()


async def test_input_that_kills_each_worker_fails_alone_and_in_the_end(bench):
    b = bench(max_batch_size=2)
    worker = b.worker()
    poison, neighbour = b.submit(payload=b"poison"), b.submit(payload=b"cheese")
    await turn()
    while not poison.done():
        worker = await b.replace(worker)
    with pytest.raises(WorkerCrashedError, match="3 workers died"):
        await poison
    worker.answer()
    await neighbour
    b.check_books()


async def test_errors_of_single_items_reach_their_callers_only(bench):
    b = bench()
    worker = b.worker()
    futures = await b.send(4)
    codes = ("invalid_input", "model_error", "deadline_exceeded")
    worker.answer([b"1", *(ItemError(code, "text") for code in codes)])
    results = await asyncio.gather(*futures, return_exceptions=True)
    types = [Result, InvalidInputError, ModelFailedError, DeadlineExceededError]
    assert [type(result) for result in results] == types
    b.check_books()


async def test_solo_instance_goes_to_an_idle_worker_and_nothing_goes_behind_it(bench):
    b = bench(max_batch_size=1)
    first = b.worker()
    (poison,) = await b.send()
    first.die()
    second = b.worker(credit=2)
    await turn()
    assert second.sizes == [1]
    (innocent,) = await b.send()
    assert second.sizes == [1]
    await answer(second)
    second.answer()
    await asyncio.gather(poison, innocent)
    b.check_books()


async def test_instances_of_a_comparison_are_no_traffic_however_they_end(bench):
    b = bench()
    untouched = counts_of(b.metrics)
    worker = b.worker()

    def submit(timeout_s: float = 30.0) -> Instance:
        return b.dispatcher.submit(ref_to(b"x", timeout_s), [b"x"], is_compared=True)

    good, bad = submit(), submit()
    await turn()
    worker.answer()
    await turn()
    worker.answer([ItemError("model_error", "no")])
    await turn()
    late, cancelled, retried = submit(0.001), submit(), submit()
    cancelled.cancel()
    await asyncio.sleep(0.1)
    worker.die()
    second = b.worker()
    await turn()
    assert second.batches or retried.done()
    while second.batches:
        await answer(second)
    for instance, error in (
        (bad, ModelFailedError),
        (late, DeadlineExceededError),
    ):
        with pytest.raises(error):
            await instance
    await asyncio.gather(good, retried)
    waiting = submit()
    assert b.dispatcher.num_queued == b.dispatcher.queued_bytes == 0
    draining = asyncio.create_task(b.dispatcher.drain(30))
    await turn()
    assert not draining.done()
    await answer(second)
    await asyncio.gather(draining, waiting)
    assert counts_of(b.metrics) == untouched
    b.check_books()


async def test_answers_to_a_comparison_do_not_move_the_aim_of_an_objective(bench):
    b = bench()
    objective = Objective(b.dispatcher.scheduler, 10.0, model="m")
    b.dispatcher.scheduler.policies.append(objective)
    worker, aim_s = b.worker(), objective.aim_s
    compared = b.dispatcher.submit(ref_to(b"x"), [b"x"], is_compared=True)
    await turn()
    await asyncio.sleep(0.01)
    await answer(worker)
    await compared
    assert objective.aim_s == aim_s
    b.check_books()


def counts_of(metrics: ModelMetrics) -> dict[str, object]:
    """Return what metrics show of instances and batches."""
    return {
        name: value.count if isinstance(value, Distribution) else copy(value)
        for name, value in vars(metrics).items()
        if name != "exemplars"
    }


async def test_sooner_wake_up_is_not_lost_behind_a_later_one(bench):
    b = bench(max_batch_size=4, batch_wait_ms=30)
    b.dispatcher.scheduler.wake_in(5.0)
    worker = b.worker()
    b.submit()
    await asyncio.sleep(0.1)
    assert worker.sizes == [1]


async def test_detached_worker_is_sent_nothing_and_what_it_holds_is_still_answered(bench):
    b = bench(max_batch_size=1)
    worker = b.worker()
    (held,) = await b.send()
    b.dispatcher.detach(worker)
    (waiting,) = await b.send()
    assert worker.sizes == [1]
    b.dispatcher.cut_off("over")
    for future in (held, waiting):
        with pytest.raises(UnavailableError, match="over"):
            await future
    await answer(worker)
    b.check_books()


async def test_input_that_killed_workers_is_refused_at_once_the_next_time(bench):
    b = bench()
    poison = b.submit(payload=b"poison")
    worker = await b.replace_until_done(poison)
    assert isinstance(poison.exception(), WorkerCrashedError)
    with pytest.raises(QuarantinedError, match="within the next 60 s"):
        b.dispatcher.submit(ref_to(b"poison"), [b"poi", b"son"])
    with pytest.raises(QuarantinedError):
        b.dispatcher.submit(ref_to(b"poison"), [b"poison"], is_compared=True)
    good = b.dispatcher.submit(ref_to(b"poised"), [b"poi", b"sed"])
    await turn()
    worker.answer()
    await good
    assert b.metrics.rejected["quarantined"] == b.dispatcher.num_quarantined == 1
    assert b.metrics.accepted == 2
    b.check_books()


async def test_admitted_copies_of_a_poison_cost_no_further_worker(bench):
    b = bench(max_batch_size=1)
    sent = b.submit(payload=b"poison")
    other = b.worker(credit=1)
    copies = [b.submit(payload=b"poison") for _ in range(3)]
    innocent = b.submit(payload=b"cheese")
    await turn()
    assert other.sizes == [1]
    b.dispatcher.detach(other)
    await b.replace_until_done(copies[0])
    assert isinstance(copies[0].exception(), WorkerCrashedError)
    assert [type(copy.exception()) for copy in copies[1:]] == [QuarantinedError] * 2
    other.die()
    await turn()
    assert isinstance(sent.exception(), QuarantinedError)
    assert not innocent.done()
    assert b.metrics.failed == 4


async def resend(b: DispatcherBench, give_up: Callable[[Instance], Awaitable[None]]) -> Instance:
    """Send a poison that nobody waits for any more when it kills its worker."""
    worker = b.worker(credit=1)
    poison = b.submit(payload=b"poison", timeout_s=0.02)
    await turn()
    assert worker.sizes == [1]
    await give_up(poison)
    assert poison.done()
    worker.die()
    await turn()
    return poison


async def expire(instance: Instance) -> None:
    with pytest.raises(DeadlineExceededError):
        await instance


async def hang_up(instance: Instance) -> None:
    instance.cancel()


@pytest.mark.parametrize("give_up", [expire, hang_up])
async def test_poison_that_nobody_waits_for_when_it_kills_is_quarantined_too(bench, give_up):
    b = bench()
    for _ in range(3):
        assert b.dispatcher.num_quarantined == 0
        await resend(b, give_up)
    with pytest.raises(QuarantinedError):
        b.submit(payload=b"poison")
    assert b.metrics.accepted == 3
    b.check_books()


async def test_input_whose_worker_died_kills_nobody_elses_batch_when_it_comes_again(bench):
    b = bench(max_batch_size=4)
    await resend(b, hang_up)
    innocents = [b.submit(payload=b"cheese") for _ in range(2)]
    poison = b.submit(payload=b"poison")
    innocents += [b.submit(payload=b"cheese") for _ in range(2)]
    worker = b.worker(credit=1)
    await turn()
    assert worker.sizes == [2]
    await answer(worker)
    for _ in range(2):
        assert worker.sizes == [1]
        worker = await b.replace(worker)
    assert isinstance(poison.exception(), WorkerCrashedError)
    assert worker.sizes == [2]
    worker.answer()
    await asyncio.gather(*innocents)
    b.check_books()


async def test_input_that_succeeds_between_deaths_alone_is_no_poison(bench):
    b = bench()
    for _ in range(4):
        worker = b.worker()
        instance = b.submit(payload=b"cheese")
        await turn()
        for _ in range(2):  # the second time it is alone
            worker = await b.replace(worker)
        worker.answer()
        await instance
        b.dispatcher.detach(worker)
    worker = b.worker(credit=1)
    both = [b.submit(payload=b"cheese") for _ in range(2)]
    await turn()
    assert worker.sizes == [2]
    worker.answer()
    await asyncio.gather(*both)
    b.check_books()


async def test_death_before_the_batch_began_makes_nobody_a_suspect(bench):
    b = bench(max_batch_size=2)
    worker = b.worker()
    for instance in [b.submit() for _ in range(2)]:
        await turn()
        instance.cancel()
    worker = await b.replace(worker, started=False)
    await b.send(2)
    assert worker.sizes == [2]


async def test_if_every_input_kills_none_is_blamed_until_one_succeeds(bench, caplog):
    b = bench()
    for number in range(5):
        victim = b.submit(payload=b"%d" % number)
        b.dispatcher.detach(await b.replace_until_done(victim))
        assert isinstance(victim.exception(), WorkerCrashedError)
        assert b.dispatcher.num_quarantined == (number + 1 if number < 2 else 0)
    assert [record.levelname for record in caplog.records].count("WARNING") == 1
    worker = b.worker(credit=1)
    good = b.submit(payload=b"0")
    await turn()
    worker.answer()
    await good
    b.dispatcher.detach(worker)
    await b.replace_until_done(b.submit(payload=b"poison"))
    assert b.dispatcher.num_quarantined == 1
    b.check_books()


async def test_an_instance_is_not_blamed_for_lost_hosts_and_given_up_after_many(bench):
    b = bench()
    worker = b.worker(credit=1)
    together = await b.send(2)
    for number in range(1, MAX_HOSTS_LOST + 1):
        assert worker.sizes == [2]  # it is not suspected, so not computed alone
        assert [each.num_crashes for each in together] == [0, 0]
        worker.lose_host()
        worker = b.worker(credit=1)
        await turn()
        assert b.metrics.retried == 2 * min(number, MAX_HOSTS_LOST - 1)
    for instance in together:
        with pytest.raises(WorkerCrashedError, match=r"5 hosts were lost .*silence"):
            await instance
    assert b.metrics.faults == 0  # which are the model's own
    b.check_books()


async def test_each_observer_sees_the_batches_until_it_ends(bench):
    b = bench()
    worker, sizes, others = b.worker(), [], []
    end = b.dispatcher.observe(lambda num, done: sizes.append(num))
    b.dispatcher.observe(lambda num, done: others.append(num))
    await b.send(2)
    await answer(worker)
    end()
    end()  # which changes nothing
    await b.send(3)
    await answer(worker)
    assert (sizes, others) == ([2], [2, 3])
    b.check_books()
