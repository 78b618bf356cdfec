from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import Pipe
from types import SimpleNamespace

import pytest

import inferpool.workers.host.carrier
from inferpool.workers.host.carrier import Carrier
from inferpool.workers.shared.errors import WorkerLostError
from inferpool.workers.shared.messages import BatchDone, FrameError, ItemError, ItemRef


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
    monkeypatch.setattr(inferpool.workers.host.carrier, "time", clock)
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
