"""That the benchmarks start, ask and end what they measure. What they measure is no test."""

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from tests.bench import front, peers, plots, sweep
from tests.bench.__main__ import main
from tests.bench.load import Bodies, Cell
from tests.bench.processes import HOST, Contender, Probe, Server, ask
from tests.bench.report import paired, spread
from tests.bench.rounds import Match, Plan
from tests.bench.servers.work import WORK
from tests.bench.workloads import WORKLOADS
from tests.e2e.running import until
from tests.ports import free_port

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")


def test_a_server_is_started_asked_and_ended_with_all_its_processes(tmp_path):
    port = free_port()
    module = "tests.bench.servers.ladder_server"
    contender = Contender(
        name="ladder", argv=[sys.executable, "-m", module, "{port}", "--queue", "--fastapi"]
    )
    with Server(contender, port, tmp_path / "log") as server:
        answer = server.wait_ready(Probe(path="/predict", body=b"12345"), timeout_s=60)
        assert answer == b'{"bytes": 5}'
        assert ask(port, Probe(path="/predict", body=b"x" * 200_000))[1] == b'{"bytes": 200000}'
        pids = server.pids()
        assert pids[0] == server.pid
        assert len(pids) >= 2
        assert server.pss_mib() > 1
        assert server.usage().front_s > 0
    assert not [pid for pid in pids if _is_alive(pid)]


