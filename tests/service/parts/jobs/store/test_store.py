"""The store keeps jobs through crashes, and gives each part to one service at a time."""

import gc
import os
import stat
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from inferpool.service.errors import (
    IdempotencyError,
    InvalidInputError,
    OverQuotaError,
    OverShareError,
    StartError,
    UnavailableError,
)
from inferpool.service.parts.jobs.records import JobAnswer, JobProblem, PartResult, WaitingWebhook
from inferpool.service.parts.jobs.store.files import PartFiles
from inferpool.service.parts.jobs.store.store import JobStore
from tests.service.parts.jobs.conftest import LIMITS
from tests.service.parts.jobs.stores import (
    NOW,
    add,
    compute,
    finish,
    instance,
    new_job,
    take,
    values,
)


def test_a_job_is_computed_and_its_results_are_in_order(store: JobStore) -> None:
    job, is_new = add(store, 200, parameters=b"{}", webhook="https://a.example", trace="t-s")
    assert is_new
    assert (job.state, job.num_instances, job.num_done) == ("queued", 200, 0)
    assert store.counts().num_waiting == 200
    finish(store, NOW + 5)
    ended = store.job("a")
    assert ended is not None
    assert (ended.state, ended.num_done, ended.num_failed) == ("succeeded", 200, 0)
    assert (ended.started_at, ended.ended_at, ended.expires_at) == (NOW + 5, NOW + 5, NOW + 105)
    assert ended.versions == (1,)
    assert (ended.parameters, ended.webhook, ended.trace) == (b"{}", "https://a.example", "t-s")
    assert values(store) == [2 * number for number in range(200)]
    assert values(store, first=60, count=10) == [2 * number for number in range(60, 70)]
    assert store.counts().num_waiting == 0


def test_nobody_sees_a_job_before_it_is_committed(store: JobStore, place: str) -> None:
    with store.begin(new_job(), NOW) as writer:
        for number in range(1000):
            writer.add(instance(number, 30_000))  # many parts are written already
        assert store.job("a") is None
        assert not store.jobs(limit=10)
        assert not take(store, 10)
        assert list(Path(place).glob("parts/*")) or "://" in place
    assert not list(Path(place).glob("parts/*"))
    assert store.counts().num_bytes == 0
    assert add(store)[1]


def test_a_job_without_instances_is_refused(store: JobStore) -> None:
    with store.begin(new_job(), NOW) as writer, pytest.raises(InvalidInputError, match="no inst"):
        writer.commit(NOW)


def test_large_payloads_and_results_come_back_whole(store: JobStore, place: str) -> None:
    add(store, 3, num_bytes=3_000_000)
    (part,) = take(store, 1)
    assert part.instances == [instance(0, 3_000_000)]
    large = JobAnswer(value=b"1" * 500_000)
    job = store.leases.commit_part(part, PartResult(answers=[large], version=1), NOW)
    assert job is not None
    assert job.num_bytes < 7_000_000
    assert [answer for _, answer, _ in store.answers("a")] == [large]
    if "://" not in place:
        names = sorted(file.name for file in Path(place).glob("parts/*/*"))
        assert names == [f"0.{part.token}.out", "1.in", "2.in"]
        store.delete("a")
        assert not list(Path(place).glob("parts/*"))


def test_the_folder_is_for_its_owner_alone(tmp_path: Path) -> None:
    folder = tmp_path / "some" / "where"
    store = JobStore.open(str(folder), LIMITS)
    add(store, num_bytes=100_000)
    store.close()
    for path in (folder, folder / "parts"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / "jobs.sqlite3").stat().st_mode) == 0o600


def test_two_services_cannot_have_one_folder(tmp_path: Path) -> None:
    store = JobStore.open(str(tmp_path), LIMITS)
    with pytest.raises(StartError, match="another service keeps its jobs in"):
        JobStore.open(str(tmp_path), LIMITS)
    store.close()
    JobStore.open(str(tmp_path), LIMITS).close()


def test_a_folder_that_cannot_be_used_is_free_for_the_next_try(tmp_path: Path) -> None:
    (tmp_path / "parts").touch()
    with pytest.raises(StartError, match=r"the store of jobs .*/parts"):
        JobStore.open(str(tmp_path), LIMITS)
    (tmp_path / "parts").unlink()
    JobStore.open(str(tmp_path), LIMITS).close()


def test_a_closed_store_keeps_no_file_open(tmp_path: Path) -> None:
    store = JobStore.open(str(tmp_path / "jobs"), LIMITS)
    gc.disable()  # else it may help
    try:
        with store._database.reading():
            store.close()
        with pytest.raises(UnavailableError):
            store.job("a")
        open_files = [os.path.realpath(each) for each in Path("/proc/self/fd").iterdir()]
    finally:
        gc.enable()
    assert not [each for each in open_files if each.startswith(str(tmp_path))]


