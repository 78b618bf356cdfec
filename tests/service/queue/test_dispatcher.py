import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator

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
from inferpool.service.queue.admission import Admission
from inferpool.service.queue.deadlines import TICK_S
from inferpool.service.queue.dispatcher import Dispatcher
from inferpool.service.queue.instance import Instance
from inferpool.service.queue.quarantine import Quarantine
from inferpool.service.telemetry.metrics import ModelMetrics
from inferpool.workers.arena import Arena
from inferpool.workers.messages import ItemError
from tests.fakes import FakeWorker, ref_to
from tests.virtual_time import run_in_virtual_time as run


class Bench:
    """A dispatcher, what it stands on, and what to push into it."""

    def __init__(self, **changes: float) -> None:
        self.arena = Arena(64 * 1024)
        self.metrics = ModelMetrics("m")
        max_batch_size = int(changes.pop("max_batch_size", 4))
        self.admission = Admission(
            max_queue_length=int(changes.pop("max_queue_length", 100)),
            max_batch_size=max_batch_size,
            rejected=self.metrics.rejected,
        )
        self.dispatcher = Dispatcher(
            name="m",
            arena=self.arena,
            admission=self.admission,
            quarantine=Quarantine(name="m", duration_s=changes.pop("quarantine_s", 60.0)),
            metrics=self.metrics,
            max_batch_size=max_batch_size,
            batch_wait_ms=changes.pop("batch_wait_ms", 0.0),
        )

    def worker(self, credit: int = 2) -> FakeWorker:
        worker = FakeWorker(credit=credit)
        self.dispatcher.attach(worker)
        return worker

    def submit(self, timeout_s: float = 30.0, priority: int = 5, payload: bytes = b"x") -> Instance:
        return self.dispatcher.submit(ref_to(payload, timeout_s, priority), [payload])

    def check_books(self) -> None:
        """Nothing is in flight, and all that was accepted is accounted for."""
        assert self.dispatcher.num_unsettled == self.metrics.in_flight == 0
        assert self.dispatcher.num_queued == 0
        assert self.arena.used_bytes == 0


async def turn() -> None:
    """Let the loop do what it has been asked to."""
    for _ in range(5):
        await asyncio.sleep(0)


@pytest.fixture
def bench() -> Iterator[Callable[..., Bench]]:
    benches: list[Bench] = []

    def make(**changes: float) -> Bench:
        benches.append(Bench(**changes))
        return benches[-1]

    yield make
    for bench in benches:
        bench.arena.close()


def test_each_instance_gets_the_answer_to_its_own_payload(bench):
    async def go():
        b = bench()
        worker = b.worker()
        futures = [b.submit() for _ in range(4)]
        offsets = [future.ref.offset for future in futures]
        await turn()
        worker.answer()
        results = await asyncio.gather(*futures)
        assert [int(result.value) for result in results] == offsets
        b.check_books()
        assert b.metrics.succeeded == 4

    run(go())


async def have(b: Bench, workers: list[FakeWorker], num: int, took_s: float) -> list[list[int]]:
    """Have so many instances answered by batches that take so long; return how they went out."""
    for _ in range(num):
        b.submit()
    await turn()
    sizes = [worker.sizes for worker in workers]
    await asyncio.sleep(took_s)
    for worker in workers:
        if worker.batches:
            worker.answer(compute_s=took_s / 2)
    await turn()
    return sizes


@pytest.mark.parametrize(
    ("took_s", "num", "shares"),
    [
        (20e-6, 4, [[4], []]),
        (0.002, 4, [[2], [2]]),
        (0.00012, 9, [[5], [4]]),  # of which the second alone would soon be done
    ],
)
def test_idle_workers_share_what_waits_at_once_unless_one_is_soon_done_with_it(
    bench, took_s, num, shares
):
    async def go():
        b = bench(max_batch_size=16)
        workers = [b.worker(), b.worker()]
        await have(b, workers, 1, took_s)
        assert await have(b, workers, num, took_s) == shares
        b.check_books()

    run(go())


def test_a_light_batch_does_not_put_all_heavy_instances_on_one_worker(bench):
    async def go():
        b = bench(max_batch_size=32)
        workers = [b.worker() for _ in range(4)]
        await have(b, workers, 8, 0.001)
        await have(b, workers, 1, 20e-6)
        assert await have(b, workers, 32, 0.004) == [[8]] * 4
        b.check_books()

    run(go())


