"""The command `inferpool tune`, short, on real services."""

import json
import os
import re
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path

import psutil
import pytest

from inferpool.service.settings.loader import load
from tests.e2e import forked
from tests.e2e.running import left_over

pytestmark = [pytest.mark.measures, pytest.mark.slow]

_COMMAND = (*forked.COMMAND, "tune")
_TIMEOUT_S = 90.0


FIXED = {
    f"INFERPOOL_MODELS__ECHO__{name}": value
    for name, value in (
        ("REPLICAS", "1"),
        ("THREADS_PER_REPLICA", "1"),
        ("MAX_BATCH_SIZE", "8"),
        ("CREDIT", "2"),
        ("PREPARE_THREADS", "1"),
        ("BATCH_WAIT_MS", "0"),
    )
} | {"INFERPOOL_FRONT_ENDS": "1"}
"""What the environment says is not varied, so that there is nothing to try."""


def tune(
    cwd: Path, *arguments: str, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, **(env or {})}
    return forked.run([*_COMMAND, *arguments], cwd=cwd, env=env, timeout=_TIMEOUT_S)


def test_budget_that_is_too_short_tries_one_candidate(tmp_path: Path):
    arguments = ("--replicas", "1", "--connections", "4", "--secs", "0.2", "--budget", "1")
    done = tune(tmp_path, "echo", *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"not suffice for: .* \(one more takes about --budget \d+\)", done.stdout)
    assert "Written to inferpool.toml." in done.stdout


@pytest.mark.alone
def test_settings_are_measured_reported_and_written(tmp_path: Path):
    done = tune(
        tmp_path, "echo", "--connections", "4", "--secs", "0.2",
        "--budget", "1", "--html", "report.html", "--json", env=FIXED,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the settings as they are" in done.stderr
    assert "Written to inferpool.toml." in done.stderr
    report = json.loads(done.stdout)
    (base,) = report["tried"]
    assert base["answers"] > 0
    assert base["errors"] == {}
    assert base["memory_bytes"] > 10 * 2**20
    assert 'class="plotly-graph-div"' in (tmp_path / "report.html").read_text()
    text = (tmp_path / "inferpool.toml").read_text()
    assert text.startswith("# echo (echo), tuned by inferpool")
    loaded = load({}, {}, tmp_path)
    assert loaded.settings.models["echo"].replicas == 1
    before = tmp_path.stat().st_mtime_ns
    again = tune(tmp_path, "echo", env=FIXED)
    assert again.returncode == 2
    assert "--force replaces it" in again.stderr
    assert tmp_path.stat().st_mtime_ns == before


def test_ctrl_c_reports_what_was_found_and_leaves_no_process(tmp_path: Path):
    process = forked.popen(
        [*_COMMAND, "echo", "--connections", "4", "--secs", "0.2", "--output", "new.toml"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    lines = iter(process.stderr.readline, "")
    assert any("replicas" in line or "max_batch_size" in line for line in lines)  # the second one
    family = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=_TIMEOUT_S)
    assert process.returncode == 130, out + err
    assert "Interrupted: this is what was found until then." in out
    assert "[models.echo]" in out
    assert not (tmp_path / "new.toml").exists()
    assert len(family) >= 3
    assert left_over(family) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["echo", "--p99-ms", "0"], "'0' is not a number above 0"),
        (["echo", "--connections", "x"], "'x' is not a whole number from 1"),
        (["echo", "--inputs", "nowhere"], "there is no nowhere"),
        (["echo", "--output", "nowhere/x.toml"], "there is no folder nowhere"),
        (["echo", "--output", "-", "--json"], "name a file"),
        (["nothing"], "neither a model of the settings"),
    ],
)
def test_wrong_command_line_is_exit_2(tmp_path: Path, arguments: list[str], message: str):
    done = tune(tmp_path, *arguments)
    assert done.returncode == 2
    assert message in done.stderr
