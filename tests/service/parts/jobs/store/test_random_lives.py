"""Random lives of a store, with crashes: each instance is in its job's result exactly once."""

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Literal, TypeVar

import pytest

from inferpool.service.errors import IdempotencyError, UnavailableError
from inferpool.service.parts.jobs.records import JobProblem, JobState, LeasedPart
from inferpool.service.parts.jobs.store.store import JobStore
from tests.service.parts.jobs.conftest import LIMITS
from tests.service.parts.jobs.stores import (
    NOW,
    FailingCommits,
    add,
    compute,
    instance,
    new_job,
    take,
)

T = TypeVar("T")

IDS = "abc"
NUMS = (1, 63, 64, 65, 130)
SIZES = (0, 0, 0, 2000, 20_000)
"""Bytes of an instance or an answer: parts of the last two are kept in files."""
NUM_STEPS = 60


@dataclass
class ExpectedJob:
    """What the store should say of a job."""

    num: int
    body: str
    state: JobState = "queued"
    done: dict[int, int] = field(default_factory=dict)
    """The version of each answer, by its instance."""
    num_failed: int = 0


class StoreLife:
    """Makes, computes, ends and forgets jobs, while commits and processes fail."""

    def __init__(self, place: str, seed: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.place = place
        self.chance = Random(seed)
        self.expected: dict[str, ExpectedJob] = {}
        self.held: dict[tuple[str, int], LeasedPart] = {}
        """The newest lease of each part that is not done, by job and number."""
        self.former: list[LeasedPart] = []
        """Leases that are over, one way or another."""
        self.monkeypatch = monkeypatch
        self.store: JobStore
        self._open()

    def live(self) -> None:
        """Do one thing after another, and see that nothing is lost; then compute the rest."""
        steps = {
            self.make: 4,
            self.break_off: 1,
            self.lease: 6,
            self.commit: 6,
            self.commit_too_late: 3,
            self.let_go: 2,
            self.cancel: 1,
            self.delete: 1,
            self.fail_all: 0.3,
            self.clean: 0.3,
            self.crash: 2,
        }
        for step in self.chance.choices(list(steps), list(steps.values()), k=NUM_STEPS):
            step()
            self.check()
        self.crash()
        while leased := take(self.store, 5):
            for part in leased:
                assert self.store.leases.commit_part(part, compute(part), NOW) is not None
        for job in self.expected.values():
            if job.state in ("queued", "running"):
                job.state = "succeeded"
                job.done = {index: job.done.get(index, 1) for index in range(job.num)}
        self.check()
        self.store.close()

    def _open(self) -> None:
        self.store = JobStore.open(self.place, LIMITS)
        self.commits = FailingCommits(self.store, self.monkeypatch)

    def _plan_failures(self) -> None:
        failures: list[Literal["before", "after", ""]] = ["before", "after", "", ""]
        self.commits.plan(*self.chance.choices(failures, k=3))

    def _insist(self, call: Callable[[], T]) -> T:
        """Repeat a call that fails, as clients and the runner do."""
        while True:
            try:
                return call()
            except UnavailableError:
                continue

    def make(self) -> None:
        id, num = self.chance.choice(IDS), self.chance.choice(NUMS)
        size = self.chance.choice(SIZES)
        body = f"{num} {size}"
        former = self.expected.get(id)

        def call() -> bool | None:
            try:
                return add(self.store, num, num_bytes=size, id=id, body_digest=body)[1]
            except IdempotencyError:
                return None

        self._plan_failures()
        is_new = self._insist(call)
        if former is None:
            self.expected[id] = ExpectedJob(num, body)
        else:
            assert is_new is (False if former.body == body else None)

    def break_off(self) -> None:
        writer = self.store.begin(new_job("broken off"), NOW)
        size = self.chance.choice(SIZES)
        for number in range(self.chance.choice(NUMS)):
            writer.add(instance(number, size))
        if self.chance.random() < 0.5:  # else it stays until a restart, or for ten minutes
            writer.__exit__(None, None, None)

    def lease(self) -> None:
        for part in take(self.store, self.chance.randint(1, 3)):
            key = (part.job.id, part.number)
            assert key not in self.held, "somebody holds it"
            self.held[key] = part
            self.expected[part.job.id].state = "running"

    def commit(self) -> None:
        if not self.held:
            return
        key, part = self._pick()
        version = self.chance.randint(1, 2)
        result = compute(part, version, self.chance.choice(SIZES))
        self._plan_failures()
        job = self._insist(lambda: self.store.leases.commit_part(part, result, NOW))
        assert job is not None
        expected = self.expected[key[0]]
        expected.done |= dict.fromkeys(range(part.first, part.first + len(result.answers)), version)
        if len(expected.done) == expected.num:
            expected.state = "succeeded"
        self._forget(lambda each: each == key)

    def commit_too_late(self) -> None:
        if not self.former:
            return
        part = self.chance.choice(self.former)
        self.store.leases.commit_part(part, compute(part, 9, self.chance.choice(SIZES)), NOW)

    def let_go(self) -> None:
        if not self.held:
            return
        key, part = self._pick()
        how = self.chance.choice(("give back", "let it run out", "renew"))
        if how == "renew":
            assert self.store.leases.renew([part.token], 60.0) == {part.token}
        elif how == "give back":
            self.store.leases.give_back([part.token])
            self._forget(lambda each: each == key)
        else:  # until somebody takes it over, its holder might commit it
            assert self.store.leases.renew([part.token], -1.0) == {part.token}
            del self.held[key]

    def cancel(self) -> None:
        id = self.chance.choice(IDS)
        self._plan_failures()
        job = self._insist(lambda: self.store.cancel(id, NOW))
        assert (job is not None) == (id in self.expected)
        if job is not None and self.expected[id].state in ("queued", "running"):
            self.expected[id].state = "cancelled"
            self._forget(lambda each: each[0] == id)

    def delete(self) -> None:
        id = self.chance.choice(IDS)
        self._plan_failures()
        self._insist(lambda: self.store.delete(id))
        self.expected.pop(id, None)
        self._forget(lambda each: each[0] == id)

    def fail_all(self) -> None:
        self.store.fail_jobs("m", JobProblem(code="unknown_model", message="it is gone"), NOW)
        for job in self.expected.values():
            if job.state in ("queued", "running"):
                job.state = "succeeded" if job.done else "failed"
                job.num_failed = job.num - len(job.done)
        self._forget(lambda _: True)

    def clean(self) -> None:
        assert self.store.clean(NOW + LIMITS.retention_s / 2) == 0

    def crash(self) -> None:
        tokens = [part.token for part in self.held.values()]
        self.store.close()
        self._open()
        if "://" in self.place:  # the leases run out
            self.store.leases.renew(tokens, -1.0)
            self.held.clear()
        self._forget(lambda _: True)

    def check(self) -> None:
        """Compare all that the store says with what is expected."""
        self.commits.plan()
        assert {job.id for job in self.store.jobs(limit=9)} == set(self.expected)
        for id, expected in self.expected.items():
            job = self.store.job(id)
            assert job is not None
            num_done = expected.num if expected.num_failed else len(expected.done)
            assert (job.state, job.num_instances) == (expected.state, expected.num)
            assert (job.num_done, job.num_failed) == (num_done, expected.num_failed)
            assert set(job.versions) == set(expected.done.values())
            answers = list(self.store.answers(id))
            found = {index: version for index, answer, version in answers if answer.problem is None}
            assert found == expected.done
            assert all(
                int(answer.value) == 2 * index
                for index, answer, _ in answers
                if answer.problem is None
            )
            indices = [index for index, _, _ in answers]
            assert indices == sorted(set(indices))
            if job.is_over:
                assert indices == list(range(expected.num))

    def _pick(self) -> tuple[tuple[str, int], LeasedPart]:
        return self.chance.choice(list(self.held.items()))

    def _forget(self, which: Callable[[tuple[str, int]], bool]) -> None:
        for key in [key for key in self.held if which(key)]:
            self.former.append(self.held.pop(key))


@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (2, 3))]
)
def test_no_instance_is_lost_or_doubled(
    place: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    StoreLife(place, f"{seed}", monkeypatch).live()
