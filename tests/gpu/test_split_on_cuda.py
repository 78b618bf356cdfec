"""Replicas that are split over GPUs. Run with `uv run pytest -m gpu`; never yet run on one."""

import httpx
import pytest

from tests.e2e.running import running

pytestmark = pytest.mark.gpu

TEXTS = ["a queue", "a pool of workers answers what was accepted", "so be it"]


def embeddings(*flags: str) -> list[list[float]]:
    with running("minilm_l6", "--speed", "exact", *flags) as service:
        answer = httpx.post(f"{service.url}/predict", json={"instances": TEXTS}, timeout=60)
        assert answer.status_code == 200, answer.text
        return answer.json()["predictions"]  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def expected():
    return embeddings("--devices", "cpu", "--replicas", "1")


@pytest.mark.parametrize("placement", ["pipeline", "tensor"])
def test_two_ranks_on_one_gpu_answer_as_the_cpu(placement: str, expected: list[list[float]]):
    found = embeddings("--devices", "cuda:0,0", "--placement", placement)
    for row, wanted in zip(found, expected, strict=True):
        assert row == pytest.approx(wanted, abs=1e-4)


@pytest.mark.parametrize("placement", ["pipeline", "tensor"])
def test_two_gpus_answer_as_the_cpu_through_nccl(placement: str, expected: list[list[float]]):
    import pynvml

    pynvml.nvmlInit()
    if pynvml.nvmlDeviceGetCount() < 2:
        pytest.skip("there is one GPU")
    found = embeddings("--devices", "cuda:0,1", "--placement", placement)
    for row, wanted in zip(found, expected, strict=True):
        assert row == pytest.approx(wanted, abs=1e-4)
