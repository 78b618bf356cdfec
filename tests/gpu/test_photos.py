"""Photographs answered by replicas on several devices, as a user serves them."""

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from inferpool.models.sources.registry import build
from tests.e2e.running import Running, running, until
from tests.gpu.conftest import Devices
from tests.models.items import image_item, jpeg, loaded, run

JPEG = {"Content-Type": "image/jpeg"}
PHOTOS = {name: jpeg(name) for name in ("coffee", "rocket", "chelsea", "astronaut")}


@pytest.fixture(scope="module")
def service(devices: Devices) -> Iterator[Running]:
    """A service with a replica on each of up to four devices; on two if there is only one."""
    indices = range(min(4, len(devices.uuids)))
    replicas = str(max(2, len(indices)))
    names = devices.named(*indices)
    with running("efficientnet_lite0", "--devices", names, "--replicas", replicas) as service:
        yield service


@pytest.fixture(scope="module")
def expected() -> dict[str, np.ndarray]:
    """Scores of the CPU, in one thread: with more, sums have another order."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    model = loaded(build("efficientnet_lite0", "DEFAULT", {}))
    scores = {name: run(model, [image_item(photo)]) for name, photo in PHOTOS.items()}
    torch.set_num_threads(num_threads)
    return {name: each["probabilities"][0].numpy() for name, each in scores.items()}


def scores_of(service: Running, photo: bytes) -> np.ndarray:
    answer = service.post("/predict?top_k=1000", content=photo, headers=JPEG)
    assert answer.status_code == 200, answer.text
    scores = np.zeros(1000, np.float32)
    for entry in answer.json()["predictions"][0]:
        scores[entry["index"]] = entry["score"]
    return scores


@pytest.mark.slow
def test_scores_are_those_of_the_cpu(
    devices: Devices, service: Running, expected: dict[str, np.ndarray]
):
    """A GPU rounds otherwise, and sums in another order."""
    for name, photo in PHOTOS.items():
        found = scores_of(service, photo)
        assert np.abs(found - expected[name]).max() <= (0 if devices.is_simulated else 5e-3)


def test_replicas_compute_on_the_devices_that_health_names(devices: Devices, service: Running):
    named = [worker["device"] for worker in service.workers()]
    wanted = [f"{devices.kind}:{uuid}" for uuid in devices.uuids]
    assert set(named) == set(wanted[:4])
    gpus = service.get("/health").json()["gpus"]
    assert [gpu["uuid"] for gpu in gpus] == devices.uuids
    assert all(gpu["up"] and gpu["name"] for gpu in gpus)

    def all_are_used() -> bool:
        gpus = service.get("/health").json()["gpus"]
        used = [gpu["memory_used_bytes"] for gpu in gpus[:4]]
        return all(num is None or num > 10 << 20 for num in used)  # a driver may not tell

    until(all_are_used)  # they are read every few seconds


def test_metrics_tell_each_device(devices: Devices, service: Running):
    text = service.metrics()
    for uuid in devices.uuids:
        assert uuid in text


@pytest.mark.slow
def test_answers_under_load_are_right_while_a_worker_is_killed(
    devices: Devices, service: Running, expected: dict[str, np.ndarray]
):
    names = [*PHOTOS] * 8

    def ask(name: str) -> tuple[str, np.ndarray]:
        return name, scores_of(service, PHOTOS[name])

    with ThreadPoolExecutor(8) as pool:
        answers = pool.map(ask, names)
        os.kill(service.worker_pids()[0], signal.SIGKILL)
        for name, found in answers:
            # Batches of other sizes round differently.
            assert np.abs(found - expected[name]).max() < (1e-5 if devices.is_simulated else 5e-3)
    until(lambda: all(worker["state"] == "ready" for worker in service.workers()))
