"""Services of a store are killed at any moment: each instance is in the result exactly once."""

import random
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

from inferpool.service.jobs.store.store import JobStore
from tests.service.jobs.living import LIMITS, answer_to, payloads

PATIENCE_S = 500.0


class KilledProcess(threading.Thread):
    """A process that is killed at random moments, a few times, and then may finish."""

    def __init__(self, *arguments: object, num_kills: int, seed: str) -> None:
        super().__init__()
        self._command = [sys.executable, "-m", "tests.service.jobs.living", *map(str, arguments)]
        self._left = num_kills
        self._chance = random.Random(seed)
        self.num_kills = 0
        self.accepted: set[int] = set()
        self.is_done = False

    def run(self) -> None:
        until = time.monotonic() + PATIENCE_S
        while not self.is_done and time.monotonic() < until:
            with subprocess.Popen(self._command, stdout=subprocess.PIPE, text=True) as process:
                self._watch(process)

    def _watch(self, process: "subprocess.Popen[str]") -> None:
        assert process.stdout is not None
        # It lives for so long after the first sign of life, or dies while it starts. The first one
        # dies at once: whether later ones live long enough to be killed is up to the machine.
        life_s = self._chance.uniform(0.0, 1.0) if self.num_kills else 0.0
        killer = threading.Timer(life_s, process.kill)
        if self.num_kills and self._left and self._chance.random() < 0.2:
            killer.start()
        for line in process.stdout:
            if self._left and killer.ident is None:
                killer.start()
            if line.startswith("accepted"):
                self.accepted.add(int(line.split()[1]))
            elif line == "all are over\n":
                self.is_done = True
        killer.cancel()
        if process.wait():
            self.num_kills += 1
            self._left -= 1


@pytest.mark.parametrize(
    ("num_jobs", "num_kills"),
    [(20, 2), pytest.param(150, 25, marks=[pytest.mark.slow, pytest.mark.timeout(600)])],
)
def test_each_instance_is_in_the_result_once(
    place: str, tmp_path: Path, num_jobs: int, num_kills: int
) -> None:
    log = tmp_path / "log"
    made = [num_jobs] if "://" not in place else [num_jobs, 0]  # two services on one store
    processes = [
        KilledProcess(place, log, num_jobs, num, num_kills=num_kills, seed=f"{number}")
        for number, num in enumerate(made)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert all(process.is_done for process in processes)
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
    assert any(process.num_kills for process in processes)
    computed = Counter(log.read_text().splitlines())
    wanted = {payload.decode().rstrip() for job in range(num_jobs) for payload in payloads(job)}
    assert set(computed) == wanted
    if len(processes) == 1:  # else a lease may run out on a busy machine, without a death
        assert max(computed.values()) <= 1 + processes[0].num_kills
