import logging
from dataclasses import replace

import pytest

from inferpool.service.errors import GivenUpError, OverloadedError, UnavailableError
from inferpool.service.queue.pool import Pool, SlotNumbers
from inferpool.workers.shared.arena import Arena
from inferpool.workers.shared.config import WorkerConfig
from inferpool.workers.shared.errors import WorkerStartError
from inferpool.workers.shared.messages import ItemRef
from tests.fakes import FakeEngine, ref_to
from tests.service.pools import (
    CONFIG,
    MeasuringEngine,
    SilentAnnouncer,
    make_dispatcher,
    make_pool,
    ready_pool,
    submit,
    until,
)


async def test_before_a_worker_is_ready_callers_are_told_to_try_again(arena: Arena):
    pool = make_pool(FakeEngine(), arena)
    pool.start()
    with pytest.raises(UnavailableError, match="starting: waiting to start") as caught:
        submit(pool)
    assert caught.value.retry_after_s == 1
    await until(lambda: pool.is_ready)
    submit(pool).cancel()
    await pool.stop(0)
    pool = make_pool(FakeEngine([WorkerStartError("wrong weights", permanent=True)]), arena)
    pool.start()
    await until(lambda: pool.is_lost)
    with pytest.raises(GivenUpError, match="wrong weights") as caught:
        submit(pool)
    assert caught.value.retry_after_s is None
    await pool.stop(0)


async def test_time_to_come_back_covers_the_pause_before_the_next_start(arena: Arena):
    failures = [WorkerStartError("no luck", permanent=False)] * 5
    pool = make_pool(FakeEngine(failures), arena)
    pool.start()
    slot = pool.slots[0]
    await until(lambda: slot.state == "backoff" and slot.num_failures == 2)
    slot.due += 6  # as after a few failures more
    with pytest.raises(UnavailableError, match="backoff: no luck") as caught:
        submit(pool)
    assert caught.value.retry_after_s in (4, 5, 6, 7)
    await pool.stop(0)


async def test_only_a_restart_on_demand_measures_the_presets_again(arena: Arena):
    engine = MeasuringEngine()
    pool = await ready_pool(engine, arena, speed="auto")
    engine.started[0].die()
    await until(lambda: len(engine.started) == 2 and pool.is_ready)
    await pool.replacer.replace(pool.slots, 1)
    chosen = engine.started[0].ready.speed
    assert engine.told == {"m/0#0": None, "m/0#1": chosen, "m/0#2": None}
    await pool.stop(0)


async def test_what_is_submitted_waits_while_the_workers_compute_for_another_dispatcher(
    arena: Arena,
):
    engine = FakeEngine()
    pool, other = await ready_pool(engine, arena), make_dispatcher(arena)
    pool.attach(other)
    waiting, sent = submit(pool), other.submit(ref_to(b"y"), [b"y"])
    await until(lambda: engine.started[0].batches)
    engine.started[0].answer()
    assert await sent
    assert not waiting.done()
    assert not pool.is_ready
    pool.attach(pool.dispatcher)
    await until(lambda: engine.started[0].batches)
    engine.started[0].answer()
    assert await waiting
    await pool.stop(0)


async def test_a_gatekeeper_may_refuse_what_is_submitted_until_it_is_removed(arena: Arena):
    pool = await ready_pool(FakeEngine(), arena)

    def refuse(ref: ItemRef, chunks: object) -> None:
        raise OverloadedError("not now")

    remove = pool.guard(refuse)
    with pytest.raises(OverloadedError, match="not now"):
        submit(pool)
    remove()
    submit(pool).cancel()
    await pool.stop(0)


class TimingAnnouncer(SilentAnnouncer):
    def __init__(self) -> None:
        self.seconds: list[float] = []

    def ready(self, worker: str, seconds: float) -> None:
        self.seconds.append(seconds)


