"""A real service on a host whose driver takes down each call.

A process that has initialised CUDA cannot fork one that uses it (CUDA C++ Programming Guide,
"Initialization"), and `cuInit` reads CUDA_VISIBLE_DEVICES once.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.e2e.running import Running, running, until
from tests.fake_driver.driver import NOT_SUPPORTED, ROOT, FakeDriver, h100, mig_slice, t4

pytestmark = pytest.mark.skipif(
    torch.version.cuda is None, reason="this build of torch never loads libcuda"
)

MODEL = "efficientnet_lite0"
PHOTO = (ROOT / "models/vision/photos/chelsea.jpg").read_bytes()
GPUS = {"GPU-a": h100(), "GPU-b": h100()}


def diagnosed(driver: FakeDriver, *arguments: str) -> dict[str, str]:
    """Return level and message of each check of `inferpool doctor`."""
    done = subprocess.run(
        [sys.executable, "-m", "inferpool", "doctor", "echo", "--port", "0", "--json", *arguments],
        env={**os.environ, **driver.env},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stderr == ""
    found = json.loads(done.stdout)["findings"]
    return {each["check"]: f"{each['level']} {each['message']}" for each in found}


def decoders_of(service: Running) -> list[int]:
    """Return the number of decoders of each worker."""
    workers = service.get("/health").json()["models"][0]["workers"]
    return [len(worker["decoders"]) for worker in workers]


def test_nothing_before_a_workers_fork_initialises_cuda(tmp_path: Path):
    driver = FakeDriver(tmp_path, GPUS)
    model = {"source": MODEL, "devices": "cpu", "replicas": 2, "decoders": 2}
    settings = {"front_ends": 2, "models": {"cats": model}}
    with running(settings=settings, env=driver.env) as service:
        assert service.post(content=PHOTO, headers={"Content-Type": "image/jpeg"}).is_success
        until(lambda: decoders_of(service) == [2, 2])
        until(lambda: service.get("/health").json()["gpus"])
        health = service.get("/health").json()
    assert [gpu["uuid"] for gpu in health["gpus"]] == ["GPU-a", "GPU-b"]
    assert health["forkserver"]["state"] == "ready"
    assert len(health["fronts"]) == 2
    assert {call.pid for call in driver.calls("nvmlInitWithFlags")} == {service.process.pid}
    assert driver.calls("cuInit") == []


def test_start_names_what_is_ambiguous_instead_of_taking_another_gpu(tmp_path: Path):
    driver = FakeDriver(tmp_path, {"GPU-slow": t4(), "GPU-fast": h100()})
    env = {**driver.env, "CUDA_VISIBLE_DEVICES": "0"}
    with running("echo", env=env, ready=False) as service:
        assert service.wait() == 1
        assert "set CUDA_DEVICE_ORDER=PCI_BUS_ID" in str(service.log[-1]["message"])
    with running("echo", env={**env, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, ready=False) as service:
        service.wait_for_log("worker echo/0 on cuda:GPU-slow")


def test_doctor_on_a_host_with_gpus_names_all_that_is_wrong_with_them(tmp_path: Path):
    slices = {"MIG-a": mig_slice("GPU-c"), "MIG-b": mig_slice("GPU-c")}
    gb10 = h100(name="NVIDIA GB10", nvmlDeviceGetMemoryInfo=NOT_SUPPORTED)
    machine = {"GPU-a": h100(ecc_errors=1), "GPU-b": gb10, "GPU-c": h100(), **slices}
    driver = FakeDriver(tmp_path, {**machine, "GPU-d": h100(mig=1)})
    said = diagnosed(driver)
    # CUDA shows a process whole GPUs or one slice.
    assert {call.visible for call in driver.calls("cuInit")} == {"GPU-a,GPU-b"}
    assert said["GPU driver"] == "ok 580.82.07, for CUDA up to 13.2"
    assert said["cuda:0"].startswith("warning 1 uncorrected memory errors")
    assert said["cuda:1"] == "ok NVIDIA GB10, no errors"
    assert said["cuda:2"] == "ok NVIDIA H100 80GB HBM3, 2 MIG slices, 80.0 GiB free, no errors"
    assert said["cuda:3"].startswith("warning is in MIG mode without slices")
    assert said["devices of echo"] == (
        "ok 4 replicas on cuda:GPU-a, cuda:GPU-b, cuda:MIG-a, cuda:MIG-b"
    )


def test_doctor_computes_only_on_gpus_that_the_service_will_use(tmp_path: Path):
    driver = FakeDriver(tmp_path, GPUS, cuInit=802)
    found = diagnosed(driver, "--devices", "cuda:1")
    assert found["GPUs"].startswith("error torch cannot use the GPUs: ")
    assert "Error 802: system not yet initialized" in found["GPUs"]
    calls = driver.calls("cuInit")
    assert {(call.visible, call.order) for call in calls} == {("GPU-b", "PCI_BUS_ID")}


def test_worker_has_chosen_its_gpu_before_it_initialises_cuda(tmp_path: Path):
    driver = FakeDriver(tmp_path, GPUS)
    arguments = (MODEL, "--devices", "cuda:1", "--replicas", "1")
    with running(*arguments, env=driver.env, ready=False) as service:
        service.wait_for_log(f"worker {MODEL}/0 on cuda:GPU-b")
        service.wait_for_log("did not start")  # this driver computes nothing
        calls = driver.calls("cuInit")
    assert {(call.visible, call.order) for call in calls} == {("GPU-b", "PCI_BUS_ID")}
    assert service.process.pid not in {call.pid for call in calls}
