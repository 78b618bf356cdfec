"""Work in the background takes what is idle, and others wait for one of its batches at most."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from inferpool.service.errors import OverloadedError, UnavailableError
from inferpool.service.queue.instance import BACKGROUND, Instance
from inferpool.service.queue.scheduling.background import Background
from inferpool.service.queue.scheduling.lanes import CostCurve
from inferpool.workers.shared.arena import Arena
from inferpool.workers.shared.messages import ItemRef
from tests.fakes import FakeWorker, ref_to
from tests.service.pools import make_dispatcher, until
from tests.service.simulation import Stream, simulate_mix

pytestmark = pytest.mark.usefixtures("virtual_time")


def background(payload: bytes = b"jjj") -> tuple[ItemRef, list[bytes]]:
    return ref_to(payload, priority=BACKGROUND), [payload]


async def test_an_idle_worker_takes_one_batch_of_it(arena: Arena) -> None:
    dispatcher, worker = make_dispatcher(arena, max_queue_length=3), FakeWorker()
    dispatcher.attach(worker)
    futures = [dispatcher.submit(*background()) for _ in range(10)]  # more than may queue
    await until(lambda: worker.batches)
    assert worker.sizes == [4]
    assert (dispatcher.num_queued, dispatcher.num_background) == (0, 6)
    for _ in range(3):
        await until(lambda: worker.batches)
        assert len(worker.batches) == 1
        worker.answer()
    await until(lambda: all(future.done() for future in futures))
    assert dispatcher.num_unsettled == 0


async def test_callers_take_turns(arena: Arena) -> None:
    dispatcher, worker = make_dispatcher(arena), FakeWorker()
    dispatcher.attach(worker)

    def submit(caller: int, num: int) -> None:
        for _ in range(num):
            ref, chunks = background(b"j" * -caller)
            ref.caller = caller
            dispatcher.submit(ref, chunks)

    submit(-1, 20)
    submit(-2, 3)
    submit(-3, 1)
    batches = []
    for _ in range(6):
        await until(lambda: worker.batches)
        batches.append(sorted(item.num_bytes for item in worker.batches[0][0]))
        worker.answer()
    assert batches[0] == [1, 1, 2, 3]
    assert batches[1] == [1, 1, 2, 2]
    assert batches[2:] == [[1] * 4] * 4
    await until(lambda: dispatcher.num_unsettled == 0)


async def test_others_go_first(arena: Arena) -> None:
    dispatcher, worker = make_dispatcher(arena), FakeWorker()
    dispatcher.attach(worker)
    for _ in range(10):
        dispatcher.submit(*background())
    await until(lambda: worker.batches)
    others = [dispatcher.submit(ref_to(b"x"), [b"x"]) for _ in range(5)]
    await asyncio.sleep(0.05)
    worker.answer()
    await until(lambda: worker.batches)
    sizes = [[item.num_bytes for item in items] for items, _ in worker.batches]
    assert sizes[0] == [1] * 4
    await asyncio.sleep(0.05)
    worker.answer()
    await until(lambda: all(f.done() for f in others[:4]) and worker.batches)
    assert [item.num_bytes for item in worker.batches[0][0]] == [1, 3, 3, 3]  # there is room
    worker.answer()
    await until(lambda: others[4].done() and worker.batches)
    assert [item.num_bytes for item in worker.batches[0][0]] == [3] * 3


@pytest.mark.parametrize(("timeout_s", "size"), [(0.2, 1), (0.21, 7), (30, 7)])
async def test_it_joins_no_batch_that_it_would_make_late(
    arena: Arena, timeout_s: float, size: int
) -> None:
    """One instance takes 0.11 s, and seven take 0.17 s; a fifth is added to be sure."""
    dispatcher, worker = make_dispatcher(arena, max_batch_size=8), FakeWorker(credit=1)
    dispatcher.attach(worker)
    for num in (1, 2, 4, 8) * 4:
        futures = [dispatcher.submit(ref_to(b"x"), [b"x"]) for _ in range(num)]
        await until(lambda: worker.batches)
        await asyncio.sleep(0.1 + num / 100)
        worker.answer(compute_s=0.05 + num / 200)
        await asyncio.gather(*futures)
    for _ in range(8):
        dispatcher.submit(*background())
    dispatcher.submit(ref_to(b"x", timeout_s), [b"x"])
    await until(lambda: worker.batches)
    assert worker.sizes == [size]


async def test_what_a_lost_worker_had_is_computed_again(arena: Arena) -> None:
    dispatcher, worker = make_dispatcher(arena), FakeWorker()
    dispatcher.attach(worker)
    futures = [dispatcher.submit(*background(b"%d" % number)) for number in range(3)]
    await until(lambda: worker.batches)
    worker.die()
    await until(lambda: dispatcher.num_background == 3)
    assert dispatcher.num_queued == 0
    successor = FakeWorker()
    dispatcher.attach(successor)
    while not all(future.done() for future in futures):
        await until(lambda: successor.batches)
        successor.answer()
        await until(lambda: successor.batches or all(future.done() for future in futures))
    assert dispatcher.num_unsettled == 0


async def test_cancelled_work_leaves_the_queue_and_the_arena(arena: Arena) -> None:
    dispatcher = make_dispatcher(arena)
    futures = [dispatcher.submit(*background()) for _ in range(3)]
    for future in futures:
        future.cancel()
    assert (dispatcher.num_background, dispatcher.num_unsettled, arena.used_bytes) == (0, 0, 0)


async def test_it_leaves_half_of_the_arena_to_others(arena: Arena) -> None:
    dispatcher = make_dispatcher(arena)
    dispatcher.submit(*background(bytes(arena.num_bytes // 4)))
    with pytest.raises(OverloadedError, match="little room"):
        dispatcher.submit(*background(bytes(arena.num_bytes // 2)))
    dispatcher.submit(ref_to(bytes(arena.num_bytes // 2)), [bytes(arena.num_bytes // 2)])


async def test_nothing_is_taken_while_draining(arena: Arena) -> None:
    dispatcher = make_dispatcher(arena)
    await dispatcher.drain(0)
    with pytest.raises(UnavailableError):
        dispatcher.submit(*background())


async def test_what_must_be_alone_goes_along_with_nobody(arena: Arena) -> None:
    dispatcher, worker = make_dispatcher(arena), FakeWorker()
    dispatcher.attach(worker)
    first = dispatcher.submit(*background(b"0"))
    await until(lambda: worker.batches)
    worker.die()  # so it is suspected, and computed alone
    await until(lambda: dispatcher.num_background)
    successor = FakeWorker()
    other = dispatcher.submit(ref_to(b"x"), [b"x"])
    dispatcher.attach(successor)
    await until(lambda: successor.batches)
    assert successor.sizes == [1]
    successor.answer()
    await until(lambda: other.done() and successor.batches)
    assert successor.sizes == [1]
    successor.answer()
    await until(lambda: first.done())


def curve(*times_s: float) -> CostCurve:
    """Return the curve of a worker that takes so long for 1, 2, ... instances."""
    found = CostCurve()
    for _ in range(40):
        for size, time_s in enumerate(times_s, 1):
            found.learn(size, time_s)
    return found


def waiting(num: int = 20) -> Background:
    found = Background()
    for _ in range(num):
        found.queue.push(QueuedInstance(), 0.0)  # type: ignore[arg-type]  # as far as it is queued
    return found


class QueuedInstance:
    """An instance as far as the queue looks at one."""

    def __init__(self) -> None:
        self.ref = ref_to(b"x", priority=BACKGROUND)
        self.is_solo = False


LINEAR = [0.005 + 0.02 * size for size in range(1, 9)]
FLAT = [0.05] * 8


def test_batches_are_as_large_as_they_may_be_while_nobody_else_calls() -> None:
    assert waiting().size(curve(*LINEAR), 8, now=100.0) == 8


@pytest.mark.parametrize(("times_s", "size"), [(LINEAR, 2), (FLAT, 8)])
def test_batches_are_no_larger_than_pays_while_others_call(
    times_s: Sequence[float], size: int
) -> None:
    work = waiting()
    work.count_others(0.01)
    work.others_at = 99.0
    assert work.size(curve(*times_s), 8, now=100.0) == size


@pytest.mark.parametrize(
    ("times_s", "num", "companions"), [(LINEAR, 1, 1), (LINEAR, 4, 0), (FLAT, 3, 5), (FLAT, 8, 0)]
)
def test_batches_of_others_are_filled_while_it_gets_too_little(
    times_s: Sequence[float], num: int, companions: int
) -> None:
    assert waiting().companions(curve(*times_s), num, 8) == companions
    assert waiting(0).companions(curve(*times_s), num, 8) == 0


def test_batches_of_others_are_left_alone_while_it_gets_enough() -> None:
    work, cost = waiting(), curve(*FLAT)
    work.count_own(1.0)
    num_alone = 0
    while not work.companions(cost, 3, 8):  # each of them wastes 31 ms
        num_alone += 1
    assert num_alone == 3
    work.count_own(1.0)
    assert not work.companions(cost, 3, 8)


class IdleTaker(Stream):
    """Work in the background that never ends, and what of it was answered in the window."""

    num_done = 0
    until: float | None = None
    seconds = 0.0

    def note(self, instance: Instance, *, counts: bool) -> None:
        now = instance.dispatcher.loop.time()
        self.until = now + self.seconds if self.until is None else self.until
        self.num_done += now < self.until


LOAD = 0.4
KINDS = {
    "of a CPU": (lambda num: 0.005 + 0.02 * num, 8, 20.0),
    "of a CPU, with costs of each batch": (lambda num: 0.02 + 0.02 * num, 8, 20.0),
    "that takes the same for each batch": (lambda num: 0.05, 8, 10.0),
    "of a GPU": (lambda num: 0.008 + 0.0005 * num, 64, 2.0),
    "of a fast GPU": (lambda num: 0.002 + 0.0005 * num, 64, 2.0),
}
"""The time of a batch, the largest one, and how many seconds have some thousand calls."""


def shared(
    cost: Callable[[int], float], most: int, seconds: float, **changes: Any
) -> tuple[Stream, IdleTaker]:
    """Let calls and work in the background share two workers; return both."""
    capacity = 2 * most / cost(most)
    calls = Stream(changes.pop("load", LOAD) * capacity)
    jobs = IdleTaker(1.3 * capacity, timeout_s=1e6, priority=BACKGROUND)
    jobs.seconds = seconds
    streams = [calls, jobs] if changes.pop("with_jobs", True) else [calls]
    simulate_mix(
        streams, cost, seconds, noise=0.1, max_batch_size=most, max_queue_length=10**6, **changes
    )
    return calls, jobs


@pytest.mark.parametrize(("cost", "most", "seconds"), KINDS.values(), ids=KINDS.keys())
def test_it_takes_what_is_idle_and_costs_others_no_more_than_one_batch(
    cost: Callable[[int], float], most: int, seconds: float
) -> None:
    alone, _ = shared(cost, most, seconds, with_jobs=False)
    calls, jobs = shared(cost, most, seconds)
    assert calls.num_answered == calls.num_asked
    assert calls.p99_ms <= 1.2 * alone.p99_ms + 1000 * cost(most)
    idle_per_s = (1 - LOAD) * 2 * most / cost(most)
    assert jobs.num_done / seconds >= 0.8 * idle_per_s


@pytest.mark.parametrize(("job_share", "least", "most"), [(0.0, 0.0, 0.15), (0.5, 0.4, 0.65)])
def test_it_has_its_share_while_others_could_use_everything(
    job_share: float, least: float, most: float
) -> None:
    cost, size, seconds = KINDS["of a CPU"]
    _, jobs = shared(cost, size, seconds, load=1.5, job_share=job_share)
    assert least <= jobs.num_done / seconds / (2 * size / cost(size)) <= most
