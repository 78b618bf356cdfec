"""Worse versions that are put into real services under live traffic, and are stopped."""

import asyncio
import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from inferpool.models.vision.efficientnet import packaged_weights
from inferpool.models.vision.photos import sample_jpegs
from tests.e2e.running import Running, asking, running
from tests.e2e.swapping import KEYS, SwapOperator, SwapTally, serving, under_load

WORSE = "tests.worse_model:Worse"


@pytest.fixture(scope="module")
def photographs() -> Iterator[Running]:
    """A service of the packaged network, named m."""
    settings = {"models": {"m": {"source": "efficientnet_lite0", "replicas": 1}}}
    with running("--front-ends", "1", settings=settings, env=KEYS) as service:
        yield service


@pytest.fixture(scope="module")
def noisy(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A file of the packaged weights with noise."""
    weights = torch.load(packaged_weights(), weights_only=True)
    chance = torch.Generator().manual_seed(0)
    for tensor in weights.values():
        if tensor.dim() > 1:
            tensor += 0.3 * tensor.std() * torch.randn(tensor.shape, generator=chance)
    path = tmp_path_factory.mktemp("weights") / "noisy.pth"
    torch.save(weights, path)
    return str(path)


@pytest.mark.slow
def test_noise_in_a_real_network_is_refused_with_the_figure_that_shows_why(
    photographs: Running, noisy: str
):
    operator = SwapOperator(photographs.address)
    jpegs = itertools.cycle(sample_jpegs()[:12])
    body = {"policy": "verified", "num_inputs": 6, "weights": noisy}

    def ask() -> httpx.Response:
        return photographs.post(
            "/predict/m", content=next(jpegs), headers={"Content-Type": "image/jpeg"}
        )

    with asking(ask, num_clients=1) as answers:
        status, answer = asyncio.run(operator.post("versions", body))
        asyncio.run(operator.until_quiet())
    assert (status, answer["code"]) == (422, "version_refused"), answer
    assert "max_deviation" in answer["detail"]
    assert answer["figures"]["deviation"] > 0.05, answer["figures"]
    assert {each.status_code for each in answers} == {200}
    assert {each.headers["x-model-version"] for each in answers} == {"1"}
    model = asyncio.run(operator.look())
    assert (model["version"], model["versions"][0]["state"]) == (1, "refused")
    assert model["versions"][0]["figures"] == answer["figures"]


@pytest.fixture(scope="module")
def numbers() -> Iterator[Running]:
    """A service of a model that labels numbers."""
    with serving("--front-ends", "1", source=WORSE) as service:
        yield service


NAN_IN = 8
BAD: Mapping[str, Mapping[str, object]] = {"nan": {"nan_in": NAN_IN}, "slow": {"slower": 30}}
BOUNDS = {"nan": 1e6, "slow": 5.0}
"""The bounds of times. On a machine with other work, equal versions differ by more than usual."""
NUM_CLIENTS = {"nan": 8, "slow": 2}
"""A version is slow if the median of all its calls is: as many must come after it turns worse as
came before, so few clients ask where that takes long."""


async def until_state(operator: SwapOperator, state: str) -> Mapping[str, Any]:
    """Wait until the newest version is in a state, and return what is known of it."""
    async with asyncio.timeout(60):
        while True:
            newest = (await operator.look())["versions"][0]
            if newest["state"] == state:
                return dict(newest)
            await asyncio.sleep(0.02)


def forgive_nan(tally: SwapTally) -> int:
    """Leave out the calls whose wrong answers are NaN where it was due; return their number."""
    due = [each for each in tally.wrong if _is_nan_due(*each)]  # type: ignore[misc]
    tally.wrong = [each for each in tally.wrong if each not in due]
    return len(due)


def _is_nan_due(numbers: list[int], status: int, version: bytes, body: Mapping[str, Any]) -> bool:
    if len(numbers) == 1:
        return numbers[0] % NAN_IN == 7 and body.get("code") == "non_finite_output"
    failed = [n for n, each in zip(numbers, body["predictions"], strict=True) if "error" in each]
    return status == 200 and all(number % NAN_IN == 7 for number in failed)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "how"),
    [
        ("shadow", "nan"),
        ("canary", "nan"),
        pytest.param("shadow", "slow", marks=[pytest.mark.slow, pytest.mark.measures]),
        pytest.param("canary", "slow", marks=[pytest.mark.slow, pytest.mark.measures]),
    ],
)
def test_a_version_that_turns_worse_beside_the_one_that_serves_is_refused(
    numbers: Running, tmp_path: Path, policy: str, how: str
):
    async def run() -> None:
        operator = SwapOperator(numbers.address)
        async with under_load(numbers.address, NUM_CLIENTS[how]) as tally:
            status, answer = await operator.swap(
                {**BAD[how], "bad": str(tmp_path / "bad")},
                prefer="respond-async",
                policy=policy,
                num_inputs=5,
                traffic_share=0.5,
                duration_s=600,
                max_latency_ratio=BOUNDS[how],
            )
            assert status == 202, answer
            await operator.until_said(f"{policy}: ")
            (tmp_path / "bad").touch()
            newest = await until_state(operator, "refused")
            await tally.until(tally.right + 20)
        figures = newest["figures"]
        if policy == "shadow":
            assert len(tally.marks) == 1
        else:
            assert forgive_nan(tally) > 0 or how == "slow"
            assert figures["num_answered"] > 0
        tally.check()
        match how, policy:
            case "nan", "shadow":
                assert "non_finite_output" in newest["reason"]
                assert figures["num_faults"] > 0
            case "nan", _:
                assert figures["fault_share"] > 0.001
                assert figures["fault_share_before"] == 0
            case _, "shadow":
                assert figures["latency_ratio"] > BOUNDS[how]
            case _:
                assert figures["live_latency_ratio"] > BOUNDS[how]
        await operator.until_quiet()

    asyncio.run(run())


@pytest.mark.parametrize(
    "how", ["nan", pytest.param("slow", marks=[pytest.mark.slow, pytest.mark.measures])]
)
def test_a_version_that_turns_worse_after_the_switch_is_rolled_back_by_itself(
    numbers: Running, tmp_path: Path, how: str
):
    async def run() -> None:
        operator = SwapOperator(numbers.address)
        async with under_load(numbers.address, NUM_CLIENTS[how]) as tally:
            status, answer = await operator.swap(
                {**BAD[how], "bad": str(tmp_path / "bad")},
                policy="verified",
                num_inputs=5,
                rollback_s=600,
                max_latency_ratio=BOUNDS[how],
            )
            assert status == 200, answer
            former = max(
                each["number"]
                for each in (await operator.look())["versions"]
                if each["state"] == "kept"
            )
            (tmp_path / "bad").touch()
            newest = await until_state(operator, "rolled_back")
            await operator.until_quiet()
            await tally.until(tally.right + 20)
        figures = newest["figures"]
        if how == "nan":
            assert forgive_nan(tally) > 0
            assert figures["fault_share"] > 0.001
            assert "max_fault_share" in newest["reason"]
        else:
            assert figures["live_latency_ratio"] > BOUNDS[how]
            assert "max_latency_ratio" in newest["reason"]
        tally.check()
        assert (await operator.look())["version"] == former

    asyncio.run(run())
