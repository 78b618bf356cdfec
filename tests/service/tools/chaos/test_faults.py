import os
import subprocess
import sys
from collections import Counter
from itertools import islice

from inferpool.service.tools.chaos.faults import Faults, schedule
from inferpool.service.tools.chaos.load import ChaosTally
from inferpool.service.tools.chaos.watch import Watch
from inferpool.service.tools.trial.health import Rank, WorkerState


def test_faults_come_in_order_as_often_as_asked_and_as_the_seed_decides():
    every_s = {"kill": 2.0, "stop": 0.0, "poison": 10.0}
    found = list(islice(schedule(3, every_s), 600))  # type: ignore[arg-type]
    moments = [moment for moment, _ in found]
    assert moments == sorted(moments)
    kills = [moment for moment, fault in found if fault == "kill"]
    assert 1.8 < kills[-1] / len(kills) < 2.2
    assert {fault for _, fault in found} == {"kill", "poison"}
    assert list(islice(schedule(3, every_s), 600)) == found
    assert list(islice(schedule(2, every_s), 600)) != found
    assert list(schedule(1, dict.fromkeys(every_s, 0.0))) == []


def test_any_rank_of_a_split_worker_is_struck_and_all_of_them_are_watched():
    sleepers = [
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) for _ in range(2)
    ]
    ranks = [Rank(rank=rank, pid=process.pid) for rank, process in enumerate(sleepers)]
    worker = WorkerState(name="m/0", state="ready", incarnation=0, pid=ranks[0].pid, ranks=ranks)
    struck: Counter[int | None] = Counter()
    for seed in range(12):
        watch = Watch(("127.0.0.1", 1))
        faults = Faults(
            address=("127.0.0.1", 1), watch=watch, tally=ChaosTally(), questions=[], seed=seed,
            every_s={"kill": 0, "stop": 1, "poison": 0, "forkserver": 0},
            timeout_s=1, keeps_quarantine=True,
        )  # fmt: skip
        assert faults._strike_one_of([worker], "stop")
        (recovery,) = watch.recoveries
        struck[recovery.rank] += 1
        assert {each.pid for each in recovery.processes} == {each.pid for each in ranks}
    assert set(struck) == {0, 1}
    for process in sleepers:
        _, status = os.waitpid(process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        process.kill()
        process.wait()
