"""A front end and agents of hosts as processes, while each of them is killed, stopped and ended."""

import contextlib
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest

from tests.certificates import make_authority, make_signed
from tests.e2e.hosts import KEYS, RunningCluster, agent_at, cluster
from tests.e2e.running import Running, asking, faulty, left_over, until

pytestmark = [pytest.mark.slow, pytest.mark.measures, pytest.mark.timeout(300)]
"""A host that is silent for three seconds is lost, also where the machine stands still."""

PATIENCE_S = 150.0
"""How long a call may take whose hosts all start anew meanwhile."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cluster")


@pytest.fixture(scope="module")
def shared(folder: Path) -> Iterator[RunningCluster]:
    model = faulty(
        options={"gate": folder / "gate", "calls": folder / "calls"},
        batch_timeout_s=20,
        max_batch_size=2,
        speed="exact",
    )
    with cluster("a", "b", settings={"default_timeout_s": PATIENCE_S, **model}) as made:
        yield made


@pytest.fixture
def pair(shared: RunningCluster) -> Iterator[RunningCluster]:
    """Return the cluster that these tests share, in full order."""
    shared.wait_until_full("a", "b")
    yield shared
    for name, each in {"front end": shared.service, **shared.agents}.items():
        for line in each.log[-30:]:
            print(name, line["time"], line["message"])  # noqa: T201  # for whom a test fails


@pytest.fixture
def gate(folder: Path) -> Iterator[Path]:
    """Return the file that, while it is there, keeps the model from loading, and from "wait"."""
    file = folder / "gate"
    yield file
    file.unlink(missing_ok=True)


def pid_on(made: RunningCluster, name: str) -> int:
    """Return the pid of the only worker of a host."""
    (worker,) = made.workers_of(name)
    return int(worker["pid"])


def send_all(agent: Running, signum: int) -> None:
    """Send a signal to an agent and all processes under it."""
    for process in agent.family():
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signum)


def ok(answer: httpx.Response) -> bool:
    return answer.status_code == 200 and answer.json()["predictions"][0]["twice"] == 42


def ask(made: RunningCluster) -> httpx.Response:
    return made.service.ask({"n": 21})


def is_refusal(line: dict[str, object]) -> bool:
    message = str(line["message"])
    return "refused" in message and "key" in message


def test_each_host_computes_and_health_tells_where(pair: RunningCluster):
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: ask(pair), range(40)))
    assert all(map(ok, answers))
    pids = {answer.json()["predictions"][0]["pid"] for answer in answers}
    assert pids == {pid_on(pair, "a"), pid_on(pair, "b")}
    assert not {each.pid for each in pair.service.family()} & pids


def test_a_killed_agent_takes_its_workers_along_and_costs_no_request(pair: RunningCluster):
    agent = pair.agents["a"]
    family = agent.family()
    with asking(lambda: ask(pair), 4) as answers:
        until(lambda: len(answers) > 8)
        agent.process.kill()
        pair.service.wait_for_log("host a ")  # long before its lease would run out
        until(lambda: len(answers) > 40)
        assert left_over(family) == []
        pair.start_agent("a")
        pair.wait_until_full("a", "b")
    assert all(map(ok, answers)), [each.text for each in answers if not ok(each)]


def test_work_of_a_stopped_host_goes_to_others_and_it_comes_back_with_what_it_has_loaded(
    pair: RunningCluster, gate: Path
):
    before = pid_on(pair, "a")
    gate.touch()  # nothing can be loaded any more
    with asking(lambda: ask(pair), 4) as answers:
        until(lambda: len(answers) > 8)
        send_all(pair.agents["a"], signal.SIGSTOP)
        pair.service.wait_for_log("host a ")
        pair.wait_until_lost("a")
        num = len(answers)
        until(lambda: len(answers) > num + 20)
        send_all(pair.agents["a"], signal.SIGCONT)
        pair.wait_until_full("a", "b")
    assert all(map(ok, answers)), [each.text for each in answers if not ok(each)]
    assert pid_on(pair, "a") == before
    pair.agents["a"].wait_for_log("is used again")


def test_a_front_end_that_is_killed_and_started_again_loads_nothing(
    pair: RunningCluster, gate: Path
):
    before = {name: pid_on(pair, name) for name in ("a", "b")}
    pair.service.process.kill()
    pair.service.wait()
    gate.touch()  # nothing can be loaded any more
    service = pair.start_service()
    until(lambda: service.get("/health/ready").status_code == 200)
    assert ok(ask(pair))
    pair.wait_until_full("a", "b")
    assert {name: pid_on(pair, name) for name in ("a", "b")} == before


def test_without_hosts_calls_are_told_to_come_again_until_there_is_one(pair: RunningCluster):
    for agent in pair.agents.values():
        agent.process.kill()
    until(lambda: not pair.hosts())
    refused = ask(pair)
    assert refused.status_code == 503
    assert int(refused.headers["Retry-After"]) >= 1
    assert "host" in refused.json()["detail"]
    assert pair.service.get("/health/live").status_code == 200
    assert pair.service.get("/health/ready").status_code == 503
    for name in ("a", "b"):
        pair.start_agent(name)
    until(lambda: pair.service.get("/health/ready").status_code == 200)
    assert ok(ask(pair))


def test_an_input_that_kills_workers_is_quarantined_wherever_it_is_computed(pair: RunningCluster):
    assert pair.service.ask({"n": 7, "do": "kill"}).json()["code"] == "worker_crashed"
    assert pair.service.ask({"n": 7, "do": "kill"}).status_code == 422
    until(lambda: ok(ask(pair)))


def test_a_lost_host_convicts_no_input(pair: RunningCluster, folder: Path, gate: Path):
    def num_begun() -> int:
        return (folder / "calls").read_text().split().count("9")

    (folder / "calls").touch()
    gate.touch()
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(pair.service.ask, {"n": 9, "do": "wait"}, timeout=PATIENCE_S)
        until(num_begun)
        for name in ("a", "b"):  # it is lost with one of them, and with the other one too if it can
            pair.agents[name].process.kill()
            pair.wait_until_lost(name)
        gate.unlink()
        for name in ("a", "b"):
            pair.start_agent(name)
        answer = call.result(PATIENCE_S)
    assert answer.json()["predictions"][0]["twice"] == 18, answer.text
    assert num_begun() >= 2
    assert pair.service.predict({"n": 9, "do": "wait"})[0]["twice"] == 18


def test_an_agent_that_is_told_to_end_leaves_without_a_lost_request(pair: RunningCluster):
    family = pair.agents["b"].family()
    with asking(lambda: ask(pair), 4) as answers:
        until(lambda: len(answers) > 8)
        pair.agents["b"].signal(signal.SIGTERM)
        assert pair.agents["b"].wait() == 0
        pair.wait_until_lost("b")
        num = len(answers)
        until(lambda: len(answers) > num + 8)
    assert all(map(ok, answers)), [each.text for each in answers if not ok(each)]
    assert left_over(family) == []
    pair.start_agent("b")


def test_an_agent_with_another_key_is_refused_and_both_sides_say_why(pair: RunningCluster):
    env = {"INFERPOOL_CLUSTER_KEYS": "the-key-of-another-cluster"}
    with agent_at(f"127.0.0.1:{pair.port}", "stranger", "--once", env=env) as stranger:
        assert stranger.wait() == 1
        for each in (stranger, pair.service):
            until(lambda log=each.log: any(is_refusal(line) for line in log))
    assert "stranger" not in pair.hosts()


def test_over_tls_an_agent_must_show_a_certificate_of_the_authority(tmp_path: Path):
    authority = make_authority(tmp_path)
    front, key = make_signed(tmp_path, "front", authority)
    host, host_key = make_signed(tmp_path, "host", authority)
    stranger, stranger_key = make_signed(tmp_path, "stranger", make_authority(tmp_path, "another"))
    own = {"certificate": front, "key": key, "authority": authority[0]}
    settings = faulty() | {f"cluster_{name}": path for name, path in own.items()}
    shown = ("--certificate", str(host), "--key", str(host_key), "--authority", str(authority[0]))
    with cluster("a", settings=settings, agent_arguments=shown) as made:
        assert ok(ask(made))
        address = f"127.0.0.1:{made.port}"
        wrong = [str(stranger), "--key", str(stranger_key), "--authority", str(authority[0])]
        for arguments in ((), ("--certificate", *wrong)):
            with agent_at(address, "b", *arguments, env=KEYS) as other:
                other.wait_for_log(address)  # why it could not join
                made.service.wait_for_log("did not join")
        assert set(made.hosts()) == {"a"}
