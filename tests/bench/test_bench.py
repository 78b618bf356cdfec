"""The benchmarks start, ask and end what they measure. What they measure is no test."""

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from tests.bench import front, peers
from tests.bench.__main__ import main, make_parser
from tests.bench.entries import count
from tests.bench.frame import Benchmark, Cell, range_text, ratios
from tests.bench.server import (
    HOST,
    INFERPOOL,
    BenchServer,
    Bodies,
    Probe,
    ServerCommand,
    _adopt_orphans,
    ask,
)
from tests.bench.servers.work import WORK
from tests.bench.sweep import load_open
from tests.bench.workloads import WORKLOADS
from tests.e2e.running import until
from tests.ports import free_port

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")

_SKETCH = [sys.executable, "-m", "tests.bench.servers.sketch_server", "{port}"]


def test_server_is_started_asked_and_ended_with_all_its_processes(tmp_path):
    port = free_port()
    command = ServerCommand(name="sketch", argv=[*_SKETCH, "--queue", "--fastapi"])
    with BenchServer(command, port, tmp_path / "log") as server:
        answer = server.wait_ready(Probe(path="/predict", body=b"12345"), timeout_s=60)
        assert answer == b'{"bytes": 5}'
        assert ask(port, Probe(path="/predict", body=b"x" * 200_000))[1] == b'{"bytes": 200000}'
        processes = server.processes()
        assert processes[0].pid == server.pid
        assert len(processes) >= 2
        assert server.pss_mib() > 1
        assert server.cpu().server > server.cpu().front > 0
    assert not any(process.is_running() for process in processes)


