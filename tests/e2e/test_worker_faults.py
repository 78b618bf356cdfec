"""One worker that dies, hangs, or answers nonsense, in every phase of its work, over HTTP."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.e2e.running import Running, running, until
from tests.groups import control_group

pytestmark = [pytest.mark.measures, pytest.mark.slow]

FAULTY = "tests.fault_model:FaultModel"
SPLIT = "tests.split_fault_model:SplitFaultModel"
MIB = 1 << 20


@contextlib.contextmanager
def faulty(
    folder: Path,
    *,
    batch_timeout_s: float = 20,
    source: str = FAULTY,
    preexec_fn=None,
    **options: object,
):
    """A service with one worker, whose model does what ends it once."""
    paths = {"once": "done", "calls": "calls", "gate": "gate"}
    values = {**{name: str(folder / path) for name, path in paths.items()}, **options}
    listed = ", ".join(f"{name} = {value!r}" for name, value in values.items())
    config = folder / "inferpool.toml"
    config.write_text(
        f"""
        [models.m]
        source = "{source}"
        placement = "{"tensor" if source == SPLIT else "replicate"}"
        replicas = 1
        batch_timeout_s = {batch_timeout_s}
        options = {{ {listed} }}
        """
    )
    env = {"INFERPOOL_ARENA_BYTES": str(64 * MIB)}
    with running("--config", str(config), env=env, preexec_fn=preexec_fn) as service:
        yield service


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory):
    return tmp_path_factory.mktemp("service")


@pytest.fixture(scope="module")
def service(folder: Path):
    with faulty(folder, batch_timeout_s=1) as service:
        assert worker(service)["last_ending"] is None
        yield service


@pytest.fixture
def healthy(service: Running, folder: Path):
    """The service with its worker ready, whose model will do once more what ends it."""
    (folder / "done").unlink(missing_ok=True)
    until(lambda: worker(service)["state"] == "ready")
    return service


def ask(service: Running, do: str = "ok", n: int = 21, rank: int = 0) -> httpx.Response:
    body = {"instances": [{"n": n, "do": do, "rank": rank}]}
    return httpx.post(f"{service.url}/predict", json=body, timeout=60)


def is_right(answer: httpx.Response, n: int = 21) -> bool:
    return answer.status_code == 200 and answer.json()["predictions"][0]["twice"] == 2 * n


def ask_until_right(service: Running) -> httpx.Response:
    """Ask again for as long as there is no worker."""
    deadline = time.monotonic() + 60
    while (answer := ask(service)).status_code == 503:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return answer


def worker(service: Running) -> dict:
    (worker,) = httpx.get(f"{service.url}/health").json()["models"][0]["workers"]
    return worker


@contextlib.contextmanager
def asked_meanwhile(service: Running, do: str) -> Iterator[list[httpx.Response]]:
    """Ask in another thread; the answer is there when the block ends."""
    answers: list[httpx.Response] = []
    thread = threading.Thread(target=lambda: answers.append(ask(service, do)))
    thread.start()
    yield answers
    thread.join(60)


@pytest.mark.parametrize("do", ["kill early", "kill", "segfault", "device"])
def test_request_whose_worker_dies_at_work_is_answered_by_the_next(healthy: Running, do: str):
    reasons = {"device": "device-side assert", "segfault": "SIGSEGV"}
    assert is_right(ask(healthy, do))
    ending = worker(healthy)["last_ending"]
    assert reasons.get(do, "SIGKILL from outside") in ending["reason"]
    assert 0 <= ending["age_s"] < 60
    assert worker(healthy)["reason"] == ""


def test_worker_that_dies_while_it_loads_is_started_again(tmp_path: Path):
    with faulty(tmp_path, load="kill") as service:
        assert is_right(ask(service))
        assert worker(service)["last_ending"]["cause"] == "start"


def test_idle_worker_that_dies_is_replaced_and_health_tells_of_it(healthy: Running):
    os.kill(worker(healthy)["pid"], signal.SIGKILL)
    assert is_right(ask(healthy))
    assert worker(healthy)["last_ending"]["cause"] == "signal"


def test_worker_killed_in_the_middle_of_its_answer_costs_no_request(healthy: Running, folder: Path):
    pid = worker(healthy)["pid"]
    (folder / "gate").touch()
    (folder / "calls").unlink()
    body = {"instances": [{"n": 21, "do": "wait"}], "parameters": {"big": 1}}
    answers: list[httpx.Response] = []
    post = threading.Thread(
        target=lambda: answers.append(httpx.post(f"{healthy.url}/predict", json=body, timeout=60))
    )
    post.start()
    until((folder / "calls").exists)
    os.kill(healthy.process.pid, signal.SIGSTOP)  # so that nobody reads the answer
    (folder / "gate").unlink()
    wait_until_blocked(pid)
    os.kill(pid, signal.SIGKILL)
    os.kill(healthy.process.pid, signal.SIGCONT)
    post.join(60)
    assert is_right(answers[0])
    assert worker(healthy)["pid"] != pid


def wait_until_blocked(pid: int) -> None:
    """Wait until a process has used no time for a while."""
    deadline = time.monotonic() + 60
    before = -1
    while (used := cpu_ticks(pid)) != before:
        assert time.monotonic() < deadline
        before = used
        time.sleep(0.5)


def cpu_ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


@pytest.mark.parametrize("do", ["hang early", "spin"])
def test_request_of_a_hung_worker_is_answered_by_the_next_and_its_stacks_are_logged(
    healthy: Running, do: str
):
    incarnation = worker(healthy)["incarnation"]
    assert is_right(ask(healthy, do))
    line = healthy.wait_for_log(f"m/0#{incarnation} hung")
    assert "fault_model.py" in str(line["exception"])
    assert line["worker"] == f"m/0#{incarnation}"
    assert worker(healthy)["last_ending"]["cause"] == "hang"


def test_request_to_an_idle_worker_that_is_stopped_is_answered_right_after(healthy: Running):
    incarnation = worker(healthy)["incarnation"]
    os.kill(worker(healthy)["pid"], signal.SIGSTOP)
    began = time.monotonic()
    assert is_right(ask(healthy))
    assert time.monotonic() - began < 20
    line = healthy.wait_for_log(f"m/0#{incarnation} hung")
    assert "it is stopped" in str(line["message"])


def test_model_without_progress_is_red_within_its_batch_timeout(tmp_path: Path):
    gate = tmp_path / "gate"
    with faulty(tmp_path, batch_timeout_s=1) as service:
        gate.touch()  # whoever comes next does not come up yet
        with asked_meanwhile(service, "hang") as answers:
            began = time.monotonic()
            while (ready := httpx.get(f"{service.url}/health/ready")).status_code == 200:
                assert time.monotonic() - began < 20
                time.sleep(0.05)
            report = httpx.get(f"{service.url}/health").json()
            assert not report["ready"]
            assert not report["models"][0]["ready"]
            assert ready.json()["code"] == "unavailable"
            gate.unlink()
        assert is_right(answers[0]) or answers[0].status_code == 503
        assert is_right(ask_until_right(service))
        assert "ran for more than 1 s" in worker(service)["last_ending"]["reason"]


def test_outputs_that_are_not_finite_fail_alone_and_say_so(healthy: Running):
    body = {"instances": [{"n": n, "do": "nan" if n == 2 else "ok"} for n in range(4)]}
    answer = httpx.post(f"{healthy.url}/predict", json=body)
    twice = [each.get("twice") for each in answer.json()["predictions"]]
    assert twice == [0, 2, None, 6]
    alone = ask(healthy, "nan")
    assert (alone.status_code, alone.json()["code"]) == (500, "non_finite_output")


def test_canaries_are_no_requests(healthy: Running):
    before = worker(healthy)["num_batches"], counted(healthy)
    deadline = time.monotonic() + 60
    ages: list[float] = []
    while len(ages) < 2 or ages[-1] >= ages[-2]:  # until it has proved itself once more
        assert time.monotonic() < deadline
        ages.append(worker(healthy)["last_answer_age_s"])
        time.sleep(0.2)
    assert (worker(healthy)["num_batches"], counted(healthy)) == before
    metrics = httpx.get(f"{healthy.url}/metrics").text
    assert 'inferpool_worker_answer_age_seconds{model="m",worker="0"}' in metrics


def counted(service: Running) -> list[str]:
    """What the metrics say of requests."""
    names = ("inferpool_instances_total", "inferpool_batch_size", "inferpool_inference_duration")
    lines = httpx.get(f"{service.url}/metrics").text.splitlines()
    return [line for line in lines if line.startswith(names)]


@pytest.mark.parametrize(
    ("source", "rank", "where"), [(FAULTY, 0, ""), (SPLIT, 1, "rank 1: ")], ids=["whole", "split"]
)
def test_worker_killed_for_memory_is_said_to_be_and_its_request_answered(
    tmp_path: Path, source: str, rank: int, where: str
):
    with (
        control_group("memory") as group,
        faulty(tmp_path, source=source, preexec_fn=group.enter) as service,
    ):
        used = int(group.get("memory.usage_in_bytes"))
        group.set("memory.limit_in_bytes", used + 100 * MIB)
        assert is_right(ask(service, "eat", rank=rank))
        assert "oom_kill 1" in group.get("memory.oom_control")
        line = service.wait_for_log(f"m/0#0 ended: {where}SIGKILL, likely out of memory (last")
        assert "iB)" in str(line["message"])
        ending = worker(service)["last_ending"]
        assert ending["cause"] == "memory"
        assert "likely out of memory" in ending["reason"]
        metrics = httpx.get(f"{service.url}/metrics").text
        assert 'inferpool_worker_restarts_total{model="m",reason="memory"} 1.0' in metrics
