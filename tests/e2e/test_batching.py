"""How large batches get in a real service, and what shares one."""

import asyncio
import time
from collections.abc import Iterator

import httpx
import numpy as np
import pytest

from tests.bench.open_loop import Answer, Load
from tests.e2e.running import Running, running

pytestmark = pytest.mark.measures

FORWARD_S = 0.02
OBJECTIVE_S = 0.25


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    config = tmp_path_factory.mktemp("batching") / "inferpool.toml"
    config.write_text(
        f"""
        default_model = "slow"
        [models.slow]
        source = "tests.fault_model:FaultModel"
        replicas = 1
        max_batch_size = 4
        objective_p99_ms = {OBJECTIVE_S * 1000:g}
        options = {{ forward_s = {FORWARD_S} }}
        [models.echo]
        replicas = 1
        [models.minilm_l6]
        replicas = 1
        """
    )
    with running("--config", str(config)) as service:
        yield service


@pytest.mark.slow
@pytest.mark.alone
def test_queue_is_kept_so_short_that_answers_are_within_the_objective(service: Running):
    async def go() -> list[Answer]:
        load = Load("127.0.0.1", int(service.url.rpartition(":")[2]))
        await load.connect(64)
        await load.open(600, 0.5)  # three times what it can do
        answers = await load.open(600, 2.0)
        load.close()
        return answers

    for tries_left in reversed(range(3)):
        answers = asyncio.run(go())
        good = sorted(answer.total_ms for answer in answers if answer.status == 200)
        refused = [answer for answer in answers if answer.status == 429]
        assert len(good) + len(refused) == len(answers)
        assert all(answer.retry_after_s >= 1 for answer in refused)
        # Without an objective, 1024 may wait here, and do so for 5 s. Twice, for a busy machine;
        # where that stands still for a moment, those that are in flight are late.
        is_timely = good[int(len(good) * 0.8)] < 2 * OBJECTIVE_S * 1000
        if is_timely and refused and len(good) > 0.5 * 2.0 * 4 / FORWARD_S:
            break
        assert tries_left, (good, len(refused))
    assert 'rejected_total{model="slow",reason="objective"}' in metrics(service)


def test_batches_of_echo_grow_to_64_by_themselves_and_are_answered_right(service: Running):
    until = time.monotonic() + 90
    instances = list(range(256))
    while 'max_batch_size{model="echo"} 64.0' not in metrics(service):
        answer = httpx.post(f"{service.url}/predict/echo", json={"instances": instances})
        assert answer.json()["predictions"] == instances
        assert time.monotonic() < until, metrics(service)
    assert 'max_batch_size{model="slow"} 4.0' in metrics(service)


def test_texts_of_all_lengths_are_answered_in_one_call_as_each_is_alone(service: Running):
    def ask(texts: list[str]) -> np.ndarray:
        url = f"{service.url}/predict/minilm_l6"
        return np.array(httpx.post(url, json={"instances": texts}).json()["predictions"])

    texts = ["a cat", "one word " * 40, "a kitten", "how are you " * 10, "", "more and more"]
    together = ask(texts)
    assert together.shape == (len(texts), 384)
    assert np.abs(together - np.concatenate([ask([text]) for text in texts])).max() < 1e-6
    assert together[0] @ together[2] > 0.7 > together[0] @ together[1]


def metrics(service: Running) -> str:
    return httpx.get(f"{service.url}/metrics").text
