"""Batches and queues of a real service: how large they get, alone and under overload."""

import asyncio
import time
from collections.abc import Iterator, Mapping

import httpx
import numpy as np
import pytest

from tests.bench.overload import ask_numbers, measure
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
    for tries_left in reversed(range(3)):
        # Three times what it can do.
        load = ask_numbers(service.address[1], rate=600, secs=2.0)
        tally, judge = asyncio.run(load)
        assert set(tally.statuses) <= {"200", "429"}
        assert tally.num_requests == tally.statuses.total()
        assert min(judge.retry_after_s, default=1) >= 1
        # Without an objective 1024 may wait here, for 5 s. The limit is twice the objective, since
        # a busy machine that stands still for a moment makes late what is in flight.
        is_timely = judge.server_time[200].percentile_s(80) < 2 * OBJECTIVE_S
        least_good = 0.5 * 2.0 * MAX_BATCH_SIZE / FORWARD_S
        if is_timely and tally.statuses["429"] and tally.num_good > least_good:
            break
        assert tries_left, (tally.statuses, judge.server_time[200].summary_ms())
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
        for timeout_ms, check in ((0, check_full), (TIMEOUT_MS, check_tight)):
            for tries_left in reversed(range(4)):
                load = measure(
                    service.address[1], times=10, secs=2, timeout_ms=timeout_ms, peak_s=1.5
                )
                found = asyncio.run(load)
                assert found["wrong"] == found["other"] == 0
                try:
                    check_times(found)
                    check(found)
                    break
                except AssertionError:  # the machine may have stood still for a moment
                    if not tries_left:
                        raise


def check_times(found: Mapping[str, float]) -> None:
    assert found["refused"] > 5 * found["good"]
    assert found["retry_after_least_s"] >= 1
    assert found["refusal_p90_ms"] < 10
    assert found["goodput_share"] >= 0.9


def check_full(full: Mapping[str, float]) -> None:
    assert full["expired"] == 0
    most_s = (MAX_QUEUE_LENGTH + 3 * MAX_BATCH_SIZE) / full["peak"] + 0.15
    assert full["p99_ms"] < 1000 * most_s


def check_tight(tight: Mapping[str, float]) -> None:
    assert tight["expired"] <= 0.05 * tight["good"]
    assert tight["p99_ms"] < TIMEOUT_MS + 150
