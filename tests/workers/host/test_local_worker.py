"""The front end's view of a worker that was never started; its clock is the test's."""

import pytest

import inferpool.workers.shared.heartbeat
from inferpool.workers.host.engine import USUAL_PERIODS, WorkerId
from inferpool.workers.host.local_worker import HeldBatch, LocalWorker
from inferpool.workers.host.observed import OomKills
from inferpool.workers.shared.heartbeat import Heartbeat
from tests.workers.contract import config_of


class Clock:
    """A clock that stands still but when the test moves it on."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic_ns(self) -> int:
        return int(self.now * 1e9)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(inferpool.workers.shared.heartbeat, "time", clock)
    return clock


def made() -> LocalWorker:
    config = config_of(batch_timeout_s=10.0)
    return LocalWorker(WorkerId(model="m", slot=0), config, print, OomKills(), USUAL_PERIODS)


def begin(worker: LocalWorker, now: float) -> None:
    """Have it begin a batch."""
    worker.carrier.held.add(1, HeldBatch([], None, 10.0), now)
    Heartbeat(worker.lead.heartbeat.memory.map).received(1)


async def test_worker_that_is_idle_and_silent_for_more_than_three_seconds_is_stalled(clock: Clock):
    worker = made()
    clock.now += 3.0
    assert not worker.is_stalled
    clock.now += 0.1
    assert worker.is_stalled
    begin(worker, clock.now)
    assert not worker.is_stalled  # one that computes gives no sign of life
    await worker.kill("never started")


@pytest.mark.parametrize(("late_s", "is_hung"), [(0.5, True), (0.6, False), (9.0, False)])
async def test_time_in_which_the_whole_host_stood_still_ends_no_worker(
    clock: Clock, late_s: float, is_hung: bool
):
    worker = made()
    begin(worker, clock.now)
    await worker._look_after(clock.now + 10.5, late_s)
    assert ("hung" in worker._reason) == is_hung
    if not is_hung:
        await worker.kill("never started")
