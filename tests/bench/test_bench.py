"""The benchmarks start, ask and end what they measure. What they measure is no test."""

import argparse
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

from inferpool.workers.host.orphans import adopt_orphans
from tests.bench import peers
from tests.bench.command import main, make_parser
from tests.bench.frame import Benchmark, Cell, range_text, ratios
from tests.bench.server import BenchServer, Bodies, ServerCommand
from tests.bench.trace import Span, busy, overlap
from tests.e2e import forked
from tests.e2e.running import until
from tests.ports import free_port

pytestmark = [
    pytest.mark.slow,
    pytest.mark.measures,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc"),
]

_ONE_CELL = "--rounds 1 --secs 1 --warm 0 --connections 4"
_COMMANDS = {
    "front --rounds 1 --turns 60": "least_us",
    "outputs --rounds 1 --kib 64": "wall_us",
    "batches --rounds 1 --num 20": "longest_ms",
    "trace --secs 1 --workers 1 --model tests.bench.models:StandIn": "hidden",
    "start --rounds 1 --model echo": "seconds",
    "overload --rounds 1 --secs 1 --times 3": "goodput_share",
    "decoders --rounds 1 --secs 0.5 --warm 0.2 --numbers 1": "worker_us",
    "bodies --rounds 1 --secs 0.5 --warm 0.2 --bytes 80000 --front-ends 1": "main_us",
    "protocols --rounds 1 --secs 0.5 --warm 0.2 --connections 4": "service_us",
    "streams --rounds 1 --secs 1 --hangups 64": "parts_per_s",
    "shares --source sleep --rounds 1 --secs 1": "ratio",
    "jobs --source sleep --rounds 1 --secs 1": "of_idle",
    'soak --requests 400 --serve-args "--job-store none"': "",
    "presets --rounds 1 --pictures 8 --sources torchvision:mobilenet_v3_small": "images_per_s",
    "split --parts restart --kills 1 --workloads minilm --placements 'pipeline 2'": "restart_ms",
}
_WRK_COMMANDS = {
    "peers --peers asgi --workloads echo-1k --rounds 1 --secs 1 --warm 1 --connections 4": (
        "requests_per_s"
    ),
    "sweep --peers none --workloads echo-1k --rounds 1 --secs 1 --rates 20,40": "good_per_s",
    f"hosts --batches 20 --workloads echo-1k {_ONE_CELL}": "front_cpu_us",
}
_SKETCH = [sys.executable, "-m", "tests.bench.servers.sketch_server", "{port}"]
_WITH_A_WORKER = """
import os, sys, tempfile, time

def wait_for_the_end_of_parent(pid):
    while os.getppid() == pid:
        time.sleep(0.01)

server = os.getpid()
print(tempfile.mkdtemp(), flush=True)
if os.fork():
    time.sleep(600)
os.setsid()
wait_for_the_end_of_parent(server)
worker = os.getpid()
if os.fork():
    sys.exit()
wait_for_the_end_of_parent(worker)
print(os.getpid(), "is left", flush=True)
time.sleep(600)
"""


@pytest.fixture
def body(tmp_path: Path) -> Bodies:
    (tmp_path / "body").write_bytes(b"x" * 200_000)  # more than a socket takes at once
    return Bodies(files=[tmp_path / "body"])


