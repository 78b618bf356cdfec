"""What only a CUDA device can show. Run with `uv run pytest -m gpu`; never yet run on one."""

import base64
import os
import signal

import httpx
import numpy as np
import pytest

from tests.e2e.photos import jpeg
from tests.e2e.running import Running, running

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def service():
    with running("efficientnet_lite0", "--devices", "cuda:0", "--replicas", "1") as service:
        yield service


def test_worker_is_on_the_device_and_the_front_end_is_not(service: Running):
    (worker,) = httpx.get(f"{service.url}/health").json()["models"][0]["workers"]
    assert worker["device"].startswith("cuda:GPU-")
    import pynvml

    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    pids = {process.pid for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)}
    assert service.process.pid not in pids


def test_scores_are_those_of_the_cpu(service: Running):
    import torch

    from inferpool.models.item import Item
    from inferpool.models.sources.registry import build
    from inferpool.models.spec import Placement

    model = build("efficientnet_lite0", "DEFAULT", {})
    model.load(Placement(devices=("cpu",)))
    photo = jpeg("coffee")
    with torch.inference_mode():
        features = model.preprocess(Item(kind="image", payload=memoryview(photo)))
        expected = model.postprocess(model.forward(model.collate([features])))["probabilities"][0]
    body = {"instances": [{"b64": base64.b64encode(photo).decode()}], "parameters": {"top_k": 1000}}
    answer = httpx.post(f"{service.url}/predict", json=body, timeout=30)
    scores = np.zeros(1000)
    for entry in answer.json()["predictions"][0]:
        scores[entry["index"]] = entry["score"]
    assert np.abs(scores - expected.numpy()).max() < 5e-3  # TF32 and another order of sums


def test_killed_worker_gives_its_memory_back_and_returns(service: Running):
    (pid,) = service.worker_pids()
    os.kill(pid, signal.SIGKILL)
    headers = {"Content-Type": "image/jpeg"}
    answer = httpx.post(
        f"{service.url}/predict", content=jpeg("coffee"), headers=headers, timeout=60
    )
    assert answer.status_code in (200, 503)
    service.wait_for_log("ready in", 60)
    answer = httpx.post(
        f"{service.url}/predict", content=jpeg("coffee"), headers=headers, timeout=60
    )
    assert answer.status_code == 200


@pytest.mark.parametrize("preset", ["graphed", "graphed_fp16"])
def test_graphs_answer_as_the_network_does(preset: str):
    from inferpool.models.speed.choose import SpeedWish, choose
    from tests.models.speed.test_choose import loaded

    model = loaded()
    model.network.cuda()
    found = choose(model, SpeedWish(speed=preset, max_batch_size=8, cache_dir=None), print)
    assert found.preset == preset
    assert found.deviation < 0.05
