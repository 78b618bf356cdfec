"""Behaviour that only CUDA devices show. Run with `uv run pytest -m gpu`; never yet run on one."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from inferpool.models.base import Model
from inferpool.models.item import Item
from inferpool.models.sources.registry import build
from inferpool.models.spec import Placement
from inferpool.models.speed.choose import SpeedOptions, choose
from inferpool.models.vision.gpu_jpegs import GpuJpegs, decoder_on
from tests.e2e.running import Running, faulty, running
from tests.models.items import encoded, image_item, jpeg, photo, run
from tests.models.speed.test_choose import small

pytestmark = pytest.mark.gpu

JPEG = {"Content-Type": "image/jpeg"}
DATAS = [encoded(photo(name)) for name in ("astronaut", "chelsea", "coffee", "rocket")]
TEXTS = ["a queue", "a pool of workers answers what was accepted", "so be it"]
PINNED = """
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


@pytest.fixture(scope="module")
def service() -> Iterator[Running]:
    with running("efficientnet_lite0", "--devices", "cuda:0", "--replicas", "2") as service:
        yield service


@pytest.fixture(scope="module")
def model() -> Model:
    model = build("efficientnet_lite0", "DEFAULT", {})
    model.load(Placement(devices=("cuda:0",)))
    return model


@pytest.fixture(scope="module")
def greedy() -> Iterator[Running]:
    source = "tests.gpu.cuda_fault_model:CudaFaultModel"
    with running(settings=faulty(source=source, devices="cuda:0", max_batch_size=8)) as service:
        yield service


def pids_on_gpu() -> set[int]:
    import pynvml

    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    return {process.pid for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)}


def test_replicas_share_a_device_on_which_the_front_end_is_not(service: Running):
    assert all(worker["device"].startswith("cuda:GPU-") for worker in service.workers())
    assert set(service.worker_pids()) <= pids_on_gpu()
    assert service.process.pid not in pids_on_gpu()
    for name in ("coffee", "rocket", "chelsea"):
        answer = service.post(content=jpeg(name), headers=JPEG)
        assert answer.status_code == 200, answer.text


def test_scores_are_those_of_the_cpu(service: Running):
    model = build("efficientnet_lite0", "DEFAULT", {})
    model.load(Placement(devices=("cpu",)))
    photo = jpeg("coffee")
    with torch.inference_mode():
        features = model.preprocess(Item(kind="image", payload=memoryview(photo)))
        expected = model.postprocess(model.forward(model.collate([features])))["probabilities"][0]
    answer = service.post("/predict?top_k=1000", content=photo, headers=JPEG)
    scores = np.zeros(1000)
    for entry in answer.json()["predictions"][0]:
        scores[entry["index"]] = entry["score"]
    assert np.abs(scores - expected.numpy()).max() < 5e-3  # TF32 and another order of sums


def test_killed_worker_gives_its_memory_back_and_returns(service: Running):
    os.kill(service.worker_pids()[0], signal.SIGKILL)
    assert service.post(content=jpeg("coffee"), headers=JPEG).status_code in (200, 503)
    service.wait_for_log("ready in", 60)
    assert service.post(content=jpeg("coffee"), headers=JPEG).status_code == 200


def test_worker_allocates_no_more_than_its_share():
    command = [sys.executable, "-c", PINNED]  # pinning is for a process of its own
    assert subprocess.run(command, capture_output=True, text=True).stdout == "bounded\n"


@pytest.mark.parametrize("preset", ["graphed", "graphed_fp16"])
def test_graphs_answer_as_the_network_does(preset: str):
    model = small()
    model.network.cuda()
    found = choose(model, SpeedOptions(speed=preset, max_batch_size=8, cache_dir=None), print)
    assert found.preset == preset
    assert found.deviation < 0.05


def test_jpegs_are_decoded_on_the_device_and_look_about_the_same(model):
    decode = decoder_on(model.device)
    assert decode is not None
    jpegs = GpuJpegs(decode, model.transform)
    accepted = [jpegs.accept(memoryview(data), 50_000_000) for data in DATAS]
    assert all(jpeg is not None for jpeg in accepted)
    pixels = jpegs.pixels(accepted, model._quick_pixels)
    assert {each.device.type for each in pixels} == {"cuda"}
    for each, data in zip(pixels, DATAS, strict=True):
        exact = model._quick_pixels(memoryview(data))
        assert (each.cpu().float() - exact.float()).abs().mean() < 2


def test_scores_are_those_of_exact_decoding(model):
    items = [image_item(data) for data in DATAS]
    exact = run(model, items)["probabilities"].cpu()
    model.decode = "device"
    fast = run(model, items)["probabilities"].cpu()
    model.decode = "exact"
    assert torch.equal(exact.argmax(1), fast.argmax(1))
    assert (exact - fast).abs().max() < 0.05


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
    assert greedy.predict({"n": 3, "share": 0.7})[0]["twice"] == 6
    assert greedy.worker_pids() == [pid]


def test_device_side_assert_recycles_the_worker_and_fails_its_input_alone(greedy: Running):
    answer = greedy.ask({"n": 1, "share": 0.0, "assert": True}, timeout=120)
    assert (answer.status_code, answer.json()["code"]) == (500, "worker_crashed")
    greedy.wait_for_log("the device's context is lost", 5)
    assert greedy.predict({"n": 4, "share": 0.01}, timeout=120)[0]["twice"] == 8
    ending = greedy.workers()[0]["last_ending"]
    assert ending["cause"] == "device"
    assert "device-side assert" in ending["reason"]


def embeddings(*flags: str) -> list[list[float]]:
    with running("minilm_l6", *flags) as service:
        return service.predict(*TEXTS)


@pytest.fixture(scope="module")
def expected() -> list[list[float]]:
    return embeddings("--devices", "cpu", "--replicas", "1")


@pytest.mark.parametrize("placement", ["pipeline", "tensor"])
@pytest.mark.parametrize("devices", ["cuda:0,0", "cuda:0,1"])
def test_two_ranks_answer_as_the_cpu(placement: str, devices: str, expected: list[list[float]]):
    if devices == "cuda:0,1" and torch.cuda.device_count() < 2:
        pytest.skip("needs a second GPU, to use NCCL")
    found = embeddings("--devices", devices, "--placement", placement)
    for row, wanted in zip(found, expected, strict=True):
        assert row == pytest.approx(wanted, abs=1e-4)
