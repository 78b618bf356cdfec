"""Versions that are swapped in real services while clients ask."""

import asyncio
import os
import random
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from inferpool.service.tools.chaos.resources import holdings_of
from inferpool.service.tools.trial.connection import NoAnswerError
from inferpool.service.tools.trial.processes import pss_of
from tests.e2e.running import Running, left_over, num_descriptors, running
from tests.e2e.swapping import KEYS, SwapOperator, serving, under_load

NUM_CLIENTS = 8
_PAUSE_S = 0.02
"""Between two calls of a client: some hundred calls a second, and tens in each swap."""
_MOST_POOLED = 8
"""Threads that the main process may still begin for work off the event loop; they stay."""


@dataclass(frozen=True)
class Held:
    """What a service holds."""

    num_processes: int
    shared: tuple[int, int]
    """The bytes and the pieces of shared memory."""
    by_pid: Mapping[int, int]
    """Descriptors of each process."""
    num_threads: int
    """Threads of the main process."""
    own_bytes: Mapping[int, int]

    def is_within(self, before: "Held") -> bool:
        """Return whether nothing more is held; workers of other versions are other processes."""
        same = [pid for pid in self.by_pid if pid in before.by_pid]
        return (
            (self.num_processes, self.shared) == (before.num_processes, before.shared)
            and all(self.by_pid[pid] <= before.by_pid[pid] for pid in same)
            and self.num_threads <= before.num_threads + _MOST_POOLED
        )


def held_by(service: Running) -> Held:
    family = service.family()
    total = holdings_of(service.process.pid, family)
    return Held(
        num_processes=len(family),
        shared=(total.shared_bytes, total.shared_files),
        by_pid={each.pid: num_descriptors(each) for each in family},
        num_threads=psutil.Process(service.process.pid).num_threads(),
        own_bytes={each.pid: pss_of(each.pid).own for each in family},
    )


@pytest.mark.slow
@pytest.mark.measures  # a busy machine returns memory later
def test_each_call_is_answered_whole_by_one_version_and_swaps_leave_nothing_over():
    asyncio.run(swap_often(20))  # a coroutine may take a minute


async def swap_often(num_swaps: int) -> None:
    with serving("--front-ends", "2") as service:
        operator = SwapOperator(service.address)

        async def swap(num: int) -> Held:
            """Swap so often under load, and return what is held once all is quiet."""
            async with under_load(service.address, pause_s=_PAUSE_S) as tally:
                for number in range(num):
                    status, answer = await operator.swap(rollback_s=60 * (number % 2))
                    assert status == 200, answer
                    if number % 4 == 3:
                        status, answer = await operator.post("rollback")
                        assert status == 200, answer
                status, answer = await operator.swap()
                assert status == 200, answer
                await tally.until(tally.right + 50)
            tally.check()
            assert len(tally.marks) > num / 2
            await operator.until_quiet()
            return held_by(service)

        before = await swap(6)
        after = await swap(num_swaps)
        for _ in range(300):  # connections and exits take a moment
            if after.is_within(before):
                break
            await asyncio.sleep(0.2)
            after = held_by(service)
        assert after.is_within(before), (after, before)
        main = service.process.pid
        # What is remembered of the last 20 versions comes to 1 MiB.
        assert after.own_bytes[main] < before.own_bytes[main] + 3 * 2**20


def pids_of(service: Running, who: str, known: set[int]) -> list[int]:
    """Return the processes of a kind; `known` are those from before the swap."""
    health = service.get("/health").json()
    match who:
        case "old worker":
            return [w["pid"] for m in health["models"] for w in m["workers"] if w["pid"] in known]
        case "new worker":
            return [each.pid for each in service.family() if each.pid not in known]
        case "forkserver":
            return [health["forkserver"]["pid"]]
    return [front["pid"] for front in health["fronts"] if front["pid"]]


@pytest.mark.slow
def test_swaps_end_whole_when_processes_are_killed_meanwhile():
    asyncio.run(kill_meanwhile(num_rounds=3))


async def kill_meanwhile(num_rounds: int) -> None:
    chance = random.Random(5)
    with serving("--front-ends", "2", replicas=2) as service:
        operator = SwapOperator(service.address)
        async with under_load(service.address, NUM_CLIENTS, pause_s=_PAUSE_S) as tally:
            for who in ("old worker", "new worker", "forkserver", "front") * num_rounds:
                known = {each.pid for each in service.family()}
                asked = asyncio.create_task(operator.swap({"load_s": 0.3}))
                await asyncio.sleep(chance.uniform(0.05, 1.0))
                pids = await asyncio.to_thread(pids_of, service, who, known)
                if pids:
                    os.kill(chance.choice(pids), signal.SIGKILL)
                try:
                    status, answer = await asked
                except NoAnswerError:  # the front that was killed had it
                    assert who == "front"
                else:
                    assert status == 200 or (status == 422 and answer["detail"]), answer
                await operator.until_quiet()
                await asyncio.to_thread(service.wait_until_full)
            await tally.until(tally.right + 50)
        # A front that is killed takes the calls of its connections with it.
        assert len(tally.lost) <= NUM_CLIENTS * num_rounds
        assert not any("no answer in" in each for each in tally.lost), tally.lost
        tally.lost.clear()
        tally.check(may_refuse=True)


def test_a_service_that_is_killed_while_it_swaps_comes_back_with_one_whole_version(tmp_path: Path):
    asyncio.run(kill_again_and_again(2, tmp_path))  # a coroutine may take a minute


async def kill_again_and_again(num_kills: int, tmp_path: Path) -> None:
    config = tmp_path / "inferpool.toml"
    config.write_text(
        'arena_bytes = 67108864\nmodels.m.source = "tests.marked_model:MarkedModel"\n'
        "models.m.replicas = 2\nmodels.m.options.mark = 0\n"
    )
    chance = random.Random(7)
    allowed = {0}
    for number in range(1, num_kills + 2):
        with running("--config", str(config), env=KEYS) as service:
            answers = [service.ask({"n": n}, {"n": n + 1}) for n in range(8)]
            assert {answer.status_code for answer in answers} == {200}
            assert len({answer.headers["x-model-version"] for answer in answers}) == 1
            marks = {each["mark"] for a in answers for each in a.json()["predictions"]}
            assert len(marks) == 1
            assert marks <= allowed
            if number > num_kills:
                return
            swap = SwapOperator(service.address).swap({"mark": number, "load_s": 0.2})
            asked = asyncio.create_task(swap)
            await asyncio.sleep(chance.uniform(0.0, 1.5))
            family = service.family()
            service.signal(signal.SIGKILL)
            try:
                status, answer = await asked
            except (OSError, NoAnswerError):
                allowed = marks | {number}
            else:
                assert status == 200, answer
                allowed = {number}
            assert not await asyncio.to_thread(left_over, family)
