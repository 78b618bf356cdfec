import asyncio
import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import get_args

from inferpool.service.client.health import (
    DecoderState,
    ForkserverState,
    ModelState,
    Rank,
    ServiceHealth,
    WorkerState,
)
from inferpool.service.tools.chaos.faults import BURST, Faults, schedule
from inferpool.service.tools.chaos.hosts import HostFaults
from inferpool.service.tools.chaos.load import ChaosTally
from inferpool.service.tools.chaos.plan import Fault
from inferpool.service.tools.chaos.watch import Recovery, Watch


def test_faults_come_in_order_as_often_as_asked_and_as_the_seed_decides():
    every_s = {"kill": 2.0, "stop": 0.0, "poison": 10.0}
    found = list(islice(schedule(3, every_s), 600))  # type: ignore[arg-type]
    moments = [moment for moment, _ in found]
    assert moments == sorted(moments)
    kills = [moment for moment, fault in found if fault == "kill"]
    assert 1.8 < kills[-1] / len(kills) < 2.2
    assert {fault for _, fault in found} == {"kill", "poison"}
    assert list(islice(schedule(3, every_s), 600)) == found
    assert list(islice(schedule(2, every_s), 600)) != found
    assert list(schedule(1, dict.fromkeys(every_s, 0.0))) == []


class SeenWatch(Watch):
    """Sees one worker with decoders."""

    def __init__(self, decoders: Sequence[DecoderState]) -> None:
        super().__init__(("127.0.0.1", 1))
        self.decoders = list(decoders)

    async def look(self) -> ServiceHealth:
        worker = WorkerState(name="m/0", state="ready", pid=1, decoders=self.decoders)
        return ServiceHealth(models=[ModelState(name="m", workers=[worker])])

    async def compare(self) -> None:
        self._compare(self.pending, await self.look(), 5.0)


def faults_on(watch: Watch, seed: int = 1, **every_s: float) -> Faults:
    return Faults(
        address=("127.0.0.1", 1), watch=watch, tally=ChaosTally(), questions=[], seed=seed,
        every_s=dict.fromkeys(get_args(Fault), 0.0) | every_s,
        timeout_s=1, keeps_quarantine=True, hosts=HostFaults(watch=watch, agents=[], seed=1),
        acts={},
    )  # fmt: skip


@contextmanager
def sleeping(num: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    processes = [subprocess.Popen(["sleep", "3600"]) for _ in range(num)]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


def is_stopped(process: "subprocess.Popen[bytes]") -> bool:
    return os.WIFSTOPPED(os.waitpid(process.pid, os.WUNTRACED)[1])


async def test_decoders_that_have_worked_are_killed_and_stopped_in_turn():
    assert not await faults_on(SeenWatch([]), decoder=1)._strike_decoder()
    with sleeping(3) as (first, second, idle):
        watch = SeenWatch([DecoderState(0, idle.pid), DecoderState(1, first.pid, 5)])
        faults = faults_on(watch, decoder=1)
        assert await faults._strike_decoder()
        faults.counts["decoder"] += 1
        assert first.wait(60) == -signal.SIGKILL
        watch.decoders[1] = DecoderState(1, second.pid, 5)
        assert not await faults._strike_decoder()  # until it is back
        await watch.compare()
        assert [(each.noticed, each.recovered) for each in watch.recoveries] == [(5.0, 5.0)]
        assert await faults._strike_decoder()
        assert await asyncio.to_thread(is_stopped, second)
        assert idle.poll() is None
        faults._kill_stopped_decoders()
        assert second.wait(60) == -signal.SIGKILL


async def test_burst_kills_each_forkserver_that_follows_and_watches_the_last():
    with sleeping(BURST) as living:
        watch = SeenWatch([])
        seen = [ForkserverState(state="starting", incarnation=n, pid=each.pid)
                for n, each in enumerate(living)]  # fmt: skip

        async def look() -> ServiceHealth:
            dead = [each for each in living if each.poll() is not None]
            return ServiceHealth(models=[], forkserver=seen[min(len(dead), BURST - 1)])

        watch.look = look  # type: ignore[method-assign]
        await faults_on(watch, burst=1)._strike_forkservers()
        assert {each.wait(60) for each in living} == {-signal.SIGKILL}
        assert [each.incarnation for each in watch.recoveries] == [BURST - 1]


async def test_decoder_that_is_not_there_is_noticed_and_not_back_and_no_worker_waits_for_it():
    watch = SeenWatch([])
    watch.add(Recovery(kind="decoder", worker="m/0 decoder 0", incarnation=77, began=1.0))
    watch.add(Recovery(kind="kill", worker="m/0", incarnation=-1, began=1.0))
    await watch.compare()
    decoder, worker = watch.recoveries
    assert (decoder.noticed, decoder.recovered) == (5.0, None)
    assert worker.recovered == 5.0


async def test_workers_of_a_version_that_was_swapped_are_not_waited_for():
    watch = SeenWatch([])
    watch.add(Recovery(kind="stop", worker="m/2/0", incarnation=0, began=1.0))
    watch.add(Recovery(kind="decoder", worker="m/2/0 decoder 1", incarnation=77, began=1.0))
    await watch.compare()
    assert not watch.recoveries


def test_any_rank_of_a_split_worker_is_struck_and_all_of_them_are_watched():
    with sleeping(2) as sleepers:
        ranks = [Rank(rank=rank, pid=process.pid) for rank, process in enumerate(sleepers)]
        worker = WorkerState(
            name="m/0", state="ready", incarnation=0, pid=ranks[0].pid, ranks=ranks
        )
        struck = set()
        for seed in range(12):
            watch = Watch(("127.0.0.1", 1))
            assert faults_on(watch, seed, stop=1)._strike_one_of([worker], "stop")
            (recovery,) = watch.recoveries
            struck.add(recovery.rank)
            assert {each.pid for each in recovery.processes} == {each.pid for each in ranks}
        assert struck == {0, 1}
        assert all(map(is_stopped, sleepers))
