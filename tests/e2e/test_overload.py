"""Ten times what the workers can do, from an open loop, against a real service."""

import asyncio
from pathlib import Path

import pytest

from tests.bench.overload import Phase, measure
from tests.e2e.running import running

pytestmark = [pytest.mark.measures, pytest.mark.slow]

MAX_BATCH_SIZE = 4
MAX_QUEUE_LENGTH = 48
"""Half a second of work: longer than the deadlines below, and shorter than the default ones."""
TIMEOUT_MS = 300


@pytest.mark.alone
def test_ten_times_the_capacity_costs_those_who_are_admitted_nothing(tmp_path: Path):
    config = tmp_path / "inferpool.toml"
    config.write_text(
        f"""
        max_queue_length = {MAX_QUEUE_LENGTH}
        [models.m]
        source = "tests.fault_model:FaultModel"
        replicas = 1
        max_batch_size = {MAX_BATCH_SIZE}
        options = {{ forward_s = 0.04 }}
        """
    )
    with running("--config", str(config)) as service:
        port = int(service.url.rpartition(":")[2])
        for timeout_ms, check in ((None, check_full), (TIMEOUT_MS, check_tight)):
            for tries_left in reversed(range(4)):
                phase = measure(
                    "127.0.0.1", port, times=10, secs=2, timeout_ms=timeout_ms, peak_s=1.5
                )
                found = asyncio.run(phase)
                assert found.num_wrong == 0
                assert {answer.status for answer in found.answers} <= {200, 429, 504}
                try:
                    check_times(found)
                    check(found)
                    break
                except AssertionError:  # which a machine that stands still for a moment explains
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
