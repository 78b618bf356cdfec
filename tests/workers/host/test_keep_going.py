"""What watches goes on, though the process has no descriptor for a while."""

import asyncio
import logging
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

import inferpool.workers.host.keep_going
import inferpool.workers.host.local_worker
from inferpool.workers.errors import WorkerLostError
from inferpool.workers.host.engine import WorkerHandle
from inferpool.workers.host.keep_going import KeepGoing
from inferpool.workers.host.local import LocalEngine
from inferpool.workers.host.local_worker import LocalWorker
from tests.workers.contract import answers, is_gone, pid_of, started
from tests.workers.host.test_local import arena, engine, put, run  # noqa: F401  # fixtures


@contextmanager
def no_descriptors() -> Iterator[None]:
    """Whatever this process opens meanwhile is refused with EMFILE."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_errors_of_rounds_are_logged_once_a_minute(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    keep_going = KeepGoing("the watch")
    for _ in range(3):
        with keep_going, no_descriptors():
            open("/proc/self/stat").close()
    assert len(caplog.records) == 1
    assert "the watch was disturbed, and goes on: OSError(24, 'Too many open" in caplog.text
    assert caplog.records[0].exc_info is None
    monkeypatch.setattr(
        inferpool.workers.host.keep_going.time, "monotonic", lambda: time.perf_counter() + 1e6
    )
    with keep_going:
        raise ValueError("a mistake")
    assert len(caplog.records) == 2
    assert caplog.records[1].exc_info


def test_end_of_a_task_is_no_error_of_a_round():
    with pytest.raises(asyncio.CancelledError), KeepGoing("the watch"):
        raise asyncio.CancelledError


def looks(worker: WorkerHandle, monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """How often the worker's watch has looked from now on."""
    assert isinstance(worker, LocalWorker)
    num = 0
    look = worker.lead.look

    def counted() -> None:
        nonlocal num
        num += 1
        look()

    monkeypatch.setattr(worker.lead, "look", counted)
    return lambda: num


def test_worker_is_watched_while_and_after_descriptors_run_out(
    engine: LocalEngine,  # noqa: F811
    put,  # noqa: F811
    run,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    monkeypatch.setattr(inferpool.workers.host.local_worker, "_LOOK_S", 0.02)

    async def go():
        worker = await started(engine, batch_timeout_s=0.5)
        num_looks = looks(worker, monkeypatch)
        with no_descriptors():
            until = time.monotonic() + 20
            while num_looks() < 3:
                assert time.monotonic() < until
                await asyncio.sleep(0.01)
            assert worker.vitals().rss_bytes >= 0
        assert answers(await worker.run([put({"n": 1})])) == [2]
        with pytest.raises(WorkerLostError, match="hung"):
            await worker.run([put({"n": 1, "do": "hang"})])

    with caplog.at_level(logging.CRITICAL):
        run(go())
    assert not caplog.records


def test_worker_that_hangs_is_killed_without_a_descriptor(
    engine: LocalEngine,  # noqa: F811
    put,  # noqa: F811
    run,  # noqa: F811
):
    async def go():
        worker = await started(engine, batch_timeout_s=0.5)
        with no_descriptors(), pytest.raises(WorkerLostError, match="hung"):
            await worker.run([put({"n": 1, "do": "spin"})])
        assert is_gone(pid_of(worker))

    run(go())