@pytest.fixture(autouse=True)
def same_threads() -> Iterator[None]:
    """Restore the number of torch's threads, which a benchmark may set."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("command", [*_COMMANDS, *_WRK_COMMANDS])
def test_command_measures_and_writes_its_report(command, tmp_path):
    if command in _WRK_COMMANDS and not shutil.which("wrk"):
        pytest.skip("apt-get install wrk")
    saved = _run(command, tmp_path)
    figure = (_COMMANDS | _WRK_COMMANDS)[command]
    assert not figure or any(figure in cell["figures"] for cell in saved["cells"])
    assert (tmp_path / "out.html").exists()
    if command.startswith("soak"):
        counts = saved["counts"]
        assert counts["sent"] == 400
        assert counts["right"] == 400 - 24
        assert counts["abandoned"] == counts["bad"] == 12
    if command.startswith("trace"):
        stages = {each["cat"] for each in saved["traceEvents"] if "cat" in each}
        assert stages == {"queued", "prepare", "compute", "answer"}


def _run(command, tmp_path):
    out = tmp_path / "out.json"
    words = [*shlex.split(command), "--port", str(free_port()), "--out", str(out)]
    if not command.startswith("start"):
        forked.origin_pid()  # it runs, so that it does not count as a process of a service
        words += ["--inferpool", shlex.join(forked.COMMAND)]
    assert main(words, forked.popen) == 0
    return json.loads(out.read_text())


@pytest.mark.parametrize(("num_fronts", "most_files", "most_entries"), [(1, 16, 35), (2, 20, 53)])
def test_call_enters_few_files(num_fronts, most_files, most_entries, tmp_path):
    saved = _run(f"entries --front-ends {num_fronts}", tmp_path)
    # As counted, and one entry more: a timer may fall due.
    for side, files, entries in (("front end", most_files, most_entries), ("worker", 8, 18)):
        found = saved[side]
        assert len(found["files"]) <= files, found["entries"]
        assert len(found["entries"]) <= entries, found["entries"]


def test_echo_imports_little(tmp_path):
    saved = _run("loaded", tmp_path)
    for side, most_lines in ("front end", 35_500), ("worker", 8_200):
        assert saved[side]["lines"] <= most_lines, saved[side]["files"]


def test_server_is_started_asked_and_ended_with_its_processes_alone(tmp_path, body):
    with subprocess.Popen(["sleep", "600"], start_new_session=True) as other:
        command = ServerCommand(name="sketch", argv=[*_SKETCH, "--queue", "--fastapi"])
        with BenchServer(command, free_port(), tmp_path / "log") as server:
            assert server.wait_ready(body) == '{"bytes": 200000}'
            processes = server.processes()
            assert processes[0].pid == server.pid
            assert len(processes) >= 2
        assert not any(process.is_running() for process in processes)
        assert other.poll() is None
        other.kill()


def test_worker_that_leaves_the_session_is_ended_even_if_its_parent_has_gone(tmp_path):
    log = tmp_path / "log"
    command = ServerCommand(name="forks", argv=[sys.executable, "-c", _WITH_A_WORKER])
    end_adoption = adopt_orphans()
    try:
        with BenchServer(command, free_port(), log) as server:
            until(lambda: len(server.processes()) == 2)
            os.kill(server.pid, signal.SIGKILL)
            until(lambda: "is left" in log.read_text())
            folder, pid, *_ = log.read_text().split()
            assert psutil.pid_exists(int(pid))
        assert not psutil.pid_exists(int(pid))
        assert not Path(folder).exists(), "its folder for temporary files goes with it"
    finally:
        end_adoption()


def test_latencies_omit_nothing_of_a_server_that_stands_still(tmp_path, body):
    args = argparse.Namespace(secs=1, warm=0, max_connections=8)
    command = ServerCommand(name="sketch", argv=_SKETCH)
    with BenchServer(command, free_port(), tmp_path / "log") as server:
        server.wait_ready(body)
        os.kill(server.pid, signal.SIGSTOP)
        stopped = peers.load_open(server, body, 20.0, args, seed=0)
        os.kill(server.pid, signal.SIGCONT)
    assert stopped["good_per_s"] == 0
    assert stopped["unanswered"] > 5
    assert stopped["p50_ms"] > 4900


def test_peers_that_are_installed_take_part_and_one_that_is_named_must_be(capsys, monkeypatch):
    monkeypatch.setattr(peers, "is_installed", lambda name: name == "litserve")
    args = make_parser().parse_args(["peers", "--workloads", "echo-1k"])
    found = peers.contenders(Benchmark("peers", args))
    assert [command.name for _, _, command in found] == ["inferpool", "litserve"]
    assert "Without mosec" in capsys.readouterr().out
    assert main(["peers", "--peers", "mosec", "--port", str(free_port())]) == 2
    assert "mosec is not installed" in capsys.readouterr().err


def test_ratios_are_taken_within_a_round_and_rounds_are_summed_up():
    ours = [Cell("w", "ours", 0, {"rate": rate}, i) for i, rate in enumerate((10, 40, 30))]
    theirs = [Cell("w", "theirs", 0, {"rate": rate}, i) for i, rate in enumerate((5, 10))]
    assert ratios(ours, theirs, "rate") == [2.0, 4.0]
    assert ratios(ours, theirs, "p50_ms") == []
    assert range_text([1200.0, 1100.0, 1250.0]) == "1,200 (1,100-1,250)"


def test_overlap_is_the_share_of_preparing_that_other_batches_hide():
    spans = [
        Span(worker=0, num_items=1, stages={
            "queued": (0.0, prepare), "prepare": (prepare, prepare + 1),
            "compute": (prepare + 1, prepare + 3), "answer": (prepare + 3, prepare + 3),
        })
        for prepare in (0.0, 2.5)
    ]  # fmt: skip
    assert overlap(spans) == 0.25
    assert busy(spans) == 4 / 5.5
