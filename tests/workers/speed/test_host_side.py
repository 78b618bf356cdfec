"""Tests with the real process that searches for a faster preset."""

import asyncio
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from inferpool.models.spec import Placement
from inferpool.models.speed.compiled import can_compile
from inferpool.models.speed_names import SpeedReport
from inferpool.workers.shared.config import ModelConfig, WorkerConfig
from inferpool.workers.speed.host_side import SearchFailedError, search
from tests.e2e.running import left_over
from tests.small_classifier import SmallClassifier

CONFIG = WorkerConfig(
    model=ModelConfig(name="m", source="tests.small_classifier:SmallClassifier"),
    placement=Placement(devices=("cpu",)),
    max_batch_size=4,
)


def config(folder: Path, source: str = CONFIG.model.source, **options: object) -> WorkerConfig:
    model = replace(CONFIG.model, source=source, options=options)
    return replace(CONFIG, model=model, cache_dir=str(folder))


def slow_to_load(folder: Path) -> WorkerConfig:
    return config(folder, "tests.fault_model:FaultModel", load_s=600.0)


def refusal(wanted: WorkerConfig, within_s: float = 60) -> str:
    with pytest.raises(SearchFailedError) as caught:
        asyncio.run(asyncio.wait_for(search(wanted, "key", lambda stage: None), within_s))
    return str(caught.value)


@pytest.mark.parametrize(
    ("chosen", "nice", "policy"),
    [(None, 19, os.SCHED_IDLE), (SpeedReport(is_provisional=True), 10, os.SCHED_OTHER)],
)
def test_search_gives_way_to_workers_and_ends_when_it_is_cancelled(
    tmp_path: Path, chosen: SpeedReport | None, nice: int, policy: int
):
    wanted = replace(slow_to_load(tmp_path), chosen=chosen)

    async def go() -> list[psutil.Process]:
        before = set(psutil.Process().children())  # of other tests: forkservers and the like
        begun = asyncio.Event()
        task = asyncio.create_task(search(wanted, "key", lambda stage: begun.set()))
        await asyncio.wait_for(begun.wait(), 60)
        (process,) = set(psutil.Process().children()) - before
        assert process.nice() == min(19, psutil.Process().nice() + nice)
        assert os.sched_getscheduler(process.pid) == policy
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return [process]

    assert not left_over(asyncio.run(go()), 60)  # at idle priority even an end takes time


async def test_suspended_search_is_killed_and_leaves_no_mark_of_an_attempt(tmp_path):
    """It may get no time on a busy host; what it leaves must not delay the next search."""
    mark, other = tmp_path / "key.begun", tmp_path / "other.begun"
    scratch = tmp_path / "key-compiled-compiling-x"

    before = set(psutil.Process().children())  # of other tests: forkservers and the like
    begun = asyncio.Event()
    task = asyncio.create_task(search(slow_to_load(tmp_path), "key", lambda stage: begun.set()))
    await asyncio.wait_for(begun.wait(), 60)
    (process,) = set(psutil.Process().children()) - before
    process.suspend()
    scratch.mkdir()
    for each in (mark, other):
        each.write_text(str(process.pid))
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert [path.name for path in tmp_path.iterdir()] == [other.name]


_FRONT_END = """
import asyncio, os
from tests.workers.speed.test_host_side import slow_to_load
from inferpool.models.speed_names import SpeedReport
from inferpool.workers.speed.host_side import search
from pathlib import Path
asyncio.run(search(slow_to_load(Path(".")), "key", print))
"""


def caught(pid: int) -> set[int]:
    """Return the signals that a process handles, as the kernel says."""
    (mask,) = re.findall(r"^SigCgt:\s*(\w+)$", Path(f"/proc/{pid}/status").read_text(), re.M)
    return {number for number in range(1, 65) if int(mask, 16) >> number - 1 & 1}


@pytest.mark.slow
def test_search_ends_with_a_killed_front_end(tmp_path):
    command = [sys.executable, "-u", "-c", _FRONT_END]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as front_end:
        assert front_end.stdout is not None
        assert b"loading" in front_end.stdout.readline()
        family = psutil.Process(front_end.pid).children(recursive=True)
        assert family
        assert signal.SIGUSR2 in caught(family[0].pid), "which is for the front end"
        front_end.send_signal(signal.SIGKILL)
    assert not left_over(family, 60)


class LosesDeviceOnce(SmallClassifier):
    """A classifier that loses its device as it is loaded, if there is a file that says so."""

    def __init__(self, mark: str) -> None:
        super().__init__()
        self.mark = Path(mark)

    def load(self, placement: Placement) -> None:
        """Load it."""
        import torch

        if self.mark.exists():
            self.mark.unlink()
            raise torch.AcceleratorError("an illegal memory access was encountered")
        super().load(placement)


@pytest.mark.compile  # it compiles nothing, but imports torch at low priority
@pytest.mark.timeout(600)
def test_a_search_that_loses_its_device_begins_anew(tmp_path):
    mark = tmp_path / "mark"
    mark.touch()
    wanted = config(tmp_path, f"{__name__}:LosesDeviceOnce", mark=str(mark))
    wanted = replace(wanted, chosen=SpeedReport(is_provisional=True))
    assert "the weights differ from one load to the next" in refusal(wanted, 500)
    assert not mark.exists()


@pytest.mark.compile  # it compiles nothing, but imports torch at idle priority
def test_failed_search_says_why(tmp_path):
    assert "no_such_module" in refusal(config(tmp_path, "tests.no_such_module:Net"))


@pytest.mark.compile
@pytest.mark.timeout(600)
@pytest.mark.skipif(not can_compile(), reason="there is no C++ compiler")
def test_search_compiles_and_stores_its_verdict_in_the_cache(tmp_path):
    import torch

    from inferpool.models.speed.options import SpeedOptions
    from inferpool.models.speed.trial import Trial
    from tests.workers.speed.test_worker_side import loaded

    torch.set_num_threads(1)
    key = Trial(loaded(), SpeedOptions(max_batch_size=4)).key
    stages: list[str] = []
    found = asyncio.run(search(config(tmp_path), key, stages.append))
    assert found.is_final
    assert "compiled" in found.note
    assert any(stage.startswith("compiling") for stage in stages)
    names = {path.name for path in tmp_path.iterdir()}
    assert f"{key}.json" in names
    assert not any("begun" in name or "compiling-" in name for name in names)
