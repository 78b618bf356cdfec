import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from inferpool.service.settings.loader import load
from inferpool.service.tools.trial.connection import TrialError
from inferpool.service.tools.trial.service import TrialService, rows_of
from tests.e2e.running import left_over

_SUBJECT = """
import asyncio, time
from pathlib import Path
from inferpool.service.settings.loader import load
from inferpool.service.tools.trial.service import TrialService, rows_of
subject = TrialService(rows_of(load({"model": "echo"}, {}, Path("/"))))
"""
_STARTER = """
with subject:
    print(subject.pid, flush=True)
    time.sleep(60)
"""
_STOPPER = """
async def stop():
    with subject:
        await subject.until_ready(50.0)
        print(len(subject.family()), *await subject.stop())
asyncio.run(stop())
"""
_CARELESS_GUARDIAN = """
import ctypes, subprocess, sys
PR_SET_CHILD_SUBREAPER = 36  # all orphans below become its own; it does not look after them
ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
subprocess.run([sys.executable, "-c", sys.argv[1]], check=True)
"""
_TIMEOUT_S = 50.0


def test_address_and_keys_of_the_users_settings_are_left_out(tmp_path: Path):
    (tmp_path / "inferpool.toml").write_text("port = 9\n[models.echo]\nreplicas = 3\n")
    found = load({}, {"INFERPOOL_PREDICT_KEYS": "k" * 20}, tmp_path)
    rows = {key: value for key, value, _ in rows_of(found)}
    assert rows["models", "echo", "replicas"] == 3
    assert not [key for key in rows if key[0] in ("host", "port") or "keys" in key[0]]


def test_a_service_on_trial_keeps_no_jobs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    environ = {"XDG_STATE_HOME": str(tmp_path)}
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "inferpool.toml").write_text("[models.echo]\nreplicas = 1\n")
    with TrialService(rows_of(load({}, environ, tmp_path))) as subject:
        asyncio.run(subject.until_ready(_TIMEOUT_S))
    assert [path.name for path in tmp_path.iterdir()] == ["inferpool.toml"]


def test_a_service_on_trial_sends_no_traces(monkeypatch: pytest.MonkeyPatch):
    secret = {"OTEL_EXPORTER_OTLP_HEADERS": "api-key=secret"}
    environ = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1", **secret}
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    rows = rows_of(load({"model": "echo"}, environ, Path("/")))
    assert not [key for key, _, _ in rows if key[0].startswith("trace_")]
    with TrialService(rows) as subject:
        until = time.monotonic() + _TIMEOUT_S
        while "PATH" not in (given := psutil.Process(subject.pid).environ()):
            assert time.monotonic() < until  # while it becomes the service, it has none
            time.sleep(0.01)
    assert not [name for name in given if name.startswith("OTEL_")]


def test_service_does_not_outlive_whoever_started_it_however_that_ends(tmp_path: Path):
    starter = subprocess.Popen(
        [sys.executable, "-c", _SUBJECT + _STARTER],
        env={**os.environ, "TMPDIR": str(tmp_path)},  # nobody is left to clear it
        stdout=subprocess.PIPE,
        text=True,
    )
    assert starter.stdout is not None
    with starter.stdout:
        service = psutil.Process(int(starter.stdout.readline()))
        until = time.monotonic() + _TIMEOUT_S
        while service.cmdline()[2:5] != ["-m", "inferpool", "serve"]:
            assert time.monotonic() < until, service.cmdline()
            time.sleep(0.01)
        starter.send_signal(signal.SIGKILL)
        starter.wait()
    assert left_over([service], _TIMEOUT_S) == []


def test_zombies_do_not_count_as_left_over():
    command = [sys.executable, "-c", _CARELESS_GUARDIAN, _SUBJECT + _STOPPER]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3 * _TIMEOUT_S)
    num_processes, exit_code, num_left = done.stdout.split()
    assert int(num_processes) >= 3, done.stderr
    assert (exit_code, num_left) == ("0", "0"), done.stderr


def test_the_reason_for_a_failed_start_is_given_without_the_log():
    async def start() -> str:
        with TrialService(rows_of(load({"model": "no_such.module:Net"}, {}, Path("/")))) as subject:
            with pytest.raises(TrialError) as caught:
                await subject.until_ready(_TIMEOUT_S)
            return str(caught.value)

    first, second = asyncio.run(start()).splitlines()
    assert "there is no module 'no_such'" in first
    assert "inferpool serve" in second
