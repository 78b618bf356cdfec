"""The front end's view of a group that was never started; its clock is the test's."""

from types import SimpleNamespace

import pytest

from inferpool.models.spec import Placement
from inferpool.workers.host.engine import USUAL_PERIODS, WorkerId
from inferpool.workers.host.observed import OomKills
from inferpool.workers.ranks.host_side import RankedWorker
from tests.workers.contract import config_of
from tests.workers.host.test_local_worker import Clock, clock

__all__ = ["clock"]


@pytest.mark.parametrize(("is_started", "late_s"), [(True, 0.0), (True, 0.6), (False, 0.0)])
async def test_only_a_follower_that_is_ready_is_ended_for_its_silence(
    clock: Clock, is_started: bool, late_s: float
):
    pair = Placement(devices=("cpu", "cpu"), split="pipeline")
    config = config_of(placement=pair, batch_timeout_s=10.0)
    worker = RankedWorker(WorkerId(model="m", slot=0), config, print, OomKills(), USUAL_PERIODS)
    if is_started:
        worker.started.set_result(SimpleNamespace())  # type: ignore[arg-type]  # nobody looks at it
    clock.now += 5.1
    await worker._look_after(clock.now, late_s)
    is_hung = is_started and not late_s
    assert ("no sign of life for 5 s" in worker._reason) == is_hung
    if not is_hung:
        await worker.kill("never started")