def test_a_database_that_does_not_answer_is_named_without_a_traceback() -> None:
    with pytest.raises(StartError, match=r"postgresql://nobody@127\.0\.0\.1:1/x: "):
        JobStore.open("postgresql://nobody@127.0.0.1:1/x", LIMITS)


def test_another_database_is_refused() -> None:
    with pytest.raises(StartError, match="begins with postgresql://"):
        JobStore.open("mysql://somewhere/x", LIMITS)


def test_errors_stand_in_place_and_a_job_of_nothing_else_has_failed(store: JobStore) -> None:
    problem = JobProblem(code="invalid_input", message="no image")
    for id, num_failed, state in (("a", 2, "succeeded"), ("b", 3, "failed")):
        add(store, 3, id=id)
        (part,) = take(store)
        answers = [JobAnswer(value=b"1")] * (3 - num_failed)
        answers += [JobAnswer(value=b"", problem=problem)] * num_failed
        job = store.leases.commit_part(part, PartResult(answers=answers, version=2), NOW)
        assert job is not None
        assert (job.state, job.num_done, job.num_failed) == (state, 3, num_failed)
        assert [answer for _, answer, _ in store.answers(id)] == answers


def test_a_cancelled_job_keeps_what_was_computed(store: JobStore) -> None:
    add(store, 100)
    first, second = take(store, 2)
    store.leases.commit_part(first, compute(first), NOW)
    job = store.cancel("a", NOW + 1)
    assert job is not None
    assert (job.state, job.num_done, job.ended_at) == ("cancelled", 64, NOW + 1)
    assert store.leases.commit_part(second, compute(second), NOW) is None
    assert store.leases.renew([second.token], 60.0) == set()
    answers = list(store.answers("a"))
    assert [index for index, _, _ in answers] == list(range(100))
    problems = [answer.problem.code for _, answer, _ in answers if answer.problem]
    assert problems == ["cancelled"] * 36
    again = store.cancel("a", NOW + 5)
    assert again is not None
    assert again.ended_at == NOW + 1


@pytest.mark.parametrize(("num_computed", "state"), [(0, "failed"), (1, "succeeded")])
def test_a_removed_model_fails_the_rest(store: JobStore, num_computed: int, state: str) -> None:
    add(store, 100)
    for part in take(store, num_computed) if num_computed else []:
        store.leases.commit_part(part, compute(part), NOW)
    problem = JobProblem(code="unknown_model", message="m was removed")
    (job,) = store.fail_jobs("m", problem, NOW)
    num_failed = 100 - 64 * num_computed
    assert (job.state, job.num_done, job.num_failed) == (state, 100, num_failed)
    assert [answer.problem for _, answer, _ in store.answers("a")][-1] == problem


def test_the_same_call_makes_one_job(store: JobStore) -> None:
    first, _ = add(store, id="a", idempotency_key="k")
    again, is_new = add(store, id="b", idempotency_key="k")
    assert (again.id, is_new) == ("a", False)
    assert add(store, id="a")[1] is False
    assert store.former(new_job("e", idempotency_key="k")) == first
    assert store.former(new_job("e", idempotency_key="l")) is None
    with pytest.raises(IdempotencyError, match="with this Idempotency-Key"):
        add(store, id="c", idempotency_key="k", body_digest="other")
    with pytest.raises(IdempotencyError, match="with this id"):
        add(store, id="a", body_digest="other")
    assert add(store, id="d", idempotency_key="k", owner="someone")[1]
    assert len(store.jobs(limit=10)) == len(store.jobs(owner="someone", limit=10)) == 1


def test_two_owners_may_give_jobs_the_same_id(store: JobStore) -> None:
    for owner, num in (("ann", 3), ("ben", 4)):
        assert add(store, num, id="cats", owner=owner, body_digest=owner)[1]
    with pytest.raises(IdempotencyError, match="with this id"):
        add(store, id="cats", owner="ben", body_digest="other")
    finish(store)
    for owner, num in (("ann", 3), ("ben", 4)):
        job = store.job("cats", owner)
        assert job is not None
        assert (job.owner, job.num_done) == (owner, num)
        assert len(list(store.answers("cats", owner=owner))) == num
    store.delete("cats", "ann")
    assert store.job("cats", "ann") is None
    assert store.job("cats", "ben") is not None


def test_an_owner_sees_its_own_jobs(store: JobStore) -> None:
    for number in range(5):
        add(store, id=f"a{number}", owner="ann")
    add(store, id="b", owner="ben")
    assert store.job("b", "ann") is None
    assert store.job("b") is None
    assert store.job("b", "ben") is not None
    page = store.jobs(owner="ann", limit=3)
    assert [job.id for job in page] == ["a4", "a3", "a2"]
    assert [job.id for job in store.jobs(owner="ann", limit=3, before="a2")] == ["a1", "a0"]
    store.cancel("a1", NOW, "ann")
    assert [job.id for job in store.jobs(owner="ann", states=["cancelled"], limit=3)] == ["a1"]


