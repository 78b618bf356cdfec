"""Followers of a lead on another host, before they are started."""

import pytest

from inferpool.models.spec import Placement
from inferpool.workers.host.engine import USUAL_PERIODS, WorkerId
from inferpool.workers.host.observed import OomKills
from inferpool.workers.ranks.following_worker import FollowingWorker
from inferpool.workers.shared.config import HostPart
from inferpool.workers.shared.messages import BatchDone, FrameError, StartProgress
from tests.workers.contract import config_of


async def test_follower_does_not_speak_for_its_lead():
    pair = Placement(devices=("cpu", "cpu"), split="pipeline")
    part = HostPart(first=1, placement=Placement(devices=("cpu",), split="pipeline"), token="t")
    config = config_of(placement=pair, part=part)
    worker = FollowingWorker(WorkerId(model="m", slot=0), config, print, OomKills(), USUAL_PERIODS)
    for message in (BatchDone(1, [], 0.0, 0.0), StartProgress("loading")):
        with pytest.raises(FrameError, match="which this rank may not send"):
            worker.on_message(worker.ranks[0], message)
    await worker.kill("never started")
