"""Replicas that are split over two ranks, on one device and on two, against the CPU's answers."""

from collections.abc import Iterator

import pytest

from inferpool.models.sources.registry import build
from tests.e2e.running import Running, running, until
from tests.gpu.conftest import Devices
from tests.models.items import answers, json_item, loaded

TEXTS = ["a queue", "a pool of workers answers what was accepted", "so be it"]
PLACEMENTS = ("pipeline", "tensor")
INDICES = {"one device": (0, 0), "two devices": (0, 1)}


@pytest.fixture(scope="module")
def expected() -> list[list[float]]:
    pytest.importorskip("tokenizers")
    return answers(loaded(build("minilm_l6", "DEFAULT", {})), [json_item(text) for text in TEXTS])


@pytest.fixture(scope="module")
def service(devices: Devices) -> Iterator[Running]:
    """One service for all tests. It need not be ready: what fails to load fails its own test."""
    models = {
        f"{placement}{len(set(indices))}": {
            "source": "minilm_l6",
            "devices": devices.named(*indices),
            "placement": placement,
            # Each size of a batch is computed once at the start: seconds, on a simulated device.
            **({"max_batch_size": 2} if devices.is_simulated else {}),
        }
        for indices in INDICES.values()
        if max(indices) < len(devices.uuids)
        for placement in PLACEMENTS
    }
    room = {"SIM_CAPACITY_MB": "4096"}  # six ranks share a device, and may warm up at once
    with running(settings={"models": models}, env=room, ready=False) as service:
        yield service.wait_until_listening()


@pytest.mark.slow
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("indices", INDICES.values(), ids=INDICES)
def test_two_ranks_answer_as_the_cpu(
    devices: Devices,
    service: Running,
    placement: str,
    indices: tuple[int, int],
    expected: list[list[float]],
):
    devices.named(*indices)  # skips where there are too few
    model = f"{placement}{len(set(indices))}"
    path = f"/predict/{model}"
    until(lambda: service.worker(model)["state"] == "ready", 150)
    worker = service.worker(model)
    for row, wanted in zip(service.predict(*TEXTS, path=path), expected, strict=True):
        assert row == pytest.approx(wanted, abs=1e-5 if devices.is_simulated else 1e-4)
    assert worker["placement"] == placement
    assert len(worker["ranks"]) == 2
    for index in indices:
        assert devices.uuids[index] in worker["device"]
    # Several batches at once go through the stages of a pipeline.
    for row in service.predict(*TEXTS * 8, path=path)[::3]:
        assert row == pytest.approx(expected[0], abs=1e-4)
    until(lambda: service.worker(model)["state"] == "ready")
