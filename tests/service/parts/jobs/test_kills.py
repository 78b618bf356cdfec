"""Services of a store are killed at any moment: each instance is in the result exactly once."""

import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

from inferpool.service.parts.jobs.store.store import JobStore
from tests.service.parts.jobs.living import LIMITS, answer_to, payloads


class KilledProcess(threading.Thread):
    """Processes, one after the other, that die after random steps of their work, but the last."""

    def __init__(self, *arguments: object, num_steps: int, num_kills: int, seed: str) -> None:
        super().__init__()
        chance = random.Random(seed)
        # The first one has done something; later ones may die while they start.
        dies_after = [chance.randint(0 if num else 1, num_steps) for num in range(num_kills)]
        told = map(str, (*arguments, *dies_after, -1))
        self._command = [sys.executable, "-m", "tests.service.parts.jobs.living", *told]
        self.exits: list[int] = []
        self.accepted: set[int] = set()

    def run(self) -> None:
        with subprocess.Popen(self._command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for what, number in map(str.split, process.stdout):
                if what == "accepted":
                    self.accepted.add(int(number))
                else:
                    self.exits.append(int(number))


@pytest.mark.parametrize(
    ("num_jobs", "num_kills"),
    [(8, 2), pytest.param(90, 25, marks=[pytest.mark.slow, pytest.mark.timeout(600)])],
)
def test_each_instance_is_in_the_result_once(
    place: str, tmp_path: Path, num_jobs: int, num_kills: int
) -> None:
    log = tmp_path / "log"
    is_shared = "://" in place
    made = [num_jobs, 0] if is_shared else [num_jobs]  # two services on one store
    lease_s = 1.5 if is_shared else 3600.0  # a service that is alone waits for no lease
    num_kills_each = num_kills // len(made)
    processes = [
        KilledProcess(
            *(place, log, num_jobs, num, lease_s),
            num_steps=3 * num_jobs,
            num_kills=num_kills_each,
            seed=f"{number}",
        )
        for number, num in enumerate(made)
    ]
    began = time.monotonic()
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    took_s = time.monotonic() - began
    for process in processes:
        assert process.exits == [-signal.SIGKILL] * num_kills_each + [0]
    assert processes[0].accepted == set(range(num_jobs))
    store = JobStore.open(place, LIMITS)
    for number in range(num_jobs):
        job = store.job(f"{number}")
        assert job is not None
        assert (job.state, job.num_failed) == ("succeeded", 0)
        answers = [answer.value for _, answer, _ in store.answers(f"{number}")]
        assert answers == [answer_to(payload) for payload in payloads(number)]
    assert len(store.jobs(limit=1000)) == num_jobs
    store.close()
    computed = Counter(log.read_text().splitlines())
    wanted = {payload.decode().rstrip() for job in range(num_jobs) for payload in payloads(job)}
    assert set(computed) == wanted
    # A part is computed again after a death, or after its lease ran out on a busy machine.
    assert max(computed.values()) <= 1 + num_kills + took_s // lease_s
