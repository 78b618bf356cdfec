"""A real service on a host whose driver takes down each call.

A process that has initialised CUDA cannot fork one that uses it (CUDA C++ Programming Guide,
"Initialization"), and `cuInit` reads CUDA_VISIBLE_DEVICES once.
"""

from pathlib import Path

import pytest
import torch

from tests.e2e.running import running, until
from tests.fake_driver.driver import ROOT, FakeDriver, h100

pytestmark = pytest.mark.skipif(
    torch.version.cuda is None, reason="this build of torch never loads libcuda"
)

MODEL = "efficientnet_lite0"
PHOTO = (ROOT / "models/vision/photos/chelsea.jpg").read_bytes()
GPUS = {"GPU-a": h100(), "GPU-b": h100()}


def test_nothing_before_a_workers_fork_initialises_cuda(tmp_path: Path):
    driver = FakeDriver(tmp_path, GPUS)
    with running(MODEL, "--devices", "cpu", "--replicas", "2", env=driver.env) as service:
        assert service.post(content=PHOTO, headers={"Content-Type": "image/jpeg"}).is_success
        health = service.get("/health").json()
        until(lambda: service.get("/health").json()["gpus"])
        assert [gpu["uuid"] for gpu in service.get("/health").json()["gpus"]] == ["GPU-a", "GPU-b"]
    assert health["forkserver"]["state"] == "ready"
    assert {call.pid for call in driver.calls("nvmlInitWithFlags")} == {service.process.pid}
    assert driver.calls("cuInit") == []


def test_worker_has_chosen_its_gpu_before_it_initialises_cuda(tmp_path: Path):
    driver = FakeDriver(tmp_path, GPUS)
    arguments = (MODEL, "--devices", "cuda:1", "--replicas", "1")
    with running(*arguments, env=driver.env, ready=False) as service:
        service.wait_for_log(f"worker {MODEL}/0 on cuda:GPU-b")
        service.wait_for_log("did not start")  # this driver computes nothing
        calls = driver.calls("cuInit")
    assert {(call.visible, call.order) for call in calls} == {("GPU-b", "PCI_BUS_ID")}
    assert service.process.pid not in {call.pid for call in calls}
