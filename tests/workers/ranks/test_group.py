"""A replica of two ranks does all that a worker does, and ends as one."""

import asyncio
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path

import psutil
import pytest

import inferpool.workers.ranks.group
from inferpool.models.spec import Placement
from inferpool.workers.host.engine import WorkerHandle, WorkerId
from inferpool.workers.host.local import LocalEngine
from inferpool.workers.host.local_worker import LocalWorker
from inferpool.workers.ranks.group import Group, backend_for
from inferpool.workers.ranks.wiring import Wiring
from inferpool.workers.shared.arena import Arena
from inferpool.workers.shared.config import WorkerConfig
from inferpool.workers.shared.errors import WorkerLostError, WorkerStartError
from inferpool.workers.shared.messages import RankReady
from inferpool.workers.shared.queues import FrameError
from tests.descriptors import num_open
from tests.workers.contract import (
    PATIENT,
    EngineContract,
    answers,
    config_of,
    hurried,
    is_gone,
    started,
    suspend,
    until,
)

PAIR = Placement(devices=("cpu", "cpu"), split="pipeline")


class PairEngine(LocalEngine):
    """Starts every worker as a group of two ranks."""

    async def start(
        self, id: WorkerId, config: WorkerConfig, on_progress: Callable[[str], None]
    ) -> LocalWorker:
        source = config.model.source.replace(
            "tests.fault_model:FaultModel", "tests.split_fault_model:SplitFaultModel"
        )
        model = replace(config.model, source=source)
        return await super().start(id, replace(config, model=model, placement=PAIR), on_progress)


@pytest.fixture
def engine(arena: Arena):
    return PairEngine(arena, PATIENT)


class TestGroup(EngineContract):
    pass


def pids_of(worker: WorkerHandle) -> list[int]:
    return [rank.pid for rank in worker.vitals().ranks]


async def test_vitals_list_the_ranks_and_their_parts(engine: PairEngine):
    worker = await started(engine)
    vitals = worker.vitals()
    lead, follower = vitals.ranks
    assert lead.pid == worker.ready.pid != follower.pid
    assert follower.part == "part 1"
    assert vitals.rss_bytes == lead.rss_bytes + follower.rss_bytes
    assert worker.ready.split is not None
    assert worker.ready.split.cuts == ("here",)
    await worker.stop(5)


@pytest.mark.measures  # what lost another rank waits for seconds before it exits
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("act", "reason"),
    [("kill", "SIGKILL"), ("segfault", "SIGSEGV"), ("exit", "exit code 7"), ("device", "device")],
)
async def test_end_of_any_rank_ends_all_at_once_and_settles_what_they_held(
    engine: PairEngine, put, rank: int, act: str, reason: str
):
    worker = await started(engine)
    pids = pids_of(worker)
    with pytest.raises(WorkerLostError, match=reason) as lost:
        await worker.run([put({"n": 1, "do": act, "rank": rank})])
    assert f"rank {rank}" in str(lost.value)
    assert lost.value.started
    assert all(map(is_gone, pids))
    assert worker.ranks[1 - rank].ending[0] == "signal"  # it did not find out by itself
    ending = await worker.wait()
    assert f"rank {rank}" in ending.reason


@pytest.mark.measures
async def test_hung_follower_is_a_hang_of_the_worker_and_every_rank_shows_its_stacks(
    engine: PairEngine, put, caplog: pytest.LogCaptureFixture
):
    worker = await hurried(engine)
    pids = pids_of(worker)
    with pytest.raises(WorkerLostError, match="a batch ran for more than"):
        await worker.run([put({"n": 1, "do": "hang", "rank": 1})])
    assert all(map(is_gone, pids))
    said = [record for record in caplog.records if "killing it" in record.message]
    assert {(record.worker, record.rank) for record in said} == {("m/0#0", 0), ("m/0#0", 1)}  # type: ignore[attr-defined]
    traces = [record.exc_text or "" for record in caplog.records if "killing it" in record.message]
    assert len(traces) == 2
    assert any("in _act" in trace for trace in traces)


async def test_follower_that_stands_still_while_idle_is_found_out(
    engine: PairEngine,
):
    worker = await started(engine)
    worker.patience_s = 4.0  # each rank shows a sign of life every second
    pids = pids_of(worker)
    suspend(pids[1])
    ending = await worker.wait()
    assert ending.cause == "hang"
    assert "rank 1: hung: it was idle" in ending.reason
    assert all(map(is_gone, pids))


