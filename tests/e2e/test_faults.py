"""Workers and front ends that die, hang and stop, under load, in real processes."""

import asyncio
import os
import re
import signal
import socket
import sys
import time
from functools import partial
from pathlib import Path

import httpx
import pytest

from tests.e2e.load import Tally, ask_until, ask_until_stopped
from tests.e2e.running import Running, left_over, running, until

pytestmark = pytest.mark.measures

FAULTY = "tests.fault_model:FaultModel"


def shared_memory() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir()}


def stop(service: Running) -> float:
    """Tell it to stop; returns when."""
    service.signal(signal.SIGTERM)
    return time.monotonic()


def holding(folder: Path) -> str:
    """Settings for two workers that hold what they are told to: see `load.held`."""
    config = folder / "inferpool.toml"
    config.write_text(
        f"""
        [models.m]
        source = "{FAULTY}"
        replicas = 2
        options = {{ gate = "{folder / "gate"}", calls = "{folder / "calls"}" }}
        """
    )
    return str(config)


def left_in_shared_memory(before: set[str], timeout_s: float = 10.0) -> set[str]:
    """What is there after a while and was not before; what others make there, they take away."""
    until = time.monotonic() + timeout_s
    while (left := shared_memory() - before) and time.monotonic() < until:
        time.sleep(0.02)
    return left


def num_ready(service: Running) -> int:
    return len(service.worker_pids())


def test_killed_workers_cost_no_request_and_come_back():
    async def go(service: Running) -> Tally:
        is_over = asyncio.Event()
        load = asyncio.ensure_future(
            ask_until(service.url, lambda tally: is_over.is_set() and tally.right > 100)
        )
        for round in range(5):
            await asyncio.sleep(0.2)
            pids = await asyncio.to_thread(service.worker_pids)
            os.kill(pids[round % len(pids)], signal.SIGKILL)
            await asyncio.to_thread(until, lambda old=pids: set(service.worker_pids()) - set(old))
        is_over.set()
        return await load

    with running(FAULTY, "--replicas", "2") as service:
        tally = asyncio.run(go(service))
        assert (tally.wrong, tally.unanswered) == ([], [])
        metrics = httpx.get(f"{service.url}/metrics").text
        assert 'inferpool_worker_restarts_total{model="faultmodel",reason="signal"} 5.0' in metrics


def forkserver_pid(service: Running) -> int:
    return httpx.get(f"{service.url}/health").json()["forkserver"]["pid"]


def test_forkserver_that_is_killed_costs_no_request_and_no_worker():
    async def go(service: Running) -> Tally:
        is_over = asyncio.Event()
        load = asyncio.ensure_future(
            ask_until(service.url, lambda tally: is_over.is_set() and tally.right > 100)
        )
        for _ in range(2):  # the second while it imports torch
            pid = await asyncio.to_thread(forkserver_pid, service)
            os.kill(pid, signal.SIGKILL)
            await asyncio.to_thread(until, lambda old=pid: forkserver_pid(service) != old)
        is_over.set()
        return await load

    with running(FAULTY, "--replicas", "2") as service:
        pids = service.worker_pids()
        tally = asyncio.run(go(service))
        assert (tally.wrong, tally.unanswered) == ([], [])
        assert service.worker_pids() == pids


def test_poison_fails_alone_while_its_neighbours_succeed():
    def do(n: int) -> str:
        return "kill" if n == 40 else "ok"

    with running(FAULTY, "--replicas", "2") as service:
        tally = asyncio.run(ask_until(service.url, lambda tally: tally.right > 400, do=do))
        assert tally.unanswered == []
        assert [(n, status) for n, status, _ in tally.wrong] == [(40, 500)]
        assert tally.wrong[0][2]["code"] == "worker_crashed"