def test_a_lone_instance_does_not_wait_for_a_quick_worker_while_another_is_idle(bench):
    async def go():
        b = bench()
        workers = [b.worker(), b.worker()]
        await have(b, workers, 1, 20e-6)
        for _ in range(3):
            b.submit()
        await turn()
        assert await have(b, workers, 1, 20e-6) == [[3], [1]]
        b.check_books()

    run(go())


def test_idle_worker_starts_at_once_and_a_busy_one_gets_a_full_batch_in_advance(bench):
    async def go():
        b = bench(max_batch_size=4)
        worker = b.worker()
        b.submit()
        await turn()
        assert worker.sizes == [1]
        for _ in range(3):
            b.submit()
        await turn()
        assert worker.sizes == [1]
        b.submit()
        await turn()
        assert worker.sizes == [1, 4]
        b.submit()
        await turn()
        assert worker.sizes == [1, 4]
        worker.answer()
        await turn()
        assert worker.sizes == [4]
        worker.answer()
        await turn()
        assert worker.sizes == [1]
        worker.answer()
        await turn()
        b.check_books()

    run(go())


def test_partial_batch_is_sent_just_before_the_running_one_ends(bench):
    async def go():
        b = bench(max_batch_size=4)
        worker = b.worker()
        b.submit()
        await turn()
        await asyncio.sleep(0.1)
        worker.answer()
        await turn()
        b.submit()
        await turn()
        b.submit()
        await turn()
        assert worker.sizes == [1]
        await asyncio.sleep(0.12)
        assert worker.sizes == [1, 1]

    run(go())


def test_instances_are_spread_over_the_idle_workers(bench):
    async def go():
        b = bench(max_batch_size=8)
        first, second, third = b.worker(), b.worker(), b.worker()
        futures = [b.submit() for _ in range(7)]
        await turn()
        assert sorted(first.sizes + second.sizes + third.sizes) == [2, 2, 3]
        for worker in (first, second, third):
            worker.answer()
        await asyncio.gather(*futures)
        b.check_books()

    run(go())


def test_batch_wait_holds_an_idle_worker_until_the_batch_is_full_or_time_is_up(bench):
    async def go():
        b = bench(max_batch_size=2, batch_wait_ms=30)
        worker = b.worker()
        b.submit()
        await turn()
        assert worker.sizes == []
        b.submit()
        await turn()
        assert worker.sizes == [2]
        worker.answer()
        await turn()
        b.submit()
        await asyncio.sleep(0.06)
        assert worker.sizes == [1]

    run(go())


def test_wake_ups_closer_than_the_event_loop_can_tell_are_told_apart(bench):
    async def go():
        b = bench()
        b.dispatcher._schedule.wake_in(
            0.0003
        )  # to uvloop, which counts milliseconds, this is at once
        b.dispatcher._schedule.wake_in(0.0002)
        b.dispatcher._schedule.wake_in(0.0004)
        await turn()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(asyncio.wait_for(go(), 10))


def test_full_queue_refuses_with_a_time_to_come_back(bench):
    async def go():
        b = bench(max_queue_length=3)
        worker = b.worker(credit=1)
        b.submit()
        await turn()
        for _ in range(3):
            b.submit()
        with pytest.raises(OverloadedError, match="queue is full") as caught:
            b.submit()
        assert caught.value.retry_after_s >= 1
        assert b.metrics.rejected["queue_full"] == 1
        worker.answer()
        await turn()
        b.submit()

    run(go())


def test_full_arena_refuses(bench):
    async def go():
        b = bench()
        b.worker()
        b.submit(payload=bytes(60_000))
        with pytest.raises(OverloadedError, match="arena"):
            b.submit(payload=bytes(60_000))

    run(go())


def test_deadline_that_cannot_be_met_is_refused_at_once(bench):
    async def go():
        b = bench(max_batch_size=1)
        worker = b.worker(credit=1)
        for _ in range(4):
            b.submit()
            await turn()
            await asyncio.sleep(0.05)
            worker.answer()
            await turn()
        for _ in range(10):
            b.submit()
        b.submit(timeout_s=0.9)  # which goes first
        b.submit(timeout_s=0.3)
        await turn()
        with pytest.raises(OverloadedError, match="deadline cannot be met"):
            b.submit(timeout_s=0.1)

    run(go())