async def test_start_time_is_whole_and_speed_is_logged_once(
    arena: Arena, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.INFO)
    engine, told = MeasuringEngine(), TimingAnnouncer()
    pool = make_pool(engine, arena, told, [replace(CONFIG, speed="auto")] * 2)
    pool.start()
    await until(lambda: len(told.seconds) == 2)
    engine.started[0].die()
    await until(lambda: len(told.seconds) == 3)
    assert min(told.seconds) >= 0.19
    await pool.stop(0)
    lines = [line for line in caplog.messages if "speed" in line]
    assert lines == ["m speed: folded, 1.50 x exact, largest deviation 0"]


def on_host(host: str, num: int) -> list[WorkerConfig]:
    return [replace(CONFIG, host=host)] * num


def names(pool: Pool) -> list[str]:
    return [str(slot.id) for slot in pool.slots]


async def lose(pool: Pool, engine: FakeEngine, host: str) -> None:
    """Lose a host as the engine tells it: its workers first."""
    gone = {str(slot.id) for slot in pool.slots if slot.config.host == host}
    for worker in engine.started:
        if str(worker.id) in gone:
            worker.lose_host()
    pool.withdraw(host, "silence")


async def test_workers_come_and_go_with_their_hosts_which_keep_their_numbers(arena: Arena):
    engine = FakeEngine()
    pool = make_pool(engine, arena, configs=[])
    pool.start()
    assert not pool.is_lost
    assert not pool.is_ready
    with pytest.raises(UnavailableError, match="no host is connected") as caught:
        submit(pool)
    assert caught.value.retry_after_s == 1
    pool.extend(on_host("a", 2))
    pool.extend(on_host("b", 1))
    await until(lambda: all(slot.handle for slot in pool.slots))
    assert names(pool) == ["m/0#0", "m/1#0", "m/2#0"]
    await lose(pool, engine, "a")
    assert names(pool) == ["m/2#0"]
    assert [(str(each.id), each.cause) for each in pool.endings] == [
        ("m/0#0", "host"),
        ("m/1#0", "host"),
    ]
    submit(pool).cancel()
    pool.extend(on_host("c", 1))
    pool.extend(on_host("a", 2))
    await until(lambda: all(slot.handle for slot in pool.slots))
    assert names(pool) == ["m/2#0", "m/3#0", "m/0#1", "m/1#1"]
    assert pool.dispatcher.num_ready == 4
    for host in "abc":
        await lose(pool, engine, host)
    assert pool.reason == "no host is connected that can run it"
    assert not pool.is_lost
    await pool.stop(0)


async def test_what_a_lost_host_held_is_computed_by_another_one(arena: Arena):
    engine = FakeEngine()
    pool = make_pool(engine, arena, configs=on_host("a", 1))
    pool.start()
    await until(lambda: pool.is_ready)
    future = submit(pool)
    await until(lambda: engine.started[0].batches)
    await lose(pool, engine, "a")
    assert not future.done()
    pool.extend(on_host("b", 1))
    await until(lambda: len(engine.started) == 2 and engine.started[1].batches)
    engine.started[1].answer()
    assert await future
    await pool.stop(0)


async def test_a_host_that_joins_a_version_which_has_not_begun_waits_with_the_others(arena: Arena):
    pool = make_pool(FakeEngine(), arena, configs=on_host("a", 1))
    pool.start(paused=True)
    (joined,) = pool.extend(on_host("b", 1))
    assert joined.is_paused
    for slot in pool.slots:
        pool.resume(slot)
    (late,) = pool.extend(on_host("c", 1))
    assert not late.is_paused
    await until(lambda: pool.dispatcher.num_ready == 3)
    await pool.stop(0)


def test_the_numbers_of_hosts_that_stay_away_are_given_to_others():
    numbers = SlotNumbers()
    assert numbers.take("first", 2) == [0, 1]
    for number in range(65):
        numbers.leave(f"host {number - 1}")
        assert min(numbers.take(f"host {number}", 1)) == number + 2
    numbers.leave("first")
    assert numbers.take("first", 3) == [0, 1, 2]  # 2 was that of the one away for longest