_WITH_A_WORKER = """
import os, sys, tempfile, time

def wait_for_the_end_of_parent(pid):
    while os.getppid() == pid:
        time.sleep(0.01)

server = os.getpid()
print(tempfile.mkdtemp(), flush=True)
if os.fork():
    time.sleep(600)
if sys.argv[1] == "late":
    wait_for_the_end_of_parent(server)
    os.setsid()
else:
    os.setsid()
    wait_for_the_end_of_parent(server)
    worker = os.getpid()
    if os.fork():
        sys.exit()
    wait_for_the_end_of_parent(worker)
print(os.getpid(), "is left", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("when", ["early", "late"])
def test_worker_that_leaves_the_session_is_ended_even_if_its_parent_has_gone(tmp_path, when):
    log = tmp_path / "log"
    command = ServerCommand(name="forks", argv=[sys.executable, "-c", _WITH_A_WORKER, when])
    with BenchServer(command, free_port(), log) as server:
        until(lambda: len(server.processes()) == 2)
        os.kill(server.pid, signal.SIGKILL)
        until(lambda: "is left" in log.read_text())
        folder, pid, *_ = log.read_text().split()
        assert psutil.pid_exists(int(pid))
        assert Path(folder).is_dir()
    assert not psutil.pid_exists(int(pid))
    assert not Path(folder).exists(), "its folder for temporary files goes with it"


@pytest.mark.parametrize("adopts", [True, False])
def test_process_adopts_orphans_afterwards_if_it_did_so_before(tmp_path, adopts: bool):
    before = _adopt_orphans(adopts)
    try:
        with BenchServer(
            ServerCommand(name="sleep", argv=["sleep", "600"]), free_port(), tmp_path / "log"
        ):
            assert _adopt_orphans(True)
        assert _adopt_orphans(before) == adopts
    finally:
        _adopt_orphans(before)


def test_process_that_was_there_before_is_not_the_servers(tmp_path):
    sleep = ["sleep", "600"]
    with subprocess.Popen(sleep, start_new_session=True) as other:
        try:
            command = ServerCommand(name="sleep", argv=sleep)
            with BenchServer(command, free_port(), tmp_path / "log") as server:
                assert [process.pid for process in server.processes()] == [server.pid]
            assert other.poll() is None
        finally:
            other.kill()


@pytest.mark.parametrize(("path", "asked_at"), [("", "/predict?a=1"), ("/own", "/own")])
def test_server_that_cannot_choose_its_path_is_asked_there(tmp_path, path, asked_at):
    body = tmp_path / "body"
    body.write_bytes(b"12345")
    bodies = Bodies(files=[body], path="/predict?a=1")
    bench = Benchmark("peers", argparse.Namespace(port=free_port(), warm=0))
    command = ServerCommand(name="sketch", argv=_SKETCH, path=path)
    with bench.warm_server("w", bodies, command) as (_, asked):
        assert asked == replace(bodies, path=asked_at)


@pytest.mark.alone
def test_arrivals_come_at_their_rate_and_omit_nothing(tmp_path):
    port = free_port()
    body = tmp_path / "body"
    body.write_bytes(b"x" * 200_000)  # more than a socket takes at once
    bodies = Bodies(files=[body])
    args = argparse.Namespace(secs=1, warm=0, max_connections=8)
    with BenchServer(ServerCommand(name="sketch", argv=_SKETCH), port, tmp_path / "log") as server:
        server.wait_ready(bodies.probe(), timeout_s=60)
        found = load_open(server, bodies, 100.0, args, seed=0)
        # 100 expected; five standard deviations of a Poisson process.
        assert 50 <= found["good_per_s"] <= 150
        assert found["refused"] == found["unanswered"] == 0
        assert found["p50_ms"] <= found["p99_ms"] <= found["max_ms"]
        os.kill(server.pid, signal.SIGSTOP)
        stopped = load_open(server, bodies, 20.0, args, seed=0)
        os.kill(server.pid, signal.SIGCONT)
    assert stopped["good_per_s"] == 0
    assert stopped["unanswered"] > 5
    assert stopped["p50_ms"] > 4900


def test_every_workload_is_known_to_the_peers_and_has_its_bodies():
    for workload in WORKLOADS.values():
        assert workload.work in WORK
        assert all(file.stat().st_size for file in workload.bodies().files)


def test_port_that_is_taken_is_refused(capsys):
    with socket.create_server((HOST, 0)) as listener:
        assert main(["start", "--port", str(listener.getsockname()[1])]) == 2
    assert "is taken" in capsys.readouterr().err


def test_peer_asked_for_by_name_must_be_installed(capsys, monkeypatch):
    monkeypatch.setattr(peers, "installed_version", lambda python, distribution: None)
    assert main(["peers", "--peers", "mosec", "--port", str(free_port())]) == 2
    assert "--peer-python mosec=PATH" in capsys.readouterr().err


def test_peers_that_are_installed_take_part_by_default(capsys, monkeypatch):
    installed = {"mosec": "mosec", "/envs/ray": "ray"}
    monkeypatch.setattr(
        peers,
        "installed_version",
        lambda python, distribution: "1" if installed.get(python) == distribution else None,
    )
    pythons = ["--peer-python", "mosec=mosec", "--peer-python", "ray=/envs/ray"]
    args = make_parser().parse_args(["peers", "--workloads", "echo-1k", *pythons])
    bench = Benchmark("peers", args)
    names = [command.name for _, _, command in peers.contenders(bench)]
    assert names == ["inferpool", "mosec", "ray"]
    assert list(bench.content["peers"]) == ["mosec", "ray"]
    assert "Without torchserve" in capsys.readouterr().out


def test_ratios_are_taken_within_a_round_and_rounds_are_summed_up():
    def cell(contender: str, round_: int, rate: float) -> Cell:
        return Cell(workload="w", contender=contender, round=round_, figures={"rate": rate})

    ours = [cell("ours", 0, 10), cell("ours", 1, 40), cell("ours", 2, 30)]
    theirs = [cell("theirs", 0, 5), cell("theirs", 1, 10)]
    cells = [*ours, *theirs]
    assert ratios(cells, ours[0].key, theirs[0].key, "rate") == [2.0, 4.0]
    assert ratios(cells, ours[0].key, theirs[0].key, "p50_ms") == []
    assert range_text([1200.0, 1100.0, 1250.0]) == "1,200 (1,100-1,250)"
    assert range_text([2.0], 1) == "2.0"


def test_front_end_is_timed_step_by_step_and_the_report_has_all_files(tmp_path, monkeypatch):
    monkeypatch.setattr(front, "_NUM_TURNS", 60)
    out = tmp_path / "front.json"
    assert main(["front", "--rounds", "1", "--out", str(out), "--port", str(free_port())]) == 0
    cells = json.loads(out.read_text())["cells"]
    assert [cell["contender"] for cell in cells] == [*front.STEPS, "all"]
    assert all(cell["figures"]["least_us"] > 0 for cell in cells)
    assert front.STEPS[0] in out.with_suffix(".html").read_text()


_MOST = {1: (32, 65), 2: (36, 85)}
"""Files and entries by the number of front ends: as counted, and a few more. A timer may fall due
meanwhile, or a message come in two pieces."""


@pytest.mark.measures  # on a busy machine more timers fall due
@pytest.mark.parametrize("num_fronts", _MOST)
def test_call_enters_few_files(num_fronts: int) -> None:
    entries = count(INFERPOOL, num_fronts, free_port())
    most_files, most_entries = _MOST[num_fronts]
    assert len({entered for _, entered in entries}) <= most_files, entries
    assert len(entries) <= most_entries, entries
