"""Models that share the cores of a real service by weight."""

import os
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.e2e.running import FAULTY, Running, asking, running, until

NUMBERS = {"a": 1, "b": 2}
"""The number that each model is asked about."""


@pytest.fixture
def calls(tmp_path: Path) -> Path:
    """Return the file where both models write each number before they compute it."""
    return tmp_path / "calls"


@pytest.fixture
def service(calls: Path) -> Iterator[Running]:
    """Start two models, each of which would use all cores for 10 ms a batch of one."""
    model = {
        "source": FAULTY,
        "options": {"forward_s": 0.01, "calls": str(calls)},
        "replicas": 1,
        "threads_per_replica": os.cpu_count(),
        "max_batch_size": 1,
    }
    models = {"a": {**model, "share": 3.0}, "b": model}
    with running(settings={"models": models}) as service:
        yield service


def ask(service: Running, model: str):
    """Ask for so much that a model never has to wait for its clients."""
    return service.post(f"/predict/{model}", json={"instances": [{"n": NUMBERS[model]}] * 20})


@pytest.mark.slow
@pytest.mark.measures
def test_models_under_full_load_are_computed_in_the_ratio_of_their_shares(service, calls):
    with (
        asking(partial(ask, service, "a"), 4) as first,
        asking(partial(ask, service, "b"), 4) as second,
    ):
        until(lambda: len(second) >= 10)
    assert {answer.status_code for answer in first + second} == {200}
    lines = calls.read_text().split()
    both = lines[lines.index("2") : len(lines) - lines[::-1].index("2")][40:-40]
    assert 2.0 <= both.count("1") / both.count("2") <= 4.5


def test_a_killed_worker_of_one_model_holds_up_none_of_the_other(service):
    with asking(partial(ask, service, "a"), 4) as first:
        until(lambda: len(first) >= 5)
        killed = next(each for each in service.workers() if each["name"].startswith("a/"))
        os.kill(killed["pid"], signal.SIGKILL)
        assert {ask(service, "b").status_code for _ in range(5)} == {200}
        until(lambda: all(each["state"] == "ready" for each in service.workers()))
        num = len(first)
        until(lambda: len(first) >= num + 5)
    assert {answer.status_code for answer in first} <= {200, 503}
