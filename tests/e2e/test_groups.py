"""A model that is split over two processes: its group of ranks is a worker like any other."""

import asyncio
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import psutil
import pytest

from tests.e2e.load import ask_until_stopped
from tests.e2e.running import Running, faulty, left_over, running, until

SPLIT = {"source": "tests.split_fault_model:SplitFaultModel", "placement": "tensor"}
SETTINGS = faulty(**SPLIT, devices_per_replica=2, replicas=2)


def when_ready(service: Running, incarnation: int | None = None) -> dict:
    """Return the first worker, in a given incarnation, once all workers are ready."""
    first: dict = {}

    def are_ready() -> bool:
        workers = service.workers()
        first.update(workers[0])
        is_wanted = incarnation in (None, workers[0]["incarnation"])
        return is_wanted and all(worker["state"] == "ready" for worker in workers)

    until(are_ready)
    return first


def pids_of(worker: dict) -> list[int]:
    return [rank["pid"] for rank in worker["ranks"]]


@pytest.mark.slow
def test_group_under_load_loses_nothing_to_a_killed_follower_nor_to_sigterm():
    worker: dict = {}
    family: list[psutil.Process] = []

    def strike(service: Running) -> float:
        """Kill a follower, wait until its whole group is back, and stop the service."""
        ranks = [psutil.Process(pid) for pid in pids_of(when_ready(service))]
        ranks[1].kill()
        worker.update(when_ready(service, 1))
        assert left_over(ranks) == []
        assert service.metric('worker_rank_parameter_bytes{model="m",rank="1",worker="0"}') == 4
        family.extend(service.family())
        assert set(pids_of(worker)) < {process.pid for process in family}
        service.signal(signal.SIGTERM)
        return time.monotonic()

    with running(settings=SETTINGS) as service:
        tally = asyncio.run(ask_until_stopped(service.url, partial(strike, service)))
        assert service.wait() == 0
        assert left_over(family) == []
    assert (tally.wrong, tally.unanswered) == ([], [])
    assert worker["placement"] == "tensor"
    assert [rank["part"] for rank in worker["ranks"]] == ["part 0", "part 1"]
    assert worker["split"] == {"cuts": ["here"], "note": "as told"}
    assert worker["restarts"] == 1
    assert worker["last_ending"]["reason"].startswith("rank 1: SIGKILL")


def test_no_rank_outlives_a_front_end_that_is_killed():
    with running(settings=SETTINGS) as service:
        pids = pids_of(when_ready(service))
        family = service.family()
        assert set(pids) < {process.pid for process in family}
        service.signal(signal.SIGKILL)
        assert left_over(family) == []


def test_death_of_a_stage_with_several_batches_under_way_convicts_the_guilty_input_alone():
    stages = {"source": "tests.acting_stages:ActingStages", "placement": "pipeline"}
    settings = faulty(**stages, devices_per_replica=2, max_batch_size=1)
    poison = {"n": 7, "do": "kill", "stage": 1}

    def ask_innocent(n: int) -> int:
        return service.predict({"n": n, "do": "sleep", "stage": -1})[0]["twice"]

    with running(settings=settings) as service, ThreadPoolExecutor(17) as pool:
        answers = [pool.submit(ask_innocent, n) for n in range(8)]
        time.sleep(0.3)  # some are under way by now
        os.kill(pids_of(when_ready(service))[0], signal.SIGKILL)
        assert [answer.result() for answer in answers] == [2 * n for n in range(8)]
        when_ready(service)
        crashed = pool.submit(service.ask, poison)
        answers = [pool.submit(ask_innocent, n % 8) for n in range(16)]
        assert [answer.result() for answer in answers] == [2 * (n % 8) for n in range(16)]
        assert (crashed.result().status_code, crashed.result().json()["code"]) == (
            500,
            "worker_crashed",
        )
        when_ready(service)
        assert service.ask(poison).json()["code"] == "quarantined"
        assert [ask_innocent(n) for n in range(3)] == [0, 2, 4]
        assert service.metric('quarantined_inputs{model="m"}') == 1
