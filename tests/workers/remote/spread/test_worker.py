"""A worker of one rank on each of two hosts does what a worker does, and ends as one."""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from inferpool.models.spec import Placement, Split
from inferpool.workers.arena import Arena
from inferpool.workers.config import HostShare, WorkerConfig
from inferpool.workers.host.engine import WorkerHandle, WorkerId
from inferpool.workers.remote.hosts import RemoteHosts
from tests.workers.contract import EngineContract, answers, is_gone, started, until
from tests.workers.remote.cluster import connected

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
    """Starts every worker over two hosts, which join at the first start."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._stack = contextlib.AsyncExitStack()
        self._hosts: RemoteHosts | None = None

    async def start(
        self, id: WorkerId, config: WorkerConfig, on_progress: Callable[[str], None]
    ) -> WorkerHandle:
        if self._hosts is None:
            self._hosts, _ = await self._stack.enter_async_context(connected(self._arena, "a", "b"))
        return await self._hosts.start(id, over(config, ["a", "b"]), on_progress)


@pytest.fixture
def engine(arena: Arena) -> SpreadEngine:
    return SpreadEngine(arena)


class TestSpreadEngine(EngineContract):
    pass


def pids_of(worker: WorkerHandle) -> list[int]:
    return [rank.pid for rank in worker.vitals().ranks]


async def known(worker: WorkerHandle, num_ranks: int = 2) -> list[int]:
    """Wait until all hosts have told of their ranks; return the numbers of their processes."""
    await until(lambda: len(worker.vitals().ranks) == num_ranks)
    return pids_of(worker)


async def test_ranks_on_two_hosts_answer_and_are_seen(engine: SpreadEngine, put):
    worker = await started(engine)
    assert answers(await worker.run([put({"n": 4, "rank": 1}), put({"n": 5})])) == [8, 10]
    await known(worker)
    lead, follower = worker.vitals().ranks
    assert (lead.host, lead.rank, follower.host, follower.rank) == ("a", 0, "b", 1)
    assert follower.part is not None
    pids = pids_of(worker)
    await worker.stop(10)
    assert all(map(is_gone, pids))
    assert (await worker.wait()).reason == "stopped"