async def test_idle_group_leaves_together_when_its_lead_is_told_to(engine: PairEngine):
    worker = await started(engine)
    pids = pids_of(worker)
    await worker.stop(5)
    assert all(map(is_gone, pids))
    assert (await worker.wait()).reason == "stopped"


@pytest.mark.slow
async def test_every_stage_of_a_pipeline_leaves_of_its_own_accord(arena: Arena):
    none_is_helped = replace(PATIENT, follow_out_s=1000.0)
    three = Placement(devices=("cpu",) * 3, split="pipeline")
    config = replace(config_of("tests.models.split.networks:Chain"), placement=three)
    id = WorkerId(model="m", slot=0)
    worker = await LocalEngine(arena, none_is_helped).start(id, config, lambda stage: None)
    await worker.stop(60)
    assert all(rank.has_left for rank in worker.ranks)  # one that loses another exits with 1


async def test_several_groups_at_once_do_not_meet_each_other(engine: PairEngine, put):
    ids = [WorkerId(model="m", slot=slot) for slot in range(3)]
    starts = [engine.start(id, config_of(), lambda stage: None) for id in ids]
    groups = await asyncio.gather(*starts)
    batches = [group.run([put({"n": n, "do": "ok", "rank": 1})]) for n, group in enumerate(groups)]
    for n, done in enumerate(await asyncio.gather(*batches)):
        assert answers(done) == [2 * n]
    os.kill(pids_of(groups[0])[1], signal.SIGKILL)
    await groups[0].wait()
    assert answers(await groups[1].run([put({"n": 5, "rank": 1})])) == [10]
    await asyncio.gather(*(group.stop(5) for group in groups))


async def test_rank_that_fails_to_load_fails_the_start_and_leaves_nobody(engine: PairEngine):
    before = set(psutil.Process().children(recursive=True))
    with pytest.raises(WorkerStartError, match=r"rank .: these are not") as error:
        await started(engine, options={"load": "wrong"})
    assert error.value.permanent
    await until(lambda: not set(psutil.Process().children(recursive=True)) - before)


async def test_rank_that_comes_up_after_its_start_was_given_up_is_left_nowhere(
    arena: Arena, no_process_left: None, monkeypatch: pytest.MonkeyPatch
):
    engine = PairEngine(arena, replace(PATIENT, give_up_s=0.1))
    begun, start_process = [], engine._start_process

    may_end = asyncio.Event()

    async def start_slowly(process: BaseProcess) -> None:
        await start_process(process)
        begun.append(process.pid)
        if len(begun) == 2:
            await may_end.wait()

    await (await started(engine)).stop(5)
    before = num_open()
    monkeypatch.setattr(engine, "_start_process", start_slowly)
    with pytest.raises(WorkerStartError, match="was not loaded within 1 s"):
        await started(engine, load_timeout_s=1.0)
    may_end.set()
    await until(lambda: all(map(is_gone, begun)))
    await until(lambda: num_open() <= before)


async def test_follower_does_not_speak_for_the_lead(engine: PairEngine):
    worker = await started(engine)
    lead, follower = worker.ranks
    with pytest.raises(FrameError, match="Ready, which no follower may send"):
        worker.on_message(follower, worker.ready)
    with pytest.raises(FrameError, match="RankReady"):
        worker.on_message(lead, RankReady("cpu", None))
    await worker.stop(0)


async def test_descriptors_of_a_group_are_given_back(engine: PairEngine):
    await (await started(engine)).stop(5)
    before = num_open()
    for _ in range(3):
        worker = await started(engine)
        os.kill(pids_of(worker)[1], signal.SIGKILL)
        await worker.wait()
    assert num_open() <= before


def test_ranks_that_share_a_gpu_go_by_way_of_the_host():
    assert backend_for(("cuda:0", "cuda:1")) == "nccl"
    assert backend_for(("cuda:0", "cuda:0")) == "gloo"
    assert backend_for(("cpu", "cpu")) == "gloo"


def test_ranks_that_cannot_meet_say_over_what(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "")  # what the group sets is taken back
    monkeypatch.setattr(inferpool.workers.ranks.group, "_LOOPBACK", "nowhere0")
    wiring = Wiring(2)
    ends = wiring.ends_of(0)
    meeting = str(tmp_path / "meeting")  # as it is in the process that it is passed to
    with pytest.raises(RuntimeError, match=r"over the loopback interface 'nowhere0'.* is it up"):
        Group(replace(ends, meeting=meeting), PAIR)  # type: ignore[arg-type]
    wiring.close()
