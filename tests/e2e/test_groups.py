"""A model that is split over two processes, over HTTP: a worker like any other."""

import asyncio
import os
import signal
import time
from functools import partial
from pathlib import Path

import httpx
import psutil

from tests.e2e.load import ask_until_stopped
from tests.e2e.running import Running, left_over, running


def config(folder: Path) -> str:
    """Settings for two replicas of two ranks each."""
    file = folder / "inferpool.toml"
    file.write_text(
        """
        [models.m]
        source = "tests.split_fault_model:SplitFaultModel"
        placement = "tensor"
        devices_per_replica = 2
        replicas = 2
        """
    )
    return str(file)


def when_ready(service: Running, incarnation: int | None = None) -> dict:
    """The first worker, in that life, once all are ready."""
    until = time.monotonic() + 60
    while True:
        workers = httpx.get(f"{service.url}/health").json()["models"][0]["workers"]
        are_ready = all(worker["state"] == "ready" for worker in workers)
        if are_ready and incarnation in (None, workers[0]["incarnation"]):
            return dict(workers[0])
        assert time.monotonic() < until
        time.sleep(0.02)


def pids_of(worker: dict) -> list[int]:
    return [rank["pid"] for rank in worker["ranks"]]


def test_group_under_load_loses_nothing_to_a_killed_follower_nor_to_sigterm(tmp_path: Path):
    worker: dict = {}
    family: list[psutil.Process] = []

    def strike(service: Running) -> float:
        """Kill a follower, see its group come back as a whole, and end the service."""
        ranks = [psutil.Process(pid) for pid in pids_of(when_ready(service))]
        ranks[1].kill()
        worker.update(when_ready(service, 1))
        assert left_over(ranks) == []
        metrics = httpx.get(f"{service.url}/metrics").text
        assert 'worker_rank_parameter_bytes{model="m",rank="1",worker="0"} 4.0' in metrics
        family.extend(service.family())
        assert set(pids_of(worker)) < {process.pid for process in family}
        service.signal(signal.SIGTERM)
        return time.monotonic()

    with running("--config", config(tmp_path)) as service:
        tally = asyncio.run(ask_until_stopped(service.url, partial(strike, service)))
        assert service.wait() == 0
        assert left_over(family) == []
    assert (tally.wrong, tally.unanswered) == ([], [])
    assert worker["placement"] == "tensor"
    assert [rank["part"] for rank in worker["ranks"]] == ["part 0", "part 1"]
    assert worker["split"] == {"cuts": ["here"], "note": "as told"}
    assert worker["restarts"] == 1
    assert worker["last_ending"]["reason"].startswith("rank 1: SIGKILL")


def test_no_rank_outlives_a_front_end_that_is_killed(tmp_path: Path):
    with running("--config", config(tmp_path)) as service:
        pids = pids_of(when_ready(service))
        family = service.family()
        assert set(pids) < {process.pid for process in family}
        service.signal(signal.SIGKILL)
        assert left_over(family) == []


def test_death_of_a_stage_with_several_batches_under_way_is_laid_to_the_guilty_alone(
    tmp_path: Path,
):
    file = tmp_path / "inferpool.toml"
    file.write_text(
        """
        [models.m]
        source = "tests.acting_stages:ActingStages"
        placement = "pipeline"
        devices_per_replica = 2
        replicas = 1
        max_batch_size = 1
        """
    )
    poison = {"n": 7, "do": "kill", "stage": 1}

    async def go(service: Running) -> None:
        async with httpx.AsyncClient(base_url=service.url, timeout=30) as client:

            async def ask(instance: dict) -> httpx.Response:
                return await client.post("/predict", json={"instances": [instance]})

            async def ask_innocents() -> None:
                """Some of which are under way when a rank dies."""
                numbers = range(8)
                asked = [{"n": n, "do": "sleep", "stage": -1} for n in numbers]
                answers = await asyncio.gather(*map(ask, asked))
                assert [each.json()["predictions"][0]["twice"] for each in answers] == [
                    2 * n for n in numbers
                ]

            innocents = asyncio.ensure_future(ask_innocents())
            await asyncio.sleep(0.3)
            os.kill(pids_of(await asyncio.to_thread(when_ready, service))[0], signal.SIGKILL)
            await innocents
            await asyncio.to_thread(when_ready, service)
            crashed, *_ = await asyncio.gather(ask(poison), ask_innocents(), ask_innocents())
            assert (crashed.status_code, crashed.json()["code"]) == (500, "worker_crashed")
            await asyncio.to_thread(when_ready, service)
            assert (await ask(poison)).json()["code"] == "quarantined"
            await ask_innocents()
            metrics = (await client.get("/metrics")).text
            assert 'inferpool_quarantined_inputs{model="m"} 1.0' in metrics

    with running("--config", str(file)) as service:
        asyncio.run(go(service))
