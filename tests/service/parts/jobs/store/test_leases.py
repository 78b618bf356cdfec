"""Each part is computed by one service at a time, and its result is kept once."""

from collections import Counter

from inferpool.service.parts.jobs.records import LeaseRoom
from inferpool.service.parts.jobs.store.store import JobStore
from tests.service.parts.jobs.stores import NOW, add, compute, take, values


def test_a_part_is_leased_once_until_its_lease_is_out(store: JobStore) -> None:
    add(store)
    (first,) = take(store)
    store.leases.give_back([first.token])
    (part,) = take(store)
    for now in (NOW, NOW + 1e6, NOW - 1e6):  # it has a clock that does not jump
        assert not take(store, now=now)
    assert store.leases.renew([part.token], 0.0) == {part.token}
    (again,) = take(store)
    assert not take(store)
    assert store.leases.renew([part.token], 60.0) == set()
    assert store.leases.commit_part(part, compute(part), NOW) is None
    assert values(store) == []
    assert store.leases.commit_part(again, compute(again), NOW) is not None
    assert values(store) == [0, 2, 4]


def test_only_models_that_can_compute_get_parts(store: JobStore) -> None:
    add(store, model="other")
    assert not take(store)


def test_a_small_job_does_not_wait_behind_a_large_one(store: JobStore) -> None:
    add(store, 640, id="large")
    take(store, 1)
    add(store, 3, id="small")
    add(store, 3, id="urgent", priority=1)
    assert [take(store, 1)[0].job.id for _ in range(3)] == ["urgent", "small", "large"]
    assert len(take(store, 4)) == 4


def test_jobs_share_what_is_leased(store: JobStore) -> None:
    for id in ("a", "b"):
        add(store, 640, id=id)
    room = LeaseRoom(num_instances=256, num_bytes=2**30, num_parts=100)
    leased = store.leases.lease({"m"}, room, 60.0, NOW)
    assert [(part.job.id, part.number) for part in leased] == [
        ("a", 0), ("a", 1), ("b", 0), ("b", 1),
    ]  # fmt: skip


def test_owners_share_what_is_leased_whatever_their_jobs_and_priorities(store: JobStore) -> None:
    for number in range(20):
        add(store, 640, id=f"{number}", owner="ann", priority=1)
    add(store, 640, id="9", owner="ben", priority=9)
    room = LeaseRoom(num_instances=256, num_bytes=2**30, num_parts=100, share=0.75)
    leased = store.leases.lease({"m"}, room, 60.0, NOW)
    assert Counter(part.job.owner for part in leased) == {"ann": 2, "ben": 2}
    for owner in ("ann", "ben", "ann"):  # who was served last comes last
        assert [part.job.owner for part in take(store, 1)] == [owner]


def test_an_owner_leaves_a_reserve_for_others(store: JobStore) -> None:
    add(store, 640, id="a", owner="ann")
    room = LeaseRoom(num_instances=256, num_bytes=2**30, num_parts=100, share=0.75)
    assert sum(len(part.instances) for part in store.leases.lease({"m"}, room, 60.0, NOW)) == 192
    held = {"ann": LeaseRoom(num_instances=192, num_bytes=0, num_parts=3)}
    room = LeaseRoom(num_instances=64, num_bytes=2**30, num_parts=97, share=0.75, held=held)
    assert not store.leases.lease({"m"}, room, 60.0, NOW)
    add(store, 640, id="a", owner="ben")
    assert [part.job.owner for part in store.leases.lease({"m"}, room, 60.0, NOW)] == ["ben"]


def test_an_owner_that_fills_its_share_with_one_model_has_a_part_of_another(
    store: JobStore,
) -> None:
    add(store, 640, id="a", owner="ann")
    mib = 2**20
    held = {"ann": LeaseRoom(num_instances=0, num_bytes=48 * mib, num_parts=48)}
    room = LeaseRoom(num_instances=128, num_bytes=16 * mib, num_parts=464, share=0.75, held=held)
    assert len(store.leases.lease({"m"}, room, 60.0, NOW)) == 1


def test_no_more_is_leased_than_there_is_room_for(store: JobStore) -> None:
    add(store, 20, num_bytes=2**20)
    room = LeaseRoom(num_instances=100, num_bytes=3 * 2**20, num_parts=100)
    assert len(store.leases.lease({"m"}, room, 60.0, NOW)) == 3
    room = LeaseRoom(num_instances=2, num_bytes=2**30, num_parts=100)
    assert len(store.leases.lease({"m"}, room, 60.0, NOW)) == 2
    room = LeaseRoom(num_instances=1, num_bytes=1, num_parts=1)
    assert len(store.leases.lease({"m"}, room, 60.0, NOW)) == 1
