"""One worker that dies, hangs, or answers nonsense, in every phase of its work, over HTTP."""

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest

from tests.e2e.running import FAULTY, Running, faulty, running, until
from tests.groups import control_group

pytestmark = [pytest.mark.measures, pytest.mark.slow]

SPLIT = "tests.split_fault_model:SplitFaultModel"
MIB = 1 << 20


@contextlib.contextmanager
def one_worker(
    folder: Path, *, batch_timeout_s: float = 20, source: str = FAULTY, preexec_fn=None, **options
) -> Iterator[Running]:
    """Start a service whose only worker does what ends or blocks it once."""
    model = {
        "source": source,
        "placement": "tensor" if source == SPLIT else "replicate",
        "batch_timeout_s": batch_timeout_s,
        "options": {**{name: folder / name for name in ("once", "calls", "gate")}, **options},
    }
    settings = faulty(**model) | {"arena_bytes": 64 * MIB}
    with running(settings=settings, preexec_fn=preexec_fn) as service:
        yield service


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory):
    return tmp_path_factory.mktemp("service")


@pytest.fixture(scope="module")
def service(folder: Path):
    with one_worker(folder, batch_timeout_s=1) as service:
        assert worker(service)["last_ending"] is None
        yield service


@pytest.fixture
def healthy(service: Running, folder: Path):
    """The shared service, its worker ready and its model able to fail once more."""
    (folder / "once").unlink(missing_ok=True)
    until(lambda: worker(service)["state"] == "ready")
    return service


def ask(service: Running, do: str = "ok", rank: int = 0) -> httpx.Response:
    return service.ask({"n": 21, "do": do, "rank": rank})


def is_right(answer: httpx.Response) -> bool:
    return answer.status_code == 200 and answer.json()["predictions"][0]["twice"] == 42


def worker(service: Running) -> dict:
    (worker,) = service.workers()
    return worker


@pytest.mark.parametrize("do", ["kill early", "kill", "segfault", "device"])
def test_request_whose_worker_dies_at_work_is_answered_by_the_next(healthy: Running, do: str):
    reasons = {"device": "device-side assert", "segfault": "SIGSEGV"}
    assert is_right(ask(healthy, do))
    ending = worker(healthy)["last_ending"]
    assert reasons.get(do, "SIGKILL from outside") in ending["reason"]
    assert 0 <= ending["age_s"] < 60
    assert worker(healthy)["reason"] == ""


def test_worker_that_dies_while_it_loads_is_started_again(tmp_path: Path):
    with one_worker(tmp_path, load="kill") as service:
        assert is_right(ask(service))
        assert worker(service)["last_ending"]["cause"] == "start"


def test_idle_worker_that_dies_is_replaced_and_health_says_why(healthy: Running):
    os.kill(worker(healthy)["pid"], signal.SIGKILL)
    assert is_right(ask(healthy))
    assert worker(healthy)["last_ending"]["cause"] == "signal"


def test_worker_killed_in_the_middle_of_its_answer_costs_no_request(healthy: Running, folder: Path):
    pid = worker(healthy)["pid"]
    (folder / "gate").touch()
    (folder / "calls").unlink()
    body = {"instances": [{"n": 21, "do": "wait"}], "parameters": {"big": 1}}
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(healthy.post, json=body)
        until((folder / "calls").exists)
        os.kill(healthy.process.pid, signal.SIGSTOP)  # so that nobody reads the answer
        (folder / "gate").unlink()
        wait_until_blocked(pid)
        os.kill(pid, signal.SIGKILL)
        os.kill(healthy.process.pid, signal.SIGCONT)
        assert is_right(asked.result(60))
    assert worker(healthy)["pid"] != pid


def wait_until_blocked(pid: int) -> None:
    """Wait until a process has used no CPU time for a while."""
    process = psutil.Process(pid)
    deadline = time.monotonic() + 60
    before = None
    while (used := process.cpu_times()[:2]) != before:
        assert time.monotonic() < deadline
        before = used
        time.sleep(0.5)


@pytest.mark.parametrize("do", ["hang early", "spin"])
def test_request_of_a_hung_worker_is_answered_by_the_next_and_its_stacks_are_logged(
    healthy: Running, do: str
):
    incarnation = worker(healthy)["incarnation"]
    num_hangs = healthy.metric('worker_restarts_total{model="m",reason="hang"}')
    assert is_right(ask(healthy, do))
    line = healthy.wait_for_log(f"m/0#{incarnation} hung")
    assert "fault_model.py" in str(line["exception"])
    assert line["worker"] == f"m/0#{incarnation}"
    assert worker(healthy)["last_ending"]["cause"] == "hang"
    assert healthy.metric('worker_restarts_total{model="m",reason="hang"}') == num_hangs + 1


def test_request_to_an_idle_worker_that_is_stopped_is_answered_right_after(healthy: Running):
    incarnation = worker(healthy)["incarnation"]
    os.kill(worker(healthy)["pid"], signal.SIGSTOP)
    began = time.monotonic()
    assert is_right(ask(healthy))
    assert time.monotonic() - began < 20
    line = healthy.wait_for_log(f"m/0#{incarnation} hung")
    assert "it is stopped" in str(line["message"])


def test_model_without_progress_is_unready_within_its_batch_timeout(healthy: Running, folder: Path):
    (folder / "gate").touch()  # keeps the next worker from coming up
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(ask, healthy, "hang")
        until(lambda: healthy.get("/health/ready").status_code == 503, 20)
        assert healthy.get("/health/ready").json()["code"] == "unavailable"
        assert not healthy.get("/health").json()["ready"]
        assert not healthy.model()["ready"]
        (folder / "gate").unlink()
        assert is_right(asked.result(60)) or asked.result().status_code == 503
    until(lambda: (answer := ask(healthy)).status_code != 503 and is_right(answer))
    assert "ran for more than 1 s" in worker(healthy)["last_ending"]["reason"]


@pytest.mark.parametrize(
    ("source", "rank", "where"), [(FAULTY, 0, ""), (SPLIT, 1, "rank 1: ")], ids=["whole", "split"]
)
def test_worker_killed_for_memory_is_said_to_be_and_its_request_answered(
    tmp_path: Path, source: str, rank: int, where: str
):
    with (
        control_group("memory") as group,
        one_worker(tmp_path, source=source, preexec_fn=group.enter) as service,
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
        assert service.metric('worker_restarts_total{model="m",reason="memory"}') == 1
