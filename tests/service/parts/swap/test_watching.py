"""The former version that is kept, and the watch over the one that serves."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from inferpool.service.api.routes.health import SwapFigures
from inferpool.service.errors import VersionRefusedError
from inferpool.service.parts.swap.requests import SwapOptions
from inferpool.service.parts.swap.watching import FaultShare, VersionWatch
from inferpool.service.telemetry.metrics import ModelMetrics
from inferpool.workers.shared.messages import BatchDone
from tests.service.catalog.test_catalog import Kept
from tests.service.parts.swap.test_decision import Acts, Stage, ready, swapped, when

pytestmark = pytest.mark.usefixtures("virtual_time")


def states(it: Stage) -> dict[int, str]:
    return {each.number: each.state for each in it.changes.model_info("m").versions}


async def refuse_a_third(it: Stage, **request: object) -> None:
    with pytest.raises(VersionRefusedError):
        await it.swap(**request)
    assert states(it) == {1: "kept", 2: "serving", 3: "refused"}
    assert [version.number for version in it.catalog.versions("m")] == [1, 2]


async def test_a_refused_swap_leaves_the_kept_version_to_go_back_to_at_once(stage):
    it = await ready(stage())
    with it.clients():
        await swapped(it, rollback_s=600)
        it.acts.append(Acts(shift=1))
        await refuse_a_third(it)
        it.changes.begin_rollback("m")
        await it.changes.until_decided("m")
    assert states(it)[1] == "serving"
    assert len(it.kept.engine.started) == 3, "nothing was loaded anew"


async def test_faults_after_a_refused_swap_still_roll_back(stage):
    it = await ready(stage())
    with it.clients():
        await swapped(it, rollback_s=600)
        it.acts.append(Acts(shift=1))
        await refuse_a_third(it)
        it.failed.clear()
        it.acts[1] = Acts(fails=lambda number: number % 3 == 0)
        await when(lambda: states(it)[2] == "rolled_back")
    assert it.changes.model_info("m").version == 1
    (version,) = (each for each in it.changes.model_info("m").versions if each.number == 2)
    assert "max_fault_share" in version.reason
    assert version.figures.fault_share > 0.001
    assert sum(it.failed.values()) < 60


async def test_slowness_after_a_refused_canary_still_rolls_back(stage):
    it = await ready(stage())
    it.at_once, it.pause_s = 3, 0.05
    with it.clients():
        await swapped(it, rollback_s=600)
        it.acts.append(Acts(fails=lambda number: number > 1500))
        await refuse_a_third(it, policy="canary", traffic_share=0.5, duration_s=300)
        it.acts[1] = Acts(item_s=0.012, batch_s=0.012)
        await when(lambda: states(it)[2] == "rolled_back")
    (version,) = (each for each in it.changes.model_info("m").versions if each.number == 2)
    assert version.figures.live_latency_ratio == pytest.approx(3.0, rel=0.2)


async def test_a_kept_version_whose_time_is_over_while_another_is_refused_leaves_then(stage):
    it = await ready(stage())
    with it.clients():
        await swapped(it, rollback_s=10)
        it.pause_s = 0.2
        it.acts.append(Acts(fails=lambda number: True))
        it.changes.begin_swap("m", {"wait_s": 15, "num_inputs": 10_000})
        await asyncio.sleep(12)
        assert states(it)[1] == "kept"
        with pytest.raises(VersionRefusedError):
            await it.changes.until_decided("m")
        await when(lambda: states(it)[1] == "gone")
    assert states(it)[2] == "serving"


async def test_a_version_that_takes_over_lets_the_one_kept_before_leave(stage):
    it = await ready(stage())
    with it.clients():
        await swapped(it, rollback_s=600)
        it.acts.append(Acts())
        assert (await it.swap(rollback_s=600))["serves"] == 3
        await when(lambda: states(it)[1] == "gone")
    assert states(it) == {1: "gone", 2: "kept", 3: "serving"}


class Counting:
    """A version as far as a watch reads it: what it counts, and what its batches take."""

    def __init__(self, num: int = 0, num_faults: int = 0) -> None:
        self.metrics = ModelMetrics("m")
        self.pool: Any = SimpleNamespace(
            is_lost=False, is_draining=False, dispatcher=SimpleNamespace(observe=self.observe)
        )
        self.count(num, num_faults)

    def count(self, num: int, num_faults: int) -> None:
        """Count inputs; one of the faults is that no worker was there."""
        self.metrics.succeeded += num - num_faults
        self.metrics.faults += max(0, num_faults - 1)
        self.metrics.rejected["unavailable"] += min(1, num_faults)

    def observe(self, callback: Callable[[int, BatchDone], None]) -> Callable[[], None]:
        self.callback = callback
        return lambda: None

    def compute(self, *times_s: float) -> None:
        for time_s in times_s:
            done = BatchDone(0, [], prepare_s=4 * time_s - 2, compute_s=2)
            self.callback(4, done)


def watching(old: Counting, new: Counting, *, is_canary: bool = False, **bounds: float) -> Any:
    options = SwapOptions(**bounds)  # type: ignore[arg-type]  # all are numbers
    watch = VersionWatch(old, new, options, FaultShare(), is_canary=is_canary)  # type: ignore[arg-type]
    watch.begin()
    return watch


@pytest.mark.parametrize(
    ("num", "num_faults", "is_worse"),
    [(1000, 94, False), (1000, 95, True), (2, 2, False), (3, 3, True)],
)
async def test_a_version_may_fail_by_a_bound_more_often_and_no_more(num, num_faults, is_worse):
    """The former version fails on 2%, and 5% more are allowed; 9.5% of 1000 is no chance."""
    old, new = Counting(num=100, num_faults=2), Counting()
    watch = watching(old, new, max_fault_share=0.05)
    new.count(num, num_faults)
    assert bool(await watch.look()) == is_worse
    assert watch.with_figures(SwapFigures()).fault_share == round(num_faults / num, 5)


@pytest.mark.parametrize(
    ("times_s", "ratio", "is_worse"),
    [
        ([1.49] * 10, 1.49, False),
        ([1.51] * 10, 1.51, True),
        ([1.51] * 9, None, False),
        ([1.0] * 9 + [1.6] * 11, 1.6, False),
        ([1.0] * 3 + [1.6] * 17, 1.6, True),
    ],
    ids=["in bounds", "slow", "too few", "by chance", "surely slow"],
)
async def test_a_canary_may_take_longer_by_a_bound_and_no_more(times_s, ratio, is_worse):
    old, new = Counting(), Counting()
    watch = watching(old, new, is_canary=True, max_latency_ratio=1.5)
    old.compute(*[1.0] * 10)
    new.compute(*times_s)
    assert bool(await watch.look()) == is_worse
    assert watch.with_figures(SwapFigures()).live_latency_ratio == ratio


async def test_what_is_computed_while_nobody_looks_does_not_count(arena):
    kept = Kept(arena)
    await when(lambda: kept.catalog.serving["m"].is_ready)
    old, new = kept.catalog.version("m"), await kept.ready()
    watch = VersionWatch(old, new, SwapOptions(), FaultShare())
    watch.begin()
    new.metrics.succeeded += 7
    watch.stop()
    new.metrics.faults += 50
    watch.begin()
    assert (watch.num_answered, await watch.look()) == (7, "")
    watch.stop()