def test_deadline_in_the_queue_is_answered_on_time_and_never_sent(bench):
    async def go():
        b = bench(max_batch_size=1)
        worker = b.worker(credit=1)
        b.submit()
        await turn()
        began = time.monotonic()
        with pytest.raises(DeadlineExceededError, match="in the queue"):
            await b.submit(timeout_s=0.1)
        assert 0.099 < time.monotonic() - began < 0.101 + TICK_S
        worker.answer()
        await turn()
        assert worker.sizes == []
        b.check_books()
        assert b.metrics.expired == 1

    run(go())


def test_deadline_in_a_worker_is_answered_on_time_and_its_slot_stays_until_the_batch_returns(bench):
    async def go():
        b = bench()
        worker = b.worker()
        with pytest.raises(DeadlineExceededError, match="in a worker"):
            await b.submit(timeout_s=0.05)
        assert b.arena.used_bytes > 0
        worker.answer()
        await turn()
        b.check_books()

    run(go())


def test_cancelled_instances_leave_the_queue_and_the_books_balance(bench):
    async def go():
        b = bench(max_batch_size=1)
        worker = b.worker(credit=1)
        sent, queued = b.submit(), None
        await turn()
        queued = b.submit()
        assert queued.cancel()
        assert sent.cancel()
        assert not sent.cancel()
        assert b.dispatcher.num_queued == 0
        worker.answer()
        await turn()
        b.check_books()
        assert b.metrics.cancelled == 2

    run(go())


def test_a_payload_that_lies_in_the_arena_is_left_there_and_its_owner_gets_the_slot_back(bench):
    class Owner:
        def __init__(self):
            self.freed = []

        def free(self, offset):
            self.freed.append(offset)

    async def go():
        b = bench(max_batch_size=1)
        worker, owner = b.worker(credit=1), Owner()
        futures = []
        for offset in (4096, 8192, 1024):
            ref = ref_to(b"x")
            ref.offset = offset
            futures.append(b.dispatcher.submit(ref, [b"x"], owner=owner))
        await turn()
        assert b.arena.used_bytes == 0
        futures[1].cancel()
        futures[0].cancel()
        assert owner.freed == [8192]  # what a worker holds is still the worker's
        worker.answer()
        await turn()
        worker.answer()
        await turn()
        assert futures[2].result().value == b"1024"
        assert owner.freed == [8192, 4096, 1024]
        b.check_books()

    run(go())


def test_what_a_dead_worker_held_is_sent_again_alone(bench):
    async def go():
        b = bench(max_batch_size=4)
        first = b.worker()
        futures = [b.submit() for _ in range(4)]
        await turn()
        assert first.sizes == [4]
        first.die()
        second = b.worker(credit=1)
        for _ in range(4):
            await turn()
            assert second.sizes == [1]
            second.answer()
        results = await asyncio.gather(*futures)
        assert [int(r.value) for r in results] == [f.ref.offset for f in futures]
        b.check_books()
        assert b.metrics.retried == 4

    run(go())


def test_batch_that_never_started_costs_no_retry_and_stays_together(bench):
    async def go():
        b = bench(max_batch_size=2)
        worker = b.worker()
        futures = [b.submit() for _ in range(2)]
        for _ in range(5):
            await turn()
            assert worker.sizes == [2]
            worker.die(started=False)
            worker = b.worker()
        await turn()
        worker.answer()
        await asyncio.gather(*futures)
        b.check_books()

    run(go())


def test_input_that_kills_each_worker_fails_alone_and_in_the_end(bench):
    async def go():
        b = bench(max_batch_size=2)
        worker = b.worker()
        poison, neighbour = b.submit(payload=b"poison"), b.submit(payload=b"cheese")
        await turn()
        while not poison.done():
            worker.die()
            worker = b.worker(credit=1)
            await turn()
        with pytest.raises(WorkerCrashedError, match="3 workers died"):
            await poison
        worker.answer()
        await neighbour
        b.check_books()

    run(go())


def test_errors_of_single_items_reach_their_callers_only(bench):
    async def go():
        b = bench()
        worker = b.worker()
        futures = [b.submit() for _ in range(4)]
        await turn()
        worker.answer(
            [
                ItemError("invalid_input", "no picture"),
                b"1",
                ItemError("model_error", "boom"),
                ItemError("deadline_exceeded", "late"),
            ]
        )
        results = await asyncio.gather(*futures, return_exceptions=True)
        assert [type(result).__name__ for result in results] == [
            InvalidInputError.__name__,
            "Result",
            ModelFailedError.__name__,
            DeadlineExceededError.__name__,
        ]
        b.check_books()

    run(go())


