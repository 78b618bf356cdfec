import pytest

from inferpool.service.errors import (
    DeadlineExceededError,
    OverloadedError,
    OverShareError,
    UnavailableError,
)
from inferpool.service.queue.admission import Admission
from inferpool.service.queue.batcher import Position
from inferpool.service.telemetry.metrics import ModelMetrics
from inferpool.workers.shared.arena import Arena
from tests.fakes import ref_to


def admission(
    num_items: int = 0, took_s: float = 0.0, num: int = 4, key_share: float = 1.0
) -> tuple[Admission, ModelMetrics]:
    """Return an admission that has seen so many batches."""
    metrics = ModelMetrics("m")
    gate = Admission(
        max_queue_length=100, max_batch_size=8, rejected=metrics.rejected, key_share=key_share
    )
    for _ in range(num if num_items else 0):
        gate.rate.learn(num_items=num_items, elapsed_s=took_s, now=1.0)
    return gate, metrics


def behind(num: int) -> Position:
    """Return the place of an instance behind so many of its kind, with nothing behind it."""
    return Position(num, num, 0, 0, ())


def test_retry_after_is_computed_from_the_measured_rate():
    gate, metrics = admission(8, 4.0)
    with pytest.raises(OverloadedError) as full:
        gate.check(num_queued=100, num_workers=2, left_s=1000)
    assert full.value.retry_after_s == 13  # half of 100 x 0.5 s / 2 workers, rounded
    assert not gate.is_welcome(num_queued=24, num_ahead=40, num_workers=2, left_s=16.7)
    assert gate.is_welcome(num_queued=24, num_ahead=40, num_workers=2, left_s=16.9)
    assert not gate.is_welcome(num_queued=100, num_ahead=100, num_workers=2, left_s=1000)
    with pytest.raises(OverloadedError) as late:
        gate.check_time(behind(40), free_s=0.0, num_workers=2, left_s=3, now=2.0)
    assert late.value.retry_after_s == 14  # (40 x 0.5 s / 2 workers + its own batch) x 1.2 - 3 s
    assert (metrics.rejected["queue_full"], metrics.rejected["deadline"]) == (1, 1)


def test_the_estimate_includes_what_workers_hold_and_the_batch_itself():
    gate, _ = admission(8, 0.1)
    gate.check_time(behind(8), free_s=0.1, num_workers=1, left_s=0.37, now=1.0)
    with pytest.raises(OverloadedError):
        gate.check_time(behind(8), free_s=0.1, num_workers=1, left_s=0.35, now=1.0)


def test_a_rate_that_says_little_refuses_nothing():
    unmeasured, _ = admission()
    unmeasured.check(num_queued=99, num_workers=1, left_s=0.001)
    assert unmeasured.is_welcome(num_queued=99, num_ahead=99, num_workers=1, left_s=0.001)
    slow, _ = admission(1, 5.0)
    slow.check_time(behind(0), free_s=0.0, num_workers=1, left_s=0.1, now=1.0)  # nothing ahead
    fast, _ = admission(8, 0.01, num=3)
    fast.rate.learn(num_items=1, elapsed_s=30.0, now=2.0)  # the only slow batch
    fast.check_time(behind(99), free_s=0.0, num_workers=1, left_s=1, now=2.0)


def test_small_batches_do_not_tell_how_many_a_full_one_serves():
    gate, _ = admission(1, 0.04, num=8)
    gate.check_time(behind(80), free_s=0.0, num_workers=1, left_s=0.6, now=1.0)
    for _ in range(4):
        gate.rate.learn(num_items=8, elapsed_s=0.32, now=1.0)
    with pytest.raises(OverloadedError):
        gate.check_time(behind(80), free_s=0.0, num_workers=1, left_s=0.6, now=1.0)


def test_batches_of_half_the_size_tell_it():
    half, _ = admission(4, 0.4)
    with pytest.raises(OverloadedError):
        half.check_time(behind(40), free_s=0.0, num_workers=1, left_s=5.2, now=1.0)
    smaller, _ = admission(3, 0.4)  # a full one may take no longer
    smaller.check_time(behind(40), free_s=0.0, num_workers=1, left_s=2.9, now=1.0)


def test_what_waits_is_in_time_if_another_batch_may_go_before_it():
    gate, _ = admission(8, 0.8)  # 1 s, half of 10 x 0.1 s, and two batches: 3.1 s
    assert gate.are_in_time(10, free_s=1.0, num_workers=2, left_s=3.42, now=1.0)
    assert not gate.are_in_time(10, free_s=1.0, num_workers=2, left_s=3.40, now=1.0)


def test_nothing_is_admitted_after_its_deadline_nor_while_draining():
    gate, metrics = admission()
    with pytest.raises(DeadlineExceededError):
        gate.check(num_queued=0, num_workers=1, left_s=0.0)
    gate.is_draining = True
    with pytest.raises(UnavailableError, match="shutting down"):
        gate.check(num_queued=0, num_workers=1, left_s=1)
    assert metrics.rejected["deadline"] == metrics.rejected["draining"] == 1


