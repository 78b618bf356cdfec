"""Services whose machine has too little of something, in real processes."""

import asyncio
import contextlib
import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from tests.e2e.photos import jpeg
from tests.e2e.running import ROOT, Running, running, until
from tests.groups import control_group, with_mounts

pytestmark = [pytest.mark.measures, pytest.mark.slow]

FAULTY = "tests.fault_model:FaultModel"
SERVICE = (sys.executable, "-m", "inferpool")
MIB = 1 << 20


@contextlib.contextmanager
def client_of(service: Running) -> Iterator[httpx.Client]:
    """A client whose one connection is open already."""
    with httpx.Client(base_url=service.url, timeout=30) as client:
        assert client.get("/health/live").status_code == 200
        yield client


def workers(client: httpx.Client) -> list[dict[str, object]]:
    return [w for m in client.get("/health").json()["models"] for w in m["workers"]]


def num_ready(client: httpx.Client) -> int:
    return sum(worker["state"] == "ready" for worker in workers(client))


def answers(client: httpx.Client, n: int = 21) -> bool:
    """Whether `FaultModel` gives its right answer."""
    body = {"instances": [{"n": n}]}
    return client.post("/predict", json=body).json()["predictions"][0]["twice"] == 2 * n


def has_replaced(client: httpx.Client, pid: int) -> bool:
    """Whether every worker is ready, and none of them is the process that was killed."""
    return all(w["state"] == "ready" and w["pid"] != pid for w in workers(client))


def kill_one(client: httpx.Client) -> int:
    """SIGKILL the first worker; returns its pid."""
    pid = int(str(workers(client)[0]["pid"]))
    os.kill(pid, signal.SIGKILL)
    return pid


def test_arena_that_the_control_group_has_no_room_for_is_said_at_start():
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


def test_full_shared_memory_of_the_host_costs_nothing():
    command = [*with_mounts("-t tmpfs -o size=1m none /dev/shm"), "sh", "-c"]
    command += ['head -c 9999999 /dev/zero > /dev/shm/full 2>/dev/null; exec "$@"', "sh", *SERVICE]
    with (
        running("efficientnet_lite0", "--replicas", "1", command=command) as service,
        client_of(service) as client,
    ):
        killed = kill_one(client)
        until(lambda: has_replaced(client, killed))
        answer = client.post(
            "/predict", content=jpeg("astronaut"), headers={"Content-Type": "image/jpeg"}
        )
        assert answer.status_code == 200


