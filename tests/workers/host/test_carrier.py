from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import Pipe
from types import SimpleNamespace

import pytest

import inferpool.workers.host.local_worker
from inferpool.workers.host.local_worker import (
    Canary,
    Carrier,
    HeldBatch,
    HeldBatches,
    batch_timeout_s,
)
from inferpool.workers.shared.errors import WorkerLostError
from inferpool.workers.shared.messages import BatchDone, ItemError, ItemRef
from inferpool.workers.shared.queues import FrameError


@contextmanager
def carrying(wanted_timeout_s: float | None = 10.0) -> Iterator[Carrier]:
    heartbeat = SimpleNamespace(last_received=0, progressed_at=0.0, at_work_since=0.0)
    made = Carrier(
        heartbeat,  # type: ignore[arg-type]
        None,  # type: ignore[arg-type]  # no answer in these tests has outputs of its own
        wanted_timeout_s=wanted_timeout_s,
        patience_s=1.0,
        canary_every_s=5.0,
    )
    reader, writer = Pipe(duplex=False)
    with reader, writer:
        made.attach(writer)
        yield made
        made.close()


def item() -> ItemRef:
    return ItemRef(kind="json", offset=0, num_bytes=1, deadline=0.0)


async def test_batch_that_nobody_waits_for_keeps_no_other_from_its_failure():
    with carrying() as carrier:
        cancelled, waiting = carrier.give([item()]), carrier.give([item()])
        cancelled.cancel()
        assert not carrier.lose_all("killed", is_our_doing=False)
        assert not carrier.held
        with pytest.raises(WorkerLostError, match="killed"):
            await waiting


async def test_answer_that_nobody_waits_for_is_taken_like_others():
    with carrying() as carrier:
        cancelled, waiting = carrier.give([item()]), carrier.give([item()])
        cancelled.cancel()
        for id in (1, 2):
            carrier.take(BatchDone(id, ["right"], 0.0, 0.0, 0, 0.0, 0.0))
        assert (await waiting).outcomes == ["right"]
        assert carrier.has_worked
        assert not carrier.held


@pytest.mark.parametrize("outcomes", [[], ["one"], ["one", "two", "three"]])
async def test_worker_that_returns_too_few_or_too_many_outcomes_is_not_believed(outcomes: list):
    with carrying() as carrier:
        answer = carrier.give([item(), item()])
        with pytest.raises(FrameError, match=f"{len(outcomes)} outcomes for 2 items"):
            carrier.take(BatchDone(1, outcomes, 0.0, 0.0))
        assert not answer.done()
        assert carrier.held


async def test_worker_that_answers_what_it_does_not_hold_is_not_believed():
    with carrying() as carrier:
        carrier.give([item()])
        carrier.take(BatchDone(1, ["right"], 0.0, 0.0))
        for id in (1, 2):
            with pytest.raises(FrameError, match=f"batch {id}, which it does not hold"):
                carrier.take(BatchDone(id, ["again"], 0.0, 0.0))


async def test_batches_have_the_time_that_follows_from_the_warm_up_unless_it_is_set():
    for wanted_s, found_s in ((None, 30.0), (7.0, 7.0)):
        with carrying(wanted_s) as carrier:
            carrier.prove(3.0)
            assert carrier.held.has_canary
            assert carrier.held.batch_timeout_s == carrier.canary.limit_s == found_s


async def test_busy_worker_gets_a_canary_once_all_its_answers_are_errors_for_long(
    monkeypatch: pytest.MonkeyPatch,
):
    now = 100.0
    clock = SimpleNamespace(monotonic=lambda: now)
    monkeypatch.setattr(inferpool.workers.host.local_worker, "time", clock)
    refused = ItemError("model_error", "no")
    with carrying() as carrier:
        for id, (later_s, outcomes, has_canary) in enumerate(
            [
                (0.0, ["right", refused], False),
                (4.9, [refused, refused], False),
                (0.1, [refused, refused], True),
            ],
            start=1,
        ):
            carrier.give([item(), item()])
            now += later_s
            carrier.take(BatchDone(id, outcomes, 0.0, 0.0))
            assert carrier.held.has_canary == has_canary


