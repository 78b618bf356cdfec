"""A worker of one rank on each of two hosts does what a worker does, and ends as one."""

import asyncio
import json
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from inferpool.models.spec import Placement, Split
from inferpool.workers.host.engine import RankVitals, WorkerHandle, WorkerId
from inferpool.workers.host.local import LocalEngine
from inferpool.workers.shared.arena import Arena
from inferpool.workers.shared.config import HostShare, WorkerConfig
from inferpool.workers.shared.errors import WorkerLostError, WorkerStartError
from inferpool.workers.shared.messages import BatchDone, ItemError
from tests.workers.contract import EngineContract, answers, config_of, is_gone, started, until
from tests.workers.remote.cluster import (
    JoinedHosts,
    connected,
    make_agent,
    open_front,
    running,
)
from tests.workers.remote.spread.networks import WIDTH, SeededMlp

pytestmark = pytest.mark.usefixtures("no_process_left")


def over(config: WorkerConfig, hosts: Sequence[str], split: Split = "pipeline") -> WorkerConfig:
    """Return a configuration of a worker with a rank on each host."""
    source = config.model.source.replace(
        "tests.fault_model:FaultModel", "tests.split_fault_model:SplitFaultModel"
    )
    share = Placement(devices=("cpu",), split=split)
    return replace(
        config,
        model=replace(config.model, source=source),
        placement=replace(share, devices=("cpu",) * len(hosts)),
        shares=tuple(HostShare(host=host, placement=share) for host in hosts),
        host="+".join(hosts),
    )


class SpreadEngine:
    """Starts every worker over two hosts."""

    def __init__(self, arena: Arena) -> None:
        self._hosts = JoinedHosts(arena, "a", "b")

    async def start(
        self, id: WorkerId, config: WorkerConfig, on_progress: Callable[[str], None]
    ) -> WorkerHandle:
        hosts = await self._hosts.get()
        return await hosts.start(id, over(config, ["a", "b"]), on_progress)


@pytest.fixture
def engine(arena: Arena) -> SpreadEngine:
    return SpreadEngine(arena)


class TestSpreadEngine(EngineContract):
    pass


def pids_of(worker: WorkerHandle) -> list[int]:
    return [rank.pid for rank in worker.vitals().ranks]


async def known(worker: WorkerHandle, num_ranks: int = 2) -> Sequence[RankVitals]:
    """Wait until all hosts have told of their ranks."""
    await until(lambda: len(worker.vitals().ranks) == num_ranks)
    return worker.vitals().ranks


def numbers_in(done: BatchDone) -> list[float]:
    """Return all numbers of the outputs of a batch, which may be JSON or tensors."""
    numbers: list[float] = []
    for outcome in done.outcomes:
        assert not isinstance(outcome, ItemError), outcome
        if isinstance(outcome, bytes):
            value = json.loads(outcome)
            numbers += value["output"] if isinstance(value, dict) else value
        else:
            numbers += [x for blob in outcome for x in memoryview(blob.buffer).cast("f")]
    return numbers


async def test_ranks_on_two_hosts_answer_and_are_seen(engine: SpreadEngine, put):
    worker = await started(engine)
    assert answers(await worker.run([put({"n": 4, "rank": 1}), put({"n": 5})])) == [8, 10]
    lead, follower = await known(worker)
    assert (lead.host, lead.rank, follower.host, follower.rank) == ("a", 0, "b", 1)
    assert follower.part is not None
    pids = pids_of(worker)
    await worker.stop(10)
    assert all(map(is_gone, pids))
    assert (await worker.wait()).reason == "stopped"


