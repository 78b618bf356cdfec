import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from inferpool.service.settings.loader import load
from inferpool.service.tools.trial.connection import TrialError
from inferpool.service.tools.trial.service import TrialService, rows_of
from tests.e2e.running import left_over, until

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
    time.sleep(3600)
"""
_STOPPER = """
async def stop():
    with subject:
        await subject.until_ready(120.0)
        print(len(subject.family()), *await subject.stop(stop_s=120, linger_s=120))
asyncio.run(stop())
"""
_CARELESS_GUARDIAN = """
import ctypes, subprocess, sys
PR_SET_CHILD_SUBREAPER = 36  # all orphans below become its own; it does not look after them
ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
subprocess.run([sys.executable, "-c", sys.argv[1]], check=True)
"""
_TIMEOUT_S = 120.0


def test_a_service_on_trial_has_the_users_settings_and_leaves_no_traces(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """It has no address or keys of the user's, keeps no jobs, and sends no spans."""
    environ = {
        "INFERPOOL_PREDICT_KEYS": "k" * 20,
        "XDG_STATE_HOME": str(tmp_path),
        "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1",
        "OTEL_EXPORTER_OTLP_HEADERS": "api-key=secret",
        "K_SERVICE": "mine",
        "PORT": "1",
        "CONTAINER_IMAGE": "inferpool",
    }
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    properties = tmp_path / "config.properties"
    properties.write_text("inference_address=http://127.0.0.1:1\n")
    text = f"port = 9\ntorchserve = '{properties}'\n[models.echo]\nreplicas = 1\n"
    (tmp_path / "inferpool.toml").write_text(text)
    loaded = load({}, environ, tmp_path)
    assert (loaded.settings.only_predictions, loaded.settings.torchserve) == (True, str(properties))
    rows = rows_of(loaded)
    assert (("models", "echo", "replicas"), 1) in [row[:2] for row in rows]
    left_out = ("host", "port", "predict_keys", "trace_endpoint", "trace_headers", "torchserve")
    assert not [key for key, _, _ in rows if key[0] in left_out]
    with TrialService(rows) as subject:
        asyncio.run(subject.until_ready(_TIMEOUT_S))
        given = psutil.Process(subject.pid).environ()
    assert not [name for name in given if name.startswith("OTEL_")]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "config.properties",
        "inferpool.toml",
    ]


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
        until(lambda: service.cmdline()[2:5] == ["-m", "inferpool", "serve"])
        starter.send_signal(signal.SIGKILL)
        starter.wait()
    assert left_over([service], _TIMEOUT_S) == []


@pytest.mark.slow
def test_zombies_do_not_count_as_left_over():
    command = [sys.executable, "-c", _CARELESS_GUARDIAN, _SUBJECT + _STOPPER]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    num_processes, exit_code, num_left = done.stdout.split()
    assert int(num_processes) >= 3, done.stderr
    assert (exit_code, num_left) == ("0", "0"), done.stderr


@pytest.mark.slow
def test_the_reason_for_a_failed_start_is_given_without_the_log():
    async def start() -> str:
        with TrialService(rows_of(load({"model": "no_such.module:Net"}, {}, Path("/")))) as subject:
            with pytest.raises(TrialError) as caught:
                await subject.until_ready(_TIMEOUT_S)
            return str(caught.value)

    first, second = asyncio.run(start()).splitlines()
    assert "there is no module 'no_such'" in first
    assert "inferpool serve" in second
