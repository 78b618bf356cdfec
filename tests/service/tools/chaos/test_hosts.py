import asyncio
import signal
import time
from functools import partial
from pathlib import Path

import psutil
import pytest

from inferpool.service.client.health import (
    KnownHost,
    ModelState,
    ServiceHealth,
    WorkerState,
)
from inferpool.service.tools.chaos.hosts import TURNS, HostFaults
from inferpool.service.tools.chaos.watch import Recovery, Watch
from inferpool.service.tools.trial.agents import TrialAgent
from tests.e2e.running import left_over, until


class FakeAgent(TrialAgent):
    """Keeps what is done to it; no process is behind it."""

    def __init__(self, name: str, done: list[str]) -> None:
        super().__init__(name, [], Path("/nowhere"))
        for word in ("start", "kill", "pause", "resume", "end"):
            setattr(self, word, partial(done.append, f"{name} {word}"))

    async def ended(self) -> int:
        return 0


class HostsWatch(Watch):
    """Sees hosts with one worker each, as the test says."""

    def __init__(self, *names: str) -> None:
        super().__init__(("127.0.0.1", 1))
        self.hosts = {name: KnownHost(name, "connected", 1) for name in names}
        self.states = dict.fromkeys(names, "ready")

    async def look(self) -> ServiceHealth:
        workers = [
            WorkerState(name=f"m/{name}", state=state, host=name)
            for name, state in self.states.items()
            if self.hosts[name].is_connected
        ]
        models = [ModelState(name="m", workers=workers)]
        return ServiceHealth(models=models, hosts=list(self.hosts.values()))

    async def compare(self) -> None:
        self._compare(self.pending, await self.look(), time.monotonic())

    async def lose(self, name: str) -> None:
        self.hosts[name].state = "lost"
        await self.compare()

    async def find(self, name: str) -> None:
        self.hosts[name] = KnownHost(name, "connected", self.hosts[name].epoch + 1)
        await self.compare()


async def test_hosts_are_killed_stopped_and_ended_in_turn_and_each_is_brought_back(virtual_time):
    watch, done = HostsWatch("a", "b"), list[str]()
    faults = HostFaults(watch=watch, agents=[FakeAgent(n, done) for n in ("a", "b")], seed=3)
    for kind in TURNS:
        await faults.strike()
        (struck,) = watch.pending
        assert (struck.kind, struck.noticed) == (kind, None)
        await watch.lose(struck.host)
        await faults.settle()
        assert (struck.noticed, struck.recovered) != (None, None)
        await watch.find(struck.host)
        assert struck.freed is not None
        assert struck.recovered is not None
        assert struck.began <= struck.freed <= struck.recovered
    words = [each.split()[1] for each in done]
    assert words == ["kill", "start", "pause", "resume", "end", "start"]


async def test_the_last_host_that_is_well_is_left_alone_unless_it_is_the_only_one(virtual_time):
    watch, done = HostsWatch("a", "b"), list[str]()
    faults = HostFaults(watch=watch, agents=[FakeAgent(n, done) for n in ("a", "b")], seed=1)
    watch.states["b"] = "loading"
    striking = asyncio.create_task(faults.strike())
    await asyncio.sleep(5)
    assert not striking.done()
    watch.states["b"] = "ready"
    await striking
    alone = HostFaults(watch=HostsWatch("a"), agents=[FakeAgent("a", done)], seed=1)
    await alone.strike()
    assert done[-1] == "a kill"


async def test_workers_of_a_struck_host_are_not_waited_for_and_others_do_not_wait_for_it():
    watch = HostsWatch("a", "b")
    watch.add(Recovery(kind="kill", worker="m/a", host="a", incarnation=-1, began=1.0))
    watch.add(Recovery(kind="kill", worker="m/b", host="b", incarnation=-1, began=1.0))
    watch.add(Recovery(kind="host kill", worker="a", host="a", incarnation=1, began=1.0))
    assert [each.worker for each in watch.recoveries] == ["m/b", "a"]
    watch.states["a"] = "loading"
    await watch.compare()
    assert [each.worker for each in watch.pending] == ["a"]


@pytest.mark.parametrize("state", ["lost", "connected"])
async def test_host_that_joined_again_between_two_looks_was_lost(state):
    watch = HostsWatch("a")
    watch.add(Recovery(kind="host stop", worker="a", host="a", incarnation=1, began=1.0))
    await watch.compare()
    assert watch.pending[0].noticed is None
    watch.hosts["a"] = KnownHost("a", state, 2)
    await watch.compare()
    assert watch.pending[0].noticed is not None


def test_a_host_is_stopped_with_all_processes_under_its_agent_and_goes_on(tmp_path, monkeypatch):
    program = "import subprocess; subprocess.run(['sleep', '3600'])"
    monkeypatch.setattr(
        "inferpool.service.tools.trial.processes.bound_command",
        lambda _: ["python3", "-c", program],
    )
    agent = TrialAgent("a", [], tmp_path / "log")

    def statuses() -> set[str]:
        return {each.status() for each in agent.family()}

    agent.start()
    try:
        # One that is stopped before it is a program of its own would hold up its parent's stop.
        until(lambda: "sleep" in {each.name() for each in agent.family()})
        agent.pause()  # a busy machine takes a while to stop them, and to let them go on
        until(lambda: statuses() == {psutil.STATUS_STOPPED})
        agent.resume()
        until(lambda: psutil.STATUS_STOPPED not in statuses())
        agent.kill()
        assert asyncio.run(agent.ended()) == -signal.SIGKILL
        assert len(agent.family()) == 1  # what it forks is its own to look after
    finally:
        agent.destroy()
    assert not left_over(agent.family())