def test_worker_comes_back_once_there_are_descriptors_again_and_the_others_go_on():
    with running(FAULTY, "--replicas", "2") as service, client_of(service) as client:
        front_end = psutil.Process(service.process.pid)
        before = front_end.num_fds()
        soft, hard = resource.prlimit(front_end.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(front_end.pid, resource.RLIMIT_NOFILE, (front_end.num_fds(), hard))
        kill_one(client)
        line = service.wait_for_log("did not start")
        assert "Too many open files (ulimit -n)" in str(line["message"])
        for _ in range(5):
            assert answers(client)
        assert num_ready(client) == 1
        resource.prlimit(front_end.pid, resource.RLIMIT_NOFILE, (soft, hard))
        until(lambda: num_ready(client) == 2)
        until(lambda: front_end.num_fds() <= before)


def test_worker_comes_back_once_there_may_be_processes_again_and_the_others_go_on():
    with (
        control_group("pids") as group,
        running(FAULTY, "--replicas", "2", preexec_fn=group.enter) as service,
        client_of(service) as client,
    ):
        survivor = workers(client)[1]["pid"]
        group.set("pids.max", int(group.get("pids.current")) - 3)
        kill_one(client)
        service.wait_for_log("did not start")
        for _ in range(5):
            assert answers(client)
        assert workers(client)[1]["pid"] == survivor
        assert "raw" not in {line["level"] for line in service.log}
        group.set("pids.max", "max")
        until(lambda: num_ready(client) == 2)
        assert workers(client)[1]["pid"] == survivor


def test_full_disk_under_the_log_costs_lines_and_no_answers():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with open("/dev/full", "w") as full:
        process = subprocess.Popen(
            [*SERVICE, "serve", FAULTY, "--replicas", "1", "--port", str(port)],
            cwd=ROOT,
            stdout=full,
            stderr=full,
        )
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as client:

            def is_ready() -> bool:
                with contextlib.suppress(httpx.TransportError):
                    return client.get("/health/ready").status_code == 200
                return False

            until(is_ready)
            assert answers(client)
            for name in ("raise", "kill"):
                body = {"instances": [{"n": 1, "do": name}]}
                assert client.post("/predict", json=body).status_code == 500
            until(lambda: num_ready(client) == 1)
            assert answers(client)
            metrics = client.get("/metrics").text
        (dropped,) = [m for m in metrics.splitlines() if m.startswith("inferpool_log_lines_drop")]
        assert float(dropped.split()[1]) > 5
        process.terminate()
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("fault", ["read-only", "a long name"])
def test_temporary_folder_that_is_of_no_use_is_not_needed(fault: str, tmp_path: Path):
    command, folder, cwd = SERVICE, tmp_path / ("long" * 25), tmp_path
    folder.mkdir()
    if fault == "read-only":
        read_only = [f"-t tmpfs -o ro none {each}" for each in ("/tmp", "/var/tmp")]
        command, folder, cwd = (*with_mounts(*read_only), *SERVICE), Path("/tmp"), Path("/proc")
    env = {"TMPDIR": str(folder)}
    with (
        running(FAULTY, "--replicas", "1", command=command, env=env, cwd=cwd) as service,
        client_of(service) as client,
    ):
        assert answers(client)


def test_full_temporary_folder_is_no_trouble():
    command = [*with_mounts("-t tmpfs -o size=64k none /tmp"), "sh", "-c"]
    command += ['head -c 99999 /dev/zero > /tmp/full 2>/dev/null; exec "$@"', "sh", *SERVICE]
    env = {"TMPDIR": "/tmp"}
    with (
        running(FAULTY, "--replicas", "1", command=command, env=env) as service,
        client_of(service) as client,
    ):
        killed = kill_one(client)
        until(lambda: has_replaced(client, killed))
        assert answers(client)


def test_reader_of_the_log_that_stops_reading_holds_nothing_up():
    with running(FAULTY, "--replicas", "1") as service, client_of(service) as client:
        service.pause_reading()
        body = {"instances": [{"n": 1, "do": "raise"}] * 32}
        for _ in range(12):  # each failure is logged with its traceback: in all five full pipes
            assert client.post("/predict", json=body).status_code == 500
        assert answers(client)
        service.resume_reading()


def test_pause_of_the_whole_family_kills_nobody(tmp_path: Path):
    config = tmp_path / "inferpool.toml"
    config.write_text(
        f"""
        [models.m]
        source = "{FAULTY}"
        replicas = 2
        batch_timeout_s = 1.5
        options = {{ forward_s = 0.1 }}
        """
    )

    async def ask(url: str) -> list[object]:
        async with httpx.AsyncClient(base_url=url, timeout=30) as client:
            posts = [
                asyncio.ensure_future(client.post("/predict", json={"instances": [{"n": n}]}))
                for n in range(40)
            ]
            await asyncio.sleep(0.3)
            family = service.family()
            for process in family:
                process.suspend()
            await asyncio.sleep(2.5)
            for process in reversed(family):  # the front end last, as it has the clock
                process.resume()
            return [
                answer.json()["predictions"][0]["twice"] for answer in await asyncio.gather(*posts)
            ]

    with running("--config", str(config)) as service:
        pids = service.worker_pids()
        assert asyncio.run(ask(service.url)) == [2 * n for n in range(40)]
        assert service.worker_pids() == pids
