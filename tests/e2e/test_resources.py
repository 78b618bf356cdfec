"""Services on a machine that has too little of something, in real processes."""

import contextlib
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest

from tests.e2e.running import (
    FAULTY,
    ROOT,
    Running,
    faulty,
    num_descriptors,
    running,
    status_of,
    until,
)
from tests.groups import control_group, with_mounts
from tests.models.items import jpeg
from tests.ports import free_port

pytestmark = [pytest.mark.measures, pytest.mark.slow]

SERVICE = (sys.executable, "-m", "inferpool")
MIB = 1 << 20


@contextlib.contextmanager
def connected(service: Running) -> Iterator[Running]:
    """Let a service be asked over one connection, which is open before resources run out."""
    service.http.close()
    with httpx.Client(timeout=30) as service.http:
        assert service.get("/health/live").status_code == 200
        yield service


def answers(service: Running) -> bool:
    """Return whether `FaultModel` gives its right answer."""
    return service.predict({"n": 21})[0]["twice"] == 42


def kill_one(service: Running) -> int:
    """Kill the first worker, and return its pid."""
    pid = int(service.workers()[0]["pid"])
    psutil.Process(pid).kill()
    return pid


def has_replaced(service: Running, pid: int) -> bool:
    """Return whether every worker is ready, and none of them is the process that was killed."""
    return all(each["state"] == "ready" and each["pid"] != pid for each in service.workers())


def test_arena_that_the_control_group_has_no_room_for_stops_the_start():
    with control_group("memory") as group:
        group.set("memory.limit_in_bytes", 200 * MIB)
        done = subprocess.run(
            [*SERVICE, "serve", "echo", "--port", "0"],
            cwd=ROOT,
            env={**os.environ, "INFERPOOL_ARENA_BYTES": str(256 * MIB)},
            preexec_fn=group.enter,
            capture_output=True,
            text=True,
            timeout=90,
        )
        assert done.returncode == 1
        assert "cannot reserve 256 MiB of shared memory for the arena" in done.stderr


def test_full_shared_memory_and_a_full_temporary_folder_cost_nothing():
    mounts = with_mounts("-t tmpfs -o size=1m none /dev/shm", "-t tmpfs -o size=64k none /tmp")
    fill = "for folder in /dev/shm /tmp; do head -c 9999999 /dev/zero > $folder/full; done"
    command = [*mounts, "sh", "-c", f'{fill} 2>/dev/null; exec "$@"', "sh", *SERVICE]
    arguments = ("efficientnet_lite0", "--replicas", "1")
    with (
        running(*arguments, command=command, env={"TMPDIR": "/tmp"}) as service,
        connected(service),
    ):
        killed = kill_one(service)
        until(lambda: has_replaced(service, killed))
        photo = {"content": jpeg("astronaut"), "headers": {"Content-Type": "image/jpeg"}}
        assert service.post(**photo).status_code == 200


@pytest.mark.parametrize("fault", ["read-only", "a long name"])
def test_temporary_folder_that_cannot_be_used_is_not_needed(fault: str, tmp_path: Path):
    command, folder, cwd = SERVICE, tmp_path / ("long" * 25), tmp_path
    folder.mkdir()
    if fault == "read-only":
        read_only = [f"-t tmpfs -o ro none {each}" for each in ("/tmp", "/var/tmp")]
        command, folder, cwd = (*with_mounts(*read_only), *SERVICE), Path("/tmp"), Path("/proc")
    env = {"TMPDIR": str(folder)}
    with running(FAULTY, "--replicas", "1", command=command, env=env, cwd=cwd) as service:
        assert answers(service)


def test_worker_comes_back_once_there_are_descriptors_again_and_the_others_go_on():
    with running(settings=faulty(replicas=2), forks=False) as service, connected(service):
        front_end = psutil.Process(service.process.pid)
        before = num_descriptors(front_end)
        soft, hard = resource.prlimit(front_end.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(front_end.pid, resource.RLIMIT_NOFILE, (front_end.num_fds(), hard))
        kill_one(service)
        line = service.wait_for_log("did not start")
        assert "Too many open files (ulimit -n)" in str(line["message"])
        assert all(answers(service) for _ in range(5))
        assert len(service.worker_pids()) == 1
        resource.prlimit(front_end.pid, resource.RLIMIT_NOFILE, (soft, hard))
        until(lambda: len(service.worker_pids()) == 2)
        until(lambda: num_descriptors(front_end) <= before)


def test_worker_comes_back_once_there_may_be_processes_again_and_the_others_go_on():
    with (
        control_group("pids") as group,
        running(settings=faulty(replicas=2), preexec_fn=group.enter) as service,
        connected(service),
    ):
        survivor = service.workers()[1]["pid"]
        group.set("pids.max", int(group.get("pids.current")) - 3)
        kill_one(service)
        service.wait_for_log("did not start")
        assert all(answers(service) for _ in range(5))
        assert service.workers()[1]["pid"] == survivor
        assert "raw" not in {line["level"] for line in service.log}
        group.set("pids.max", "max")
        until(lambda: len(service.worker_pids()) == 2)
        assert service.workers()[1]["pid"] == survivor


def test_full_disk_under_the_log_costs_lines_and_no_answers():
    port = free_port()
    with open("/dev/full", "w") as full:
        process = subprocess.Popen(
            [*SERVICE, "serve", FAULTY, "--replicas", "1", "--port", str(port)],
            cwd=ROOT,
            stdout=full,
            stderr=full,
        )
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as client:

        def is_ready() -> bool:
            return status_of(f"http://127.0.0.1:{port}/health/ready") == 200

        def ask(**instance: object) -> httpx.Response:
            return client.post("/predict", json={"instances": [{"n": 21, **instance}]})

        try:
            until(is_ready)
            assert [ask(do=act).status_code for act in ("ok", "raise", "kill")] == [200, 500, 500]
            until(is_ready)
            assert ask().json()["predictions"][0]["twice"] == 42
            metrics = client.get("/metrics").text.splitlines()
            (dropped,) = [m for m in metrics if m.startswith("inferpool_log_lines_drop")]
            assert float(dropped.split()[1]) > 5
            process.terminate()
            assert process.wait(60) == 0
        finally:
            process.kill()
            process.wait()


def test_log_that_nobody_reads_delays_no_answer():
    with running(settings=faulty()) as service, connected(service):
        service.may_read.clear()
        for _ in range(12):  # the tracebacks of all fill the pipe five times
            assert service.ask(*[{"n": 1, "do": "raise"}] * 32).status_code == 500
        assert answers(service)


def test_pause_of_all_processes_kills_nobody():
    settings = faulty(replicas=2, batch_timeout_s=1.5, options={"forward_s": 0.1})
    with running(settings=settings) as service, ThreadPoolExecutor(40) as pool:
        pids = service.worker_pids()
        posts = [pool.submit(service.predict, {"n": n}) for n in range(40)]
        time.sleep(0.3)
        family = service.family()
        for process in family:
            process.suspend()
        time.sleep(2.5)
        for process in reversed(family):  # the main process last, as it measures the time
            process.resume()
        assert [post.result()[0]["twice"] for post in posts] == [2 * n for n in range(40)]
        assert service.worker_pids() == pids