_WITH_A_WORKER = """
import os, sys, time

def wait_for_the_end_of_parent(pid):
    while os.getppid() == pid:
        time.sleep(0.01)

server = os.getpid()
if os.fork():
    time.sleep(600)
if sys.argv[1] == "late":
    wait_for_the_end_of_parent(server)
    os.setsid()
else:
    os.setsid()
    print("has a session", flush=True)
    wait_for_the_end_of_parent(server)
    worker = os.getpid()
    if os.fork():
        sys.exit()
    wait_for_the_end_of_parent(worker)
print(os.getpid(), "is left", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("when", ["early", "late"])
def test_worker_that_takes_a_session_is_ended_even_if_its_parent_has_gone(tmp_path, when):
    log = tmp_path / "log"
    contender = Contender(name="ladder", argv=[sys.executable, "-c", _WITH_A_WORKER, when])
    with Server(contender, free_port(), log) as server:
        until(lambda: len(server.pids()) == 2)
        if when == "early":
            until(lambda: "has a session" in log.read_text())
        assert len(server.pids()) == 2
        os.kill(server.pid, signal.SIGKILL)
        until(lambda: "is left" in log.read_text())
        *_, pid, _, _ = log.read_text().split()
        assert _is_alive(int(pid))
    assert not _is_alive(int(pid))


def test_a_process_that_has_the_number_of_an_earlier_one_is_not_ours(tmp_path):
    contender = Contender(
        name="ladder", argv=[sys.executable, "-c", "import time; time.sleep(600)"]
    )
    with (
        subprocess.Popen(["sleep", "600"], start_new_session=True) as other,
        Server(contender, free_port(), tmp_path / "log") as server,
    ):
        try:
            server._births[other.pid] = 0
            assert server.pids() == [server.pid]
        finally:
            other.kill()


_WITH_A_FILE = "import tempfile, time; print(tempfile.mkdtemp(), flush=True); time.sleep(600)"


def test_what_a_server_leaves_in_its_folder_for_temporary_files_goes_with_it(tmp_path):
    log = tmp_path / "log"
    contender = Contender(name="ladder", argv=[sys.executable, "-c", _WITH_A_FILE])
    with Server(contender, free_port(), log) as server:
        until(lambda: log.read_text().endswith("\n"))
        assert server.pids() == [server.pid]
        left = Path(log.read_text().strip())
        assert left.is_dir()
    assert not left.exists()


def _is_alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.alone
def test_arrivals_come_at_their_rate_and_omit_nothing(tmp_path):
    port = free_port()
    module = "tests.bench.servers.ladder_server"
    contender = Contender(name="ladder", argv=[sys.executable, "-m", module, "{port}"])
    body = tmp_path / "body"
    body.write_bytes(b"x" * 200_000)  # more than a socket takes at once
    bodies = Bodies(files=[body], content_type="application/octet-stream")
    plan = Plan(connections=(), secs=1, warm_s=0, rounds=1, port=port)
    with Server(contender, port, tmp_path / "log") as server:
        server.wait_ready(bodies.probe(), timeout_s=60)
        found = sweep.arrivals(port, bodies, 100.0, plan, max_connections=8, seed=0)
        # 100 expected; five standard deviations of a Poisson process.
        assert 50 <= found["num_due"] <= 150
        assert found["num_good"] == found["num_due"]
        assert found["p50_ms"] <= found["p99_ms"] <= found["max_ms"]
        os.kill(server.pid, signal.SIGSTOP)
        stopped = sweep.arrivals(port, bodies, 20.0, plan, max_connections=8, seed=0)
        os.kill(server.pid, signal.SIGCONT)
    assert stopped["num_good"] == 0
    assert stopped["num_unanswered"] == stopped["num_due"] > 5
    assert stopped["p50_ms"] > 3000


def test_every_workload_is_known_to_the_peers_and_has_its_bodies():
    for workload in WORKLOADS.values():
        assert workload.work in WORK
        assert all(file.stat().st_size for file in workload.bodies().files)


def test_a_plot_of_cells_has_two_charts_for_each_workload():
    def cell(contender, round_, rate):
        values: dict[str, Any] = dict.fromkeys((each.name for each in fields(Cell)), 1)
        return Cell(**values | {
            "contender": contender, "workload": "w", "round": round_, "requests_per_s": rate
        })  # fmt: skip

    speed, tail = plots.of_cells([cell("a", 0, 10), cell("a", 1, 30), cell("b", 0, 5)])
    assert [bars.values[0] for bars in speed.bars] == [(20, 10, 30), (5, 5, 5)]
    assert [line.name for line in tail.lines] == ["a", "b"]


def test_a_port_that_is_taken_is_refused(capsys):
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        listener.listen()
        port = listener.getsockname()[1]
        assert main(["start", "--port", str(port)]) == 2
    assert "is taken" in capsys.readouterr().err


def test_a_peer_asked_for_by_name_must_be_installed(capsys, monkeypatch):
    monkeypatch.setattr(peers, "require_wrk", lambda: None)
    monkeypatch.setattr(peers, "installed_version", lambda python, distribution: None)
    assert main(["peers", "--peers", "mosec", "--port", str(free_port())]) == 2
    assert "--peer-python mosec=PATH" in capsys.readouterr().err


def test_the_peers_that_are_installed_take_part_by_default(capsys, monkeypatch):
    installed = {"mosec": "mosec", "/envs/ray": "ray"}
    monkeypatch.setattr(
        peers,
        "installed_version",
        lambda python, distribution: "1" if installed.get(python) == distribution else None,
    )
    parser = argparse.ArgumentParser()
    peers.add_arguments(parser)
    parser.add_argument("--inferpool", default="inferpool")
    args = parser.parse_args(
        ["--workloads", "echo-1k", "--peer-python", "mosec=mosec", "--peer-python", "ray=/envs/ray"]
    )
    (match,), settings = peers.make_matches(args)
    assert [each.name for each in match.contenders] == ["inferpool", "mosec", "ray"]
    assert list(settings) == ["mosec", "ray"]
    assert "Without torchserve" in capsys.readouterr().out


def test_a_peer_is_asked_where_it_predicts():
    bodies = Bodies(files=[], content_type="", path="/predict?shape=3")
    ours, other = Contender(name="a", argv=[]), Contender(name="b", argv=[], path="/predictions/b")
    match = Match(workload="w", bodies=bodies, contenders=[ours, other])
    assert match.asked_of(ours).bodies.path == "/predict?shape=3"
    assert match.asked_of(other).bodies.path == "/predictions/b"


def test_ratios_are_taken_within_a_round():
    ratio = paired({0: 10.0, 1: 40.0, 2: 30.0}, {0: 5.0, 1: 10.0})
    assert ratio is not None
    assert (ratio.median, ratio.low, ratio.high) == (3.0, 2.0, 4.0)
    assert paired({0: 1.0}, {1: 1.0}) is None


def test_a_spread_says_its_range():
    assert spread([1200.0, 1100.0, 1250.0]).text() == "1,200 (1,100-1,250)"
    assert spread([2.0]).text(1) == "2.0"


def test_the_front_end_is_timed_step_by_step(tmp_path, monkeypatch):
    monkeypatch.setattr(front, "_NUM_TURNS", 20)
    out = tmp_path / "front.json"
    assert main(["front", "--rounds", "1", "--out", str(out)]) == 0
    least = json.loads(out.read_text())["least_us"]
    assert set(least) == {*front.STEPS, "all"}
    assert all(value > 0 for value in least.values())
