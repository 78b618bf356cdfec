from types import SimpleNamespace

import pytest

from workers.held import Held, HeldBatches


def test_the_oldest_batch_is_as_old_as_the_time_that_it_has_had_the_worker():
    heartbeat = SimpleNamespace(last_received=0, progressed_at=0.0, at_work_since=0.0)
    held = HeldBatches(heartbeat, batch_timeout_s=10, patience_s=1)  # type: ignore[arg-type]
    batch = Held([], None, 10)
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
    heartbeat = SimpleNamespace(last_received=3, progressed_at=0.0, at_work_since=0.0)
    held = HeldBatches(heartbeat, batch_timeout_s=10, patience_s=1)  # type: ignore[arg-type]
    for id in (1, 2, 3):
        held.add(id, Held([], None, 10), now=5.0)
    held.remove(2, now=14.0)
    assert held.oldest_age_s(now=14.0) == 9.0
    assert held.hang(now=16.0)
    held.remove(1, now=16.0)
    assert held.oldest_age_s(now=17.0) == 1.0


def test_batch_of_several_under_way_has_the_time_that_it_takes_of_its_own():
    heartbeat = SimpleNamespace(last_received=2, progressed_at=0.0, at_work_since=9.0)
    held = HeldBatches(heartbeat, batch_timeout_s=2, patience_s=1)  # type: ignore[arg-type]
    for id in (1, 2):
        held.add(id, Held([], None, 2), now=5.0)
    assert held.oldest_age_s(now=10.0) == 1.0
    assert not held.hang(now=10.0)
    assert held.next_due_s(now=10.0) <= 1.0
    heartbeat.at_work_since = 7.5  # another clock, which stood still and runs again
    assert held.hang(now=10.0)


def test_batch_that_hangs_has_no_more_time_when_one_before_it_is_answered():
    heartbeat = SimpleNamespace(last_received=2, progressed_at=0.0, at_work_since=5.0)
    held = HeldBatches(heartbeat, batch_timeout_s=2, patience_s=1)  # type: ignore[arg-type]
    for id in (1, 2, 3):
        held.add(id, Held([], None, 2), now=5.0)
    held.remove(1, now=6.75)
    heartbeat.at_work_since = 5.25
    assert not held.hang(now=7.0)
    assert held.hang(now=7.5)
    held.remove(2, now=7.5)
    assert held.oldest_age_s(now=8.0) == 0.5  # the third has not been begun


def test_batch_whose_clock_ran_while_the_host_stood_still_has_its_time_again():
    heartbeat = SimpleNamespace(last_received=2, progressed_at=0.0, at_work_since=5.0)
    held = HeldBatches(heartbeat, batch_timeout_s=2, patience_s=1)  # type: ignore[arg-type]
    for id in (1, 2):
        held.add(id, Held([], None, 2), now=5.0)
    held.forgive(9.0, now=15.0)
    held.remove(1, now=15.5)
    heartbeat.at_work_since = 5.75  # of the second, which has run for 0.75 s of its own
    assert not held.hang(now=16.5)
    assert held.hang(now=18.0)
