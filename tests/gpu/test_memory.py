"""Memory of devices: what does not fit is halved, shares are kept, the dead give theirs back."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.e2e.running import Running, faulty, running, until
from tests.gpu.conftest import Devices

MODEL = "tests.gpu.device_models:DeviceFaultModel"
PINNED = """
import sys
import torch
from inferpool.models.accelerator.device import module_of
from inferpool.models.spec import Placement
from inferpool.workers.inside.own_process import pin

kind, uuid = sys.argv[1:]
pin(Placement(devices=(f"{kind}:0",), visible=(uuid,), memory_fraction=0.1))
total = module_of(kind).get_device_properties(0).total_memory
torch.empty(total // 20, dtype=torch.uint8, device=f"{kind}:0")
try:
    torch.empty(total // 5, dtype=torch.uint8, device=f"{kind}:0")
except torch.OutOfMemoryError:
    print("bounded", module_of(kind).device_count())
"""


@pytest.fixture(scope="module")
def greedy(devices: Devices) -> Iterator[Running]:
    settings = faulty(source=MODEL, devices=devices.named(0), max_batch_size=8)
    with running(settings=settings, env={"SIM_CAPACITY_MB": "128"}) as service:
        yield service


def test_batch_that_does_not_fit_is_halved_and_the_worker_lives(greedy: Running):
    (pid,) = greedy.worker_pids()
    # A quarter of the device for each row: eight rows never fit, two do.
    answers = greedy.predict(*({"n": n, "share": 0.25} for n in range(8)))
    assert [answer["twice"] for answer in answers] == [2 * n for n in range(8)]
    assert greedy.worker_pids() == [pid]
    greedy.wait_for_log("inputs of this shape at once", 5)


def test_input_that_does_not_fit_alone_fails_and_its_memory_is_returned(greedy: Running):
    (pid,) = greedy.worker_pids()
    good, bad = greedy.predict({"n": 1, "share": 0.01}, {"n": 2, "share": 2.0})
    assert good["twice"] == 2
    assert bad["error"]["code"] == "model_error"
    assert "out of memory on this input alone" in bad["error"]["message"]
    assert greedy.predict({"n": 3, "share": 0.6})[0]["twice"] == 6
    assert greedy.worker_pids() == [pid]


@pytest.mark.slow
def test_process_sees_its_device_alone_and_allocates_no_more_than_its_share(devices: Devices):
    command = [sys.executable, "-c", PINNED, devices.kind, devices.uuids[-1]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.stdout == "bounded 1\n", done.stderr


def test_replicas_share_the_memory_of_a_device(devices: Devices):
    settings = faulty(source=MODEL, devices=devices.named(0), replicas=2, max_batch_size=1)
    with running(settings=settings, env={"SIM_CAPACITY_MB": "2048"}) as service:
        assert {worker["device"] for worker in service.workers()} == {
            f"{devices.kind}:{devices.uuids[0]}"
        }
        # The share of each is less than a half, since each context takes some memory, too.
        answer = service.ask({"n": 1, "share": 0.5})
        assert "out of memory on this input alone" in answer.text
        answers = [service.predict({"n": n, "share": 0.05})[0]["twice"] for n in range(6)]
        assert answers == [2 * n for n in range(6)]


def test_killed_worker_gives_its_memory_back_and_returns(devices: Devices, greedy: Running):
    library = devices.library
    library.nvmlInit()
    handle = library.nvmlDeviceGetHandleByUUID(devices.uuids[0])

    def pids_on_device() -> set[int]:
        return {each.pid for each in library.nvmlDeviceGetComputeRunningProcesses(handle)}

    (pid,) = greedy.worker_pids()
    assert greedy.predict({"n": 4, "share": 0.6})[0]["twice"] == 8  # torch keeps the memory
    # In a container the driver may name no process, or tell their numbers outside of it.
    names_ours = pid in pids_on_device()
    os.kill(pid, signal.SIGKILL)
    answer = greedy.predict({"n": 5, "share": 0.6}, timeout=120)
    assert answer[0]["twice"] == 10
    until(lambda: greedy.worker_pids() not in ([], [pid]))
    if names_ours:
        assert pid not in pids_on_device()
        assert set(greedy.worker_pids()) <= pids_on_device()
        assert greedy.process.pid not in pids_on_device()
    else:
        assert not devices.is_simulated
