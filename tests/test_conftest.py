"""A failed test that measures runs once more, and no failure makes another test fail."""

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


def test_a_failed_test_that_measures_runs_once_more_and_harms_no_other(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(_MODULE)
    (tmp_path / "conftest.py").write_text("from tests.conftest import *")
    settings = ["-c", str(_ROOT / "pyproject.toml"), "-o", f"cache_dir={tmp_path}"]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *settings, "--rootdir", tmp_path, tmp_path],
        cwd=_ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert run.returncode == 1
    assert "2 failed, 2 passed, 2 rerun in" in run.stdout
    failures, first_runs = run.stdout.split(" first run of ", 1)
    assert re.findall(r"^E +AssertionError: (.+)$", failures, re.MULTILINE) == ["slow", "wrong"]
    assert re.findall(r"^E +AssertionError: (.+)$", first_runs, re.MULTILINE) == [
        "the cores were busy",
        "slow",
    ]
