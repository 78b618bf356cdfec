"""Several replicas on one GPU. Run with `uv run pytest -m gpu`; never yet run on one."""

import subprocess
import sys

import httpx
import pytest

from tests.e2e.photos import jpeg
from tests.e2e.running import running

pytestmark = pytest.mark.gpu


def test_two_replicas_share_a_gpu():
    import pynvml

    with running("efficientnet_lite0", "--devices", "cuda:0", "--replicas", "2") as service:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        pids = {process.pid for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)}
        assert set(service.worker_pids()) <= pids
        headers = {"Content-Type": "image/jpeg"}
        for name in ("coffee", "rocket", "chelsea"):
            answer = httpx.post(
                f"{service.url}/predict", content=jpeg(name), headers=headers, timeout=60
            )
            assert answer.status_code == 200, answer.text


_PINNED = """
import torch
from inferpool.models.spec import Placement
from inferpool.workers.inside.own_process import pin

pin(Placement(devices=("cuda:0",), visible=("0",), memory_fraction=0.01))
size = torch.cuda.get_device_properties(0).total_memory // 20
try:
    torch.empty(size, dtype=torch.uint8, device="cuda:0")
except torch.OutOfMemoryError:
    print("bounded")
"""


def test_worker_allocates_no_more_than_its_share():
    command = [sys.executable, "-c", _PINNED]  # to pin is for a process of its own
    assert subprocess.run(command, capture_output=True, text=True).stdout == "bounded\n"
