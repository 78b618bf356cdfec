"""Whatever fails while jobs are written, none is lost, and none is there twice."""

import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

import pytest

from inferpool.service.errors import OverQuotaError, ServiceError, UnavailableError
from inferpool.service.parts.jobs.records import StoreLimits
from inferpool.service.parts.jobs.store.store import JobStore
from tests.service.parts.jobs.conftest import LIMITS
from tests.service.parts.jobs.stores import (
    NOW,
    FailingCommits,
    add,
    compute,
    finish,
    instance,
    new_job,
    take,
    values,
)

LARGE = 200_000
"""Bytes of an instance whose part is kept in a file, if the store has a folder."""


@pytest.fixture
def commits(store: JobStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[FailingCommits]:
    failing = FailingCommits(store, monkeypatch)
    yield failing
    failing.plan()


def files(place: str) -> list[str]:
    return [] if "://" in place else [file.name for file in Path(place).glob("parts/*/*")]


@pytest.mark.parametrize("num_bytes", [0, LARGE])
def test_a_job_that_is_not_accepted_leaves_others_alone(
    store: JobStore, commits: FailingCommits, num_bytes: int
) -> None:
    with store.begin(new_job("lost"), NOW) as writer:
        writer.add(instance(0, num_bytes))
        commits.plan("before")
        with pytest.raises(UnavailableError):
            writer.commit(NOW)
        add(store, id="a", num_bytes=num_bytes)  # it may get the number of the other one
    assert store.job("lost") is None
    finish(store)
    assert values(store) == [0, 2, 4]


@pytest.mark.parametrize("num_bytes", [0, LARGE])
def test_a_job_is_accepted_if_only_the_news_of_it_was_lost(
    store: JobStore, commits: FailingCommits, num_bytes: int
) -> None:
    with store.begin(new_job(), NOW) as writer:
        for number in range(100):
            writer.add(instance(number, num_bytes))
        commits.plan("after")
        job, is_new = writer.commit(NOW)
    assert (job.id, is_new) == ("a", True)
    finish(store)
    assert values(store) == [2 * number for number in range(100)]


@pytest.mark.parametrize("discarding", ["before", ""])
def test_a_job_that_may_have_been_accepted_is_kept_for_the_next_attempt(
    store: JobStore,
    commits: FailingCommits,
    place: str,
    monkeypatch: pytest.MonkeyPatch,
    discarding: Literal["before", ""],
) -> None:
    with store.begin(new_job(), NOW) as writer:
        writer.add(instance(0, LARGE))
        monkeypatch.setattr(store._database, "reading", commits.unavailable)
        commits.plan("after", discarding)  # nor can it be looked up
        with pytest.raises(UnavailableError):
            writer.commit(NOW)
    monkeypatch.undo()
    assert len(files(place)) == ("://" not in place)
    assert add(store, 1, num_bytes=LARGE)[1] is False
    finish(store)
    assert values(store) == [0]


def test_a_result_is_whole_if_only_the_news_of_it_was_lost(
    store: JobStore, commits: FailingCommits
) -> None:
    add(store, 1)
    (part,) = take(store)
    commits.plan("after")
    with pytest.raises(UnavailableError):
        store.leases.commit_part(part, compute(part, num_bytes=LARGE), NOW)
    assert values(store) == [0]  # whoever was to try again has died


@pytest.mark.parametrize("num_bytes", [0, LARGE])
def test_a_result_of_a_job_that_was_deleted_leaves_nothing(
    store: JobStore, place: str, num_bytes: int
) -> None:
    add(store, 2, num_bytes=num_bytes)
    part, *_ = take(store)
    store.delete("a")
    assert store.leases.commit_part(part, compute(part, num_bytes=LARGE), NOW) is None
    assert not files(place)


def test_a_result_that_comes_too_late_leaves_nothing(store: JobStore, place: str) -> None:
    add(store, 1)
    (part,) = take(store, lease_s=0)
    (again,) = take(store)
    assert store.leases.commit_part(part, compute(part, num_bytes=LARGE), NOW) is None
    assert not files(place)
    assert store.leases.commit_part(again, compute(again, num_bytes=LARGE), NOW) is not None
    assert values(store) == [0]


def test_a_slow_body_is_not_taken_for_an_abandoned_one(store: JobStore) -> None:
    with store.begin(new_job(), now=0.0) as writer:
        for number in range(64):
            writer.add(instance(number, 2**17))
        assert store.counts().num_bytes == 0
        assert store.clean(NOW) == 0
        for number in range(64, 100):
            writer.add(instance(number))
        assert writer.commit(NOW)[1]
    finish(store)
    assert values(store) == [2 * number for number in range(100)]


def test_a_body_that_was_given_up_is_refused(store: JobStore) -> None:
    with store.begin(new_job(), NOW) as writer:
        for number in range(64):
            writer.add(instance(number, 2**17))
        assert store.clean(NOW, abandoned_s=0.0) == 1
        with pytest.raises(UnavailableError, match="given up"):
            writer.commit(NOW)
    assert add(store)[1]


def test_a_payload_that_is_lost_is_told_in_its_place(tmp_path: Path) -> None:
    store = JobStore.open(str(tmp_path), LIMITS)
    add(store, 2, num_bytes=2**20)
    (file,) = tmp_path.glob("parts/*/0.in")
    file.unlink()
    for part in take(store):
        lost = part.instances[0].problem
        if lost is None:
            assert store.leases.commit_part(part, compute(part), NOW)
        else:
            assert part.number == 0
            assert (lost.code, lost.message[:14]) == ("internal_error", "the store has ")
    assert [index for index, _, _ in store.answers("a")] == [1]
    store.close()


@pytest.mark.parametrize("content", [None, b"", b"\xc1"])
def test_a_result_that_is_lost_is_told_in_its_place(tmp_path: Path, content: bytes | None) -> None:
    store = JobStore.open(str(tmp_path), LIMITS)
    add(store, 100)
    for part in take(store):
        store.leases.commit_part(part, compute(part, num_bytes=10_000), NOW)
    (file,) = tmp_path.glob("parts/*/0.*.out")
    file.unlink()
    if content is not None:
        file.write_bytes(content)
    answers = list(store.answers("a"))
    assert [index for index, _, _ in answers] == list(range(100))
    problems = [answer.problem.code for _, answer, _ in answers if answer.problem]
    assert problems == ["internal_error"] * 64
    store.close()


def test_a_restart_removes_what_a_dead_service_left(tmp_path: Path) -> None:
    store = JobStore.open(str(tmp_path), LIMITS)
    add(store, 3, num_bytes=2**20)
    first, second, _ = take(store)
    kept = store.leases.commit_part(first, compute(first, num_bytes=LARGE), NOW)
    assert kept is not None
    folder = next(tmp_path.glob("parts/*"))
    needed = sorted(file.name for file in folder.iterdir())
    writer = store.begin(new_job("lost"), NOW)
    for number in range(200):
        writer.add(instance(number, 100_000))  # the process dies before the commit
    (folder / "0.in").write_bytes(b"its part was committed, but it was not removed yet")
    (folder / f"1.{second.token}.out").write_bytes(b"it was written, but not committed yet")
    shutil.copytree(folder, folder.with_name("nobodys"))
    store.close()
    store = JobStore.open(str(tmp_path), LIMITS)
    assert list(tmp_path.glob("parts/*")) == [folder]
    assert sorted(file.name for file in folder.iterdir()) == needed
    assert store.leases.commit_part(second, compute(second), NOW) is None
    finish(store)
    assert values(store) == [0, 2, 4]
    store.close()


def test_concurrent_calls_cannot_exceed_a_quota(place: str) -> None:
    store = JobStore.open(place, StoreLimits(retention_s=100.0, max_jobs=3, max_bytes=2**30))
    ready = threading.Barrier(8)

    def try_to_add(number: int) -> bool:
        ready.wait(60)
        try:
            return add(store, 1, id=f"{number}")[1]
        except OverQuotaError:
            return False

    with ThreadPoolExecutor(8) as threads:
        assert sum(threads.map(try_to_add, range(8))) == 3
    assert len(store.jobs(limit=9)) == 3
    store.close()


def test_the_same_call_at_the_same_time_makes_one_job(place: str) -> None:
    stores = [JobStore.open(place, LIMITS)]
    if "://" in place:
        stores.append(JobStore.open(place, LIMITS))
    ready = threading.Barrier(6)

    def repeat(number: int) -> tuple[str, bool]:
        ready.wait(60)
        store = stores[number % len(stores)]
        job, is_new = add(store, 200, id=f"{number}", num_bytes=10_000, idempotency_key="k")
        return job.id, is_new

    with ThreadPoolExecutor(6) as threads:
        made = list(threads.map(repeat, range(6)))
    assert len({id for id, _ in made}) == 1
    assert sum(is_new for _, is_new in made) == 1
    assert stores[0].counts().num_waiting == 200
    for store in stores:
        store.close()


def test_a_store_whose_connections_are_all_taken_is_unavailable(
    store: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = store._database._engine.pool
    monkeypatch.setattr(pool, "_timeout", 0.01)
    taken = [store._database._engine.connect() for _ in range(15)]
    with pytest.raises(UnavailableError):
        store.job("a")
    for connection in taken:
        connection.close()
    assert store.job("a") is None


def test_services_do_not_wait_for_each_other_in_a_circle(place: str) -> None:
    """All kinds of transactions at once, on the same jobs."""
    stores = [JobStore.open(place, LIMITS)]
    if "://" in place:
        stores.append(JobStore.open(place, LIMITS))
    for number in range(20):
        add(stores[0], 200, id=f"{number}")
    errors: list[ServiceError] = []

    def work(which: int) -> None:
        store = stores[which % len(stores)]
        try:
            for turn in range(12):
                leased = take(store, 7)
                store.leases.renew([part.token for part in reversed(leased)], 60.0)
                for part in leased[::-2]:
                    if part.instances[0].problem:  # the job was deleted meanwhile
                        continue
                    store.leases.commit_part(part, compute(part), NOW)
                store.leases.give_back([part.token for part in leased])
                store.cancel(f"{(turn + which) % 20}", NOW)
                store.delete(f"{(turn * which) % 20}")
                store.clean(NOW)
        except ServiceError as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(which,)) for which in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    for store in stores:
        store.close()
