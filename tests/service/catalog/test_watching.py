"""The former version that is kept, and the watch over the one that serves."""

import asyncio

import pytest

from inferpool.service.catalog.requests import SwapOptions
from inferpool.service.catalog.watching import FaultShare, VersionWatch
from inferpool.service.errors import VersionRefusedError
from tests.service.catalog.test_catalog import Kept
from tests.service.catalog.test_judging import Acts, Stage, ready, stage, swapped, when

pytestmark = pytest.mark.usefixtures("virtual_time")

__all__ = ["stage"]


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
        it.acts[1] = Acts(fails=lambda number: number % 3 == 0)
        await when(lambda: states(it)[2] == "rolled_back")
    assert it.changes.model_info("m").version == 1


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
