import asyncio
from collections.abc import Callable

import pytest

from inferpool.workers.host.engine import WorkerId
from inferpool.workers.host.shared_check import SharedCheck
from inferpool.workers.shared.config import CheckReport, WorkerConfig
from inferpool.workers.shared.errors import WorkerStartError
from tests.fakes import FakeWorker
from tests.workers.contract import config_of, until


class Starts:
    """Starts workers when the test says so."""

    def __init__(self) -> None:
        self.checks: dict[str, list[bool]] = {}
        """Whether each incarnation was to check its model, by worker."""
        self._pending: dict[str, asyncio.Future[None]] = {}
        self.workers: dict[str, FakeWorker] = {}

    async def start(
        self, id: WorkerId, config: WorkerConfig, on_progress: Callable[[str], None]
    ) -> FakeWorker:
        checks = config.check != "off" and config.checked is None
        self.checks.setdefault(str(id.slot), []).append(checks)
        future = self._pending[str(id.slot)] = asyncio.get_running_loop().create_future()
        await future
        worker = self.workers[str(id.slot)] = FakeWorker(id)
        return worker

    async def finish(self, slot: int, error: Exception | None = None) -> None:
        """Let a worker become ready, or fail."""
        await until(lambda: str(slot) in self._pending)
        future = self._pending.pop(str(slot))
        if error:
            future.set_exception(error)
        else:
            future.set_result(None)


def begin(shared: SharedCheck, slot: int, **changes: object) -> "asyncio.Task[object]":
    id = WorkerId(model="m", slot=slot)
    return asyncio.create_task(shared.start(id, config_of(**changes), lambda stage: None))


async def test_one_worker_checks_and_the_others_load_meanwhile_and_are_ready_after_it():
    starts = Starts()
    check = SharedCheck(starts.start)
    first, second = begin(check, 0), begin(check, 1)
    await starts.finish(1)
    await until(lambda: "1" in starts.workers)
    assert not second.done()
    assert check.report is None
    await starts.finish(0)
    assert await asyncio.gather(first, second) == [starts.workers["0"], starts.workers["1"]]
    assert starts.checks == {"0": [True], "1": [False]}
    assert check.report == CheckReport()
    again = begin(check, 0)
    await starts.finish(0)
    await again
    check.forget()  # since files have changed
    refused = begin(check, 1)
    await starts.finish(1, WorkerStartError("it gives NaN", permanent=True))
    with pytest.raises(WorkerStartError, match="NaN"):
        await refused
    assert check.report == CheckReport()  # that of the workers that serve on
    renewed = begin(check, 1)
    await starts.finish(1)
    await renewed
    assert starts.checks == {"0": [True, False], "1": [False, True, True]}


async def test_refused_version_is_refused_for_all_of_its_workers():
    starts = Starts()
    check = SharedCheck(starts.start)
    first, second = begin(check, 0), begin(check, 1)
    await starts.finish(1)
    await starts.finish(0, WorkerStartError("it gives NaN", permanent=True))
    for start in (first, second):
        with pytest.raises(WorkerStartError, match="it gives NaN") as caught:
            await start
        assert caught.value.permanent
    assert starts.workers["1"].is_gone


@pytest.mark.parametrize("patience_s", [0.0, 60.0])
async def test_another_worker_checks_if_the_first_does_not_come_up(patience_s: float):
    starts = Starts()
    check = SharedCheck(starts.start, patience_s=patience_s)
    first, second = begin(check, 0), begin(check, 1)
    await starts.finish(1)
    if patience_s:  # else the first is never heard of again
        await starts.finish(0, WorkerStartError("SIGKILL", permanent=False))
        with pytest.raises(WorkerStartError, match="SIGKILL"):
            await first
    await until(lambda: starts.checks["1"] == [False, True])
    assert starts.workers["1"].is_gone
    await starts.finish(1)
    assert await second is starts.workers["1"]
    assert not starts.workers["1"].is_gone
    assert check.report == CheckReport()
    first.cancel()


async def test_nobody_waits_where_nothing_is_checked():
    starts = Starts()
    check = SharedCheck(starts.start)
    begun = [begin(check, 0, check="off"), begin(check, 1, check="off")]
    await starts.finish(1)
    await begun[1]
    assert starts.checks == {"0": [False], "1": [False]}
    begun[0].cancel()


async def test_worker_that_waits_for_the_check_leaves_if_its_start_is_given_up():
    starts = Starts()
    check = SharedCheck(starts.start)
    first, second = begin(check, 0), begin(check, 1)
    await starts.finish(1)
    await until(lambda: "1" in starts.workers)
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    assert starts.workers["1"].is_gone
    first.cancel()
