"""That the benchmarks start, ask and end what they measure. What they measure is no test."""

import socket
import sys

import pytest

from tests.bench import peers
from tests.bench.__main__ import main
from tests.bench.processes import HOST, Contender, Probe, Server, ask
from tests.bench.report import paired, spread

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        port: int = listener.getsockname()[1]
        return port


def test_a_server_is_started_asked_and_ended_with_all_its_processes(tmp_path):
    port = _free_port()
    module = "tests.bench.servers.ladder_server"
    contender = Contender(
        name="ladder", argv=[sys.executable, "-m", module, "{port}", "--queue", "--fastapi"]
    )
    with Server(contender, port, tmp_path / "log") as server:
        answer = server.wait_ready(Probe(path="/predict", body=b"12345"), timeout_s=30)
        assert answer == b'{"bytes": 5}'
        assert ask(port, Probe(path="/predict", body=b"x" * 200_000))[1] == b'{"bytes": 200000}'
        pids = server.pids()
        assert pids[0] == server.pid
        assert len(pids) >= 2
        assert server.pss_mib() > 1
        assert server.usage().front_s > 0
    assert not [pid for pid in pids if _is_alive(pid)]


def _is_alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_port_that_is_taken_is_refused(capsys):
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        listener.listen()
        port = listener.getsockname()[1]
        assert main(["start", "--port", str(port)]) == 2
    assert "is taken" in capsys.readouterr().err


def test_a_peer_asked_for_by_name_must_be_installed(capsys, monkeypatch):
    monkeypatch.setattr(peers, "require_wrk", lambda: None)
    monkeypatch.setattr(peers, "module_version", lambda python, module: None)
    assert main(["peers", "--peers", "mosec", "--port", str(_free_port())]) == 2
    assert "--peer-python mosec=PATH" in capsys.readouterr().err


def test_ratios_are_taken_within_a_round():
    ratio = paired({0: 10.0, 1: 40.0, 2: 30.0}, {0: 5.0, 1: 10.0})
    assert ratio is not None
    assert (ratio.median, ratio.low, ratio.high) == (3.0, 2.0, 4.0)
    assert paired({0: 1.0}, {1: 1.0}) is None


def test_a_spread_says_its_range():
    assert spread([1200.0, 1100.0, 1250.0]).text() == "1,200 (1,100-1,250)"
    assert spread([2.0]).text(1) == "2.0"
