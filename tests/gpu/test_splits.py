"""Replicas that are split over two ranks, on one device and on two, against the CPU's answers."""

import pytest

from inferpool.models.sources.registry import build
from tests.e2e.running import running, until
from tests.gpu.conftest import Devices
from tests.models.items import answers, json_item, loaded

TEXTS = ["a queue", "a pool of workers answers what was accepted", "so be it"]


@pytest.fixture(scope="module")
def expected() -> list[list[float]]:
    pytest.importorskip("tokenizers")
    return answers(loaded(build("minilm_l6", "DEFAULT", {})), [json_item(text) for text in TEXTS])


@pytest.mark.parametrize("placement", ["pipeline", "tensor"])
@pytest.mark.parametrize("indices", [(0, 0), (0, 1)], ids=["one device", "two devices"])
def test_two_ranks_answer_as_the_cpu(
    devices: Devices, placement: str, indices: tuple[int, int], expected: list[list[float]]
):
    names = devices.named(*indices)
    with running("minilm_l6", "--devices", names, "--placement", placement) as service:
        found = service.predict(*TEXTS)
        for row, wanted in zip(found, expected, strict=True):
            assert row == pytest.approx(wanted, abs=1e-5 if devices.is_simulated else 1e-4)
        (worker,) = service.workers()
        assert worker["placement"] == placement
        assert len(worker["ranks"]) == 2
        for index in indices:
            assert devices.uuids[index] in worker["device"]
        # Several batches at once go through the stages of a pipeline.
        for row in service.predict(*TEXTS * 8)[::3]:
            assert row == pytest.approx(expected[0], abs=1e-4)
        until(lambda: worker["state"] == "ready")
