"""A service that is forked for a test is what a command line would have started."""

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.descriptors import num_open
from tests.e2e import forked
from tests.e2e.running import FAULTY, Running, left_over, running, until

SCRIPT = """
import json, os, sys
import beside
found = [sys.argv, __name__, globals().get("__file__"), sys.path, sys.orig_argv, os.getcwd()]
print(json.dumps([*found, beside.WORD, "torch" in globals()]))
sys.exit(7)
"""
SERVING = """
import time, inferpool
with inferpool.serve("echo") as service:
    print(service._process.pid, flush=True)
    time.sleep(600)
"""
_SIGNALS = ("SigBlk", "SigIgn", "SigCgt")


def descriptors(pid: int) -> Counter[str]:
    """Return what kinds of files a process has open, and how many of each."""
    found: Counter[str] = Counter()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # just closed
            found[re.sub(r"\d+", "N", str(link.readlink()))] += 1
    return found


def signals(pid: int) -> dict[str, int]:
    """Return which signals a process blocks, ignores and handles, as bits.

    Signals 32 and 33 are glibc's own: it handles them once a process has had a second thread.
    """
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    fields = dict(line.split(":\t", 1) for line in status if ":\t" in line)
    return {name: int(fields[name], 16) & ~(3 << 31) for name in _SIGNALS}


def processes(service: Running) -> list[psutil.Process]:
    """Return the main process of a service, its forkserver, and its only worker."""
    forkserver = service.get("/health").json()["forkserver"]["pid"]
    return [
        psutil.Process(each) for each in (service.process.pid, forkserver, *service.worker_pids())
    ]


def state_of(each: psutil.Process) -> tuple[object, ...]:
    return descriptors(each.pid), signals(each.pid), each.cwd(), each.nice()


@pytest.mark.slow
def test_forked_service_has_the_descriptors_and_signal_handlers_of_one_that_was_started():
    arguments = (FAULTY, "--replicas", "1")
    with running(*arguments, forks=False) as started, running(*arguments) as service:
        assert psutil.Process(service.process.pid).ppid() == forked.origin_pid()
        assert psutil.Process(started.process.pid).ppid() == os.getpid()
        for theirs, ours in zip(processes(started), processes(service), strict=True):
            until(
                lambda a=theirs, b=ours: state_of(a) == state_of(b)
            )  # once connections are closed


def test_forked_services_draw_other_random_numbers():
    ids = set()
    for _ in range(2):
        with running(FAULTY, "--replicas", "1", ready=False) as service:
            ids.add(service.wait_until_listening().get("/health/live").headers["X-Request-ID"])
    assert len(ids) == 2


@pytest.mark.slow
def test_an_end_of_the_process_that_forks_costs_no_later_command_and_none_costs_a_descriptor():
    origin = forked.origin_pid()
    os.kill(origin, signal.SIGKILL)
    os.waitid(os.P_PID, origin, os.WEXITED | os.WNOWAIT)
    done = forked.run([*forked.COMMAND, "version"], timeout=240)
    assert done.returncode == 0
    before = num_open()
    for _ in range(3):
        process = forked.popen([*forked.COMMAND, "version"], stdout=subprocess.DEVNULL)
        assert process.wait(60) == 0
    assert num_open() == before


def test_forked_command_tells_its_output_and_its_exit_status(tmp_path: Path):
    done = forked.run([*forked.COMMAND, "serve", "nothing"], cwd=tmp_path, timeout=240)
    assert done.returncode == 2
    assert "nothing" in done.stderr
    done = forked.run([*forked.COMMAND, "version"], timeout=240)
    assert (done.returncode, done.stderr) == (0, "")
    assert "inferpool" in done.stdout


def test_forked_script_finds_what_one_that_was_started_finds(tmp_path: Path):
    (tmp_path / "beside.py").write_text("WORD = 'beside'")
    (tmp_path / "script.py").write_text(SCRIPT)
    env = {**os.environ, "PYTHONPATH": f"{forked.python_path()}{os.pathsep}{tmp_path / 'more'}"}
    for words in (["script.py", "-x", "1"], ["-c", SCRIPT, "2"], ["-m", "script", "3"]):
        command = [sys.executable, *words]
        options: dict[str, Any] = {"cwd": tmp_path, "env": env, "timeout": 60}
        started = subprocess.run(command, capture_output=True, text=True, **options)
        done = forked.run(command, **options)
        assert (done.returncode, done.stdout) == (7, started.stdout), done.stderr
        assert started.returncode == 7


def test_forked_script_computes_with_as_many_threads_as_one_that_was_started():
    command = [sys.executable, "-c", "import torch; print(torch.get_num_threads())"]
    started = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert forked.run(command, timeout=60).stdout == started.stdout


def test_service_of_a_forked_script_is_forked_and_ends_with_it(tmp_path: Path):
    (tmp_path / "script.py").write_text(SERVING)
    command = [sys.executable, "script.py"]
    with forked.popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as script:
        try:
            assert script.stdout is not None
            service = psutil.Process(int(script.stdout.readline()))
            assert service.ppid() == psutil.Process(script.pid).ppid() == forked.origin_pid()
            family = [service, *service.children(recursive=True)]
        finally:
            script.kill()
    assert left_over(family) == []


def test_command_whose_interpreter_reads_other_variables_is_not_forked():
    env = {"PYTHONWARNINGS": "error"}
    with running(FAULTY, "--replicas", "1", env=env, ready=False) as service:
        assert psutil.Process(service.process.pid).ppid() != forked.origin_pid()
