"""A failed test that measures runs once more, and no test makes another one fail."""

import re
import subprocess
import sys
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[1]
_MODULE = """
import gc
import socket
import pytest

num_runs = 0

@pytest.fixture(scope="module")
def served():
    return []  # a test may break it

@pytest.mark.alone
def test_fails_once(served):
    global num_runs
    num_runs += 1
    served.append(1)
    assert num_runs == 2, "the cores were busy"
    assert served == [1]

@pytest.mark.measures
def test_fails_twice():
    left_open = socket.socket()
    assert not left_open, "slow"

def test_fails_in_any_case(served):
    served.append(left_open := socket.socket())
    assert not left_open, "wrong"

def test_passes(served):
    gc.collect()
    assert not served
"""

_CARELESS = """
import os
import signal
import pytest

def test_keeps_a_handler():
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)

def test_goes_elsewhere(tmp_path):
    os.chdir(tmp_path)

def test_comes_back(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)

@pytest.fixture
def ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGHUP, before)

def test_has_a_fixture_that_restores(ignored):
    pass
"""


def run_tests(module: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run the tests of a module with the settings of this repository, and its `conftest.py`."""
    (folder / "test_it.py").write_text(module)
    (folder / "conftest.py").write_text("from tests.conftest import *")
    settings = ["-c", str(_ROOT / "pyproject.toml"), "-o", f"cache_dir={folder}"]
    return subprocess.run(
        [sys.executable, "-m", "pytest", *settings, "--rootdir", folder, folder],
        cwd=_ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def test_a_failed_test_that_measures_runs_once_more_and_harms_no_other(tmp_path: Path) -> None:
    run = run_tests(_MODULE, tmp_path)
    assert run.returncode == 1
    assert "2 failed, 2 passed, 2 rerun in" in run.stdout
    failures, first_runs = run.stdout.split(" first run of ", 1)
    assert re.findall(r"^E +AssertionError: (.+)$", failures, re.MULTILINE) == ["slow", "wrong"]
    assert re.findall(r"^E +AssertionError: (.+)$", first_runs, re.MULTILINE) == [
        "the cores were busy",
        "slow",
    ]


def test_a_test_that_leaves_the_process_changed_fails_and_no_later_one_does(tmp_path: Path) -> None:
    run = run_tests(_CARELESS, tmp_path)
    assert "4 passed, 2 errors in" in run.stdout
    assert re.findall(r"^ERROR \S+::(\S+)", run.stdout, re.MULTILINE) == [
        "test_keeps_a_handler",
        "test_goes_elsewhere",
    ]
    told = re.findall(r"^E +([^:]+): .+ before, .+ now$", run.stdout, re.MULTILINE)
    assert told == ["signal handlers", "working directory"]
