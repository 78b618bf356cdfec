"""Batches and queues of a real service: how large they get, alone and under overload."""

import asyncio
import time
from collections.abc import Iterator

import httpx
import numpy as np
import pytest

from tests.bench.open_loop import Answer, Load
from tests.bench.overload import Phase, measure
from tests.e2e.running import FAULTY, Running, faulty, running

pytestmark = pytest.mark.measures

FORWARD_S = 0.02
OBJECTIVE_S = 0.25
MAX_BATCH_SIZE = 4
MAX_QUEUE_LENGTH = 48
"""Half a second of work: longer than the tight deadline, and shorter than the default one."""
TIMEOUT_MS = 300


@pytest.fixture(scope="module")
def service() -> Iterator[Running]:
    slow = {
        "source": FAULTY,
        "replicas": 1,
        "max_batch_size": MAX_BATCH_SIZE,
        "objective_p99_ms": OBJECTIVE_S * 1000,
        "options": {"forward_s": FORWARD_S},
    }
    models = {"slow": slow, "echo": {"replicas": 1}, "minilm_l6": {"replicas": 1}}
    with running(settings={"default_model": "slow", "models": models}) as service:
        yield service


@pytest.mark.slow
@pytest.mark.alone
def test_queue_is_kept_so_short_that_answers_are_within_the_objective(service: Running):
    async def go() -> list[Answer]:
        load = Load(*service.address)
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
        # Without an objective 1024 may wait here, for 5 s. The limit is twice the objective, since
        # a busy machine that stands still for a moment makes late what is in flight.
        is_timely = good[int(len(good) * 0.8)] < 2 * OBJECTIVE_S * 1000
        if is_timely and refused and len(good) > 0.5 * 2.0 * MAX_BATCH_SIZE / FORWARD_S:
            break
        assert tries_left, (good, len(refused))
    assert service.metric('rejected_total{model="slow",reason="objective"}')


def test_batches_of_echo_grow_to_64_by_themselves_and_are_answered_right(service: Running):
    until = time.monotonic() + 90
    instances = list(range(256))
    with httpx.Client(base_url=service.url) as client:
        while service.metric('max_batch_size{model="echo"}') != 64:
            answer = client.post("/predict/echo", json={"instances": instances})
            assert answer.json()["predictions"] == instances
            assert time.monotonic() < until, service.metrics()
    assert service.metric('max_batch_size{model="slow"}') == MAX_BATCH_SIZE


def test_texts_of_all_lengths_are_answered_in_one_call_as_each_is_alone(service: Running):
    def ask(texts: list[str]) -> np.ndarray:
        answer = service.post("/predict/minilm_l6", json={"instances": texts})
        return np.array(answer.json()["predictions"])

    texts = ["a cat", "one word " * 40, "a kitten", "how are you " * 10, "", "more and more"]
    together = ask(texts)
    assert together.shape == (len(texts), 384)
    assert np.abs(together - np.concatenate([ask([text]) for text in texts])).max() < 1e-6
    assert together[0] @ together[2] > 0.7 > together[0] @ together[1]


@pytest.mark.slow
@pytest.mark.alone
def test_ten_times_the_capacity_costs_admitted_requests_nothing():
    settings = faulty(max_batch_size=MAX_BATCH_SIZE, options={"forward_s": 0.04})
    with running(settings=settings | {"max_queue_length": MAX_QUEUE_LENGTH}) as service:
        for timeout_ms, check in ((None, check_full), (TIMEOUT_MS, check_tight)):
            for tries_left in reversed(range(4)):
                phase = measure(
                    *service.address, times=10, secs=2, timeout_ms=timeout_ms, peak_s=1.5
                )
                found = asyncio.run(phase)
                assert found.num_wrong == 0
                assert {answer.status for answer in found.answers} <= {200, 429, 504}
                try:
                    check_times(found)
                    check(found)
                    break
                except AssertionError:  # the machine may have stood still for a moment
                    if not tries_left:
                        raise


def check_times(found: Phase) -> None:
    refused = found.of(429)
    assert len(refused) > 5 * len(found.of(200))
    assert all(answer.retry_after_s >= 1 for answer in refused)
    assert found.refusal_ms(0.9) < 10
    assert found.goodput >= 0.9 * found.peak


def check_full(full: Phase) -> None:
    assert full.of(504) == []
    assert full.latency_s(0.99) < (MAX_QUEUE_LENGTH + 3 * MAX_BATCH_SIZE) / full.peak + 0.15


def check_tight(tight: Phase) -> None:
    assert len(tight.of(504)) <= 0.05 * len(tight.of(200))
    assert tight.latency_s(0.99) < TIMEOUT_MS / 1000 + 0.15
