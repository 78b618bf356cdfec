"""A model that is spread over hosts, each an agent of its own: it ends and comes back as one."""

import contextlib
import os
import signal
from collections.abc import Iterator

import httpx
import psutil
import pytest

from tests.e2e.hosts import RunningCluster, cluster
from tests.e2e.running import asking, faulty, left_over, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

START_S = 120.0
"""How long the agents of several hosts may take to start at once, on a busy machine."""
SPREAD = faulty(
    source="tests.split_fault_model:SplitFaultModel",
    placement="pipeline",
    devices_per_replica=2,
    spread=True,
    batch_timeout_s=20,
)


@pytest.fixture(scope="module")
def shared() -> Iterator[RunningCluster]:
    settings = SPREAD | {"default_timeout_s": 60}
    with cluster("a", "b", "c", settings=settings, ready=False) as made:
        yield made


@pytest.fixture
def trio(shared: RunningCluster) -> RunningCluster:
    """Return a cluster of three hosts, of which two have the ranks of a replica."""
    until(lambda: set(shared.hosts()) >= {"a", "b", "c"}, START_S)
    until(lambda: ready(shared), START_S)
    return shared


def ready(made: RunningCluster) -> bool:
    workers = made.service.workers()
    return [each["state"] for each in workers] == ["ready"] and len(workers[0]["ranks"]) == 2


def ask(made: RunningCluster) -> httpx.Response:
    return made.service.ask({"n": 21, "rank": 1})


def is_right(answer: httpx.Response) -> bool:
    """Return whether a call was answered right, or refused at once, since nothing was up."""
    if answer.status_code == 503:
        return int(answer.headers["Retry-After"]) >= 1
    return answer.status_code == 200 and answer.json()["predictions"][0]["twice"] == 42


def test_the_ranks_are_on_two_hosts_and_health_says_which(trio: RunningCluster):
    assert ask(trio).json()["predictions"][0]["twice"] == 42
    (worker,) = trio.service.workers()
    hosts = worker["host"].split("+")
    assert [rank["host"] for rank in worker["ranks"]] == hosts
    for host, rank in zip(hosts, worker["ranks"], strict=True):
        assert rank["pid"] in {process.pid for process in trio.agents[host].family()}
        assert trio.hosts()[host]["workers_ready"] == 1
    assert worker["placement"] == "pipeline"


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_ends_the_other_and_all_come_back(trio: RunningCluster, rank: int):
    (worker,) = trio.service.workers()
    ranks = [psutil.Process(each["pid"]) for each in worker["ranks"]]
    with asking(lambda: ask(trio), 4) as answers:
        until(lambda: len(answers) > 8)
        ranks[rank].kill()
        until(lambda: trio.service.workers()[0]["incarnation"] > worker["incarnation"])
        until(lambda: ready(trio))
        num = len(answers)
        until(lambda: len(answers) > num + 8)
    assert left_over(ranks) == []
    assert all(map(is_right, answers)), [each.text for each in answers if not is_right(each)]
    assert answers[-1].status_code == 200


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP])
def test_a_host_that_is_lost_is_replaced_by_another(trio: RunningCluster, signum: signal.Signals):
    (worker,) = trio.service.workers()
    lead, follower = worker["host"].split("+")
    agent = trio.agents[follower]
    others = [psutil.Process(worker["ranks"][0]["pid"])]
    with asking(lambda: ask(trio), 4) as answers:
        until(lambda: len(answers) > 8)
        os.kill(agent.process.pid, signum)
        trio.wait_until_lost(follower)
        until(lambda: ready(trio) and trio.service.workers()[0]["host"] != worker["host"])
        assert left_over(others) == []
        num = len(answers)
        until(lambda: len(answers) > num + 8)
    assert all(map(is_right, answers)), [each.text for each in answers if not is_right(each)]
    assert answers[-1].status_code == 200
    hosts = trio.service.workers()[0]["host"].split("+")
    assert lead in hosts
    assert follower not in hosts
    if signum == signal.SIGSTOP:
        ranks = [each for each in agent.family() if each.pid == worker["ranks"][1]["pid"]]
        agent.signal(signal.SIGCONT)
        until(lambda: left_over(ranks) == [])  # it ends what the others have given up
    else:
        with contextlib.suppress(psutil.NoSuchProcess):
            trio.start_agent(follower)


def test_too_few_hosts_are_a_wait_and_not_a_failure(trio: RunningCluster):
    for name in ("b", "c"):
        trio.agents[name].signal(signal.SIGTERM)
        assert trio.agents[name].wait() == 0
    until(lambda: trio.service.workers() == [])
    answer = ask(trio)
    assert answer.status_code == 503
    assert trio.service.process.poll() is None
    trio.start_agent("b")
    until(lambda: ready(trio), START_S)
    assert ask(trio).status_code == 200
