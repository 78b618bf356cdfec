import asyncio
import logging
from dataclasses import replace

import pytest

from inferpool.service.errors import GivenUpError, UnavailableError
from inferpool.service.queue.turns.gate import DeviceGate
from inferpool.workers.arena import Arena
from inferpool.workers.errors import WorkerStartError
from tests.fakes import FakeEngine
from tests.service.pools import (
    CONFIG,
    MeasuringEngine,
    SilentAnnouncer,
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


async def test_a_pool_whose_stop_is_cancelled_leaves_the_device_to_others(arena: Arena):
    gate, engine = DeviceGate(1), FakeEngine()
    pools = [make_pool(engine, arena, gate=gate, name=name) for name in "ab"]
    for pool in pools:
        pool.start()
    await until(lambda: all(pool.is_ready for pool in pools))
    assert pools[1].dispatcher.scheduler.turns is not None
    stop = asyncio.create_task(pools[0].stop(0))
    await asyncio.sleep(0)
    stop.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stop
    assert pools[1].dispatcher.scheduler.turns is None
    await pools[0].stop(0)
    await pools[1].stop(0)


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
