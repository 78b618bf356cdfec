"""A full disk refuses what is new, loses nothing, and goes on when it has room."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from inferpool.service.errors import StartError, StoreFullError
from inferpool.service.parts.jobs.records import StoreLimits
from inferpool.service.parts.jobs.store.store import JobStore
from tests.service.parts.jobs.stores import NOW, add, compute, finish, take, values

LIMITS = StoreLimits(retention_s=100.0, max_jobs=10_000, max_bytes=2**30)
SIZE = 24 * 2**20
SMALL, LARGE = 1000, 20_000
"""Bytes of an instance whose part the database keeps, and of one whose part is a file."""
NUM = 60


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", str(folder)]
    if subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip("this needs a user who may mount a small disk")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


@pytest.fixture
def store(disk: Path) -> Iterator[JobStore]:
    store = JobStore.open(str(disk / "jobs"), LIMITS)
    yield store
    store.close()


def fill(store: JobStore, num_bytes: int) -> list[str]:
    """Make jobs until one is refused; return those that were accepted."""
    accepted: list[str] = []
    while True:
        id = f"{len(accepted)}"
        try:
            add(store, NUM, num_bytes=num_bytes, id=id)
        except StoreFullError as error:
            assert "delete jobs that are over" in error.message  # noqa: PT017  # sooner or later
            assert store.job(id) is None
            return accepted
        accepted.append(id)


def check(store: JobStore, accepted: list[str]) -> None:
    assert sorted(job.id for job in store.jobs(limit=10_000)) == sorted(accepted)
    for id in accepted:
        assert values(store, id) == [2 * number for number in range(NUM)]


def fill_up(disk: Path) -> Path:
    """Take all the room that is left."""
    file = disk / "ballast"
    with file.open("wb", buffering=0) as ballast:
        for num_bytes in (2**16, 2**12, 1):
            try:
                while True:
                    ballast.write(b"x" * num_bytes)
            except OSError:
                continue
    return file


@pytest.mark.parametrize("num_bytes", [pytest.param(SMALL, marks=pytest.mark.slow), LARGE])
def test_new_jobs_are_refused_while_those_accepted_are_computed(
    store: JobStore, num_bytes: int
) -> None:
    accepted = fill(store, num_bytes)
    assert len(accepted) > 5
    finish(store)
    check(store, accepted)
    store.delete(accepted.pop())
    check(store, accepted)


@pytest.mark.parametrize("num_bytes", [pytest.param(SMALL, marks=pytest.mark.slow), LARGE])
def test_results_wait_for_room_that_the_deletion_of_a_job_makes(
    store: JobStore, num_bytes: int
) -> None:
    accepted = fill(store, num_bytes)
    while len(accepted) > 12 * 2**20 / NUM / num_bytes:  # half of the disk
        store.delete(accepted.pop())
    waiting, num_kept = [], 0
    while leased := take(store, 1):
        for part in leased:
            try:
                store.leases.commit_part(part, compute(part, num_bytes=2 * num_bytes), NOW)
                num_kept += 1
            except StoreFullError:
                waiting.append(part)
    assert waiting
    assert num_kept
    while waiting:
        id = store.jobs(states=["succeeded"], limit=1)[0].id
        store.delete(id)  # although the disk is full
        store.clean(NOW)
        accepted.remove(id)
        for part in list(waiting):
            try:
                store.leases.commit_part(part, compute(part, num_bytes=2 * num_bytes), NOW)
            except StoreFullError:
                break
            waiting.remove(part)
    check(store, accepted)


def test_a_store_opens_when_its_disk_has_room(disk: Path) -> None:
    ballast = fill_up(disk)
    with pytest.raises(StartError, match="has no room"):
        JobStore.open(str(disk / "jobs"), LIMITS)
    ballast.unlink()
    store = JobStore.open(str(disk / "jobs"), LIMITS)
    add(store, NUM, num_bytes=LARGE)
    part, *_ = take(store, 1)
    store.close()
    ballast = fill_up(disk)
    try:  # what a dead service had leased cannot be freed, unless SQLite finds a little room
        JobStore.open(str(disk / "jobs"), LIMITS).close()
    except StartError as error:
        assert "has no room" in str(error)  # noqa: PT017  # either may happen
    ballast.unlink()
    store = JobStore.open(str(disk / "jobs"), LIMITS)
    assert store.leases.commit_part(part, compute(part), NOW) is None
    finish(store)
    assert values(store) == [2 * number for number in range(NUM)]
    store.close()
