import asyncio
from collections.abc import Sequence

import pytest

from inferpool.workers.host.engine import Ending, Vitals, WorkerId
from inferpool.workers.remote.host import RemoteWorker
from inferpool.workers.remote.wire import (
    BatchLost,
    RunBatch,
    StopWorker,
    WorkerPulse,
    WorkerStarted,
)
from inferpool.workers.shared.messages import BatchDone, ItemRef
from tests.fakes import ref_to
from tests.workers.remote.cluster import ready_of

ENDED = Ending(cause="signal", reason="SIGKILL")


class FakeLink:
    """Keeps what is sent to the host."""

    def __init__(self) -> None:
        self.round_trip_s = 0.0
        self.is_silent = False
        self.orders: list[RunBatch | StopWorker] = []
        self.error: Exception | None = None

    def order(self, message: RunBatch | StopWorker, items: Sequence[ItemRef] = ()) -> None:
        if self.error is not None:
            raise self.error
        self.orders.append(message)


def make_worker(credit: int = 2) -> tuple[RemoteWorker, FakeLink]:
    link = FakeLink()
    id = WorkerId(model="m", slot=0)
    started = WorkerStarted(7, credit, ready_of(pid=123))
    return RemoteWorker(id, started, link), link  # type: ignore[arg-type]  # all that it uses


def answer(id: int, compute_s: float = 0.1, size: int = 1) -> BatchDone:
    return BatchDone(id, [b"{}"] * size, 0.0, compute_s)


def pulse(**changes: float) -> WorkerPulse:
    vitals = {"last_beat_age_s": 0.1, "num_batches": 9, "last_answer_age_s": 0.2, **changes}
    return WorkerPulse(7, False, Vitals(pid=123, rss_bytes=5, **vitals))  # type: ignore[arg-type]


async def test_batch_that_cannot_be_sent_is_not_held():
    worker, link = make_worker()
    link.error = OverflowError("too large")
    with pytest.raises(OverflowError):
        worker.run([ref_to(b"a")])
    worker.on_ended(ENDED)
    assert worker.is_settled


async def test_nobody_may_wait_for_a_batch_any_more():
    worker, _ = make_worker()
    futures = [worker.run([ref_to(b"a")]) for _ in range(3)]
    for future in futures:
        future.cancel()
    worker.on_answer(answer(1))
    worker.on_lost(BatchLost(7, 2, "SIGKILL", started=True))
    worker.on_host_lost("gone")


async def test_worker_that_ended_before_its_host_keeps_its_own_ending():
    worker, _ = make_worker()
    worker.on_ended(ENDED)
    worker.on_host_lost("silence")
    worker.on_ended(Ending(cause="exit", reason="again"))
    assert await worker.wait() == ENDED


async def test_credit_grows_by_one_while_a_round_trip_takes_longer_than_a_batch():
    worker, link = make_worker(credit=3)
    link.round_trip_s = 10.0
    assert worker.credit == 3  # it is not known yet how long a batch takes
    worker.run([ref_to(b"a")])
    worker.on_answer(answer(1, compute_s=1.0))
    assert worker.credit == 4
    link.round_trip_s = 1.0
    assert worker.credit == 3
    for number in range(2, 60):
        worker.run([ref_to(b"a")])
        worker.on_answer(answer(number, compute_s=0.01))
    assert worker.credit == 4


async def test_stop_waits_for_the_end_that_the_agent_tells():
    worker, link = make_worker()
    stopping = asyncio.ensure_future(worker.stop(5.0))
    await asyncio.sleep(0)
    assert link.orders == [StopWorker(7, 5.0)]
    assert not stopping.done()
    worker.on_ended(ENDED)
    await stopping
    await worker.stop(5.0)
    assert len(link.orders) == 1


@pytest.mark.usefixtures("virtual_time")
async def test_stop_of_a_worker_whose_agent_does_not_answer_has_an_end():
    worker, _ = make_worker()
    await worker.stop(20.0)


async def test_vitals_are_those_of_the_last_pulse_grown_older():
    worker, link = make_worker()
    assert worker.vitals().pid == 123
    now = worker._pulse_at
    worker.on_pulse(pulse(batch_age_s=1.0), now - 10.0)
    vitals = worker.vitals()
    assert vitals.rss_bytes == 5
    assert vitals.last_beat_age_s > 10.1
    assert vitals.num_batches == 0  # of this connection
    assert vitals.batch_age_s == 0.0  # it holds none any more
    worker.run([ref_to(b"a")])
    assert worker.vitals().batch_age_s > 11.0
    worker.on_answer(answer(1))
    assert worker.vitals().last_answer_age_s < 10.2
    assert not worker.is_stalled
    link.is_silent = True
    assert worker.is_stalled
    worker.on_ended(ENDED)
    assert worker.vitals().rss_bytes == 0