def test_hung_worker_is_replaced_and_its_request_answered(tmp_path: Path):
    config = tmp_path / "inferpool.toml"
    config.write_text(
        f"""
        [models.m]
        source = "{FAULTY}"
        replicas = 2
        batch_timeout_s = 1.5
        options = {{ once = "{tmp_path / "hung"}" }}
        """
    )

    def do(n: int) -> str:
        return "hang" if n == 20 else "ok"

    with running("--config", str(config)) as service:
        tally = asyncio.run(ask_until(service.url, lambda tally: tally.right > 200, do=do))
        assert (tally.wrong, tally.unanswered) == ([], [])
        assert 'reason="hang"} 1.0' in httpx.get(f"{service.url}/metrics").text


@pytest.mark.alone
def test_sigterm_under_load_answers_all_that_was_accepted_and_leaves_nothing(tmp_path: Path):
    before = shared_memory()

    with running("--config", holding(tmp_path)) as service:
        family = service.family()
        tally = asyncio.run(ask_until_stopped(service.url, partial(stop, service), tmp_path))
        assert service.wait() == 0
        assert (tally.wrong, tally.unanswered) == ([], [])
        assert left_over(family) == []
    assert left_in_shared_memory(before) == set()


@pytest.mark.alone
@pytest.mark.parametrize(("act", "has_forkserver"), [("ok", True), ("spin", True), ("spin", False)])
def test_sigkill_of_the_front_end_leaves_no_process_and_no_memory(act: str, has_forkserver: bool):
    before = shared_memory()

    async def go(service: Running) -> None:
        load = asyncio.ensure_future(
            ask_until(service.url, lambda tally: bool(tally.unanswered), do=lambda n: act)
        )
        begun = 'in_flight{model="faultmodel"} 16.0' if act == "spin" else '"succeeded"} [1-9]'
        await asyncio.to_thread(
            until, lambda: re.search(begun, httpx.get(f"{service.url}/metrics").text)
        )
        await asyncio.sleep(0.2)
        if not has_forkserver:
            os.kill(forkserver_pid(service), signal.SIGKILL)
        service.signal(signal.SIGKILL)
        await asyncio.wait_for(load, 60)

    with running(FAULTY, "--replicas", "2") as service:
        family = service.family()
        assert len(family) >= 4
        asyncio.run(go(service))
        assert left_over(family) == []
    assert left_in_shared_memory(before) == set()


def test_second_signal_hurries():
    in_flight = 'instances_in_flight{model="faultmodel"} 1.0'
    with running(FAULTY, "--replicas", "1") as service:
        family = service.family()

        async def go() -> None:
            async with httpx.AsyncClient(base_url=service.url, timeout=30) as client:
                body = {"instances": [{"n": 1, "do": "hang"}]}
                post = asyncio.ensure_future(client.post("/predict", json=body))
                await asyncio.to_thread(
                    until, lambda: in_flight in httpx.get(f"{service.url}/metrics").text
                )
                service.signal(signal.SIGINT)
                await asyncio.to_thread(service.wait_for_log, "stopping")
                await asyncio.sleep(0.4)  # sooner it would be taken for the first one
                assert service.process.poll() is None
                service.signal(signal.SIGINT)
                began = time.monotonic()
                assert (await post).status_code == 503
                await asyncio.to_thread(service.wait)
                assert time.monotonic() - began < 15  # what is in flight would be waited for longer

        asyncio.run(go())
        assert left_over(family) == []
        service.close()
        assert [line for line in service.log if line["level"] not in ("info", "warning")] == []


def test_half_sent_request_does_not_hold_up_the_end():
    env = {"INFERPOOL_BODY_GAP_S": "60"}
    with running("echo", "--replicas", "1", env=env) as service:
        port = int(service.url.rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port)) as half:
            half.sendall(b"POST /predict HTTP/1.1\r\nhost: h\r\ncontent-length: 99\r\n\r\nabc")
            time.sleep(0.2)
            service.signal(signal.SIGTERM)
            assert service.wait(30) == 0


