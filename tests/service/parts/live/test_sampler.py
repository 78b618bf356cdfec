import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from inferpool.service.api.routes.health import HealthReport
from inferpool.service.parts.jobs.records import StoreCounts
from inferpool.service.parts.live.events import HostState
from inferpool.service.parts.live.sampler import LiveFeed
from inferpool.service.settings.model import ModelSettings
from inferpool.service.settings.settings import Settings
from inferpool.service.telemetry.metrics import Metrics, ModelMetrics
from inferpool.workers.shared.arena import Arena
from tests.fakes import FakeEngine
from tests.service.pools import ready_pool

pytestmark = pytest.mark.usefixtures("virtual_time")

HEALTH = HealthReport(status="ready", ready=True, draining=False, models=[])
HOST = HostState(connections=2, arena_bytes=100, arena_used_bytes=10)


@pytest.fixture
def feed(arena: Arena) -> AbstractAsyncContextManager[tuple[LiveFeed, ModelMetrics, FakeEngine]]:
    """A feed of one model that samples every second."""

    @asynccontextmanager
    async def sampling() -> AsyncIterator[tuple[LiveFeed, ModelMetrics, FakeEngine]]:
        engine = FakeEngine()
        pool = await ready_pool(engine, arena)
        model = ModelSettings(source="echo")
        settings = Settings(models={"m": model}, default_model="m")
        metrics = Metrics(["m"], {})
        live = LiveFeed(settings, {"m": pool}, metrics, report=lambda: HEALTH, host=lambda: HOST)
        live.start()
        yield live, metrics.model("m"), engine
        await live.stop()
        await pool.stop(0)

    return sampling()


async def next_of(live: LiveFeed) -> Any:
    return json.loads(await live.next())


async def test_an_event_tells_what_was_counted_in_its_interval(feed):
    async with feed as (live, metrics, _engine):
        await live.next()
        metrics.requests[200] += 4
        metrics.requests[429] += 1
        metrics.accepted += 5
        metrics.succeeded += 4
        metrics.failed += 1
        metrics.rejected["queue_full"] += 2
        metrics.in_flight = 3
        metrics.batch_size.observe(3)
        for _ in range(100):
            metrics.answer_duration.observe(0.02)
            metrics.error_duration.observe(0.0001)
        state = await next_of(live)
        assert state["interval_s"] == 1
        sample = state["models"]["m"]
        assert sample["requests_per_s"] == 5
        rates = sample["instances_per_s"]
        assert (rates["accepted"], rates["succeeded"], rates["failed"]) == (5, 4, 1)
        assert rates["expired"] == 0
        assert sample["rejected_per_s"] == {"queue_full": 2}
        assert sample["latency_ms"]["p50"] == pytest.approx(20, rel=0.1)  # refusals are no answers
        assert sample["queue_ms"] is None
        assert (sample["batch_sizes"], sample["num_batched"]) == ({"4": 1}, 3)
        assert (sample["in_flight"], sample["queue_limit"]) == (3, 10)
        assert state["host"]["connections"] == 2
        assert state["health"]["status"] == "ready"
        later = (await next_of(live))["models"]["m"]
        assert later["requests_per_s"] == later["num_batched"] == 0
        assert later["latency_ms"] is None


async def test_a_model_that_has_left_and_come_back_meanwhile_counts_from_zero(feed, caplog):
    async with feed as (live, before, _engine):
        before.answer_duration.observe(0.5)
        before.requests[200] += 1
        await live.next()
        live._metrics.remove("m")
        live._metrics.add("m")
        sample = (await next_of(live))["models"]["m"]
        assert (sample["latency_ms"], sample["requests_per_s"]) == (None, 0)
        assert not caplog.records
        live._metrics.model("m").answer_duration.observe(0.02)
        sample = (await next_of(live))["models"]["m"]
        assert sample["latency_ms"]["p50"] == pytest.approx(20, rel=0.1)


async def test_jobs_are_told_of_where_there_are_any(arena: Arena):
    counts = StoreCounts(jobs={"queued": 2, "failed": 0}, num_waiting=70, num_bytes=9)
    jobs = SimpleNamespace(counts=counts, is_open=True, num_answered=0)
    models = {"m": ModelSettings(source="echo")}
    settings, metrics = Settings(models=models, default_model="m"), Metrics(["m"], {})
    live = LiveFeed(settings, {}, metrics, report=lambda: HEALTH, host=lambda: HOST, jobs=jobs)
    live.start()
    assert (await next_of(live))["jobs"] == {
        "open": True,
        "by_state": {"queued": 2},
        "instances_waiting": 70,
        "instances_per_s": 0.0,
        "store_bytes": 9,
    }
    jobs.num_answered = 64
    rates = [(await next_of(live))["jobs"]["instances_per_s"] for _ in range(3)]
    assert rates == [64.0, 0.0, 0.0]
    await live.stop()


async def test_a_new_listener_gets_the_past_once(feed):
    async with feed as (live, metrics, _engine):
        metrics.requests[200] += 9
        for _ in range(3):
            await live.next()
        history = json.loads(live.first())["history"]
        assert [past["models"]["m"]["requests_per_s"] for past in history] == [9, 0, 0]
        assert (await next_of(live))["history"] == []


async def test_endings_of_workers_come_with_their_reasons_newest_first(feed):
    async with feed as (live, _metrics, engine):
        for life in range(2):
            assert len(engine.started) == life + 1
            engine.started[life].die()
            await asyncio.sleep(10)
        assert len(engine.started) == 3
        endings = (await next_of(live))["models"]["m"]["endings"]
        assert [ending["incarnation"] for ending in endings] == [1, 0]
        assert {ending["worker"] for ending in endings} == {"m/0"}
        assert {(ending["cause"], ending["reason"]) for ending in endings} == {
            ("signal", "SIGKILL")
        }


async def test_all_listeners_get_a_last_event(feed):
    async with feed as (live, _metrics, _engine):
        await live.next()
        live.end()
        assert live.is_ending
        assert json.loads(live.first())["health"]