def test_a_key_has_a_quota_of_jobs_and_bytes(store: JobStore) -> None:
    for number in range(LIMITS.max_jobs):
        add(store, 1, id=f"a{number}")
    with pytest.raises(OverQuotaError, match="max_jobs"):
        add(store, id="more")
    with pytest.raises(OverQuotaError, match="max_job_bytes"):
        add(store, 100, id="large", num_bytes=2**20, owner="ben")
    assert store.job("large", "ben") is None
    assert add(store, 10, id="small", num_bytes=2**20, owner="ben")[1]


def test_a_key_leaves_others_some_of_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = JobStore.open(str(tmp_path), msgspec.structs.replace(LIMITS, share=0.75))
    monkeypatch.setattr(store._database, "_room", lambda: (3 * 2**20, 2**20))
    for number in range(2):
        add(store, 1, id=f"{number}", owner="ann", num_bytes=2**20)
    with pytest.raises(OverShareError, match=r"share of the disk \(per_key_share = 0.75 "):
        add(store, 1, id="more", owner="ann", num_bytes=2**20)
    add(store, 1, owner="ben", num_bytes=2**20)
    store.close()


def test_jobs_are_deleted_when_their_time_is_over(store: JobStore) -> None:
    add(store, id="over")
    finish(store)
    add(store, id="waiting")
    assert store.clean(NOW + LIMITS.retention_s - 1) == 0
    assert store.clean(NOW + LIMITS.retention_s) == 1
    assert [job.id for job in store.jobs(limit=9)] == ["waiting"]
    store.delete("waiting")
    assert not store.jobs(limit=9)


def waiting(store: JobStore, now: float, *busy: str) -> Sequence[WaitingWebhook]:
    return store.waiting_webhooks(9, now, busy)


def test_webhooks_are_due_until_they_are_told(store: JobStore) -> None:
    add(store, id="a", webhook="https://a.example/")
    add(store, id="b")
    assert not waiting(store, NOW)
    finish(store)
    (call,) = waiting(store, NOW)
    (due,) = store.take_webhooks([call], 60.0, NOW)
    assert (due.job.id, due.num_attempts) == ("a", 0)
    assert not store.take_webhooks([call], 60.0, NOW)
    assert not waiting(store, NOW + 59)
    store.note_webhook(call.number, NOW + 5)
    (due,) = store.take_webhooks(waiting(store, NOW + 5), 60.0, NOW + 5)
    assert due.num_attempts == 1
    store.note_webhook(call.number, None)
    assert not waiting(store, NOW + 1000)


def test_webhooks_of_owners_and_of_their_receivers_take_turns(store: JobStore) -> None:
    for number in range(6):
        add(store, 1, id=f"{number}", owner="ann", webhook=f"https://{number % 2}.example/")
    add(store, 1, id="last", owner="ben", webhook="https://0.example/")
    finish(store)
    calls = waiting(store, NOW)
    assert {call.owner for call in calls[:2]} == {"ann", "ben"}
    receivers = [call.receiver for call in calls if call.owner == "ann"]
    assert [len(set(receivers[at : at + 2])) for at in (0, 2, 4)] == [2, 2, 2]
    store.postpone_webhooks("ann 0.example", NOW + 60)
    assert {call.receiver for call in waiting(store, NOW)} == {"ann 1.example", "ben 0.example"}
    assert [call.owner for call in waiting(store, NOW, "ann 1.example")] == ["ben"]
    assert len(waiting(store, NOW + 60)) == 7


def test_answers_go_on_with_their_own_job_whoever_takes_its_id(store: JobStore) -> None:
    num = 64 * 20  # more parts than are read at once
    add(store, num)
    finish(store)
    reading = store.answers("a")
    next(reading)
    store.delete("a", owner="ben")  # it is not his
    assert store.job("a") is not None
    assert store.cancel("a", NOW, owner="ben") is None
    assert list(store.answers("a", owner="ben")) == []
    store.delete("a")
    add(store, num)
    finish(store)
    assert len(list(reading)) < num - 1


def test_files_of_a_store_that_is_gone_are_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, elsewhere = tmp_path / "jobs", tmp_path / "elsewhere"
    store = JobStore.open(str(place), LIMITS)
    add(store, 1, num_bytes=200_000)
    add(store, 1, num_bytes=200_000, id="b")
    (part,) = take(store, 1)
    assert store.leases.commit_part(part, compute(part, num_bytes=200_000), NOW) is not None
    read = PartFiles.read

    def read_later(files: PartFiles, job: str, name: str) -> bytes | None:
        place.rename(elsewhere)
        return read(files, job, name)

    with monkeypatch.context() as patch:
        patch.setattr(PartFiles, "read", read_later)
        with pytest.raises(UnavailableError, match="is gone"):
            list(store.answers("a"))
        elsewhere.rename(place)
        with pytest.raises(UnavailableError, match="is gone"):
            take(store, 1)
    elsewhere.rename(place)
    assert values(store, "a") == [0]
    store.close()