def test_many_poisons_do_not_end_the_service():
    with (
        running(FAULTY, "--replicas", "1") as service,
        httpx.Client(base_url=service.url, timeout=30) as client,
    ):
        for n in range(6):
            body = {"instances": [{"n": n, "do": "kill"}]}
            answer = client.post("/predict", json=body)
            assert (answer.status_code, answer.json()["code"]) == (500, "worker_crashed")
            good = client.post("/predict", json={"instances": [{"n": n}]})
            assert good.json()["predictions"][0]["twice"] == 2 * n
        until(lambda: num_ready(service) == 1)
        again = client.post("/predict", json={"instances": [{"n": 3, "do": "kill"}]})
        assert (again.status_code, again.json()["code"]) == (422, "quarantined")
        mixed = [{"n": 1}, {"n": 5, "do": "kill"}, {"n": 2}]
        first, second, third = client.post("/predict", json={"instances": mixed}).json()[
            "predictions"
        ]
        assert (first["twice"], second["error"]["code"], third["twice"]) == (2, "quarantined", 4)
        assert service.worker_pids() == [first["pid"]]
        metrics = client.get("/metrics").text
        assert 'inferpool_rejected_total{model="faultmodel",reason="quarantined"} 2.0' in metrics
        assert 'inferpool_quarantined_inputs{model="faultmodel"} 6.0' in metrics
        answer = client.post("/predict", json={"instances": [{"n": 4}]})
        assert answer.json()["predictions"][0]["twice"] == 8


def test_stopped_idle_worker_is_noticed_and_replaced(tmp_path: Path):
    config = tmp_path / "inferpool.toml"
    config.write_text(f'[models.m]\nsource = "{FAULTY}"\nreplicas = 1\nbatch_timeout_s = 1\n')
    with running("--config", str(config)) as service:
        (pid,) = service.worker_pids()
        body = {"instances": [{"n": 1}]}  # whose answer puts off the next look at it
        assert httpx.post(f"{service.url}/predict", json=body).status_code == 200
        os.kill(pid, signal.SIGSTOP)
        until(lambda: httpx.get(f"{service.url}/health/ready").status_code == 503)
        assert not [line for line in service.log if "it is stopped" in str(line["message"])]
        service.wait_for_log("it is stopped")
        until(lambda: service.worker_pids() not in ([pid], []))


def test_model_that_can_never_load_ends_the_service_with_its_reason_said_once():
    source = "tests.fault_model:NoSuchModel"
    with running(source, "--replicas", "2", ready=False) as service:
        assert service.wait() == 3
        text = " ".join(str(line["message"]) for line in service.log)
        assert text.count("has no 'NoSuchModel'") == 1
        assert {line["level"] for line in service.log} <= {"info", "error", "critical"}


def test_port_that_is_taken_is_said_at_once():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with running("echo", port=port, ready=False) as service:
            assert service.wait() == 1
            assert f"cannot listen on 127.0.0.1:{port}" in str(service.log[-1]["message"])


def test_package_of_the_users_that_is_called_as_one_of_ours_is_no_trouble(tmp_path: Path):
    for name in ("models", "workers", "service"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise RuntimeError('not ours')")
    command = [str(Path(sys.executable).parent / "inferpool")]
    with running("echo", "--replicas", "1", cwd=tmp_path, command=command) as service:
        assert num_ready(service) == 1


def test_failure_of_the_model_is_logged_with_the_id_of_its_request():
    with running(FAULTY, "--replicas", "1") as service:
        body = {"instances": [{"n": 1, "do": "raise"}]}
        headers = {"X-Request-ID": "find-me"}
        answer = httpx.post(f"{service.url}/predict", json=body, headers=headers)
        assert (answer.status_code, answer.json()["code"]) == (500, "model_error")
        line = service.wait_for_log("forward failed on an input")
        assert line["request_id"] == "find-me"
        assert "ValueError: I was told to" in str(line["exception"])
