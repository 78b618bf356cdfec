import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from service.settings_loader import load
from service.trial.errors import TrialError
from service.trial.subject import Subject, rows_of

_STARTER = """
import time
from pathlib import Path
from service.settings_loader import load
from service.trial.subject import Subject, rows_of
with Subject(rows_of(load({"model": "echo"}, {}, Path("/")))) as subject:
    print(subject.pid, flush=True)
    time.sleep(60)
"""
_TIMEOUT_S = 20.0


def test_where_it_listens_and_its_keys_are_no_matter_of_the_user(tmp_path: Path):
    (tmp_path / "inferpool.toml").write_text("port = 9\n[models.echo]\nreplicas = 3\n")
    found = load({}, {"INFERPOOL_PREDICT_KEYS": "k" * 20}, tmp_path)
    rows = {key: value for key, value, _ in rows_of(found)}
    assert rows["models", "echo", "replicas"] == 3
    assert not [key for key in rows if key[0] in ("host", "port") or "keys" in key[0]]


def test_service_does_not_outlive_whoever_started_it_however_that_ends(tmp_path: Path):
    starter = subprocess.Popen(
        [sys.executable, "-c", _STARTER],
        env={**os.environ, "TMPDIR": str(tmp_path)},  # nobody is left to clear it
        stdout=subprocess.PIPE,
        text=True,
    )
    assert starter.stdout is not None
    with starter.stdout:
        service = psutil.Process(int(starter.stdout.readline()))
        until = time.monotonic() + _TIMEOUT_S
        while service.cmdline()[2:5] != ["-m", "service", "serve"]:
            assert time.monotonic() < until, service.cmdline()
            time.sleep(0.01)
        starter.send_signal(signal.SIGKILL)
        starter.wait()
    gone, _ = psutil.wait_procs([service], timeout=_TIMEOUT_S)
    assert gone


def test_why_a_service_does_not_start_is_told_without_its_log():
    async def start() -> str:
        with Subject(rows_of(load({"model": "no_such.module:Net"}, {}, Path("/")))) as subject:
            with pytest.raises(TrialError) as caught:
                await subject.until_ready(_TIMEOUT_S)
            return str(caught.value)

    first, second = asyncio.run(start()).splitlines()
    assert "there is no module 'no_such'" in first
    assert "inferpool serve" in second