def test_drain_finishes_what_was_accepted_and_admits_nothing_more(bench):
    async def go():
        b = bench(max_batch_size=1)
        worker = b.worker(credit=1)
        futures = [b.submit() for _ in range(3)]
        await turn()
        drain = asyncio.ensure_future(b.dispatcher.drain(5))
        await turn()
        with pytest.raises(UnavailableError, match="shutting down"):
            b.submit()
        for _ in range(3):
            worker.answer()
            await turn()
        await drain
        await asyncio.gather(*futures)
        b.check_books()

    run(go())


def test_drain_that_runs_out_of_time_answers_all_that_is_left(bench):
    async def go():
        b = bench(max_batch_size=1)
        worker = b.worker(credit=1)
        sent = b.submit()
        await turn()
        waiting = b.submit()
        await b.dispatcher.drain(0.05)
        for future in (sent, waiting):
            with pytest.raises(UnavailableError, match="ran out of time"):
                await future
        worker.die()
        await turn()
        b.check_books()

    run(go())


def test_higher_priority_overtakes(bench):
    async def go():
        b = bench(max_batch_size=1)
        worker = b.worker(credit=1)
        b.submit()
        await turn()
        b.submit()
        urgent = b.submit(priority=1)
        worker.answer()
        await turn()
        worker.answer()
        await turn()
        assert urgent.done()

    run(go())


def test_solo_instance_goes_to_an_idle_worker_and_nothing_goes_behind_it(bench):
    async def go():
        b = bench(max_batch_size=1)
        first = b.worker()
        poison = b.submit()
        await turn()
        first.die()
        second = b.worker(credit=2)
        await turn()
        assert second.sizes == [1]
        innocent = b.submit()
        await turn()
        assert second.sizes == [1]
        second.answer()
        await turn()
        second.answer()
        await asyncio.gather(poison, innocent)
        b.check_books()

    run(go())


def test_sooner_wake_up_is_not_lost_behind_a_later_one(bench):
    async def go():
        b = bench(max_batch_size=4, batch_wait_ms=30)
        b.dispatcher._schedule.wake_in(5.0)
        worker = b.worker()
        b.submit()
        await asyncio.sleep(0.1)
        assert worker.sizes == [1]

    run(go())


def test_detached_worker_is_sent_nothing_and_what_it_holds_is_still_answered(bench):
    async def go():
        b = bench(max_batch_size=1)
        worker = b.worker()
        held = b.submit()
        await turn()
        b.dispatcher.detach(worker)
        waiting = b.submit()
        await turn()
        assert worker.sizes == [1]
        b.dispatcher.cut_off("over")
        for future in (held, waiting):
            with pytest.raises(UnavailableError, match="over"):
                await future
        worker.answer()
        await turn()
        b.check_books()

    run(go())


async def kill_with(b: Bench, poison: Instance) -> FakeWorker:
    """Let workers die until an instance is given up; returns the next one."""
    worker = b.worker(credit=1)
    await turn()
    while not poison.done():
        worker.die()
        worker = b.worker(credit=1)
        await turn()
    return worker


def test_input_that_killed_workers_is_refused_at_once_the_next_time(bench):
    async def go():
        b = bench()
        poison = b.submit(payload=b"poison")
        worker = await kill_with(b, poison)
        assert isinstance(poison.exception(), WorkerCrashedError)
        with pytest.raises(QuarantinedError, match="within the next 60 s"):
            b.submit(payload=b"poison")
        good = b.submit(payload=b"cheese")
        await turn()
        worker.answer()
        await good
        assert b.metrics.rejected["quarantined"] == b.dispatcher.num_quarantined == 1
        assert b.metrics.accepted == 2
        b.check_books()

    run(go())


def test_copies_of_a_poison_that_were_admitted_before_cost_no_worker_either(bench):
    async def go():
        b = bench(max_batch_size=1)
        sent = b.submit(payload=b"poison")
        other = b.worker(credit=1)
        copies = [b.submit(payload=b"poison") for _ in range(3)]
        innocent = b.submit(payload=b"cheese")
        await turn()
        assert other.sizes == [1]
        b.dispatcher.detach(other)
        await kill_with(b, copies[0])
        assert isinstance(copies[0].exception(), WorkerCrashedError)
        assert [type(copy.exception()) for copy in copies[1:]] == [QuarantinedError] * 2
        other.die()
        await turn()
        assert isinstance(sent.exception(), QuarantinedError)
        assert not innocent.done()
        assert b.metrics.failed == 4

    run(go())