def answer_to_a_canary(took_s: float = 0.01, error: str = "") -> BatchDone:
    return BatchDone(1, [ItemError("model_error", error)] if error else [], took_s / 2, took_s / 2)


@pytest.mark.parametrize(
    ("batch_timeout_s", "took_s", "every_s", "limit_s"),
    [
        (60.0, 0.01, 5.0, 4.0),  # a quick model is asked often
        (60.0, 2.0, 100.0, 40.0),  # canaries take a fiftieth of the time of a slow one
        (1.5, 1.0, 50.0, 1.5),  # no canary may take longer than a batch
    ],
)
def test_next_canary_depends_on_the_time_of_the_last_one(
    batch_timeout_s: float, took_s: float, every_s: float, limit_s: float
):
    canary = Canary(batch_timeout_s, every_s=5.0, patience_s=4.0)
    assert canary.limit_s == batch_timeout_s  # the first may take as long as a batch
    assert canary.record(answer_to_a_canary(took_s))
    assert (canary.every_s, canary.limit_s) == (pytest.approx(every_s), limit_s)


def test_only_failures_in_a_row_are_an_illness():
    canary = Canary(60.0, every_s=5.0, patience_s=5.0)
    assert not canary.record(answer_to_a_canary(error="no"))
    assert canary.record(answer_to_a_canary())
    assert not canary.record(answer_to_a_canary(error="no"))
    assert not canary.is_ill
    canary.forget_failures()  # after a good answer to a request
    assert not canary.record(answer_to_a_canary(error="no"))
    assert not canary.is_ill
    canary.record(answer_to_a_canary(error="never"))
    assert canary.is_ill
    assert canary.failure == "never"


def holding(
    *ids: int,
    batch_timeout_s: float,
    last_received: int = 0,
    at_work_since: float = 0.0,
    num_at_once: int = 1,
) -> tuple[SimpleNamespace, HeldBatches]:
    """A worker that was given batches at 5.0, and what its heartbeat says."""
    heartbeat = SimpleNamespace(
        last_received=last_received, progressed_at=0.0, at_work_since=at_work_since
    )
    held = HeldBatches(
        heartbeat,  # type: ignore[arg-type]
        batch_timeout_s=batch_timeout_s,
        patience_s=1,
        num_at_once=num_at_once,
    )
    for id in ids:
        held.add(id, HeldBatch([], None, batch_timeout_s), now=5.0)
    return heartbeat, held


def test_the_oldest_batch_is_as_old_as_the_time_that_it_has_had_the_worker():
    heartbeat, held = holding(batch_timeout_s=10)
    batch = HeldBatch([], None, 10)
    assert held.oldest_age_s(now=5.0) == 0
    held.add(1, batch, now=5.0)
    held.add(2, batch, now=6.0)
    assert held.oldest_age_s(now=8.0) == 3.0
    held.remove(1, now=8.0)
    assert held.oldest_age_s(now=9.0) == 1.0
    heartbeat.progressed_at = 8.75
    assert held.oldest_age_s(now=9.0) == pytest.approx(0.25)
    held.remove(2, now=9.0)
    assert held.oldest_age_s(now=20.0) == 0


def test_answers_to_later_batches_do_not_hide_that_the_oldest_hangs():
    _, held = holding(1, 2, 3, batch_timeout_s=10, last_received=3)
    held.remove(2, now=14.0)
    assert held.oldest_age_s(now=14.0) == 9.0
    assert held.hang(now=16.0)
    held.remove(1, now=16.0)
    assert held.oldest_age_s(now=17.0) == 1.0


def test_batch_of_several_under_way_has_the_time_that_it_takes_of_its_own():
    heartbeat, held = holding(
        1, 2, batch_timeout_s=2, last_received=2, at_work_since=9.0, num_at_once=2
    )
    assert held.oldest_age_s(now=10.0) == 1.0
    assert not held.hang(now=10.0)
    assert held.next_due_s(now=10.0) <= 1.0
    heartbeat.at_work_since = 7.5  # another clock, which stood still and runs again
    assert held.hang(now=10.0)


