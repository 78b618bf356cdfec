"""`inferpool place` on a real Ray cluster of simulated nodes: agents come, go and come back."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.metadata import version

import httpx
import psutil
import pytest

from tests.e2e.hosts import KEYS, RunningCluster, cluster
from tests.e2e.running import ROOT, asking, faulty, until
from tests.ray_cluster import RayCluster, needs_ray

pytestmark = [needs_ray, pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(400)]
_PATIENCE_S = 120.0
_RAYLETS = {"RAY_gcs_rpc_server_reconnect_timeout_s": "600"}
"""Raylets, and so agents, go on for so long without their head."""
_DRIVER = {"RAY_gcs_rpc_server_reconnect_timeout_s": "3"}


@dataclass
class Stage:
    """A Ray cluster, a front end, and the process that places agents."""

    ray: RayCluster
    cluster: RunningCluster
    placing: "subprocess.Popen[str] | None" = None
    log: list[str] = field(default_factory=list)

    def command(self, *flags: str) -> list[str]:
        join = f"127.0.0.1:{self.cluster.port}"
        told = ["--join", join, "--address", self.ray.address, "--gpus-per-host", "0"]
        return [sys.executable, "-m", "inferpool", "place", *told, *flags]

    def start(self, *flags: str) -> None:
        self.placing = subprocess.Popen(
            self.command(*flags),
            cwd=ROOT,
            env={**os.environ, **KEYS, **_DRIVER},
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        threading.Thread(target=self._read, args=(self.placing,), daemon=True).start()

    def end(self) -> int:
        assert self.placing is not None
        self.placing.send_signal(signal.SIGTERM)
        return self.placing.wait(_PATIENCE_S)

    def pids(self) -> dict[str, int]:
        """Return the agents that are connected and whose workers are ready, by host."""
        hosts = self.cluster.hosts().values()
        return {
            host["name"]: host["pid"]
            for host in hosts
            if host["state"] == "connected" and 0 < host["workers"] == host["workers_ready"]
        }

    def wait_for(self, num_hosts: int) -> dict[str, int]:
        self.until(lambda: len(self.pids()) == num_hosts == len(self.cluster.hosts()))
        return self.pids()

    def until(self, claim: Callable[[], bool]) -> None:
        try:
            until(claim, _PATIENCE_S)
        except AssertionError:
            raise AssertionError("".join(self.log[-40:])) from None

    def ask(self) -> httpx.Response:
        return self.cluster.service.ask({"n": 21, "do": "ok"})

    def _read(self, placing: "subprocess.Popen[str]") -> None:
        assert placing.stderr is not None
        with placing.stderr:
            self.log.extend(placing.stderr)


@pytest.fixture
def stage() -> Iterator[Stage]:
    settings = faulty(max_batch_size=1, options={"forward_s": 0.05})
    with RayCluster(_RAYLETS) as ray, cluster(ready=False, settings=settings) as front:
        stage = Stage(ray, front)
        try:
            yield stage
        finally:
            if stage.placing is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(stage.placing.pid, signal.SIGKILL)
                stage.placing.wait(_PATIENCE_S)


def test_agents_come_with_nodes_leave_with_drains_and_outlive_who_placed_them(stage: Stage):
    first, second = stage.ray.add(), stage.ray.add()
    stage.start()
    stage.wait_for(2)
    assert stage.ask().json()["predictions"][0]["twice"] == 42

    third = stage.ray.add()
    hosts = stage.wait_for(3)
    assert {psutil.Process(pid).nice() for pid in hosts.values()} == {0}

    killed = next(pid for name, pid in hosts.items() if first.startswith(name[-8:]))
    os.kill(killed, signal.SIGKILL)
    stage.until(lambda: killed not in stage.pids().values())
    stage.wait_for(3)

    with asking(stage.ask) as answers:
        stage.ray.drain(second, 60)
        stage.wait_for(2)
        stage.ray.kill(third)
        stage.wait_for(1)
    assert {answer.status_code for answer in answers} == {200}

    before = stage.wait_for(1)
    assert stage.end() == 0
    assert stage.wait_for(1) == before
    stage.start()
    stage.until(lambda: sum("connected to Ray" in line for line in stage.log) == 2)
    fourth = stage.ray.add()
    after = stage.wait_for(2)
    assert before.items() <= after.items(), "the agent that was there goes on"

    stage.ray.kill_head()
    stage.until(lambda: any("trying again in 2 s" in line for line in stage.log))
    assert stage.wait_for(2) == after, fourth
    assert stage.ask().status_code == 200
    assert stage.end() == 0


def test_stop_lets_all_agents_drain_and_frees_their_nodes(stage: Stage):
    stage.ray.add()
    stage.start()
    stage.wait_for(1)
    assert stage.end() == 0
    done = subprocess.run(
        stage.command("--stop"),
        cwd=ROOT,
        env={**os.environ, **KEYS},
        capture_output=True,
        text=True,
        timeout=_PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    stage.until(lambda: not stage.cluster.hosts())
    stage.start("--max-hosts", "1")
    stage.wait_for(1)


@pytest.mark.measures
def test_load_asks_for_another_host_which_gets_an_agent(stage: Stage):
    stage.ray.add()
    stage.ray.add()
    stage.start("--front-end", stage.cluster.service.url, "--min-hosts", "1", "--max-hosts", "5")
    stage.wait_for(1)
    with asking(stage.ask, 4) as answers:  # more than a worker can hold
        stage.wait_for(2)
    assert {answer.status_code for answer in answers} == {200}
    assert any("2 hosts are wanted, not 1: workers compute" in line for line in stage.log)


def test_other_versions_than_the_clusters_are_refused_with_both_named(stage: Stage):
    code = (
        "import ray; ray.__version__ = '2.59.0'\n"
        "from argparse import ArgumentParser\n"
        "from inferpool.service.tools.place import plan, run\n"
        "parser = ArgumentParser(); plan.add_flags(parser)\n"
        f"args = parser.parse_args({stage.command()[4:]!r})\n"
        "run.drive(plan.plan_of(args, {}), __import__('os').getppid())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=_PATIENCE_S
    )
    assert done.returncode == 3, done.stderr
    python = sys.version.split()[0]
    assert f"the cluster runs Ray {version('ray')} on Python {python}" in done.stderr
    assert f"this is Ray 2.59.0 on Python {python}" in done.stderr