def test_input_whose_worker_died_once_or_before_it_began_is_not_quarantined(bench):
    async def go():
        b = bench()
        worker = b.worker()
        instance = b.submit()
        await turn()
        for started in (False, True, False, True, False):
            worker.die(started=started)
            worker = b.worker()
            await turn()
        worker.answer()
        await instance
        assert b.dispatcher.num_quarantined == 0
        b.check_books()

    run(go())


def test_without_quarantine_a_poison_is_tried_each_time(bench):
    async def go():
        b = bench(quarantine_s=0.0)
        for _ in range(2):
            poison = b.submit()
            b.dispatcher.detach(await kill_with(b, poison))
            assert isinstance(poison.exception(), WorkerCrashedError)

    run(go())


async def resend(b: Bench, give_up: Callable[[Instance], Awaitable[None]]) -> Instance:
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
def test_poison_that_nobody_waits_for_when_it_kills_is_quarantined_too(bench, give_up):
    async def go():
        b = bench()
        for _ in range(3):
            assert b.dispatcher.num_quarantined == 0
            await resend(b, give_up)
        with pytest.raises(QuarantinedError):
            b.submit(payload=b"poison")
        assert b.metrics.accepted == 3
        b.check_books()

    run(go())


def test_input_whose_worker_died_kills_nobody_elses_batch_when_it_comes_again(bench):
    async def go():
        b = bench(max_batch_size=4)
        await resend(b, hang_up)
        innocents = [b.submit(payload=b"cheese") for _ in range(2)]
        poison = b.submit(payload=b"poison")
        innocents += [b.submit(payload=b"cheese") for _ in range(2)]
        worker = b.worker(credit=1)
        await turn()
        assert worker.sizes == [2]
        worker.answer()
        for _ in range(2):
            await turn()
            assert worker.sizes == [1]
            worker.die()
            worker = b.worker(credit=1)
        await turn()
        assert isinstance(poison.exception(), WorkerCrashedError)
        assert worker.sizes == [2]
        worker.answer()
        await asyncio.gather(*innocents)
        b.check_books()

    run(go())


def test_input_that_succeeds_between_deaths_alone_is_no_poison(bench):
    async def go():
        b = bench()
        for _ in range(4):
            worker = b.worker()
            instance = b.submit(payload=b"cheese")
            await turn()
            for _ in range(2):  # the second time it is alone
                worker.die()
                worker = b.worker()
                await turn()
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

    run(go())


def test_input_that_is_often_in_a_batch_with_a_poison_is_never_quarantined(bench):
    async def go():
        b = bench(max_batch_size=2)
        workers = [b.worker(credit=1) for _ in range(5)]
        innocents = [b.submit(payload=b"cheese") for _ in range(10)]
        await turn()
        for worker in workers:
            assert worker.sizes == [2]
            worker.die()
        worker = b.worker(credit=1)
        await turn()
        worker.die()  # once alone is chance
        worker = b.worker(credit=1)
        for _ in innocents:
            await turn()
            assert worker.sizes == [1]
            worker.answer()
        await asyncio.gather(*innocents)
        assert b.dispatcher.num_quarantined == 0
        b.check_books()

    run(go())


def test_death_before_the_batch_began_makes_nobody_a_suspect(bench):
    async def go():
        b = bench(max_batch_size=2)
        worker = b.worker()
        for instance in [b.submit() for _ in range(2)]:
            await turn()
            instance.cancel()
        worker.die(started=False)
        worker = b.worker()
        for _ in range(2):
            b.submit()
        await turn()
        assert worker.sizes == [2]

    run(go())


def test_when_all_inputs_kill_it_is_not_the_inputs_until_one_succeeds(bench, caplog):
    async def go():
        b = bench()
        for number in range(5):
            victim = b.submit(payload=b"%d" % number)
            b.dispatcher.detach(await kill_with(b, victim))
            assert isinstance(victim.exception(), WorkerCrashedError)
            assert b.dispatcher.num_quarantined == (number + 1 if number < 2 else 0)
        assert [record.levelname for record in caplog.records].count("WARNING") == 1
        worker = b.worker(credit=1)
        good = b.submit(payload=b"0")
        await turn()
        worker.answer()
        await good
        b.dispatcher.detach(worker)
        await kill_with(b, b.submit(payload=b"poison"))
        assert b.dispatcher.num_quarantined == 1
        b.check_books()

    run(go())
