import pytest

from inferpool.workers.remote.lease import BEAT_S, LEASE_S, Lease


def looks(lease: Lease, *times: float) -> list[bool]:
    """Look at these times, each announced by the one before."""
    ends = [*times[1:], times[-1] + BEAT_S]
    return [lease.is_out(now, then - now) for now, then in zip(times, ends, strict=True)]


def test_lease_runs_out_after_its_time_to_the_moment():
    lease = Lease(100.0)
    assert looks(lease, 100.0, 101.0, 102.0, 100 + LEASE_S) == [False] * 4
    assert lease.is_out(100 + LEASE_S + 0.001, BEAT_S)


def test_sign_of_life_renews_it_and_an_older_one_takes_nothing_away():
    lease = Lease(100.0)
    lease.renew(102.0)
    lease.renew(101.0)
    assert lease.age_s(104.0) == 2.0
    assert lease.age_s(101.0) == 0.0
    assert looks(lease, 100.0, 102.0, 104.0, 105.0, 105.1) == [False] * 4 + [True]


@pytest.mark.parametrize(("pause_s", "forgiven_s"), [(0.5, 0.0), (0.6, 0.6), (100.0, 100.0)])
def test_pause_of_our_own_is_not_held_against_the_other_side(pause_s: float, forgiven_s: float):
    lease = Lease(100.0)
    assert not lease.is_out(100.0, 1.0)
    lease.is_out(101.0 + pause_s, BEAT_S)
    assert lease.age_s(101.0 + pause_s) == pytest.approx(1.0 + pause_s - forgiven_s)


def test_silence_after_a_pause_still_ends_it():
    lease = Lease(100.0)
    assert looks(lease, 100.0) == [False]
    assert looks(lease, 150.0, 151.0, 152.0, 152.4) == [False] * 4
    assert lease.is_out(152.6, BEAT_S)  # half a second of it was before the pause


def test_pause_does_not_make_a_sign_of_life_lie_in_the_future():
    lease = Lease(100.0)
    lease.is_out(100.0, BEAT_S)
    lease.renew(150.0)
    lease.is_out(150.1, BEAT_S)
    assert lease.age_s(151.0) == pytest.approx(0.9)


def test_looks_come_with_each_beat_and_when_the_lease_may_be_out():
    lease = Lease(100.0)
    assert lease.look_in_s(101.0) == BEAT_S
    assert 0.3 < lease.look_in_s(100 + LEASE_S - 0.3) < 0.4
    assert 0.0 < lease.look_in_s(100 + LEASE_S) < 0.1
