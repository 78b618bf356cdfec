"""Watches go on while the process has no free descriptor."""

import asyncio
import logging
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import Mock

import pytest

import inferpool.workers.host.error_guard
from inferpool.workers.host.error_guard import ErrorGuard
from inferpool.workers.host.local import LocalEngine
from inferpool.workers.shared.errors import WorkerLostError
from tests.workers.contract import answers, hurried, is_gone, pid_of, until


@contextmanager
def no_descriptors() -> Iterator[None]:
    """Have the kernel refuse with EMFILE whatever this process opens in the block."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_errors_of_rounds_are_logged_once_a_minute(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    error_guard = ErrorGuard("the watch")
    for _ in range(3):
        with error_guard, no_descriptors():
            open("/proc/self/stat").close()
    assert len(caplog.records) == 1
    assert "the watch was disturbed, and goes on: OSError(24, 'Too many open" in caplog.text
    assert caplog.records[0].exc_info is None
    monkeypatch.setattr(
        inferpool.workers.host.error_guard.time, "monotonic", lambda: time.perf_counter() + 1e6
    )
    with error_guard:
        raise ValueError("a mistake")
    assert len(caplog.records) == 2
    assert caplog.records[1].exc_info


def test_end_of_a_task_is_no_error_of_a_round():
    with pytest.raises(asyncio.CancelledError), ErrorGuard("the watch"):
        raise asyncio.CancelledError


@pytest.mark.slow
@pytest.mark.measures
async def test_worker_is_watched_while_and_after_descriptors_run_out(
    engine: LocalEngine, put, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.CRITICAL)
    worker = await hurried(engine)
    look = Mock(wraps=worker.lead.look)
    monkeypatch.setattr(worker.lead, "look", look)
    with no_descriptors():
        await until(lambda: look.call_count >= 3)
        assert worker.vitals().rss_bytes >= 0
    assert answers(await worker.run([put({"n": 1})])) == [2]
    with no_descriptors(), pytest.raises(WorkerLostError, match="hung"):
        await worker.run([put({"n": 1, "do": "spin"})])
    assert is_gone(pid_of(worker))
    assert not caplog.records