@pytest.mark.slow
@pytest.mark.parametrize("split", ["pipeline", "tensor"])
async def test_answers_are_those_of_a_network_on_one_device(arena: Arena, put, split: Split):
    options = {"inputs": [{"name": "x", "dtype": "float32", "shape": [-1, WIDTH]}]}
    config = config_of("tests.workers.remote.spread.networks:SeededMlp", options=options)
    rows = [put([(n * k % 7) / 7 for k in range(WIDTH)]) for n in range(8)]
    whole = await LocalEngine(arena).start(WorkerId(model="m", slot=0), config, lambda _: None)
    expected = numbers_in(await whole.run(rows))
    await whole.stop(10)
    async with connected(arena, "a", "b", "c") as (hosts, _):
        spread = over(config, ["a", "b", "c"], split)
        worker = await hosts.start(WorkerId(model="m", slot=0), spread, lambda _: None)
        found = numbers_in(await worker.run(rows))
        parts = [rank.part.num_bytes for rank in (await known(worker, 3)) if rank.part]
        await worker.stop(10)
    assert found == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert len(parts) == 3
    assert all(parts)
    assert sum(parts) >= sum(each.nbytes for each in SeededMlp().parameters())
    assert len(set(expected)) > 20, "the rows and the classes differ"


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("act", "reason"),
    [("kill", "SIGKILL"), ("segfault", "SIGSEGV"), ("exit", "exit code 7"), ("device", "device")],
)
async def test_end_of_any_rank_ends_those_of_all_hosts_and_settles_what_they_held(
    engine: SpreadEngine, put, rank: int, act: str, reason: str
):
    worker = await started(engine)
    await known(worker)
    pids = pids_of(worker)
    with pytest.raises(WorkerLostError, match=reason) as lost:
        await worker.run([put({"n": 1, "do": act, "rank": rank})])
    assert f"rank {rank}" in str(lost.value)
    assert lost.value.started
    assert not lost.value.with_host
    assert all(map(is_gone, pids))
    assert f"rank {rank}" in (await worker.wait()).reason


async def test_idle_rank_that_is_killed_ends_the_others_and_another_incarnation_starts(
    engine: SpreadEngine, put
):
    worker = await started(engine)
    await known(worker)
    pids = pids_of(worker)
    os.kill(pids[1], signal.SIGKILL)
    ending = await worker.wait()
    assert "rank 1" in ending.reason
    assert not ending.was_at_work
    assert all(map(is_gone, pids))
    again = await started(engine)
    assert answers(await again.run([put({"n": 3, "rank": 1})])) == [6]
    await again.stop(10)


@pytest.mark.parametrize("lost", ["a", "b"])
async def test_lost_host_ends_the_ranks_of_the_others_and_blames_no_batch(
    arena: Arena, put, lost: str
):
    hosts, _ = open_front(arena)
    agents = {name: make_agent(hosts.address, name) for name in ("a", "b")}
    async with running(*agents.values()):
        await until(lambda: len(hosts.hosts) == 2)
        worker = await hosts.start(WorkerId(model="m", slot=0), over_two(), lambda _: None)
        await known(worker)
        pids = pids_of(worker)
        batch = worker.run([put({"n": 1, "do": "hang", "rank": 1})])
        await asyncio.sleep(0)
        hosts.hosts[lost].close("cut off")
        with pytest.raises(WorkerLostError, match=f"{lost} was lost") as error:
            await batch
        assert not error.value.started
        assert error.value.with_host
        assert (await worker.wait()).cause == "host"
        await until(lambda: all(map(is_gone, pids)))
        await until(lambda: len(hosts.hosts) == 2)  # the agent joins again
        again = await hosts.start(WorkerId(model="m", slot=0), over_two(), lambda _: None)
        assert answers(await again.run([put({"n": 2, "rank": 1})])) == [4]
        await again.stop(10)
    await hosts.close()


async def test_agent_that_leaves_takes_the_ranks_of_other_hosts_with_it(arena: Arena, put):
    hosts, _ = open_front(arena)
    agents = {name: make_agent(hosts.address, name) for name in ("a", "b")}
    async with running(*agents.values()):
        await until(lambda: len(hosts.hosts) == 2)
        worker = await hosts.start(WorkerId(model="m", slot=0), over_two(), lambda _: None)
        await known(worker)
        pids = pids_of(worker)
        agents["b"].stop()
        await worker.wait()
        assert all(map(is_gone, pids))
        with pytest.raises(WorkerLostError) as error:
            await worker.run([put({"n": 1})])
        assert not error.value.started
    await hosts.close()


async def test_worker_is_not_started_while_one_of_its_hosts_is_missing(arena: Arena):
    async with connected(arena, "a") as (hosts, _):
        with pytest.raises(WorkerStartError, match="not connected: b") as error:
            await hosts.start(WorkerId(model="m", slot=0), over_two(), lambda _: None)
        assert not error.value.permanent


async def test_interface_that_a_host_does_not_have_is_named(arena: Arena):
    hosts, _ = open_front(arena)
    agents = [make_agent(hosts.address, "a"), make_agent(hosts.address, "b")]
    agents[1]._interface = "nowhere0"
    async with running(*agents):
        await until(lambda: len(hosts.hosts) == 2)
        with pytest.raises(WorkerStartError, match=r"on b: .*nowhere0.* lo"):
            await hosts.start(WorkerId(model="m", slot=0), over_two(), lambda _: None)
    await hosts.close()


def over_two() -> WorkerConfig:
    return over(config_of(), ["a", "b"])