def test_batch_that_hangs_has_no_more_time_when_one_before_it_is_answered():
    heartbeat, held = holding(
        1, 2, 3, batch_timeout_s=2, last_received=2, at_work_since=5.0, num_at_once=2
    )
    held.remove(1, now=6.75)
    heartbeat.at_work_since = 5.25
    assert not held.hang(now=7.0)
    assert held.hang(now=7.5)
    held.remove(2, now=7.5)
    assert held.oldest_age_s(now=8.0) == 0.5  # the third has not been begun


def test_batch_whose_clock_ran_while_the_host_stood_still_has_its_time_again():
    heartbeat, held = holding(
        1, 2, batch_timeout_s=2, last_received=2, at_work_since=5.0, num_at_once=2
    )
    held.discount_pause(9.0, now=15.0)
    held.remove(1, now=15.5)
    heartbeat.at_work_since = 5.75  # of the second, which has run for 0.75 s of its own
    assert not held.hang(now=16.5)
    assert held.hang(now=18.0)


def test_pause_of_the_whole_host_is_no_time_of_the_oldest_batch():
    _, held = holding(1, batch_timeout_s=10, last_received=1)
    held.discount_pause(9.0, now=20.0)
    assert not held.hang(now=24.0)
    assert held.hang(now=24.1)
    held.discount_pause(100.0, now=30.0)  # longer than the batch has run
    assert held.oldest_age_s(now=31.0) == 1.0


def test_batch_runs_as_long_as_its_timeout_and_no_longer():
    _, held = holding(1, batch_timeout_s=10, last_received=1)
    assert not held.hang(now=15.0)
    assert "a sample of its own ran for more than 10 s" in held.hang(now=15.1)


def test_batch_that_is_not_begun_has_as_long_as_the_patience_and_no_longer():
    _, held = holding(1, batch_timeout_s=10)
    assert held.next_due_s(now=5.5) == 0.5
    assert not held.hang(now=6.0)
    assert "took up no work for 1 s" in held.hang(now=6.1)


def test_canary_that_the_preparation_of_a_later_batch_holds_up_has_the_time_of_a_batch():
    heartbeat, held = holding(batch_timeout_s=10, last_received=1)
    held.add(1, HeldBatch([], None, limit_s=2), now=5.0)
    held.add(2, HeldBatch([], None, limit_s=2), now=5.0)
    assert held.hang(now=7.1)
    heartbeat.last_received = 2
    assert not held.hang(now=15.0)
    assert held.hang(now=15.1)


@pytest.mark.parametrize(("num_instances", "most_s"), [(0, 4.0), (1, 4.0), (5, 10.0)])
@pytest.mark.parametrize("reported", ["progressed_at", "at_work_since"])
def test_no_report_gives_a_batch_more_time_than_that_of_its_instances(
    num_instances: int, most_s: float, reported: str
):
    heartbeat, held = holding(batch_timeout_s=2, last_received=1)
    held.add(1, HeldBatch([None] * num_instances, None, 2), now=5.0)  # type: ignore[list-item]
    for moment in (6.0, 7.5, 5.0 + most_s):
        setattr(heartbeat, reported, moment)
        assert not held.hang(now=moment)
    setattr(heartbeat, reported, 1e9)  # from the future
    assert held.next_due_s(now=5.0) <= most_s
    held.discount_pause(3.0, now=8.0)  # a pause of the whole host
    assert not held.hang(now=8.0 + most_s)
    assert "answered nothing" in held.hang(now=8.1 + most_s)


def test_answer_that_arrives_gives_the_next_batch_its_time():
    heartbeat, held = holding(1, 2, batch_timeout_s=2, last_received=2)
    held.remove(1, now=8.5)
    heartbeat.progressed_at = 12.0
    assert not held.hang(now=12.5)
    assert held.hang(now=12.6)


@pytest.mark.parametrize(
    ("wanted_s", "warmup_s", "expected_s"),
    [(0.5, 100.0, 0.5), (None, None, 60), (None, 0.01, 10), (None, 3.0, 30)],
)
def test_timeout_of_batches_follows_the_warm_up_unless_it_is_set(
    wanted_s: float | None, warmup_s: float | None, expected_s: float
):
    assert batch_timeout_s(wanted_s, warmup_s) == expected_s