def test_an_old_rate_refuses_nothing():
    gate, _ = admission(8, 3.0, num=8)
    with pytest.raises(OverloadedError):
        gate.check_time(behind(50), free_s=0.0, num_workers=1, left_s=10, now=24.9)
    gate.check_time(behind(50), free_s=0.0, num_workers=1, left_s=10, now=25.0)  # 8 batches of 3 s
    quick, _ = admission(8, 0.3, num=8)
    with pytest.raises(OverloadedError):
        quick.check_time(behind(50), free_s=0.0, num_workers=1, left_s=1, now=10.9)
    quick.check_time(behind(50), free_s=0.0, num_workers=1, left_s=1, now=11.0)


def test_an_instance_that_would_make_an_admitted_one_late_is_refused():
    gate, metrics = admission(8, 0.8)
    # 41 and a batch take 4.9 s; with a reserve of a twentieth, 5.145 s.
    early, late = (Position(0, 0, 0, 0, [(due, 40)]) for due in (6.14, 6.15))
    with pytest.raises(OverloadedError, match="admitted before") as refusal:
        gate.check_time(early, free_s=0.0, num_workers=1, left_s=3.0, now=1.0)
    assert refusal.value.retry_after_s == 1
    gate.check_time(late, free_s=0.0, num_workers=1, left_s=3.0, now=1.0)
    assert metrics.rejected["deadline"] == 1


def test_one_kind_leaves_room_and_time_for_others():
    gate, metrics = admission(8, 0.8)
    gate.check_share(Position(75, 75, 75, 75, ()), num_queued=75, num_workers=1)
    with pytest.raises(OverloadedError, match="have their share"):
        gate.check_share(Position(76, 76, 76, 76, ()), num_queued=76, num_workers=1)
    gate.check_time(Position(50, 50, 50, 50, ()), 0.0, num_workers=1, left_s=13.0, now=1.0)
    with pytest.raises(OverloadedError, match="have their share"):
        gate.check_time(Position(50, 50, 50, 50, ()), 0.0, num_workers=1, left_s=12.9, now=1.0)
    gate.check_time(Position(50, 50, 0, 0, ()), 0.0, num_workers=1, left_s=7.0, now=1.0)
    assert (metrics.rejected["queue_full"], metrics.rejected["deadline"]) == (1, 1)


def own(num: int, num_own: int) -> Position:
    """Return the place of an instance behind `num` of one kind, `num_own` of them of its key."""
    return Position(num, num, 0, 0, (), num_own, num_own)


def test_one_key_leaves_room_and_time_for_others():
    gate, metrics = admission(8, 0.8, key_share=0.75)
    gate.check_share(own(74, 74), num_queued=74, num_workers=1)
    with pytest.raises(OverShareError, match=r"75 requests of this key.*\(per_key_share = 0\.75 "):
        gate.check_share(own(75, 75), num_queued=75, num_workers=1)
    gate.check_share(own(99, 0), num_queued=99, num_workers=1)  # it has nothing
    gate.check_share(own(80, 40), num_queued=80, num_workers=1)  # of 60 that the others leave
    with pytest.raises(OverShareError) as over:
        gate.check_share(own(95, 20), num_queued=95, num_workers=2)  # of 25
    assert over.value.retry_after_s == 1
    gate.check_time(own(30, 30), 0.0, num_workers=1, left_s=5.8, now=1.0)  # 40 and a batch, x 1.2
    with pytest.raises(OverShareError, match="earlier deadline"):
        gate.check_time(own(30, 30), 0.0, num_workers=1, left_s=5.7, now=1.0)
    gate.check_time(own(30, 0), 0.0, num_workers=1, left_s=5.7, now=1.0)
    assert metrics.rejected["key_share"] == 3


def test_one_key_leaves_bytes_for_others():
    gate, metrics = admission(key_share=0.5)
    arena = Arena(64 * 1024)

    def put(num_bytes: int, caller: int) -> None:
        ref = ref_to(bytes(num_bytes), caller=caller)
        gate.key_share.check_bytes(arena, ref)
        arena.put([bytes(num_bytes)], num_bytes, caller)

    put(16_000, 1)
    put(16_000, 1)
    with pytest.raises(OverShareError, match="payloads of this key, 32 KiB, have its share"):
        put(1, 1)
    put(16_000, 2)
    with pytest.raises(OverShareError):
        put(16_000, 2)
    put(16_000, 3)
    assert metrics.rejected["key_share"] == 2
    arena.close()


def test_a_lost_instance_refuses_nothing():
    gate, _ = admission(8, 0.8)
    lost = Position(0, 0, 0, 0, [(4.19, 40)])  # 40 and a batch take 4.8 s, and 3.19 s are left
    gate.check_time(lost, free_s=0.0, num_workers=1, left_s=2.0, now=1.0)
    late = Position(0, 0, 0, 0, [(4.21, 40)])  # too few only if estimates are right
    with pytest.raises(OverloadedError, match="admitted before"):
        gate.check_time(late, free_s=0.0, num_workers=1, left_s=2.0, now=1.0)
